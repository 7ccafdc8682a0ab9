"""Dropout of FlashAttention-2's functions on the references: what `S_dmask` says is what the output was made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashgen import flash_attn
from flashgen.core.errors import WorkloadError
from flashgen.core.features.dropout import keep_scale
from flashgen.flash_attn.flash_attn_interface import _get_block_size_n
from tests.integrations.flash_attn_calls import HK, KEYS, QUERIES, D, H, Tensor, assert_same, ends, randn

pytestmark = pytest.mark.usefixtures("on_reference")

P = 0.25


def expected(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Output and weights of (seqlen, nheads, head_dim) tensors, causal, in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    place = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if "alibi_slopes" in given:
        scores = scores - given["alibi_slopes"][:, None, None].double() * place.abs()
    scores = scores.masked_fill(place < 0, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights * kept * keep_scale(P), v), weights


def normalised(signed: Tensor) -> Tensor:
    """Weights that sum to 1."""
    total = signed.abs().sum(-1, keepdim=True)
    return signed.abs() / total.masked_fill(total == 0, 1.0)


def test_dense() -> None:
    torch.manual_seed(0)
    q, k, v = (randn(2, n, heads, D, seed=n, grad=True) for n, heads in ((131, H), (140, HK), (140, HK)))
    slopes = torch.rand(2, H)
    out, _, signed = flash_attn.flash_attn_func(
        q, k, v, P, causal=True, alibi_slopes=slopes, window_size=torch.tensor([-1, -1]), return_attn_probs=True
    )
    assert signed.shape == (2, H, 256, 256)
    assert not signed[:, :, 131:].any()
    assert not signed[..., 140:].any()
    signed = signed[:, :, :131, :140]
    seen = torch.ones(131, 140, dtype=torch.bool).tril(9)
    dropped = (signed < 0).sum() / (seen.sum() * 2 * H)
    assert abs(float(dropped) - P) < 5 * math.sqrt(P * (1 - P) / float(seen.sum() * 2 * H))
    for b in range(2):
        right, weights = expected(q[b], k[b], v[b], signed[b] >= 0, alibi_slopes=slopes[b])
        assert_same((out[b], normalised(signed[b])), (right, weights))
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    again = torch.stack([expected(q[b], k[b], v[b], signed[b] >= 0, alibi_slopes=slopes[b])[0] for b in range(2)])
    assert_same(found, torch.autograd.grad(again.square().sum(), (q, k, v)))


def test_packed_sequences() -> None:
    q, k, v = (randn(sum(n), heads, D, seed=heads) for n, heads in ((QUERIES, H), (KEYS, HK), (KEYS, HK)))
    given = (ends(QUERIES), ends(KEYS), 4, 5, P)
    torch.manual_seed(1)
    out, _, signed = flash_attn.flash_attn_varlen_func(q, k, v, *given, causal=True, return_attn_probs=True)
    assert signed.shape == (3, H, 128, 128)
    parts = zip(q.split(QUERIES), k.split(KEYS), v.split(KEYS), out.split(QUERIES), signed, strict=True)
    for one, two, three, found, sign in parts:
        right, weights = expected(one, two, three, sign[:, : len(one), : len(two)] >= 0)
        assert_same((found, normalised(sign[:, : len(one), : len(two)])), (right, weights))
    torch.manual_seed(1)
    assert_same(flash_attn.flash_attn_varlen_func(q, k, v, *given, causal=True), out)
    other = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *given, causal=True)
    assert not torch.equal(other, out)


def test_packed_tensors_have_it_and_evaluation_has_none() -> None:
    qkv = randn(1, 9, 3, H, D)
    torch.manual_seed(2)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, P)
    torch.manual_seed(2)
    assert_same(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], P), out)
    assert flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True)[2].numel() == 0
    torch.manual_seed(2)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], ends((9,)), 9, P)
    assert_same(packed, out[0])


def test_what_flash_attentions_tests_ask_for() -> None:
    assert _get_block_size_n(torch.device("cpu"), 64, True, False) > 2**30
    with pytest.raises(WorkloadError, match=r"below 1, got 1\.0"):
        flash_attn.flash_attn_func(*(randn(1, 4, 2, 16) for _ in range(3)), 1.0)
    with pytest.raises(WorkloadError, match="q must be a tensor"):
        flash_attn.flash_attn_func(None, None, None, 0.5, return_attn_probs=True)
