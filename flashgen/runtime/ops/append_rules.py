"""The arguments of `flashgen.append_kv`, and their rules: those of shapes, dtypes and devices, then those of memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashgen.core.checks import MAX_SIZE
from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops.calls import DTYPES
from flashgen.runtime.ops.overlap import lies_in_itself, share_memory

Tensor = torch.Tensor

ROTARY_STEP = 16
"""What rotary_dim is a multiple of, as in FlashAttention."""


class AppendArguments(NamedTuple):
    """The arguments of a call, in the order of the op's schema; `seqlen` is for all sequences without `seqlens`."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seqlens: Tensor | None = None
    seqlen: int | None = None
    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    rotary_interleaved: bool = True
    q: Tensor | None = None
    q_causal: bool = True

    @property
    def batch(self) -> int:
        """Sequences; 1 for packed tokens."""
        return self.k.shape[0] if self.k.dim() == 4 else 1

    @property
    def seqlen_new(self) -> int:
        """New tokens of each sequence."""
        return self.k.shape[-3]

    @property
    def page_size(self) -> int:
        """Slots of a page, or of a row of a cache without pages."""
        return self.k_cache.shape[1]

    @property
    def num_pages(self) -> int:
        """Pages that a sequence may have."""
        return 1 if self.block_table is None else self.block_table.shape[1]

    @property
    def capacity(self) -> int:
        """Slots of a sequence."""
        return self.page_size * self.num_pages

    @property
    def tokens(self) -> int:
        """Tokens that may have a place: of packed ones those with a slot."""
        return self.batch * self.seqlen_new if self.slot_mapping is None else self.slot_mapping.numel()


def check(given: AppendArguments) -> None:
    """Check what arguments must be wherever they are: also of tensors without memory.

    Raises:
        WorkloadError: a shape, a dtype, a device or a combination breaks a rule.
    """
    _check_new(given)
    _check_caches(given)
    _check_places(given)
    _check_lengths(given)
    _check_rotary(given)
    _check_queries(given)


