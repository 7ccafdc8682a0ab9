"""FlashAttention's functions on the references: arguments, shapes, caches and gradients, against plain float64."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import flashgen
from flashgen import flash_attn, flash_attn_interface
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.settings import settings
from flashgen.flash_attn import bert_padding
from flashgen.flash_attn.installation import NAMES
from flashgen.flash_attn.layers import rotary
from tests.interpreter.dense import Rules, attention
from tests.interpreter.test_append_kv import rotated

pytestmark = pytest.mark.usefixtures("on_reference")

B, SQ, SK, H, HK, D, DV = 2, 5, 7, 4, 2, 16, 8
WIDE = torch.float64
Tensor = torch.Tensor


def randn(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=WIDE).requires_grad_(grad)


def plain(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> tuple[Tensor, Tensor]:
    """Output (batch, seqlen, nheads, head_dim) and LSE of tensors in this order, in float64."""
    out, lse = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), Rules(**rules))
    return out.transpose(1, 2), lse


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


SCORES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True}, {"causal": True}),
    ({"window_size": (2, -1), "softmax_scale": 0.3}, {"window": (2, None), "softmax_scale": 0.3}),
    ({"window_size": [-1, 1], "softcap": 2.0}, {"window": (None, 1), "softcap": 2.0}),
    ({"window_size": (1, 1), "causal": True}, {"window": (1, 0)}),
    ({"alibi_slopes": torch.full((H,), 0.3)}, {"alibi_slopes": torch.full((H,), 0.3)}),
]


@pytest.mark.parametrize(("given", "rules"), SCORES, ids=range(len(SCORES)))
def test_dense(given: dict[str, Any], rules: dict[str, Any]) -> None:
    q, k, v = randn(B, SQ, H, D), randn(B, SK, HK, D), randn(B, SK, HK, DV)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **given)
    assert_same((out, lse), plain(q, k, v, **rules))
    assert probabilities.numel() == 0
    assert_same(flash_attn.flash_attn_func(q, k, v, **given), out)
    if "alibi_slopes" not in given:
        assert_same(flash_attn_interface.flash_attn_func(q, k, v, return_attn_probs=True, **given), (out, lse))


def test_rows_that_see_no_key() -> None:
    q, k = randn(B, SQ, H, D), randn(B, 2, HK, D)
    for module, value in ((flash_attn, math.inf), (flash_attn_interface, -math.inf)):
        out, lse = module.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[:2]
        assert not out[:, :3].any()
        assert (lse[:, :, :3] == value).all()
        assert lse[:, :, 3:].isfinite().all()


def test_packed_tensors_get_one_gradient() -> None:
    qkv, q, kv = randn(B, SQ, 3, H, D, grad=True), randn(B, SQ, H, D, grad=True), randn(B, SK, 2, HK, D, grad=True)
    wide = randn(B, SQ, H + 2 * HK, D, grad=True)
    split = (wide[:, :, :H], wide[:, :, H : H + HK], wide[:, :, H + HK :])
    cases: list[tuple[Tensor, tuple[Any, ...]]] = [
        (flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), tuple(qkv.unbind(2))),
        (flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), (q, *kv.unbind(2))),
        (flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True), tuple(qkv.unbind(2))),
        (flash_attn_interface.flash_attn_qkvpacked_func(wide, causal=True, num_heads_q=H), split),
    ]
    for found, given in cases:
        expected = plain(*given, causal=True)[0]
        assert_same(found, expected)
        leaves = [leaf for leaf in (qkv, q, kv, wide) if _reaches(expected, leaf)]
        assert_same(*(torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)))


def _reaches(out: Tensor, leaf: Tensor) -> bool:
    return torch.autograd.grad(out.sum(), leaf, retain_graph=True, allow_unused=True)[0] is not None


QUERIES, KEYS = (3, 0, 4), (5, 2, 4)


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], keys: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Causal attention of each sequence of its own."""
    parts = zip(q.split(lengths), k.split(keys), v.split(keys), strict=True)
    found = [plain(*(x[None] for x in part), causal=True) for part in parts]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def test_packed_sequences() -> None:
    q, k, v = (randn(sum(n), heads, D, grad=True) for n, heads in ((QUERIES, H), (KEYS, HK), (KEYS, HK)))
    given = (ends(QUERIES), ends(KEYS), 4, 5)
    expected = one_by_one(q, k, v, QUERIES, KEYS)
    two = flash_attn.flash_attn_varlen_func(q, k, v, *given, causal=True, return_attn_probs=True)
    three = flash_attn_interface.flash_attn_varlen_func(q, k, v, *given, causal=True, return_attn_probs=True)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *given, causal=True)
    for found in (two[:2], three, (packed, expected[1])):
        assert_same(found, expected)
        assert_same(
            *(torch.autograd.grad(out[0].square().sum(), (q, k, v), retain_graph=True) for out in (found, expected))
        )
    qkv = randn(sum(KEYS), 3, H, D)
    itself = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends(KEYS), 5, causal=True)
    assert_same(itself, one_by_one(*qkv.unbind(1), KEYS, KEYS)[0])


