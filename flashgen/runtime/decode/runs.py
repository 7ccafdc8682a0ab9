"""From a decode call to its launch: a memo by shapes and strides, and the slow path that fills it.

The key has what chooses code or numbers, and nothing that a host would have to ask the GPU for. Sequences' lengths,
page ids and what they index never reach the host.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from flashgen.core.collection import CollectionPaused
from flashgen.core.config import Config
from flashgen.core.decode_limits import MAX_BATCH
from flashgen.core.errors import FlashgenError, UnsupportedError
from flashgen.core.features.values import Features
from flashgen.core.settings import settings
from flashgen.launch.decode_plan import NUMBERS_OF_HEADS, Launch
from flashgen.launch.feature_arguments import NO_FEATURES, TENSORS
from flashgen.launch.plan import EmptyPlan
from flashgen.runtime.argument_types import UNEXPECTED
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall, check_decode_tensors
from flashgen.runtime.decode.contents import check_contents
from flashgen.runtime.decode.open_calls import OPEN, Launches, open_to_sizes
from flashgen.runtime.decode.plans import decode_workload, opened
from flashgen.runtime.decode.recent import RECENT, Kind, Ready, Tensors
from flashgen.runtime.ops import recording, serve
from flashgen.runtime.ops.outputs import empty_lse, empty_output

MEMO_LIMIT = 8192

MEMO: dict[tuple[Any, ...], Any] = {}
"""What serves calls by key; None where there is no key to attend to, and so nothing to launch."""

_FIND_NUMBERS = tuple(TENSORS[name] for name in NUMBERS_OF_HEADS)
"""What finds the tensors of features that kernels may read, in the order of `POINTERS`, whose last ones they are."""

_WRITTEN, _READ = ("O", "LSE"), ("Q", "K", "V", "Lens")
_OPTIONAL = ("Table", "Leftpad", "BatchIdx", *NUMBERS_OF_HEADS)

_FIELDS = tuple(field.name for field in fields(DecodeCall))
_NO_NUMBERS = (None,) * len(NUMBERS_OF_HEADS)
_UNKNOWN = object()


def run(
    call: DecodeCall, config: Config | None = None, *, keeps: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output of a call, and its LSE where it asks for one.

    Args:
        call: the arguments.
        config: what is launched; None lets the ladder choose (`runtime.lookup.decode_ladder`).
        keeps: whether memory may be kept for the next call.

    Raises:
        WorkloadError, UnsupportedError, BuildError, LaunchError: as `flashgen.attention_decode`.
    """
    arguments: Any = (*_arguments(call), config, keeps)
    return attend(*arguments)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    features: Features,
    leftpad: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    fixed_split_size: int | None,
    return_lse: bool,
    config: Config | None = None,
    keeps: bool = True,
    kind: tuple[Any, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`run` with the fields of a `DecodeCall` in order: to make one costs as much as to find a launch.

    Calls like this one will be found by their `kind`, where it is given (`flashgen.runtime.decode.recent`).
    """
    given = (q, k_cache, v_cache, seqlens, block_table, causal, softmax_scale, features)
    others = (leftpad, batch_idx, fixed_split_size, return_lse)
    try:
        out = empty_output(q, v_cache, bshd=True)
        lse = empty_lse(q, bshd=True) if return_lse else None
        if q.shape[0] <= MAX_BATCH:
            _launch(*given, *others, out, lse, config, keeps, kind)
            return out, lse
        _launch_parts(call_of((*given, *others)), out, lse, config, keeps)
    except UNEXPECTED as error:
        if not isinstance(error, FlashgenError):
            check_decode_tensors(call_of((*given, *others)))
        raise
    return out, lse


def attend_into(
    written: tuple[torch.Tensor, torch.Tensor | None], given: tuple[Any, ...], *, keeps: bool = True
) -> None:
    """Compute a call into memory that there is.

    Args:
        written: output, (batch, seqlen_q, nheads, head_dim_v), and LSE, contiguous, or None.
        given: the fields of a `DecodeCall` up to its features, in order.
        keeps: as in `run`.

    Raises:
        WorkloadError, UnsupportedError, BuildError, LaunchError: as `flashgen.attention_decode`.
    """
    out, lse = written
    fields_of_call: Any = (*given, None, None, None, lse is not None)
    if out.shape[0] <= MAX_BATCH:
        launched: Any = (*fields_of_call, out, lse, None, keeps, None)
        _launch(*launched)
    else:
        _launch_parts(call_of(fields_of_call), out, lse, None, keeps)


def _launch_parts(
    call: DecodeCall, out: torch.Tensor, lse: torch.Tensor | None, config: Config | None, keeps: bool
) -> None:
    """A launch for every `MAX_BATCH` sequences."""
    check_decode_tensors(call)
    for start in range(0, call.q.shape[0], MAX_BATCH):
        rows = slice(start, start + MAX_BATCH)
        written = (out[rows], None if lse is None else lse[rows], config, keeps, None)
        part: Any = (*_arguments(_part(call, rows)), *written)
        _launch(*part)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    features: Features,
    leftpad: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    split: int | None,
    return_lse: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: Config | None,
    keeps: bool,
    kind: Kind | None,
) -> None:
    numbers = _NO_NUMBERS if features is NO_FEATURES else [of(features) for of in _FIND_NUMBERS]
    optional = (table, leftpad, batch_idx, *numbers)
    tensors = (q, k, v, lens, *[one for one in optional if one is not None])
    index = q.get_device()
    key = (
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15,
        config,
        index,
        q.shape,
        q.stride(),
        q.dtype,
        k.shape,
        k.stride(),
        k.dtype,
        k.get_device(),
        v.shape,
        v.stride(),
        v.dtype,
        v.get_device(),
        lens.shape,
        lens.stride(),
        lens.dtype,
        lens.get_device(),
        out.stride(),  # a part of a larger output is laid out in another way than one of its own
        *[None if one is None else (one.shape, one.stride(), one.dtype, one.get_device()) for one in optional],
        None if features is NO_FEATURES else (features.window, features.softcap),
        causal,
        softmax_scale,
        split,
        return_lse,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
    )
    served = MEMO.get(key, _UNKNOWN)
    if served is _UNKNOWN or settings().checks:
        call = call_of((q, k, v, lens, table, causal, softmax_scale, features, leftpad, batch_idx, split, return_lse))
        served = _remembered(key, call, tensors, out, config, kind)
        if settings().checks:
            check_contents(call)
    if served is None:
        EmptyPlan()(q, k, v, out, lse, features=features)
    else:
        _run(served, tensors, out, lse, keeps)
        if kind is not None:
            served.remember(kind, tensors, out, lse)
            if MEMO.get(key) is not served:  # forgotten while it was launched: nor may it be found sooner
                RECENT.pop(kind, None)


def _run(served: Ready, tensors: Tensors, out: torch.Tensor, lse: torch.Tensor | None, keeps: bool) -> None:
    written = (out,) if lse is None else (out, lse)
    pointers = tuple([one.data_ptr() for one in (*written, *tensors)])
    index = out.get_device()
    if index == torch._C._cuda_getDevice():
        served.launch(pointers, out, keeps)
    else:
        with torch.cuda.device(index):
            served.launch(pointers, out, keeps)


def _remembered(
    key: tuple[Any, ...],
    call: DecodeCall,
    tensors: Tensors,
    out: torch.Tensor,
    config: Config | None,
    kind: Kind | None,
) -> Any:
    with serve.LOCK:  # what `reload` forgets while this thread compiles would else be remembered behind it
        served = MEMO.get(key, _UNKNOWN)
        if served is _UNKNOWN:
            launch = _prepared(call, tensors, out, config, kind)
            served = None if launch is None else Ready(launch)
            if len(MEMO) >= MEMO_LIMIT:
                forget()
            MEMO[key] = served
        return served


def forget() -> None:
    """Forget every launch; kernels stay."""
    MEMO.clear()
    OPEN.clear()
    RECENT.clear()  # last: what is remembered meanwhile is seen to be forgotten in the others


serve.FORGETTING.append(forget)


def call_of(arguments: tuple[Any, ...]) -> DecodeCall:
    """A call from its fields in order."""
    return DecodeCall(**dict(zip(_FIELDS, arguments, strict=True)))


def _arguments(call: DecodeCall) -> tuple[Any, ...]:
    return tuple(getattr(call, name) for name in _FIELDS)


def _prepared(
    call: DecodeCall, tensors: Tensors, out: torch.Tensor, config: Config | None, kind: Kind | None
) -> Launch | None:
    """The slow path: check, choose a config, compile if needed, and pack the numbers."""
    checked = CheckedDecode.of(call, out)
    numbers = [of(call.features) for of in _FIND_NUMBERS]
    optional = zip(_OPTIONAL, (*call.optional.values(), *numbers), strict=True)
    names = (*_WRITTEN[: 1 + call.return_lse], *_READ, *[name for name, one in optional if one is not None])
    if 0 in call.q.shape or not checked.shape.seqlen_k:
        return None
    index = serve.gpu_index(call.q)

    def plan(other: CheckedDecode, config: Config | None = None) -> Launches:
        return opened(other, config, index, names)

    with CollectionPaused():
        try:
            launch = plan(checked, config)(checked.shape)
        except UnsupportedError:
            recording.refused(lambda: decode_workload(checked.spec, checked.shape))
            raise
    if kind is not None:
        open_to_sizes(kind, call, tensors, checked, plan)
    return launch


def _part(call: DecodeCall, rows: slice) -> DecodeCall:
    """The call for some of its sequences."""
    changes: dict[str, Any] = {name: None if t is None else t[rows] for name, t in call.optional.items()}
    slopes = call.features.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        changes["features"] = replace(call.features, alibi_slopes=slopes[rows])
    if call.block_table is None and call.batch_idx is None:
        changes |= {"k_cache": call.k_cache[rows], "v_cache": call.v_cache[rows]}
    return replace(call, q=call.q[rows], seqlens=call.seqlens[rows], **changes)
