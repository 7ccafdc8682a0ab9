"""Lengths of sequences from masks: computed in the first layer that needs them, kept for the others."""

from __future__ import annotations

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


def leftpad(visible: Visible, seqlen_k: int) -> Tensor | None:
    """The first key of each sequence that is no padding, int32 (batch,), where none of those behind it is padding.

    `visible.found["seqlens"]` has seqlen_k then, for each sequence. None where padding lies elsewhere, which waits for
    the GPU once for a mask.
    """
    found = visible.found
    if "leftpad" not in found:
        found["leftpad"] = None
        if visible.keys is not None and type(visible.offset) is int and seqlen_k:
            keys = visible.keys[:, :seqlen_k]
            first = seqlen_k - keys.sum(1)
            if bool((keys == (torch.arange(seqlen_k, device=keys.device) >= first[:, None])).all()):
                found["leftpad"] = first.to(torch.int32)
                found["seqlens"] = torch.full_like(found["leftpad"], seqlen_k)
    pad: Tensor | None = found["leftpad"]
    return pad
