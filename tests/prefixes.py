"""Decode calls whose sequences share a prefix, and the calls without one that are the same."""

from __future__ import annotations

import bisect
import math
from dataclasses import replace

import torch

from flashgen.runtime.decode.call import DecodeCall
from flashgen.runtime.decode.prefix import Prefix
from tests.decoding import Case, make


def make_prefix(
    case: Case, lens: tuple[int, ...], starts: tuple[int, ...] = (), page: int | None = None, device: str = "cpu"
) -> Prefix:
    """A prefix of random keys for the sequences of a case, poisoned wherever no query of its group looks."""
    shared = Case(
        lens=lens, page=page, nheads=case.nheads, nheads_k=case.nheads_k, head_dim=case.head_dim, dtype=case.dtype
    )
    made = make(replace(shared, head_dim_v=case.head_dim_v, layout=case.layout if page else "nhd"), device, seed=7)
    left = case.options.get("window", (None, None))[0]
    groups = [group_of(b, len(case.lens), len(lens), starts) for b in range(len(case.lens))]
    for g, length in enumerate(lens):
        nearest = min(n for n, group in zip(case.lens, groups, strict=True) if group == g)
        hidden = 0 if left is None else min(max(length + nearest - case.seqlen_q - left, 0), length)
        for cache in (made.k_cache, made.v_cache):
            keys = torch.arange(hidden, device=device)
            if made.block_table is None:
                cache[g, keys] = math.nan
            else:
                cache[made.block_table[g, keys // cache.shape[1]].long(), keys % cache.shape[1]] = math.nan
    return Prefix(
        seqlens=made.seqlens, block_table=made.block_table, k=made.k_cache, v=made.v_cache, group_starts=starts
    )


def group_of(b: int, batch: int, prefixes: int, starts: tuple[int, ...]) -> int:
    """The group of a sequence."""
    return bisect.bisect_right(starts, b) - 1 if starts else b // (batch // prefixes)


def joined(call: DecodeCall, prefix: Prefix) -> DecodeCall:
    """The same call over contiguous caches that begin with the shared keys."""
    assert prefix.k is not None
    assert prefix.v is not None
    batch, prefixes = len(call.q), len(prefix.seqlens)
    shared = replace(
        call, k_cache=prefix.k, v_cache=prefix.v, seqlens=prefix.seqlens, block_table=prefix.block_table, batch_idx=None
    )
    rows: dict[str, list[torch.Tensor]] = {"k_cache": [], "v_cache": []}
    for b in range(batch):
        group = group_of(b, batch, prefixes, prefix.group_starts)
        for name, found in rows.items():
            found.append(torch.cat([_keys(shared, name, group), _keys(call, name, b)]))
    caches = {name: torch.nn.utils.rnn.pad_sequence(found, True, math.nan) for name, found in rows.items()}
    lens = torch.tensor([len(one) for one in rows["k_cache"]], dtype=torch.int32, device=call.q.device)
    return replace(call, **caches, seqlens=lens, block_table=None, batch_idx=None)


def _keys(call: DecodeCall, name: str, b: int) -> torch.Tensor:
    """The keys or values of a sequence, one after the other."""
    cache, length = getattr(call, name), int(call.seqlens[b])
    keys = torch.arange(length, device=call.q.device)
    found: torch.Tensor
    if call.block_table is not None:
        page = cache.shape[1]
        found = cache[call.block_table[b][keys // page].long(), keys % page]
    else:
        found = cache[b if call.batch_idx is None else int(call.batch_idx[b]), keys]
    return found