def check_memory(given: AppendArguments) -> None:
    """Check strides and places in memory.

    Raises:
        WorkloadError: a stride is unusual, or what is written lies in itself or in what is read.
    """
    for name in ("k", "v", "k_cache", "v_cache", "q", "rotary_cos", "rotary_sin", "block_table"):
        tensor = getattr(given, name)
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
            raise WorkloadError(f"the last dimension is contiguous, got {name} with strides {tensor.stride()}")
    for name in ("seqlens", "slot_mapping", "batch_idx", "rotary_seqlens"):
        tensor = getattr(given, name)
        if tensor is not None and not tensor.is_contiguous():
            raise WorkloadError(f"{name} is contiguous, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    for name in ("k_cache", "v_cache"):
        tensor = getattr(given, name)
        if lies_in_itself(tensor):
            raise WorkloadError(
                f"each element of a cache has a place of its own, got {name} {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}"
            )


def check_apart(given: AppendArguments) -> None:
    """Check that nothing that is written lies in anything else.

    Raises:
        WorkloadError: something does.
    """
    for cache, others in (("k_cache", ("v_cache", "k", "v", "q")), ("v_cache", ("k", "v", "q"))):
        for name in others:
            tensor = getattr(given, name)
            if tensor is not None and share_memory(getattr(given, cache), tensor):
                raise WorkloadError(f"{cache} shares no memory with k, v, q or the other cache, got one with {name}")


def _check_new(given: AppendArguments) -> None:
    k, v = given.k, given.v
    ranks = (3, 4) if given.slot_mapping is not None else (4,)
    if k.dim() not in ranks or v.dim() != k.dim() or k.shape[:-1] != v.shape[:-1]:
        packed = " or, with a slot_mapping, (tokens, nheads_k, head_dim)"
        raise WorkloadError(
            f"k is (batch, seqlen_new, nheads_k, head_dim){packed if len(ranks) > 1 else ''}, and v the same with "
            f"head_dim_v, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not (k.shape[-2] and k.shape[-1] and v.shape[-1]):
        raise WorkloadError(
            f"nheads_k, head_dim and head_dim_v are at least 1, got k {tuple(k.shape)} and v {tuple(v.shape)}"
        )
    if k.dtype not in DTYPES:
        raise WorkloadError(f"dtype is bfloat16, float16 or float32, got k with {k.dtype}")
    for name in ("v", "k_cache", "v_cache", "q"):
        tensor = getattr(given, name)
        if tensor is not None and (tensor.dtype != k.dtype or tensor.device != k.device):
            raise WorkloadError(
                f"k, v, q and the caches share dtype and device, got k {k.dtype} on {k.device}, {name} {tensor.dtype} "
                f"on {tensor.device}"
            )


def _check_caches(given: AppendArguments) -> None:
    k, v, k_cache, v_cache = given[:4]
    if (
        k_cache.dim() != 4
        or v_cache.dim() != 4
        or k_cache.shape[:3] != v_cache.shape[:3]
        or k_cache.shape[2:] != k.shape[-2:]
        or v_cache.shape[2:] != v.shape[-2:]
    ):
        raise WorkloadError(
            "k_cache is (rows, slots, nheads_k, head_dim) or (num_blocks, page_size, nheads_k, head_dim), and v_cache "
            f"the same with head_dim_v, got {tuple(k_cache.shape)} and {tuple(v_cache.shape)} for k {tuple(k.shape)} "
            f"and v {tuple(v.shape)}"
        )
    is_paged = given.block_table is not None or given.slot_mapping is not None
    if is_paged and given.page_size < 1:
        raise WorkloadError(f"a page has at least 1 slot, got k_cache {tuple(k_cache.shape)}")
    if k_cache.shape[0] * given.page_size > MAX_SIZE or given.batch * given.seqlen_new * k.shape[-2] > MAX_SIZE:
        raise WorkloadError(
            f"slots of a cache, and tokens times heads, are at most {MAX_SIZE}, got k_cache {tuple(k_cache.shape)} and "
            f"k {tuple(k.shape)}"
        )


def _check_places(given: AppendArguments) -> None:
    batch = given.batch
    _check_integers("block_table", given.block_table, given, torch.int32, 2, (batch, None))
    _check_integers("batch_idx", given.batch_idx, given, torch.int32, 1, (batch,))
    slots = given.slot_mapping
    named = [name for name in ("block_table", "slot_mapping", "batch_idx") if getattr(given, name) is not None]
    if len(named) > 1:
        raise WorkloadError(f"block_table, slot_mapping and batch_idx exclude each other, got {' and '.join(named)}")
    if slots is not None:
        _check_integers("slot_mapping", slots, given, torch.int64, None, None)
        shape, whole = tuple(slots.shape), (batch, given.seqlen_new)
        fits = shape[0] <= whole[1] if given.k.dim() == 3 and len(shape) == 1 else shape in (whole, (batch * whole[1],))
        if not fits:
            raise WorkloadError(
                "a slot_mapping has one slot for each token, (batch, seqlen_new) or flat, or for the first ones of "
                f"packed tokens, got {shape} for k {tuple(given.k.shape)}"
            )
    elif given.block_table is None and given.batch_idx is None and given.k_cache.shape[0] < batch:
        raise WorkloadError(
            f"a cache without pages has a row for each sequence, or a batch_idx, got {given.k_cache.shape[0]} rows for "
            f"batch {batch}"
        )


def _check_lengths(given: AppendArguments) -> None:
    for name in ("seqlens", "leftpad", "rotary_seqlens"):
        _check_integers(name, getattr(given, name), given, torch.int32, 1, (given.batch,))
    has_lengths = given.seqlens is not None or given.seqlen is not None
    if given.slot_mapping is not None:
        if has_lengths and given.k.dim() == 3:
            raise WorkloadError("packed tokens have slots and no seqlens, got both")
        if given.seqlen is not None and not 0 <= given.seqlen <= MAX_SIZE:
            raise WorkloadError(f"seqlens is from 0 to {MAX_SIZE}, got {given.seqlen}")
        return
    if not has_lengths:
        raise WorkloadError(
            "seqlens, the keys of each sequence before, are given unless a slot_mapping is, got neither"
        )
    capacity = given.capacity
    if capacity + given.seqlen_new > MAX_SIZE:
        raise WorkloadError(
            f"slots of a sequence are at most {MAX_SIZE - given.seqlen_new}, got {given.num_pages} pages of "
            f"{given.page_size}"
        )
    if given.seqlen is not None and not 0 <= given.seqlen <= capacity - given.seqlen_new:
        raise WorkloadError(
            f"seqlens is from 0 to what leaves room for the new tokens, {capacity} slots less {given.seqlen_new}, got "
            f"{given.seqlen}"
        )


def _check_rotary(given: AppendArguments) -> None:
    cos, sin = given.rotary_cos, given.rotary_sin
    if cos is None or sin is None:
        named = [
            name for name in ("rotary_cos", "rotary_sin", "rotary_seqlens", "q") if getattr(given, name) is not None
        ]
        if named:
            raise WorkloadError(
                f"rotary_cos and rotary_sin come together, before rotary_seqlens or q, got {named} alone"
            )
        return
    head_dim, dim = given.k.shape[-1], 2 * cos.shape[-1] if cos.dim() == 2 else 0
    if cos.shape != sin.shape or cos.dim() != 2 or not cos.shape[0]:
        raise WorkloadError(
            f"rotary_cos and rotary_sin are (positions, rotary_dim / 2), got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if not 0 < dim <= head_dim or dim % ROTARY_STEP:
        raise WorkloadError(
            f"rotary_dim is a multiple of {ROTARY_STEP} up to head_dim {head_dim}, got {dim}, tables of "
            f"{tuple(cos.shape)}"
        )
    if cos.dtype not in (given.k.dtype, torch.float32) or cos.dtype != sin.dtype:
        raise WorkloadError(
            f"rotary_cos and rotary_sin have the dtype of k or float32, got {cos.dtype} and {sin.dtype} for "
            f"{given.k.dtype}"
        )
    if cos.device != given.k.device or sin.device != given.k.device:
        raise WorkloadError(
            f"rotary_cos and rotary_sin are on the device of k, got {cos.device} and {sin.device} for {given.k.device}"
        )
    _check_positions(given, cos.shape[0])


def _check_positions(given: AppendArguments, positions: int) -> None:
    if given.rotary_seqlens is not None:
        return
    if given.slot_mapping is not None:
        if given.seqlens is None and given.seqlen is None:
            raise WorkloadError(
                "a rotary embedding needs the positions of tokens, seqlens or rotary_seqlens, got neither"
            )
        return
    capacity = given.capacity
    if positions < capacity:
        raise WorkloadError(
            "rotary_cos and rotary_sin have a position for each slot of a sequence, or rotary_seqlens say which are "
            f"meant, got {positions} positions and {capacity} slots"
        )


def _check_queries(given: AppendArguments) -> None:
    q, k = given.q, given.k
    if q is None:
        return
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or not q.shape[2]:
        raise WorkloadError(
            f"q is (batch, seqlen_q, nheads, head_dim) for k of four dimensions, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise WorkloadError(f"nheads is a multiple of nheads_k, got {q.shape[2]} and {k.shape[2]}")
    if q.shape[0] * q.shape[1] * q.shape[2] > MAX_SIZE:
        raise WorkloadError(f"rows of q are at most {MAX_SIZE}, got {tuple(q.shape)}")


def _check_integers(
    name: str,
    tensor: Tensor | None,
    given: AppendArguments,
    dtype: torch.dtype,
    rank: int | None,
    shape: tuple[int | None, ...] | None,
) -> None:
    """Refuse a tensor of numbers that has another dtype, device or shape; None in a shape is any size."""
    if tensor is None:
        return
    fits = rank is None or tensor.dim() == rank
    if fits and shape is not None:
        fits = all(wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True))
    if tensor.dtype != dtype or tensor.device != given.k.device or not fits or tensor.dim() not in (1, 2):
        words = {1: "(batch,)", 2: "(batch, num_pages)"}.get(rank or 0, "")
        raise WorkloadError(
            f"{name} is {str(dtype).removeprefix('torch.')} {words + ' ' if words else ''}on the device of k, got "
            f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device} for batch {given.batch} on {given.k.device}"
        )
