"""FlashAttention's call over caches on the references: new keys, rotation, pages and lengths, for both versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen import flash_attn, flash_attn_interface
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from tests.integrations.flash_attn_calls import (
    DV,
    HK,
    SLOTS,
    WIDE,
    B,
    D,
    H,
    assert_same,
    caches,
    ends,
    long_caches,
    plain,
    randn,
)
from tests.rotary import rotated

pytestmark = pytest.mark.usefixtures("on_reference")

NEW = 3
LENGTHS = (4, 0)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["2", "3"])
@pytest.mark.parametrize("kind", ["rows", "pages", "batch_idx", "leftpad"])
@pytest.mark.parametrize("causal", [True, False])
def test_caches(module: Any, kind: str, causal: bool) -> None:
    """Lengths are those before the new keys, which are written in place; rotation and masks count from there."""
    k_cache, v_cache, given, slots = caches(kind)
    if module is flash_attn_interface and "block_table" in given:
        given = {"page_table": given["block_table"]}
    q, k, v = randn(B, NEW, H, D), randn(B, NEW, HK, D, seed=1), randn(B, NEW, HK, DV)
    angle = randn(SLOTS, D // 2)
    cos, sin, neox = angle.cos(), angle.sin(), kind == "rows"
    before = [[slots(cache, b).clone() for b in range(B)] for cache in (k_cache, v_cache)]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    named = {"causal": causal, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": not neox}
    out, lse = module.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, return_softmax_lse=True, **named, **given
    )
    assert lengths.tolist() == list(LENGTHS)
    for b, n in enumerate(LENGTHS):
        turned = [
            torch.stack([rotated(x[b, i], cos, sin, n + i * step, interleaved=not neox) for i in range(NEW)])
            for x, step in ((q, int(causal)), (k, 1))
        ]
        whole_k, whole_v = (torch.cat([old[b][:n], new]) for old, new in zip(before, (turned[1], v[b]), strict=True))
        assert_same((slots(k_cache, b)[: n + NEW], slots(v_cache, b)[: n + NEW]), (whole_k, whole_v))
        assert_same(slots(k_cache, b)[n + NEW :], before[0][b][n + NEW :])
        first = 1 if kind == "leftpad" and b == 0 else 0
        expected = plain(turned[0][None], whole_k[None, first:], whole_v[None, first:], causal=causal)
        assert_same((out[b], lse[b]), (expected[0][0], expected[1][0]))


@pytest.mark.parametrize("new", [0, 3])
def test_lengths_behind_the_block_table_are_refused_where_they_are_known(
    new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number always; a tensor with FLASHGEN_CHECKS=1 alone, as FlashAttention does, before anything is written."""
    k_cache, v_cache, given, _ = long_caches("pages", 32)
    q, more = randn(B, 2, H, D), [randn(B, new, HK, D, seed=n) if new else None for n in (1, 2)]
    before = k_cache.clone()
    over, fits = 33 - new, 32 - new
    for known in (over, torch.tensor([4, over], dtype=torch.int32)):
        if isinstance(known, torch.Tensor):
            monkeypatch.setenv("FLASHGEN_CHECKS", "1")
            settings.cache_clear()
        for module, name in ((flash_attn, "block_table"), (flash_attn_interface, "page_table")):
            with pytest.raises(RuntimeError, match="the 32 keys that block_table has room for, got") as found:
                module.flash_attn_with_kvcache(
                    q, k_cache, v_cache, *more, cache_seqlens=known, **{name: given["block_table"]}
                )
            assert isinstance(found.value, WorkloadError)
    for wrong, rule in ((3.5, "must be a whole number, got 3.5"), (-1, "must be at least 0, got -1")):
        with pytest.raises(WorkloadError, match=rule):
            flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *more, cache_seqlens=wrong, **given)
    torch.testing.assert_close(k_cache, before, equal_nan=True)
    seqlens = torch.tensor([4, fits], dtype=torch.int32)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *more, cache_seqlens=seqlens, **given)


@pytest.mark.parametrize("queries", [3, 20])
def test_a_cache_gives_an_output_and_no_gradient(queries: int) -> None:
    """As FlashAttention does, whose gradients are missing without a word."""
    k_cache, v_cache, given, _ = caches("pages")
    q = randn(B, queries, H, D, grad=True)
    new = [randn(B, 2, HK, width, grad=True) for width in (D, DV)]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    with torch.no_grad():
        expected = flash_attn.flash_attn_with_kvcache(
            q, k_cache.clone(), v_cache.clone(), *new, cache_seqlens=lengths, return_softmax_lse=True, **given
        )
    cached = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=lengths, return_softmax_lse=True, **given
    )
    places = (ends((queries,) * B), ends(LENGTHS), queries, 4)
    packed = flash_attn.flash_attn_varlen_func(q.flatten(0, 1), k_cache, v_cache, *places, **given)
    with torch.no_grad():
        expected += (flash_attn.flash_attn_varlen_func(q.flatten(0, 1), k_cache, v_cache, *places, **given),)
    assert_same((*cached, packed), expected)
    for out, why in ((cached[0], "kvcache has no backward pass"), (cached[1], "kvcache has"), (packed, "in pages")):
        with pytest.raises(UnsupportedError, match=why):
            out.sum().backward()
    assert q.grad is None


