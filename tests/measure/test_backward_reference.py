"""The oracle's gradients against torch's autograd of a dense formula, and eager attention's against torch's own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashgen.launch.extras import Extras
from flashgen.measure.backward_reference import (
    Gradients,
    exact_gradients,
    rounded_gradients,
    sinks_gradient,
)
from flashgen.measure.score_rule import ScoreRule
from tests.measure.test_oracle_features import dense, random

AXES = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())


def autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    offset: torch.Tensor,
    causal: bool,
    extras: Extras,
) -> Gradients:
    """Gradients of the dense formula; a hidden score has none, a row without a key none either."""
    leaves = {"dq": q, "dk": k, "dv": v, "dbias": extras.bias, "dsinks": extras.sinks}
    given = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    out, lse = dense(q, k, v, 0.8, offset, causal, extras)
    blind = torch.isinf(lse)
    total = (out.masked_fill(blind[..., None], 0.0) * dout).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(blind, 0.0) * dlse).sum()
    found = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient.nan_to_num(0.0)
        for (name, leaf), gradient in zip(given.items(), found, strict=True)
    }


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
    extras = Extras(
        window=window,
        softcap=softcap,
        alibi_slopes=random(batch, nheads, seed=seed + 3).abs() if alibi else None,
        sinks=random(nheads, seed=seed + 4) if sink else None,
        bias=random(*sizes[0], seed=seed + 5) if bias else None,
        mask=random(*sizes[1], seed=seed + 6) > -0.5 if mask else None,
    )
    dlses = random(batch, nheads, seqlen_q, seed=seed + 8) if dlse else None
    offsets = torch.tensor([offset, offset + 2], dtype=torch.int32)
    expected = autograd(q, k, v, dout, dlses, offsets, causal, extras)
    with torch.no_grad():
        rule = ScoreRule.of(q, k, causal=causal, q_offset=offsets, softmax_scale=0.8, extras=extras)
        shape = sizes[0] if bias else None
        found = exact_gradients(q, k, v, dout, rule, dlse=dlses, bias_shape=shape, block_bytes=block_bytes)
        if extras.sinks is not None:
            dsinks = sinks_gradient(extras.sinks, found.forward.lse, found.neg_delta)
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
