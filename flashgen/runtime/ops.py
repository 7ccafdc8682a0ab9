"""The torch.library ops that every call goes through.

Workload, memo and look-up live inside the ops, because torch.compile cannot trace them; the fakes say no more than
shapes and strides. Calls without an LSE have ops of their own, so that none is allocated, and so have calls without
features, whose key is short. Arguments that equal their default cost nothing in the dispatcher, so the front passes
only the others. A user's score functions come as a number that `flashgen.runtime.mods` knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from flashgen.launch.extras import BlockMask, Extras
from flashgen.runtime import mods as user_mods
from flashgen.runtime import serve
from flashgen.runtime.calls import Call
from flashgen.runtime.runs import Run, empty_lse, empty_output

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None, bool bshd=False, "
    "int? q_offset=None, Tensor? q_offset_tensor=None"
)
_FEATURES = (
    "int? window_left=None, int? window_right=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? bias=None, Tensor? mask=None, int mods=0, Tensor[]? aux=None, "
    "Tensor[]? block_mask=None, int[] block_sizes=[], str block_mask_mod=''"
)
_LIBRARY = torch.library.Library("flashgen", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention({_SCHEMA}) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention_lse({_SCHEMA}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention_features({_SCHEMA}, {_FEATURES}) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention_features_lse({_SCHEMA}, {_FEATURES}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]

WITH_LSE, EXPLICIT_OFFSET, OFFSET_TENSOR, BSHD, CAUSAL, TF32 = 16, 32, 64, 128, 256, 512
"""Bits of a key's flags, above the four of the pointers' alignment."""

FEATURES_WITHOUT_MODS = 7
"""The feature arguments before `mods`."""

FLOAT32 = torch.float32

_remembered = serve.MEMO.get


def allows_tf32() -> bool:
    """Whether torch may round the factors of float32 products to TF32 (`torch.backends.cuda.matmul`)."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def is_direct(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    # in variables of its own, because a look-up costs a third of each question
    tensor: type = torch.Tensor,
    dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack,
    function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled,
    transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack,
    trace: Callable[[], object] = torch._C._get_tracing_state,
) -> bool:
    """Whether torch's dispatcher would do nothing but call the op, so that the call may save it (2 to 3 us).

    It has more to do for subclasses of tensors, under modes, transforms (`vmap`, `grad`), traces and a profiler, and
    for tensors without data.
    """
    return (
        type(q) is tensor
        and type(k) is tensor
        and type(v) is tensor
        and not q.is_meta
        and not dispatch_modes()
        and not function_mode()
        and transform() is None
        and trace() is None
        and not profiler._is_profiler_enabled
    )


