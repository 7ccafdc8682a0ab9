"""FlashAttention's functions on the references: scores, shapes, packing and gradients, against plain float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from flashgen import flash_attn, flash_attn_interface
from flashgen.flash_attn import bert_padding
from tests.integrations.flash_attn_calls import (
    DV,
    HK,
    KEYS,
    QUERIES,
    SK,
    SQ,
    WIDE,
    B,
    D,
    H,
    Tensor,
    assert_same,
    ends,
    one_by_one,
    plain,
    randn,
)

pytestmark = pytest.mark.usefixtures("on_reference")

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


def test_rows_that_are_used() -> None:
    q = randn(6, H, D)
    used = torch.tensor([2, 1], dtype=torch.int32)
    found = flash_attn_interface.flash_attn_varlen_func(q, q, q, ends((3, 3)), ends((3, 3)), 3, 3, seqused_k=used)
    for b, n in enumerate((2, 1)):
        rows = q[3 * b : 3 * b + 3][None]
        assert_same(found[3 * b : 3 * b + 3], plain(rows, rows[:, :n], rows[:, :n])[0][0])


@pytest.mark.parametrize("used", [None, (4, 1, 0)], ids=["all", "some"])
@pytest.mark.parametrize("is_packed", [(True, False), (False, True), (False, False)])
def test_version_3_takes_batches_where_nothing_says_where_sequences_begin(
    is_packed: tuple[bool, bool], used: tuple[int, ...] | None
) -> None:
    """K and V of slots that all sequences have beside packed queries, say, whose lengths are `seqused_k`."""
    lengths = [n if given else (rows,) * 3 for n, given, rows in zip((QUERIES, KEYS), is_packed, (SQ, SK), strict=True)]
    heads = ((lengths[0], H, D), (lengths[1], HK, D), (lengths[1], HK, DV))
    flat = [randn(sum(n), h, columns, grad=True) for n, h, columns in heads]
    q, k, v = (
        x if given else x.view(3, -1, *x.shape[1:])
        for x, given in zip(flat, (is_packed[0], is_packed[1], is_packed[1]), strict=True)
    )
    k = torch.cat([k, k], -1)[..., :D]  # rows that lie apart
    places = [ends(n) if given else None for n, given in zip(lengths, is_packed, strict=True)]
    longest = [max(n) if given else None for n, given in zip(lengths, is_packed, strict=True)]
    seen = lengths[1] if used is None else used
    found = flash_attn_interface.flash_attn_varlen_func(
        q,
        k,
        v,
        *places,
        *longest,
        seqused_k=None if used is None else torch.tensor(used, dtype=torch.int32),
        causal=True,
        return_attn_probs=True,
    )
    parts = [[x[:n] for x, n in zip(x.split(lengths[1]), seen, strict=True)] for x in flat[1:]]
    out, lse = one_by_one(flat[0], *(torch.cat(part) for part in parts), lengths[0], seen)
    expected = (out, lse) if is_packed[0] else (out.view(3, SQ, H, DV), lse.view(H, 3, SQ).transpose(0, 1))
    assert_same(found, expected)
    assert_same(*(torch.autograd.grad(each.square().sum(), flat) for each in (found[0], out)))


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