def test_numbers_of_other_libraries_are_taken_as_flash_attention_takes_them() -> None:
    """Bounds of lengths in a tensor, as `lengths.max()` leaves them, and numpy's integers."""
    q, k = randn(B * SQ, H, D), randn(B * SK, HK, D)
    ends, key_ends = (torch.arange(B + 1, dtype=torch.int32) * size for size in (SQ, SK))
    longest = ends.diff().max(), key_ends.diff().max()
    places, numbers = (ends, key_ends, *longest), (ends, key_ends, SQ, SK)
    expected = flash_attn.flash_attn_varlen_func(q, k, k, *numbers, window_size=(-1, 2))
    window = (np.int64(-1), np.int64(2))
    assert_same(flash_attn.flash_attn_varlen_func(q, k, k, *places, window_size=window), expected)
    assert_same(flash_attn_interface.flash_attn_varlen_func(q, k, k, *places, window_size=window), expected)
    torch.manual_seed(0)
    dropped = flash_attn.flash_attn_varlen_func(q, k, k, *places, 0.5, return_attn_probs=True)
    torch.manual_seed(0)
    assert_same(dropped, flash_attn.flash_attn_varlen_func(q, k, k, *numbers, 0.5, return_attn_probs=True))
    cache = k.view(B, SK, HK, D)
    given: dict[str, Any] = {"cache_seqlens": SK, "cu_seqlens_q": ends, "causal": True}
    cached = flash_attn_interface.flash_attn_with_kvcache(q, cache, cache, max_seqlen_q=longest[0], **given)
    assert_same(cached, flash_attn_interface.flash_attn_with_kvcache(q, cache, cache, max_seqlen_q=SQ, **given))


