"""Packed sequences over a paged cache: poison in all that nobody may read, and stale entries in tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.runtime.ops.calls import Call, CheckedCall
from flashgen.runtime.ops.mods import handle_for, resolve
from flashgen.runtime.varlen.arguments import one_batch_element, packed_features
from tests.packing import SCORES, Case, Packed, make

Tensor = torch.Tensor
LAYOUTS = ("nhd", "hnd", "halves", "interleaved")
STALE = (-1, 2**31 - 1, 7)


@dataclass(frozen=True, kw_only=True)
class Paged:
    """The tensors of a call with pages; `packed` is the same call with keys side by side, for the oracle."""

    packed: Packed
    q: Tensor
    k: Tensor
    v: Tensor
    named: dict[str, Any]
    lengths: tuple[int, ...] = field(default=())


def paged(
    case: Case, page: int, layout: str = "nhd", *, device: str = "cpu", order: int = 0, by_ends: bool = False
) -> Paged:
    """The call of a case, whose keys lie in pages of `page` keys in the order that a seed says.

    Keys before the window of the first query that counts are NaN, and their pages are stale entries of the table.
    Lengths of keys are those of the case; `by_ends` says them by cu_seqlens_k and not by seqused_k.
    """
    packed = make(case, device)
    lengths = tuple(keys.stop - keys.start for _, _, keys in packed.sequences())
    columns = max(max(lengths, default=0) + page - 1, page) // page + 1
    counts = [-(-length // page) for length in lengths]
    pages = sum(counts) + 3
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(order)).tolist()
    k, v = caches(layout, pages, page, packed.k, packed.v)
    wide = torch.full((len(lengths), columns + 3), STALE[2], dtype=torch.int32)
    wide[:, 0::2], wide[:, 1::2] = STALE[:2]
    table = wide[:, 1 : 1 + columns]  # with a stride of its own
    left, _ = case.options.get("window", (None, None))
    for b, queries, keys in packed.sequences():
        before = 0 if left is None else lengths[b] - (queries.stop - queries.start) - left
        for number in range(max(before, 0) // page, counts[b]):
            table[b, number] = shuffled.pop()
            first, last = max(number * page, before), min((number + 1) * page, lengths[b])
            for cache, tensor in ((k, packed.k), (v, packed.v)):
                of_page = cache[int(table[b, number])]
                of_page[first - number * page : last - number * page] = tensor[keys.start + first : keys.start + last]
    named = {name: value for name, value in packed.named.items() if name not in ("cu_seqlens_k", "seqused_k")}
    named["block_table"] = table if device == "cpu" else wide.to(device)[:, 1 : 1 + columns]
    if by_ends:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        named["cu_seqlens_k"] = ends.to(device)
    else:
        named["seqused_k"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    named["max_seqlen_k"] = max(lengths, default=0)
    return Paged(packed=packed, q=packed.q, k=k, v=v, named=named, lengths=lengths)


def caches(layout: str, pages: int, page: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two caches full of NaN, (pages, page, heads, columns) in any memory."""
    heads, wide, wide_v = k.shape[1], k.shape[2], v.shape[2]

    def full(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=k.dtype, device=k.device)

    if layout == "hnd":
        one, two = full(pages, heads, page, wide), full(pages, heads, page, wide_v)
        return one.transpose(1, 2), two.transpose(1, 2)
    if layout == "halves":
        assert wide == wide_v
        one, two = full(pages, 2, page, heads, wide).unbind(1)
        return one, two
    if layout == "interleaved":
        both = full(pages, heads, page, wide + wide_v).transpose(1, 2)
        return both[..., :wide], both[..., wide:]
    return full(pages, page, heads, wide), full(pages, page, heads, wide_v)


def checked(call: Paged) -> CheckedCall:
    """The call, its rules checked."""
    named = call.named
    scores: dict[str, Any] = {name: named[name] for name in SCORES if name in named}
    mod = named.get("mask_mod")
    mods = 0 if mod is None else handle_for(None, mod)
    lengths = (named.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"))
    bounds = named["max_seqlen_q"], named["max_seqlen_k"]
    features = packed_features(
        Features(**scores, mods=mods), *lengths, *bounds, block_table=named["block_table"], page_size=call.k.shape[1]
    )
    q, k, v = one_batch_element(call.q, call.k, call.v, paged=True)
    causal = bool(named.get("causal"))
    found = resolve(mods) if mods else None
    return Call(q=q, k=k, v=v, causal=causal, bshd=True, with_lse=True, features=features, mods=found).checked()
