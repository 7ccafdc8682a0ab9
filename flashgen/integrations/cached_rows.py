"""Caches of rows and slots as the keys of packed sequences: by strides alone, and a few numbers that say where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.errors import WorkloadError
from flashgen.runtime.argument_types import check_tensor

Tensor = torch.Tensor

MOST_KEYS = 128
"""Of a page that rows of a cache are cut into, where sequences name their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKeys:
    """Keys and values as `flashgen.attention_varlen` takes them, and the arguments that go with them."""

    k: Tensor
    v: Tensor
    named: dict[str, Any]
    is_behind_one: bool = False
    """Whether the sequences stand behind one more, which has no queries: its keys are those that nobody sees."""


def packed_keys(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None,
    leftpad: Tensor | None,
    batch_idx: Tensor | None,
) -> PackedKeys | None:
    """The keys of a cache, or None where they do not lie as packed sequences may.

    Args:
        k_cache: (rows, slots, nheads_k, head_dim), or with a block table (pages, page_size, nheads_k, head_dim).
        v_cache: likewise.
        lengths: keys of each sequence, int32 (batch,).
        block_table: pages of each sequence.
        leftpad: the first slot of each with a key.
        batch_idx: the row of each.

    Raises:
        WorkloadError: leftpad is not one number for each sequence.
    """
    lengths = lengths.contiguous()
    if block_table is not None:
        return PackedKeys(k=k_cache, v=v_cache, named={"block_table": block_table, "seqused_k": lengths})
    if k_cache.dim() == 4 and not k_cache.shape[0] * k_cache.shape[1]:
        ends = lengths.new_zeros(len(lengths) + 1)
        none = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        return PackedKeys(k=none[0], v=none[1], named={"cu_seqlens_k": ends, "max_seqlen_k": 0})
    jump = _slots_between_rows(k_cache)
    if jump is None or jump != _slots_between_rows(v_cache):
        return None
    if leftpad is not None:
        check_leftpad(leftpad, lengths, k_cache, is_by_row=batch_idx is None)
        lengths = (lengths - leftpad).clamp_(min=0)
    if batch_idx is not None:
        return _rows_by_pages(k_cache, v_cache, lengths, leftpad, batch_idx, jump)
    if leftpad is not None:
        return _padded_rows_by_ends(k_cache, v_cache, lengths, leftpad, jump)
    return _rows_by_ends(k_cache, v_cache, lengths, jump)


