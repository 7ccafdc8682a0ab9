"""More queries over a cache than a call of decoding takes, on the references: in one call, and packed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashgen
from flashgen import flash_attn, flash_attn_interface
from flashgen.core.errors import WorkloadError
from tests.integrations.flash_attn_calls import (
    DV,
    HK,
    SLOTS,
    B,
    D,
    H,
    assert_same,
    ends,
    long_caches,
    one_by_one,
    plain,
    randn,
)

pytestmark = pytest.mark.usefixtures("on_reference")


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_a_call_of_decoding_takes(causal: bool) -> None:
    q, k, v = randn(B, 19, H, D), randn(B, SLOTS, HK, D), randn(B, SLOTS, HK, DV)
    found = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, causal=causal, return_softmax_lse=True)
    assert_same(found, plain(q, k[:, :20], v[:, :20], causal=causal))
    assert_same(flash_attn.flash_attn_with_kvcache(q[:, :1], k, v), plain(q[:, :1], k, v)[0])
    short = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=2, causal=True, return_softmax_lse=True)
    out, lse = plain(q, k[:, :2], v[:, :2], causal=True)
    assert_same(short, (out, lse.masked_fill(lse == -math.inf, math.inf)))


@pytest.mark.parametrize("kind", ["rows", "heads first", "halves", "pages", "batch_idx"])
def test_long_chunks_are_one_call_over_any_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With new keys in front of it; nothing is decoded, so that no chunk is cut into pieces."""
    monkeypatch.setattr(flashgen, "attention_decode", None)
    chunk, slots = 20, 32
    k_cache, v_cache, given, of = long_caches(kind, slots)
    q, k, v = randn(B, chunk, H, D), randn(B, chunk, HK, D, seed=1), randn(B, chunk, HK, D, seed=2)
    lengths = torch.tensor([9, 0], dtype=torch.int32)
    before = [[of(cache, b).clone() for b in range(B)] for cache in (k_cache, v_cache)]
    for scores, rules in (
        ({"causal": True}, {"causal": True}),
        ({"window_size": (5, 2)}, {"window": (5, 2)}),
    ):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, return_softmax_lse=True, **scores, **given
        )
        for b, n in enumerate(lengths.tolist()):
            keys, values = (torch.cat([old[b][:n], new[b]])[None] for old, new in zip(before, (k, v), strict=True))
            expected = plain(q[b][None], keys, values, **rules)
            assert_same((out[b], lse[b]), (expected[0][0], expected[1][0]))


@pytest.mark.parametrize("kind", ["rows", "heads first", "batch_idx"])
def test_long_chunks_begin_behind_the_first_slots(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call with any scores; a sequence may have fewer keys than queries, and none at all."""
    monkeypatch.setattr(flashgen, "attention_decode", None)
    chunk, slots, first = 40, 72, (30, 7)
    k_cache, v_cache, given, of = long_caches(kind, slots)
    q, k, v = randn(B, chunk, H, D), randn(B, chunk, HK, D, seed=1), randn(B, chunk, HK, D, seed=2)
    leftpad, slopes = torch.tensor(first, dtype=torch.int32), torch.rand(B, H, generator=torch.Generator())
    for cache, new in ((k_cache, k), (v_cache, v)):
        for b in range(B):
            of(cache, b)[:] = math.nan
            of(cache, b)[first[b] : first[b] + chunk] = new[b]
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"causal": True}, {"causal": True}),
        ({"causal": True, "alibi_slopes": slopes}, {"causal": True}),
        ({"window_size": (5, 2)}, {"window": (5, 2)}),
        ({"alibi_slopes": slopes, "softcap": 2.0}, {"softcap": 2.0}),
    )
    for used in ((40, 40), (35, 40), (30, 40)):
        lengths = torch.tensor(used, dtype=torch.int32)
        for scores, rules in cases:
            out, lse = flash_attn.flash_attn_with_kvcache(
                q, k_cache, v_cache, None, None, None, None, lengths, cache_leftpad=leftpad, return_softmax_lse=True,
                **given, **scores,
            )  # fmt: skip
            for b, n in enumerate(used):
                more = {"alibi_slopes": slopes[b]} if "alibi_slopes" in scores else {}
                n_keys = n - first[b]
                expected = plain(q[b][None], k[b][None, :n_keys], v[b][None, :n_keys], **rules, **more)
                seen = expected[1].masked_fill(expected[1] == -math.inf, math.inf)
                assert_same((out[b], lse[b]), (expected[0][0], seen[0]))
    wrong = leftpad[:1]
    with pytest.raises(WorkloadError, match=r"cache_leftpad is torch.int32 \(2,\) on cpu"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=wrong, **given)


def test_packed_queries_over_caches() -> None:
    """Version 3's cu_seqlens_q; version 2's chunks over pages, whose lengths lie between cu_seqlens_k."""
    queries, lengths = (3, 18), torch.tensor([7, 20], dtype=torch.int32)
    q = randn(sum(queries), H, D)
    for kind, first in (
        ("rows", (0, 0)),
        ("pages", (0, 0)),
        ("batch_idx", (0, 0)),
        ("rows", (4, 1)),
        ("batch_idx", (4, 1)),
    ):
        k_cache, v_cache, given, of = long_caches(kind, 32)
        given |= {"cache_leftpad": torch.tensor(first, dtype=torch.int32)} if any(first) else {}
        k_cache.nan_to_num_(0.5), v_cache.nan_to_num_(0.25)
        named = {{"block_table": "page_table"}.get(name, name): value for name, value in given.items()}
        options = {"cu_seqlens_q": ends(queries), "max_seqlen_q": 18, "causal": True, "return_softmax_lse": True}
        out, lse = flash_attn_interface.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, **options, **named
        )
        keys = [[of(cache, b)[first[b] : int(n)] for b, n in enumerate(lengths)] for cache in (k_cache, v_cache)]
        seen = (7 - first[0], 20 - first[1])
        expected = one_by_one(q, torch.cat(keys[0]), torch.cat(keys[1]), queries, seen)
        assert_same((out, lse), expected)
        if kind == "pages":
            places = (ends(queries), ends((7, 20)), 18, 20)
            two = flash_attn.flash_attn_varlen_func(
                q, k_cache, v_cache, *places, causal=True, return_attn_probs=True, **given
            )
            assert_same((two[0], two[1]), expected)