@pytest.mark.parametrize("queries", [3, 20])
@pytest.mark.parametrize("kind", ["leftpad", "batch_idx", "both"])
def test_version_3_takes_pages_with_what_is_said_of_rows(kind: str, queries: int) -> None:
    """`cache_batch_idx` names rows of the table; `cache_leftpad` hides slots, and new keys go behind all of them."""
    table = torch.tensor([[3, 1, 6, 2], [0, 5, 4, 7], [8, 9, 10, 11]], dtype=torch.int32)
    rows, first = ((2, 0) if kind != "leftpad" else (0, 1)), ((5, 2) if kind != "batch_idx" else (0, 0))
    k_cache, v_cache = randn(12, 8, HK, D), randn(12, 8, HK, DV)
    q, k, v = randn(B, queries, H, D), randn(B, 2, HK, D), randn(B, 2, HK, DV)
    given: dict[str, Any] = {"page_table": table if kind != "leftpad" else table[:2]}
    given |= {"cache_batch_idx": torch.tensor(rows, dtype=torch.int32)} if kind != "leftpad" else {}
    given |= {"cache_leftpad": torch.tensor(first, dtype=torch.int32)} if kind != "batch_idx" else {}
    lengths = torch.tensor([21, 3], dtype=torch.int32)
    out, lse = flash_attn_interface.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True, **given
    )
    for b, n in enumerate(lengths.tolist()):
        keys, values = (cache[table[rows[b]].long()].flatten(0, 1)[: n + 2] for cache in (k_cache, v_cache))
        assert_same((keys[n:], values[n:]), (k[b], v[b]))
        expected = plain(q[b][None], keys[None, first[b] :], values[None, first[b] :], causal=True)
        assert_same((out[b], lse[b]), (expected[0][0], expected[1][0]))
    if kind == "leftpad":
        apart = torch.zeros(12, 9, HK, D, dtype=WIDE)[:, :8]
        with pytest.raises(UnsupportedError, match="pages that lie one behind the other"):
            flash_attn_interface.flash_attn_with_kvcache(q, apart, apart, cache_seqlens=lengths, **given)


def test_positions_of_rotation_without_angles_say_nothing() -> None:
    q, cache, new = randn(B, 2, H, D), randn(B, 8, HK, D), randn(B, 2, HK, D)
    places = torch.tensor([3, 1], dtype=torch.int32)
    for given in ({"k": new, "v": new}, {}):
        found = [
            flash_attn_interface.flash_attn_with_kvcache(
                q, cache.clone(), cache.clone(), cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32), **given, **more
            )
            for more in ({"rotary_seqlens": places}, {})
        ]
        assert_same(*found)


@pytest.mark.parametrize(("queries", "is_packed"), [(17, False), (1, True), (17, True)])
@pytest.mark.parametrize("kind", ["rows", "leftpad", "batch_idx", "leftpad and batch_idx"])
def test_a_length_behind_the_slots_of_a_row_is_all_of_it(queries: int, kind: str, is_packed: bool) -> None:
    """A new key without a slot is left out, and what lies behind the slots is another sequence's."""
    longer = [randn(B + 1, SLOTS + 16, HK, width) for width in (D, DV)]
    for cache in longer:
        cache[:, SLOTS:] = float("nan")
    k_cache, v_cache = (cache[:, :SLOTS] for cache in longer)
    first, rows = ((3, 5) if "leftpad" in kind else (0, 0)), ((2, 0) if "batch_idx" in kind else (0, 1))
    given: dict[str, Any] = {"cache_leftpad": torch.tensor(first, dtype=torch.int32)} if "leftpad" in kind else {}
    given |= {"cache_batch_idx": torch.tensor(rows, dtype=torch.int32)} if "batch_idx" in kind else {}
    q, new = randn(B, queries, H, D), [randn(B, 1, HK, width, seed=3) for width in (D, DV)]
    asked, places = q, {}
    if is_packed:
        asked, places = q.flatten(0, 1), {"cu_seqlens_q": ends((queries,) * B), "max_seqlen_q": queries}
    lengths = torch.tensor([SLOTS, SLOTS + 4], dtype=torch.int32)
    out, lse = flash_attn_interface.flash_attn_with_kvcache(
        asked, k_cache, v_cache, *new, cache_seqlens=lengths, return_softmax_lse=True, **given, **places
    )
    out = out.view(B, queries, H, DV)
    lse = lse.view(H, B, queries).transpose(0, 1) if is_packed else lse
    for b in range(B):
        keys, values = (cache[rows[b], first[b] :][None] for cache in (k_cache, v_cache))
        expected = plain(q[b][None], keys, values)
        assert_same((out[b], lse[b]), (expected[0][0], expected[1][0]))


def test_packed_queries_of_no_sequence_take_angles() -> None:
    """As they do without, and as queries in rows do."""
    none, angles = randn(0, 3, HK, D), randn(SLOTS, D // 2)
    out = flash_attn_interface.flash_attn_with_kvcache(
        randn(0, H, D),
        randn(1, SLOTS, HK, D),
        randn(1, SLOTS, HK, D),
        none,
        none,
        cache_seqlens=torch.zeros(0, dtype=torch.int32),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
        max_seqlen_q=1,
        rotary_cos=angles,
        rotary_sin=angles,
    )
    assert out.shape == (0, H, D)
