"""From a decode call to its launch: a memo by shapes and strides, and the slow path that fills it.

The key has what chooses code or numbers, and nothing that a host would have to ask the GPU for. Sequences' lengths,
page ids and what they index never reach the host.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
from flashgen.runtime.decode import recent
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall, check_decode_tensors
from flashgen.runtime.decode.contents import check_contents
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.outputs import empty_lse, empty_output

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel

MAX_BATCH = 1024
"""Sequences of one launch, whose lengths every program looks at; larger batches are several launches."""

MEMO_LIMIT = 8192


class Served:
    """What serves the calls of a key: a launch, and what serves calls like the last one without a key."""

    __slots__ = ("_again", "launch")

    def __init__(self, launch: Launch) -> None:
        """Keep a launch."""
        self.launch = launch
        self._again: Any = None

    def again(
        self, tensors: tuple[torch.Tensor, ...], out: torch.Tensor, lse: torch.Tensor | None
    ) -> recent.Again | None:
        """See `recent.make_again`; made anew where these are other tensors to torch, as those of inference mode."""
        if self._again is None or not self._again[0](*tensors):
            self._again = recent.make_again(tensors, out, lse, self.launch)
        return None if self._again is None else self._again[1]


MEMO: dict[tuple[Any, ...], Any] = {}
"""What serves calls by key; None where there is no key to attend to, and so nothing to launch."""

NUMBERS_OF_HEADS = tuple(TENSORS[name] for name in POINTERS if name in TENSORS)
"""What finds the tensors of features that kernels may read, in the order of `POINTERS`, whose last ones they are."""

_WRITTEN, _READ = ("O", "LSE"), ("Q", "K", "V", "Lens")
_OPTIONAL = ("Table", "Leftpad", "BatchIdx", *(name for name in POINTERS if name in TENSORS))

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
            served, tensors = _launch(*given, *others, out, lse, config, keeps)
            if kind is not None and served is not None:
                again = served.again(tensors, out, lse)
                if again is not None:
                    recent.remember(kind, again)
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
) -> tuple[Served | None, tuple[torch.Tensor, ...]]:
    """Launch, if there are keys; returns what did, and the tensors that it has read in its order."""
    numbers = _NO_NUMBERS if features is NO_FEATURES else [of(features) for of in NUMBERS_OF_HEADS]
    optional = (table, leftpad, batch_idx, *numbers)
    tensors = (q, k, v, lens, *[one for one in optional if one is not None])
    written = (out,) if lse is None else (out, lse)
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
        served = _remembered(key, call, out, config)
        if settings().checks:
            check_contents(call)
    if served is None:
        EmptyPlan()(q, k, v, out, lse, features=features)
        return None, tensors
    pointers = tuple([one.data_ptr() for one in (*written, *tensors)])
    if index == torch._C._cuda_getDevice():
        served.launch(pointers, q, keeps)
    else:
        with torch.cuda.device(index):
            served.launch(pointers, q, keeps)
    return served, tensors


def _remembered(key: tuple[Any, ...], call: DecodeCall, out: torch.Tensor, config: Config | None) -> Any:
    served = MEMO.get(key, _UNKNOWN)
    if served is _UNKNOWN:
        launch = _prepared(call, out, config)
        served = None if launch is None else Served(launch)
        if len(MEMO) >= MEMO_LIMIT:
            forget()
        MEMO[key] = served
    return served


def forget() -> None:
    """Forget every launch; kernels stay."""
    MEMO.clear()
    recent.RECENT.clear()


serve.FORGETTING.append(forget)


def call_of(arguments: tuple[Any, ...]) -> DecodeCall:
    """A call from its fields in order."""
    return DecodeCall(**dict(zip(_FIELDS, arguments, strict=True)))


def _arguments(call: DecodeCall) -> tuple[Any, ...]:
    return tuple(getattr(call, name) for name in _FIELDS)


def _prepared(call: DecodeCall, out: torch.Tensor, config: Config | None) -> Launch | None:
    """The slow path: check, choose a config, compile if needed, and pack the numbers."""
    checked = CheckedDecode.of(call, out)
    numbers = [of(call.features) for of in NUMBERS_OF_HEADS]
    optional = zip(_OPTIONAL, (*call.optional.values(), *numbers), strict=True)
    names = (*_WRITTEN[: 1 + call.return_lse], *_READ, *[name for name, one in optional if one is not None])
    if 0 in call.q.shape or not checked.shape.seqlen_k:
        return None
    with CollectionPaused(), serve.LOCK:
        return planned(checked, config, serve.gpu_index(call.q), names)


def planned(
    checked: CheckedDecode, config: Config | None, index: int | None, names: tuple[str, ...] = POINTERS
) -> Launch:
    """The launch of a checked call on torch's GPU of this index; under the lock of `serve`.

    Args:
        checked: what is compiled in, and the numbers.
        config: what is launched; None lets the rule choose.
        index: the GPU; None is refused.
        names: of `POINTERS`, those that calls give addresses for.

    Raises:
        UnsupportedError, BuildError, LaunchError: as `flashgen.attention_decode`.
    """
    spec = checked.spec
    if index is None:
        raise UnsupportedError(f"no kernel family serves {spec.key} on a CPU: all of them run on GPUs")
    from flashgen.runtime.lookup.decode_ladder import served_step
    from flashgen.runtime.lookup.ladder import Served

    device, sizes = serve.device_at(index), checked.shape.sizes
    served = Served(config=config, rung=1) if config else served_step(spec, sizes, device, serve.records())
    return serve.built(spec, served, device, index, partial(_plan, spec)).sized(checked.shape, names)


def _plan(spec: Specialization, kernel: CompiledKernel, config: Config, index: int) -> DecodePlan:
    key = (spec, config, index)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = DecodePlan(kernel, config, index)
    return plan


def _part(call: DecodeCall, rows: slice) -> DecodeCall:
    """The call for some of its sequences."""
    changes: dict[str, Any] = {name: None if t is None else t[rows] for name, t in call.optional.items()}
    slopes = call.features.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        changes["features"] = replace(call.features, alibi_slopes=slopes[rows])
    if call.block_table is None and call.batch_idx is None:
        changes |= {"k_cache": call.k_cache[rows], "v_cache": call.v_cache[rows]}
    return replace(call, q=call.q[rows], seqlens=call.seqlens[rows], **changes)