def pages_behind(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, leftpad: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A paged cache without the slots in front of each first key: K, V and a table of pages of one slot.

    None where slots of one page do not lie behind those of the one before it.
    """
    if not have_pages_in_order(k_cache, v_cache):
        return None
    pages, page = k_cache.shape[:2]
    k, v = (
        cache.as_strided((pages * page, 1, *cache.shape[2:]), (cache.stride(1), *cache.stride()[1:]))
        for cache in (k_cache, v_cache)
    )
    room = block_table.shape[1] * page
    slots = torch.arange(room, dtype=torch.int32, device=k.device) + leftpad[:, None]
    slots = slots.clamp_(max=max(room - 1, 0))
    table = block_table.gather(1, slots.div(page, rounding_mode="floor").long()) * page + slots.remainder(page)
    return k, v, table


def have_pages_in_order(*caches: Tensor) -> bool:
    """Whether slots of each page lie behind those of the one before it."""
    return all(cache.stride(0) == cache.shape[1] * cache.stride(1) for cache in caches)


def lie_as_packed(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the rows of caches without pages lie as packed sequences may: `packed_keys` has them."""
    if not k_cache.shape[0] * k_cache.shape[1]:
        return True
    jump = _slots_between_rows(k_cache)
    return jump is not None and jump == _slots_between_rows(v_cache)


def check_leftpad(leftpad: Tensor, lengths: Tensor, cache: Tensor, *, is_by_row: bool) -> None:
    """Refuse what is not one number for each sequence.

    Raises:
        WorkloadError: it is not.
    """
    check_numbers("cache_leftpad", leftpad, (len(cache),) if is_by_row else tuple(lengths.shape), cache.device)


def check_numbers(
    name: str,
    numbers: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    what: str = "one number for each sequence",
) -> None:
    """Refuse what is no int32 tensor of a shape on a device; None is passed by.

    Raises:
        WorkloadError: it is none; the message has `what` it is.
    """
    if numbers is None:
        return
    check_tensor(name, numbers)
    expected = (torch.int32, shape, device)
    found = (numbers.dtype, tuple(numbers.shape), numbers.device)
    if found != expected:
        said = [f"{dtype} {sizes} on {place}" for dtype, sizes, place in (expected, found)]
        raise WorkloadError(f"{name} is {said[0]}, {what}, got {said[1]}")


def _slots_between_rows(cache: Tensor) -> int | None:
    """How many slots the rows of a cache lie apart; None where that is no whole number of them, or too few."""
    if cache.dim() != 4 or not cache.numel():
        return None
    rows, slots = cache.shape[:2]
    if rows == 1:
        return slots
    jump, rest = divmod(cache.stride(0), max(cache.stride(1), 1))
    return None if rest or jump < slots or not cache.stride(1) else jump


def _rows_by_ends(k_cache: Tensor, v_cache: Tensor, lengths: Tensor, jump: int) -> PackedKeys:
    """Rows one behind the other, `jump` slots apart."""
    k, v = (_slots_in_order(cache, jump) for cache in (k_cache, v_cache))
    ends = first_slots(len(k_cache) + 1, jump, k).clamp_(max=len(k))
    return PackedKeys(k=k, v=v, named={"cu_seqlens_k": ends, "seqused_k": lengths, "max_seqlen_k": jump})


def _padded_rows_by_ends(k_cache: Tensor, v_cache: Tensor, lengths: Tensor, leftpad: Tensor, jump: int) -> PackedKeys:
    """The same without the slots in front of the first key: each sequence ends where the next one's first key is.

    Packed sequences begin with row 0, so the slots in front of the first sequence are those of one without queries.
    """
    k, v = (_slots_in_order(cache, jump) for cache in (k_cache, v_cache))
    begins = (first_slots(len(k_cache), jump, k) + leftpad).clamp_(max=len(k))
    ends = torch.cat([begins.new_zeros(1), begins, begins.new_full((1,), len(k))])
    used = torch.cat([lengths.new_zeros(1), lengths])
    longest = jump + k_cache.shape[1]  # from the first slot of a row to the last one of the next
    named = {"cu_seqlens_k": ends, "seqused_k": used, "max_seqlen_k": longest}
    return PackedKeys(k=k, v=v, named=named, is_behind_one=True)


def _slots_in_order(cache: Tensor, jump: int) -> Tensor:
    """All slots from the first one of the first row to the last one of the last, as (slots, nheads_k, columns)."""
    rows, slots = cache.shape[:2]
    return cache.as_strided(((rows - 1) * jump + slots, *cache.shape[2:]), cache.stride()[1:])


def first_slots(rows: int, jump: int, like: Tensor) -> Tensor:
    """Where rows begin that lie `jump` slots apart, int32 (rows,) on the device of a tensor."""
    return torch.arange(rows, dtype=torch.int32, device=like.device) * jump


def _rows_by_pages(
    k_cache: Tensor, v_cache: Tensor, lengths: Tensor, leftpad: Tensor | None, batch_idx: Tensor, jump: int
) -> PackedKeys:
    """Rows cut into pages, of which a table names those of each sequence; of one slot where keys begin anywhere."""
    rows, slots = k_cache.shape[:2]
    page = math.gcd(MOST_KEYS, slots, jump) if leftpad is None else 1
    count = ((rows - 1) * jump + slots) // page
    k, v = (
        cache.as_strided((count, page, *cache.shape[2:]), (page * cache.stride(1), *cache.stride()[1:]))
        for cache in (k_cache, v_cache)
    )
    places = torch.arange(slots // page, dtype=torch.int32, device=k.device)
    table = batch_idx[:, None] * (jump // page) + places[None, :]
    if leftpad is not None:
        table = (table + leftpad[:, None]).clamp_(max=count - 1)
    return PackedKeys(k=k, v=v, named={"block_table": table, "seqused_k": lengths})
