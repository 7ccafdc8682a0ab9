from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Features
from flashgen.measure.reference import oracle
from tests.eager import eager


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Written apart from the oracle: one row at a time, no blocks, no broadcasting over groups."""
    batch, heads, rows, _ = q.shape
    out = torch.zeros(batch, heads, rows, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            head_k = h * k.shape[1] // heads
            for i in range(rows):
                seen = visible[b, i].nonzero().flatten()
                if len(seen):
                    scores = k[b, head_k, seen].double() @ q[b, h, i].double() * scale
                    lse[b, h, i] = torch.logsumexp(scores, 0)
                    out[b, h, i] = torch.softmax(scores, 0) @ v[b, head_k, seen].double()
    return out, lse


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    nheads_k=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=st.integers(1, 9),
    seqlen_k=st.integers(1, 9),
    causal=st.booleans(),
    left=st.none() | st.integers(0, 5),
    right=st.none() | st.integers(0, 5),
    offset=st.none() | st.integers(-6, 12),
    per_batch=st.booleans(),
    block_bytes=st.sampled_from([8, 200, 1000, None]),
)
def test_the_oracle_is_attention_row_by_row(
    batch: int,
    nheads_k: int,
    group: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    left: int | None,
    right: int | None,
    offset: int | None,
    per_batch: bool,
    block_bytes: int | None,
) -> None:
    q = random(batch, nheads_k * group, seqlen_q, 4, seed=1)
    k, v = random(batch, nheads_k, seqlen_k, 4, seed=2), random(batch, nheads_k, seqlen_k, 3, seed=3)
    start = seqlen_k - seqlen_q if offset is None else offset
    offsets = torch.tensor([start + (b if per_batch else 0) for b in range(batch)])
    i, j = torch.arange(seqlen_q)[None, :, None] + offsets[:, None, None], torch.arange(seqlen_k)[None, None]
    visible = torch.ones(batch, seqlen_q, seqlen_k, dtype=torch.bool)
    visible &= (j <= i) if causal else True
    visible &= (j >= i - left) if left is not None else True
    visible &= (j <= i + right) if right is not None else True
    q_offset = offsets.to(torch.int32) if per_batch else offset
    features = Features(window=(left, right))
    arguments = {"causal": causal, "features": features, "q_offset": q_offset, "softmax_scale": 0.7}
    out, lse = oracle(q, k, v, block_bytes=block_bytes, **arguments)
    expected, expected_lse = naive(q, k, v, 0.7, visible)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    close = eager(q, k, v, block_bytes=block_bytes, **arguments)
    assert close.dtype == q.dtype
    torch.testing.assert_close(close.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_without_a_key_are_zero_with_lse_minus_infinity() -> None:
    q, k, v = random(1, 1, 5, 4), random(1, 1, 2, 4), random(1, 1, 2, 4)
    out, lse = oracle(q, k, v, causal=True)
    assert torch.equal(out[0, 0, :3], torch.zeros(3, 4, dtype=torch.float64))
    assert torch.equal(lse[0, 0, :3], torch.full((3,), float("-inf"), dtype=torch.float64))
    assert torch.isfinite(lse[0, 0, 3:]).all()
    assert torch.equal(eager(q, k, v, causal=True)[0, 0, :3], torch.zeros(3, 4))


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty_tensors_are_fine(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    q, k = random(batch, 2, seqlen_q, 4), random(batch, 1, seqlen_k, 4)
    out, lse = oracle(q, k, k)
    assert out.shape == (batch, 2, seqlen_q, 4)
    assert not out.any()
    assert (lse == float("-inf")).all()


def test_the_scale_defaults_to_the_inverse_root_of_head_dim() -> None:
    q, k, v = random(1, 2, 7, 16), random(1, 2, 7, 16, seed=1), random(1, 2, 7, 16, seed=2)
    for default, explicit in zip(oracle(q, k, v), oracle(q, k, v, softmax_scale=0.25), strict=True):
        assert torch.equal(default, explicit)


def test_strides_do_not_matter() -> None:
    q, k, v = (random(2, 7, 2, 8, seed=s).transpose(1, 2) for s in range(3))
    packed = oracle(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    for strided, straight in zip(oracle(q, k, v, causal=True), packed, strict=True):
        torch.testing.assert_close(strided, straight, rtol=1e-14, atol=1e-14)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = 300 * random(1, 1, 6, 8), 300 * random(1, 1, 6, 8, seed=1), random(1, 1, 6, 8, seed=2)
    out, lse = oracle(q, k, v)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def test_eager_rounds_to_its_dtype() -> None:
    q, k, v = (random(1, 2, 64, 32, seed=s).bfloat16() for s in range(3))
    exact, _ = oracle(q, k, v)
    error = (eager(q, k, v).double() - exact).abs()
    assert 1e-5 < float(error.mean()) < 1e-2


@pytest.mark.parametrize(
    ("q", "k", "v", "rule"),
    [
        ((2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), "four dimensions"),
        ((1, 2, 3, 8), (1, 2, 3, 4), (1, 2, 3, 4), "agree"),
        ((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), "multiple"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], rule: str
) -> None:
    with pytest.raises((WorkloadError, IndexError), match=rule):
        oracle(random(*q), random(*k), random(*v))