@pytest.mark.parametrize("heads", [H + HK + 1, H, H - 1])
def test_heads_of_packed_tensors_that_do_not_divide_are_refused(heads: int) -> None:
    qkv, turn = randn(B, SQ, heads, D), randn(SQ, D // 2)
    with pytest.raises(WorkloadError, match=rf"2 \* nheads_k, head_dim\), got \(2, 5, {heads}, 16\) and num_heads_q 4"):
        flash_attn_interface.flash_attn_qkvpacked_func(qkv, num_heads_q=H)
    with pytest.raises(WorkloadError, match="num_heads_q 4"):
        rotary.apply_rotary_emb_qkv_(qkv, turn, turn, num_heads_q=H)


@pytest.mark.parametrize("queries", [3, 20])
def test_a_length_for_all_sequences_is_a_length(queries: int) -> None:
    q, cache = randn(B, queries, H, D), randn(B, 32, HK, D)
    for wrong, words in ((3.5, "must be a whole number, got 3.5"), (-1, "must be at least 0, got -1")):
        with pytest.raises(WorkloadError, match=f"cache_seqlens, where it is no tensor, {words}"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=wrong)  # type: ignore[arg-type]


def test_rows_that_are_used() -> None:
    q = randn(6, H, D)
    used = torch.tensor([2, 1], dtype=torch.int32)
    found = flash_attn_interface.flash_attn_varlen_func(q, q, q, ends((3, 3)), ends((3, 3)), 3, 3, seqused_k=used)
    for b, n in enumerate((2, 1)):
        rows = q[3 * b : 3 * b + 3][None]
        assert_same(found[3 * b : 3 * b + 3], plain(rows, rows[:, :n], rows[:, :n])[0][0])


SLOTS, NEW = 24, 3
LENGTHS = (4, 0)


def caches(kind: str) -> tuple[Tensor, Tensor, dict[str, Any], Callable[[Tensor, int], Tensor]]:
    """K and V, the arguments that say which rows they are in, and what finds the slots of a sequence."""
    if kind == "pages":
        table = torch.tensor([[3, 1, 6], [0, 5, 2]], dtype=torch.int32)
        k, v = (randn(7, 8, HK, width) for width in (D, DV))
        return k, v, {"block_table": table}, lambda cache, b: cache[table[b].long()].flatten(0, 1)
    if kind == "batch_idx":
        k, v = (randn(4, SLOTS, HK, width) for width in (D, DV))
        rows = torch.tensor([2, 0], dtype=torch.int32)
        return k, v, {"cache_batch_idx": rows}, lambda cache, b: cache[int(rows[b])]
    k, v = (randn(B + 1, SLOTS, HK, width) for width in (D, DV))  # a row more than sequences
    given = {"cache_leftpad": torch.tensor([1, 0], dtype=torch.int32)} if kind == "leftpad" else {}
    return k, v, given, lambda cache, b: cache[b]


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


def long_caches(kind: str, slots: int) -> tuple[Tensor, Tensor, dict[str, Any], Callable[[Tensor, int], Tensor]]:
    """As `caches` has them, K and V of one width and of many more slots, which hold NaN."""
    if kind == "pages":
        table = torch.tensor([[3, 1, 6, 2], [0, 5, 4, 7]], dtype=torch.int32)
        k, v = torch.full((2, 8, slots // 4, HK, D), math.nan, dtype=WIDE)
        return *seeded(k, v), {"block_table": table}, lambda cache, b: cache[table[b].long()].flatten(0, 1)
    if kind == "batch_idx":
        rows = torch.tensor([2, 0], dtype=torch.int32)
        k, v = torch.full((2, 4, slots, HK, D), math.nan, dtype=WIDE)
        return *seeded(k, v), {"cache_batch_idx": rows}, lambda cache, b: cache[int(rows[b])]
    shape = {"heads first": (2, B, HK, slots, D), "halves": (B, 2, slots, HK, D)}.get(kind, (2, B + 1, slots, HK, D))
    k, v = torch.full(shape, math.nan, dtype=WIDE).unbind(1 if kind == "halves" else 0)
    k, v = (x.transpose(1, 2) if kind == "heads first" else x for x in (k, v))
    return *seeded(k, v), {}, lambda cache, b: cache[b]


def seeded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The first 9 slots of each row, or all of each page of 8, filled with numbers."""
    for seed, tensor in enumerate(tensors):
        tensor[:, :9] = randn(*tensor[:, :9].shape, seed=seed)
    return tensors


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


def test_states_of_version_3() -> None:
    q, k = randn(B, SQ, H, D).float(), randn(B, SK, H, D).float()
    parts = [flash_attn_interface.flash_attn_func(q, x, x, return_attn_probs=True) for x in (k[:, :3], k[:, 3:])]
    outs, lses = torch.stack([part[0] for part in parts]), torch.stack([part[1].transpose(1, 2) for part in parts])
    into = torch.empty(B, SQ, H, D, dtype=torch.float32)
    out, lse = flash_attn_interface.flash_attn_combine(outs, lses, into)
    expected = plain(q, k, k)
    torch.testing.assert_close(out.double(), expected[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1].transpose(1, 2), atol=1e-6, rtol=1e-5)
    assert out is into
    plan = flash_attn_interface.get_scheduler_metadata(1, 1, 8, 4, 2, 64, torch.zeros(1, dtype=torch.int32))
    assert (plan.dtype, plan.numel()) == (torch.int32, 0)


def test_padding() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    hidden = randn(3, 4, 2, 3, grad=True)
    rows, places, starts, longest, used = bert_padding.unpad_input(hidden, mask)
    assert_same(rows, hidden[mask.bool()])
    assert (starts.tolist(), starts.dtype, longest, used.tolist()) == ([0, 2, 2, 5], torch.int32, 3, [2, 0, 3])
    padded = bert_padding.pad_input(rows, places, 3, 4)
    assert_same(padded, hidden * mask[..., None, None])
    assert_same(torch.autograd.grad(padded.sum(), hidden)[0], mask[..., None, None].expand(3, 4, 2, 3).to(WIDE))
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    room = bert_padding.unpad_input(hidden, mask, unused)
    assert (room[2].tolist(), room[3], room[4].tolist()) == ([0, 3, 3, 6], 3, [2, 0, 3])
    several = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0], [4, 0, 0, 0]])
    rows, places, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(hidden, several)
    assert (starts.tolist(), longest) == ([0, 2, 3, 6, 10], 4)
    assert_same(rows, hidden[torch.arange(4) < torch.tensor([3, 3, 4])[:, None]])
    some, all_rows = bert_padding.index_first_axis_residual(hidden, torch.tensor([2, 0]))
    gradient = torch.autograd.grad(some.sum() + all_rows.sum(), hidden)[0]
    assert gradient[:, 0, 0, 0].tolist() == [2, 1, 2]


def version_2(**given: Any) -> Any:
    x = randn(1, 4, 2, 16)
    return flash_attn.flash_attn_func(x, x, x, **given)


def packed_2(**given: Any) -> Any:
    x = randn(4, 2, 16)
    return flash_attn.flash_attn_varlen_func(x, x, x, ends((4,)), ends((4,)), 4, 4, **given)


def version_3(**given: Any) -> Any:
    x = randn(1, 4, 2, 16)
    return flash_attn_interface.flash_attn_func(x, x, x, **given)


def cached_3(**given: Any) -> Any:
    x = randn(1, 4, 2, 16)
    return flash_attn_interface.flash_attn_with_kvcache(x, x, x, **given)


ONE = torch.ones(1, 2)
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        packed_2,
        {"dropout_p": 0.1, "block_table": torch.zeros(1, 1).int()},
        "with a block_table does not support dropout",
    ),
    *[(version_3, {name: ONE}, name) for name in ("qv", "q_descale", "k_descale", "v_descale")],
    (version_3, {"attention_chunk": 64}, "attention_chunk, got 64"),
    (cached_3, {"qv": ONE}, "qv"),
]


@pytest.mark.parametrize(("call", "given", "words"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_what_is_not_supported_is_refused_by_name(call: Callable[..., Any], given: dict[str, Any], words: str) -> None:
    call()
    with pytest.raises(UnsupportedError, match=words):
        call(**given)


def test_arguments_that_do_not_belong_together_are_refused() -> None:
    x = randn(1, 4, 2, 16)
    for given, words in (
        ({"k": x}, "come together"),
        ({"rotary_cos": ONE, "rotary_sin": ONE}, "rotary embeddings are of new keys"),
        ({"k": x, "v": x}, "go behind cache_seqlens"),
        ({"window_size": 3}, "window_size is"),
    ):
        with pytest.raises(WorkloadError, match=words):
            flash_attn.flash_attn_with_kvcache(x, x.clone(), x.clone(), **given)
    many = randn(1, 20, 2, 16)
    odd = randn(700).as_strided((2, 3, 2, 16), (97, 32, 16, 1))  # rows at no multiple of a slot
    twice = torch.cat([many, many])
    with pytest.raises(UnsupportedError, match="more than 16 queries with a window"):
        flash_attn.flash_attn_with_kvcache(twice, odd, odd, window_size=(3, 3))
    assert flash_attn.flash_attn_with_kvcache(twice, odd, odd, causal=True, window_size=(3, 3)).shape == twice.shape
    pad, lengths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    parts = {"cache_seqlens": lengths, "cache_leftpad": pad, "causal": True}
    found = [flash_attn.flash_attn_with_kvcache(twice, x, x, **parts) for x in (odd, odd.contiguous())]
    assert_same(*found)  # pieces, of which some see no key, and one call
    packed = {"cu_seqlens_q": ends((3, 17)), "cache_seqlens": torch.tensor([2, 3]).int()}
    with pytest.raises(UnsupportedError, match="packed queries over caches whose rows lie at multiples"):
        flash_attn_interface.flash_attn_with_kvcache(many[0], odd, odd, max_seqlen_q=17, **packed)
    with pytest.raises(WorkloadError, match="come with max_seqlen_q"):
        flash_attn_interface.flash_attn_with_kvcache(many[0], twice, twice, **packed)
    with pytest.raises(WorkloadError, match=r"qkv is \(\.\.\., 3, nheads"):
        flash_attn.flash_attn_qkvpacked_func(x)


ROOTS = ("flash_attn", "flash_attn_interface")


@pytest.fixture
def without_flash_attn() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ROOTS}
    for name in before:
        del sys.modules[name]
    yield
    flash_attn.uninstall()
    flash_attn_interface.uninstall()
    sys.modules.update(before)


@pytest.mark.usefixtures("without_flash_attn")
def test_programs_that_import_flash_attn_get_these_functions() -> None:
    flash_attn.install()
    flash_attn.install()
    found = [importlib.import_module(name) for name in NAMES]
    assert found[0].flash_attn_func is flash_attn.flash_attn_func
    assert found[1].flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert found[2].pad_input is bert_padding.pad_input
    layers = importlib.import_module("flash_attn.layers.rotary")
    assert layers is importlib.import_module("flashgen.flash_attn.layers.rotary")
    flash_attn.uninstall()
    assert not {*NAMES} & {*sys.modules}


@pytest.mark.usefixtures("without_flash_attn")
def test_programs_that_look_for_version_3_find_it_where_it_is_asked_for() -> None:
    other = type(sys)("flash_attn_interface")
    flash_attn.install()
    assert "flash_attn_interface" not in sys.modules
    sys.modules["flash_attn_interface"] = other
    with pytest.raises(UnsupportedError, match="another flash_attn_interface is imported"):
        flash_attn_interface.install()
    flash_attn_interface.install(force=True)
    flash_attn.uninstall()
    assert importlib.import_module("flash_attn_interface") is flash_attn_interface
    flash_attn_interface.uninstall()
    assert sys.modules.pop("flash_attn_interface") is other
    flash_attn_interface.install()
    flash_attn_interface.uninstall()
    assert "flash_attn_interface" not in sys.modules


@pytest.mark.usefixtures("without_flash_attn")
def test_another_flash_attn_is_replaced_only_by_force() -> None:
    other, part = type(sys)("flash_attn"), type(sys)("flash_attn.ops")
    sys.modules |= {"flash_attn": other, "flash_attn.ops": part}
    with pytest.raises(UnsupportedError, match=r"install\(force=True\)"):
        flash_attn.install()
    assert sys.modules["flash_attn"] is other
    flash_attn.install(force=True)
    assert sys.modules["flash_attn"] is flash_attn
    assert "flash_attn.ops" not in sys.modules
    flash_attn.uninstall()
    assert (sys.modules["flash_attn"], sys.modules["flash_attn.ops"]) == (other, part)
    del sys.modules["flash_attn"], sys.modules["flash_attn.ops"]
