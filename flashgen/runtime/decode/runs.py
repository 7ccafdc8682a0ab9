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
from flashgen.core.errors import FlashgenError, UnsupportedError
from flashgen.core.features.values import Features
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization
from flashgen.launch.decode_plan import POINTERS, DecodePlan, Launch
from flashgen.launch.feature_arguments import NO_FEATURES, TENSORS
from flashgen.launch.plan import EmptyPlan
from flashgen.runtime.argument_types import UNEXPECTED
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall, check_decode_tensors
from flashgen.runtime.decode.contents import check_contents
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.outputs import empty_lse, empty_output

MAX_BATCH = 1024
"""Sequences of one launch, whose lengths every program looks at; larger batches are several launches."""

MEMO_LIMIT = 8192

MEMO: dict[tuple[Any, ...], Any] = {}
"""Launches by key; None where there is no key to attend to, and so nothing to launch."""

NUMBERS_OF_HEADS = tuple(TENSORS[name] for name in POINTERS if name in TENSORS)
"""What finds the tensors of features that kernels may read, in the order of `POINTERS`, whose last ones they are."""

_FIELDS = tuple(field.name for field in fields(DecodeCall))
_NO_NUMBERS = (None,) * len(NUMBERS_OF_HEADS)
_UNKNOWN = object()

_PLANS: dict[tuple[Specialization, Config, int], DecodePlan] = {}


def run(
    call: DecodeCall, config: Config | None = None, *, keeps: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output of a call, and its LSE where it asks for one.

    Args:
        call: the arguments.
        config: what is launched; None lets the rule choose.
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`run` with the fields of a `DecodeCall` in order: to make one costs as much as to find a launch."""
    given = (q, k_cache, v_cache, seqlens, block_table, causal, softmax_scale, features)
    others = (leftpad, batch_idx, fixed_split_size, return_lse)
    try:
        out = empty_output(q, v_cache, bshd=True)
        lse = empty_lse(q, bshd=True) if return_lse else None
        if q.shape[0] <= MAX_BATCH:
            _launch(*given, *others, out, lse, config, keeps)
            return out, lse
        call = call_of((*given, *others))
        check_decode_tensors(call)
        for start in range(0, q.shape[0], MAX_BATCH):
            rows = slice(start, start + MAX_BATCH)
            written = (out[rows], None if lse is None else lse[rows], config, keeps)
            part: Any = (*_arguments(_part(call, rows)), *written)
            _launch(*part)
    except UNEXPECTED as error:
        if not isinstance(error, FlashgenError):
            check_decode_tensors(call_of((*given, *others)))
        raise
    return out, lse


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
) -> None:
    numbers = _NO_NUMBERS if features is NO_FEATURES else [of(features) for of in NUMBERS_OF_HEADS]
    index = q.get_device()
    pointers = (
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        lens.data_ptr(),
        0 if leftpad is None else leftpad.data_ptr(),
        0 if table is None else table.data_ptr(),
        0 if batch_idx is None else batch_idx.data_ptr(),
        0,  # the own keys of sequences that share others
        *[0 if one is None else one.data_ptr() for one in numbers],
    )
    key = (
        (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15,
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
        None if table is None else (table.shape, table.stride(), table.dtype, table.get_device()),
        None if leftpad is None else _layout(leftpad),
        None if batch_idx is None else _layout(batch_idx),
        None if features is NO_FEATURES else (features.window, features.softcap, *map(_layout, numbers)),
        causal,
        softmax_scale,
        split,
        return_lse,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
    )
    launch = MEMO.get(key, _UNKNOWN)
    if launch is _UNKNOWN or settings().checks:
        call = call_of((q, k, v, lens, table, causal, softmax_scale, features, leftpad, batch_idx, split, return_lse))
        launch = _remembered(key, call, out, config)
        if settings().checks:
            check_contents(call)
    if launch is None:
        EmptyPlan()(q, k, v, out, lse, features=features)
    elif index == torch._C._cuda_getDevice():
        launch(pointers, q, torch._C._cuda_getCurrentRawStream(index), keeps)
    else:
        with torch.cuda.device(index):
            launch(pointers, q, torch._C._cuda_getCurrentRawStream(index), keeps)


def _remembered(key: tuple[Any, ...], call: DecodeCall, out: torch.Tensor, config: Config | None) -> Any:
    launch = MEMO.get(key, _UNKNOWN)
    if launch is _UNKNOWN:
        launch = _prepared(call, out, config)
        if len(MEMO) >= MEMO_LIMIT:
            MEMO.clear()
        MEMO[key] = launch
    return launch


def _layout(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())


def call_of(arguments: tuple[Any, ...]) -> DecodeCall:
    """A call from its fields in order."""
    return DecodeCall(**dict(zip(_FIELDS, arguments, strict=True)))


def _arguments(call: DecodeCall) -> tuple[Any, ...]:
    return tuple(getattr(call, name) for name in _FIELDS)


def _prepared(call: DecodeCall, out: torch.Tensor, config: Config | None) -> Launch | None:
    """The slow path: check, choose a config, compile if needed, and pack the numbers."""
    checked = CheckedDecode.of(call, out)
    if 0 in call.q.shape or not checked.shape.seqlen_k:
        return None
    with CollectionPaused(), serve.LOCK:
        return planned(checked, config, serve.gpu_index(call.q))


def planned(checked: CheckedDecode, config: Config | None, index: int | None) -> Launch:
    """The launch of a checked call on torch's GPU of this index; under the lock of `serve`.

    Raises:
        UnsupportedError, BuildError, LaunchError: as `flashgen.attention_decode`.
    """
    spec = checked.spec
    if index is None:
        raise UnsupportedError(f"no kernel family serves {spec.key} on a CPU: all of them run on GPUs")
    from flashgen.codegen.families import decode_config

    device = serve.device_at(index)
    chosen = config or decode_config(spec, checked.shape.sizes, device)
    key = (spec, chosen, index)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = DecodePlan(serve.compiled(spec, chosen, device, index), chosen, index)
    return plan.sized(checked.shape)


def _part(call: DecodeCall, rows: slice) -> DecodeCall:
    """The call for some of its sequences."""
    changes: dict[str, Any] = {name: None if t is None else t[rows] for name, t in call.optional.items()}
    slopes = call.features.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        changes["features"] = replace(call.features, alibi_slopes=slopes[rows])
    if call.block_table is None and call.batch_idx is None:
        changes |= {"k_cache": call.k_cache[rows], "v_cache": call.v_cache[rows]}
    return replace(call, q=call.q[rows], seqlens=call.seqlens[rows], **changes)
