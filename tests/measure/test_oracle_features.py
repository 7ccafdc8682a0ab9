"""The oracle and eager attention with features, against torch's own attention and a dense formula written apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Features
from flashgen.measure.reference import exact, oracle, rounded
from flashgen.measure.score_rule import ScoreRule
from tests.eager import eager
from tests.measure.dense import dense, random

AXES = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())


@given(
    seed=st.integers(0, 1000),
    group=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    causal=st.booleans(),
    window=st.tuples(st.none() | st.integers(0, 4), st.none() | st.integers(0, 4)),
    softcap=st.sampled_from([0.0, 2.0]),
    alibi=st.sampled_from(["", "heads", "batch"]),
    sink=st.booleans(),
    bias=st.none() | AXES,
    mask=st.none() | AXES,
    offset=st.integers(-4, 9),
    block_bytes=st.sampled_from([64, 600, None]),
)
def test_every_feature_in_any_combination(
    seed: int,
    group: int,
    lengths: tuple[int, int],
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    alibi: str,
    sink: bool,
    bias: tuple[bool, ...] | None,
    mask: tuple[bool, ...] | None,
    offset: int,
    block_bytes: int | None,
) -> None:
    batch, nheads, (seqlen_q, seqlen_k) = 2, 2 * group, lengths
    q, k = random(batch, nheads, seqlen_q, 4, seed=seed), random(batch, 2, seqlen_k, 4, seed=seed + 1)
    v = random(batch, 2, seqlen_k, 3, seed=seed + 2)
    full = (batch, nheads, seqlen_q, seqlen_k)
    sizes = [tuple(n if own else 1 for n, own in zip(full, axes or full, strict=True)) for axes in (bias, mask)]
    slopes = random(batch, nheads, seed=seed + 3).abs()
    features = Features(
        window=window,
        softcap=softcap,
        alibi_slopes={"": None, "heads": slopes[0], "batch": slopes}[alibi],
        sinks=random(nheads, seed=seed + 4) if sink else None,
        bias=random(*sizes[0], seed=seed + 5) if bias else None,
        mask=random(*sizes[1], seed=seed + 6) > -0.5 if mask else None,
    )
    offsets = torch.tensor([offset, offset + 2], dtype=torch.int32)
    expected, expected_lse = dense(q, k, v, 0.8, offsets, causal, features)
    arguments = {"causal": causal, "q_offset": offsets, "softmax_scale": 0.8, "features": features}
    out, lse = oracle(q, k, v, block_bytes=block_bytes, **arguments)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    close = eager(q.float(), k.float(), v.float(), block_bytes=block_bytes, **arguments)
    torch.testing.assert_close(close.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bias", "mask", "keybias", "keymask", "causal"])
def test_torch_agrees_in_float64(kind: str) -> None:
    q, k, v = random(2, 4, 33, 8, seed=1), random(2, 2, 33, 8, seed=2), random(2, 2, 33, 6, seed=3)
    shape = (2, 1, 1, 33) if kind.startswith("key") else (1, 4, 33, 33)
    given = random(*shape, seed=4)
    given = given if "bias" in kind else given > -1.0
    features = Features(bias=given if "bias" in kind else None, mask=given if "mask" in kind else None)
    causal = kind == "causal"
    expected = scaled_dot_product_attention(
        q, k, v, attn_mask=None if causal else given, is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(oracle(q, k, v, causal=causal, features=features)[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("reason", ["mask", "window", "bias", "no keys"])
def test_a_row_that_sees_no_key_is_zero_and_its_lse_the_sink(reason: str, sink: bool) -> None:
    length = 0 if reason == "no keys" else 5
    q, k = random(1, 2, 3, 4, seed=1), random(1, 2, length, 4, seed=2)
    sinks = torch.tensor([0.5, -2.0]) if sink else None
    features = {
        "mask": Features(sinks=sinks, mask=torch.zeros(1, 1, 1, 5, dtype=torch.bool)),
        "window": Features(sinks=sinks, window=(2, None)),
        "bias": Features(sinks=sinks, bias=torch.full((1, 1, 3, 5), -math.inf)),
        "no keys": Features(sinks=sinks),
    }[reason]
    out, lse = oracle(q, k, k, q_offset=100, features=features)
    assert not out.any()
    expected = torch.full((1, 2, 3), -math.inf) if sinks is None else sinks.view(1, 2, 1).expand(1, 2, 3)
    torch.testing.assert_close(lse, expected.double())
    assert not eager(q.float(), k.float(), k.float(), q_offset=100, features=features).any()


@pytest.mark.parametrize("function", [oracle, eager])
def test_a_key_that_no_query_sees_may_be_anything(function: object) -> None:
    q, k, v = (random(2, 2, 6, 4, seed=n, dtype=torch.float32) for n in range(3))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, :, :, 2] = False
    features = Features(mask=mask, window=(None, 1))
    usual = function(q, k, v, q_offset=-2, features=features)  # type: ignore[operator]
    for tensor, value in ((k, math.nan), (v, math.inf)):
        tensor[0, :, 2] = value
        tensor[:, :, 5] = value
    poisoned = function(q, k, v, q_offset=-2, features=features)  # type: ignore[operator]
    for one, other in zip(usual, poisoned, strict=True):
        assert torch.equal(one, other)


def test_a_bias_of_minus_infinity_hides_keys() -> None:
    q, k, v = (random(1, 2, 6, 4, seed=n) for n in range(3))
    mask = random(1, 2, 6, 6, seed=4) > 0
    as_bias = torch.where(mask, 0.0, -math.inf)
    for one, other in zip(
        oracle(q, k, v, features=Features(mask=mask)), oracle(q, k, v, features=Features(bias=as_bias)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_tf32_products_know_ten_bits() -> None:
    q, k, v = (random(1, 2, 64, 32, seed=n, dtype=torch.float32) for n in range(3))
    right = oracle(q, k, v)[0]
    errors = [float((eager(q, k, v, tf32=tf32).double() - right).abs().max()) for tf32 in (False, True)]
    assert errors[0] < 1e-6
    assert 1e-4 < errors[1] < 1e-2
    coarse = [(tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) for tensor in (q, k)]
    rule = ScoreRule.of(q, k, causal=False, q_offset=None, softmax_scale=0.25, features=None)
    lse = rounded(q, k, v, rule, tf32=True).lse
    torch.testing.assert_close(lse.double(), oracle(*coarse, v, softmax_scale=0.25)[1], rtol=1e-6, atol=1e-6)


def test_the_size_of_scores_counts_parts_that_cancel_and_weighs_keys() -> None:
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 3, 4)
    bias = torch.tensor([-4.0, -4.0, -1000.0]).view(1, 1, 1, 3)  # 4 - 4 twice, and a key without weight

    def answer(features: Features) -> tuple[float, float]:
        rule = ScoreRule.of(q, k, causal=False, q_offset=None, softmax_scale=1.0, features=features)
        found = exact(q, k, k, rule)
        return float(found.lse), float(found.score_size)

    assert answer(Features(bias=bias)) == pytest.approx((math.log(2), 8.0))
    assert answer(Features())[1] == pytest.approx(4.0)
    assert answer(Features(softcap=50.0))[1] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("features", "rule"),
    [
        (Features(bias=torch.zeros(1, 1, 4, 3)), "bias broadcasts"),
        (Features(mask=torch.ones(1, 3, 1, 1, dtype=torch.bool)), "mask broadcasts"),
        (Features(sinks=torch.zeros(3)), "sinks broadcasts"),
        (Features(alibi_slopes=torch.zeros(3, 2)), "alibi_slopes broadcasts"),
        (Features(aux=(torch.zeros(1),)), "the references compute .*functions"),
    ],
)
def test_what_does_not_fit_is_refused(features: Features, rule: str) -> None:
    q = random(2, 2, 5, 4, seed=1)
    with pytest.raises(WorkloadError, match=rule):
        oracle(q, q, q, features=features)