def are_plain(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether none of these is of a class that does more than to hold data."""
    return all(one is None or type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
    with_lse: int = 0,
) -> Any:
    # the key is written out here: every call of a function costs as much as two of its parts
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | with_lse
    if causal:
        flags |= CAUSAL
    if bshd:
        flags |= BSHD
    offset: int | torch.Tensor | None = None
    if q_offset is not None:
        offset = q_offset
        flags |= EXPLICIT_OFFSET
    elif q_offset_tensor is not None:
        offset = q_offset_tensor
        flags |= OFFSET_TENSOR
    dtype = q.dtype
    if dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    key = (
        flags,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
    )
    run: Run | None = _remembered(key)
    if run is None:
        run = _prepared(key, q, k, v, flags)
    return run(q, k, v, softmax_scale, offset)


def _attention_features(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mods: int = 0,
    aux: Sequence[torch.Tensor] | None = None,
    block_mask: Sequence[torch.Tensor] | None = None,
    block_sizes: Sequence[int] = (),
    block_mask_mod: str = "",
    with_lse: int = 0,
) -> Any:
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | with_lse
    flags |= CAUSAL * causal | BSHD * bshd
    flags |= EXPLICIT_OFFSET * (q_offset is not None) | OFFSET_TENSOR * (q_offset_tensor is not None)
    if q.dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    extras = _extras(
        window_left,
        window_right,
        softcap,
        alibi_slopes,
        sinks,
        bias,
        mask,
        aux,
        block_mask,
        block_sizes,
        block_mask_mod,
    )
    tensors = (extras.alibi_slopes, extras.sinks, bias, mask, *extras.aux, *(block_mask or ()))
    key = (
        flags,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        window_left,
        window_right,
        softcap > 0,
        mods,
        len(extras.aux),
        tuple(block_sizes),
        block_mask_mod,
        *(None if tensor is None else _layout(tensor) for tensor in tensors),
    )
    run = _remembered(key)
    if run is None:
        run = _prepared(key, q, k, v, flags, extras, mods)
    offset = q_offset if q_offset is not None else q_offset_tensor
    return run(q, k, v, softmax_scale, offset, extras)


def _extras(
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    aux: Sequence[torch.Tensor] | None = None,
    block_mask: Sequence[torch.Tensor] | None = None,
    block_sizes: Sequence[int] = (),
    block_mask_mod: str = "",
) -> Extras:
    if alibi_slopes is None and sinks is None and bias is None and mask is None and not aux and not block_mask:
        return _without_tensors(window_left, window_right, softcap)
    return Extras(
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=_packed(alibi_slopes),
        sinks=_packed(sinks),
        bias=bias,
        mask=mask,
        aux=tuple(aux or ()),
        block_mask=_block_mask(block_mask, block_sizes, block_mask_mod) if block_mask else None,
    )


@functools.lru_cache(maxsize=1024)
def _without_tensors(window_left: int | None, window_right: int | None, softcap: float) -> Extras:
    return Extras(window=(window_left, window_right), softcap=softcap)


def _packed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of one number for every head, without gaps between them: kernels know no stride of it."""
    if tensor is None or not tensor.dim() or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor beside q, k and v may choose code."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15


def _block_mask(tensors: Sequence[torch.Tensor], sizes: Sequence[int], mask_mod: str) -> BlockMask:
    """What `split_block_mask` took apart."""
    partial_counts, partial_indices, full_counts, full_indices = tensors
    seqlen_q, seqlen_k, block_size = sizes
    return BlockMask(
        partial_counts=partial_counts,
        partial_indices=partial_indices,
        full_counts=full_counts,
        full_indices=full_indices,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        block_size=block_size,
        mask_mod=mask_mod,
    )


def split_block_mask(mask: BlockMask) -> tuple[list[torch.Tensor], list[int], str]:
    """A block mask as arguments of an op: `block_mask`, `block_sizes`, `block_mask_mod`."""
    tensors = [mask.partial_counts, mask.partial_indices, mask.full_counts, mask.full_indices]
    return tensors, [mask.seqlen_q, mask.seqlen_k, mask.block_size], mask.mask_mod


def call_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plain: tuple[Any, ...],
    mods: int = 0,
    *others: Any,
    **arguments: Any,
) -> Call:
    """The call that the ops make of these arguments, for an explanation; `plain` are the features before `mods`."""
    extras = _extras(*plain, *others)
    is_plain = extras is _without_tensors(None, None, 0.0) and not mods
    return Call(
        q=q,
        k=k,
        v=v,
        tf32=q.dtype is FLOAT32 and allows_tf32(),
        extras=None if is_plain else extras,
        mods=user_mods.resolve(mods) if mods else None,
        **arguments,
    )


def _prepared(
    key: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    flags: int,
    extras: Extras | None = None,
    mods: int = 0,
) -> Any:
    call = Call(
        q=q,
        k=k,
        v=v,
        causal=bool(flags & CAUSAL),
        bshd=bool(flags & BSHD),
        with_lse=bool(flags & WITH_LSE),
        explicit_offset=bool(flags & EXPLICIT_OFFSET),
        offset_tensor=bool(flags & OFFSET_TENSOR),
        tf32=bool(flags & TF32),
        extras=extras,
        mods=user_mods.resolve(mods) if mods else None,
    )
    run = serve.prepare(call)
    serve.remember(key, run)
    return run


def _attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
) -> Any:
    return _attention(q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor, WITH_LSE)


_ASKS_LSE: Any = {"with_lse": WITH_LSE}


def _attention_features_lse(*arguments: Any) -> Any:
    return _attention_features(*arguments, **_ASKS_LSE)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    *others: Any,
    **named: Any,
) -> torch.Tensor:
    return empty_output(q, v, bshd=bshd)


def _fake_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, v, bshd=bshd), empty_lse(q, bshd=bshd)


_IMPLEMENTATIONS = {
    "attention": (_attention, _fake),
    "attention_lse": (_attention_lse, _fake_lse),
    "attention_features": (_attention_features, _fake),
    "attention_features_lse": (_attention_features_lse, _fake_lse),
}
attention_kernel, attention_lse_kernel = _attention, _attention_lse
attention_features_kernel, attention_features_lse_kernel = _attention_features, _attention_features_lse
"""What the ops do, without the dispatcher: for calls that `is_direct` allows."""

for _name, (_kernel, _shapes) in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):  # the CPU's raises the error that lists every family
        _LIBRARY.impl(_name, _kernel, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashgen::{_name}", _shapes, lib=_LIBRARY)

attention_op = torch.ops.flashgen.attention.default
attention_lse_op = torch.ops.flashgen.attention_lse.default
attention_features_op = torch.ops.flashgen.attention_features.default
attention_features_lse_op = torch.ops.flashgen.attention_features_lse.default
