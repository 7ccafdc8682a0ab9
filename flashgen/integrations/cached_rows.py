"""Caches of rows and slots as the keys of packed sequences: by strides alone, and a few numbers that say where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor

MOST_KEYS = 128
"""Of a page that rows of a cache are cut into, where sequences name their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKeys:
    """Keys and values as `flashgen.attention_varlen` takes them, and the arguments that go with them."""

    k: Tensor
    v: Tensor
    named: dict[str, Any]


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
    """
    lengths = lengths.contiguous()
    if block_table is not None:
        return PackedKeys(k=k_cache, v=v_cache, named={"block_table": block_table, "seqused_k": lengths})
    jump = _slots_between_rows(k_cache)
    if jump is None or jump != _slots_between_rows(v_cache) or leftpad is not None:
        return None  # packed sequences begin with row 0
    if batch_idx is None:
        return _rows_by_ends(k_cache, v_cache, lengths, jump)
    return _rows_by_pages(k_cache, v_cache, lengths, batch_idx, jump)


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
    rows, slots = k_cache.shape[:2]
    total = (rows - 1) * jump + slots
    k, v = (cache.as_strided((total, *cache.shape[2:]), cache.stride()[1:]) for cache in (k_cache, v_cache))
    ends = (torch.arange(rows + 1, dtype=torch.int32, device=k.device) * jump).clamp_(max=total)
    return PackedKeys(k=k, v=v, named={"cu_seqlens_k": ends, "seqused_k": lengths, "max_seqlen_k": jump})


def _rows_by_pages(k_cache: Tensor, v_cache: Tensor, lengths: Tensor, batch_idx: Tensor, jump: int) -> PackedKeys:
    """Rows cut into pages, of which a table names those of each sequence."""
    rows, slots = k_cache.shape[:2]
    page = math.gcd(MOST_KEYS, slots, jump)
    count = ((rows - 1) * jump + slots) // page
    k, v = (
        cache.as_strided((count, page, *cache.shape[2:]), (page * cache.stride(1), *cache.stride()[1:]))
        for cache in (k_cache, v_cache)
    )
    places = torch.arange(slots // page, dtype=torch.int32, device=k.device)
    table = batch_idx[:, None] * (jump // page) + places[None, :]
    return PackedKeys(k=k, v=v, named={"block_table": table, "seqused_k": lengths})
