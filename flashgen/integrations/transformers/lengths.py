"""Lengths of sequences from masks: computed in the first layer that needs them, kept for the others."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashgen.integrations.transformers.mask import Visible

Tensor = torch.Tensor
Lengths = tuple[Any, Any, Any, Any]
"""cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""


def packed_lengths(visible: Visible) -> Lengths:
    """Where packed sequences begin, from their numbers (batch, seqlen), in one row behind the other."""
    if "lengths" not in visible.found:
        numbers = visible.sequences
        assert numbers is not None
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        places = begins.flatten().nonzero().flatten()
        ends = torch.cat([places, places.new_full((1,), numbers.numel())])
        longest = int(ends.diff().max()) if len(places) else 0
        ends = ends.to(torch.int32)
        visible.found["lengths"] = ends, ends, longest, longest
    lengths: Lengths = visible.found["lengths"]
    return lengths


def within_sequences(mask: Tensor, cu_seqlens: Tensor, rows: tuple[int, int]) -> Tensor:
    """A mask that says nothing of packed sequences, without what it shows of other sequences than a query's own.

    Args:
        mask: (batch, heads, seqlen, seqlen) of bools or floats.
        cu_seqlens: where sequences begin, and where the last one ends, in one row behind the other.
        rows: batch and seqlen.
    """
    batch, seqlen = rows
    places = torch.arange(batch * seqlen, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    numbers = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True).view(batch, 1, seqlen)
    is_own = (numbers[..., None] == numbers[:, :, None]).to(mask.device)
    return mask & is_own if mask.dtype == torch.bool else mask.masked_fill(~is_own, -math.inf)


def cached_keys(visible: Visible, seqlen_k: int) -> tuple[Tensor, Tensor] | None:
    """How many keys each sequence has in a cache, and the first that is no padding, int32 (batch,) both.

    All have `seqlen_k` keys, padding included. None where padding lies elsewhere than before all others, which waits
    for the GPU once for a mask and a `seqlen_k`: layers with caches of their own lengths may share a mask.
    """
    name = f"keys of {seqlen_k}"
    if name not in visible.found:
        visible.found[name] = None
        if visible.keys is not None and type(visible.offset) is int and seqlen_k:
            keys = visible.keys[:, :seqlen_k]
            first = seqlen_k - keys.sum(1)
            if bool((keys == (torch.arange(seqlen_k, device=keys.device) >= first[:, None])).all()):
                first = first.to(torch.int32)
                visible.found[name] = torch.full_like(first, seqlen_k), first
    found: tuple[Tensor, Tensor] | None = visible.found[name]
    return found
