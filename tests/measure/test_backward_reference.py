"""The oracle's gradients against torch's autograd of a dense formula, and eager attention's against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.core.features.values import Features
from flashgen.measure.backward_reference import (
    Gradients,
    exact_gradients,
    rounded_gradients,
)
from flashgen.measure.score_rule import ScoreRule
from tests.measure.dense import dense, random

AXES = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())


def autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    offset: torch.Tensor,
    causal: bool,
    features: Features,
) -> Gradients:
    """Gradients of the dense formula; a hidden score has none, a row without a key none either."""
    leaves = {"dq": q, "dk": k, "dv": v, "dbias": features.bias, "dsinks": features.sinks}
    given = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    out, lse = dense(q, k, v, 0.8, offset, causal, features)
    blind = torch.isinf(lse)
    total = (out.masked_fill(blind[..., None], 0.0) * dout).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(blind, 0.0) * dlse).sum()
    found = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient.nan_to_num(0.0)
        for (name, leaf), gradient in zip(given.items(), found, strict=True)
    }


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1000),
    group=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    causal=st.booleans(),
    window=st.tuples(st.none() | st.integers(0, 4), st.none() | st.integers(0, 4)),
    softcap=st.sampled_from([0.0, 2.0]),
    alibi=st.booleans(),
    sink=st.booleans(),
    bias=st.none() | AXES,
    mask=st.none() | AXES,
    offset=st.integers(-4, 9),
    dlse=st.booleans(),
    block_bytes=st.sampled_from([64, 600, None]),
)
def test_every_feature_in_any_combination(
    seed: int,
    group: int,
    lengths: tuple[int, int],
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    alibi: bool,
    sink: bool,
    bias: tuple[bool, ...] | None,
    mask: tuple[bool, ...] | None,
    offset: int,
    dlse: bool,
    block_bytes: int | None,
) -> None:
    batch, nheads, (seqlen_q, seqlen_k) = 2, 2 * group, lengths
    q, k = random(batch, nheads, seqlen_q, 4, seed=seed), random(batch, 2, seqlen_k, 4, seed=seed + 1)
    v, dout = random(batch, 2, seqlen_k, 3, seed=seed + 2), random(batch, nheads, seqlen_q, 3, seed=seed + 7)
    full = (batch, nheads, seqlen_q, seqlen_k)
    sizes = [tuple(n if own else 1 for n, own in zip(full, axes or full, strict=True)) for axes in (bias, mask)]
    features = Features(
        window=window,
        softcap=softcap,
        alibi_slopes=random(batch, nheads, seed=seed + 3).abs() if alibi else None,
        sinks=random(nheads, seed=seed + 4) if sink else None,
        bias=random(*sizes[0], seed=seed + 5) if bias else None,
        mask=random(*sizes[1], seed=seed + 6) > -0.5 if mask else None,
    )
    dlses = random(batch, nheads, seqlen_q, seed=seed + 8) if dlse else None
    offsets = torch.tensor([offset, offset + 2], dtype=torch.int32)
    expected = autograd(q, k, v, dout, dlses, offsets, causal, features)
    with torch.no_grad():
        rule = ScoreRule.of(q, k, causal=causal, q_offset=offsets, softmax_scale=0.8, features=features)
        shape = sizes[0] if bias else None
        found = exact_gradients(q, k, v, dout, rule, dlse=dlses, bias_shape=shape, block_bytes=block_bytes)
        if features.sinks is not None:
            weights = (features.sinks.view(1, -1, 1) - found.forward.lse).exp()
            dsinks = (weights * found.neg_delta).sum((0, 2))
            torch.testing.assert_close(dsinks, expected.pop("dsinks"), rtol=1e-10, atol=1e-12)
        assert found.gradients.keys() == expected.keys()
        for name, right in expected.items():
            torch.testing.assert_close(found.gradients[name], right, rtol=1e-10, atol=1e-12, msg=name)
            silent = found.noise[name] == 0
            assert not right[silent].any(), name
        single = [tensor.float() for tensor in (q, k, v, dout)]
        close = rounded_gradients(*single, rule, dlse=dlses, bias_shape=shape, block_bytes=block_bytes)
        for name, right in expected.items():
            torch.testing.assert_close(close[name].double(), right, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_eager_gradients_are_as_inexact_as_torchs(dtype: torch.dtype, softcap: float) -> None:
    """Standard attention written with torch's operators in the dtype, through torch's autograd, scale in k."""
    q, k, v, dout = (random(2, 2, 96, 32, seed=n, dtype=dtype) for n in range(4))
    bias = random(1, 2, 96, 96, seed=5, dtype=dtype)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v, bias)]
    scores = leaves[0] @ (leaves[1] * 0.2).mT
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    out = torch.softmax(scores + leaves[3], -1) @ leaves[2]
    theirs = dict(zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(out, leaves, dout), strict=True))
    features = Features(bias=bias, softcap=softcap)
    rule = ScoreRule.of(q, k, causal=False, q_offset=None, softmax_scale=0.2, features=features)
    right = exact_gradients(q, k, v, dout, rule, bias_shape=(1, 2, 96, 96)).gradients
    mine = rounded_gradients(q, k, v, dout, rule, bias_shape=(1, 2, 96, 96))
    for name, gradient in theirs.items():
        errors = [float((found.double() - right[name]).abs().mean()) for found in (gradient, mine[name].to(dtype))]
        assert errors[1] == pytest.approx(errors[0], rel=0.1), name


@pytest.mark.parametrize("block_bytes", [20_000, None])
def test_keys_that_nobody_sees_may_be_anything(block_bytes: int | None) -> None:
    q, k, v, dout = (random(2, 2, 30, 8, seed=n, dtype=torch.float32) for n in range(4))
    mask = torch.ones(2, 1, 30, 30, dtype=torch.bool)
    mask[0, :, :, 2] = False
    features = Features(mask=mask, window=(None, 1), softcap=3.0)

    def found() -> list[Gradients]:
        rule = ScoreRule.of(q, k, causal=False, q_offset=-2, softmax_scale=0.3, features=features)
        return [
            exact_gradients(q, k, v, dout, rule, block_bytes=block_bytes).gradients,
            exact_gradients(q, k, v, dout, rule, block_bytes=block_bytes).noise,
            rounded_gradients(q, k, v, dout, rule, block_bytes=block_bytes),
        ]

    usual = found()
    for tensor, value in ((k, float("nan")), (v, float("inf"))):
        tensor[0, :, 2] = value
        tensor[:, :, 29] = value
    for one, other in zip(usual, found(), strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), name
    assert not usual[1]["dk"][0, :, 2].any()
    assert not usual[1]["dv"][:, :, 29].any()


def test_noise_is_what_one_rounding_of_every_factor_moves_a_gradient_by() -> None:
    """Weights and dP disturbed by a relative 1e-3 at random; noise counts with the largest element of a vector."""
    q, k, v, dout = (random(1, 1, 400, 16, seed=n) for n in range(4))
    rule = ScoreRule.of(q, k, causal=True, q_offset=None, softmax_scale=0.25, features=None)
    found = exact_gradients(q, k, v, dout, rule)
    behind = torch.ones(400, 400, dtype=torch.bool).tril()
    weights = torch.softmax((0.25 * q @ k.mT).masked_fill(~behind, -torch.inf), -1)
    weights = weights * (1 + 1e-3 * random(1, 1, 400, 400, seed=8))
    dp = (dout @ v.mT) * (1 + 1e-3 * random(1, 1, 400, 400, seed=9))
    ds = weights * (dp + found.neg_delta[..., None])
    disturbed = {"dq": 0.25 * ds @ k, "dk": 0.25 * ds.mT @ q, "dv": weights.mT @ dout}
    for name, gradient in disturbed.items():
        units = (gradient - found.gradients[name]).abs().amax(-1) / found.noise[name] / 1e-3
        assert 0.5 < float(units.median()) < 2.0, name
        assert float(units.max()) < 5.0, name
