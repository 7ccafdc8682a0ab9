"""Merged states against softmax over all keys at once, in float64, and against what empty states may hold."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen
from flashgen import reference

BATCH, HEADS, ROWS, NAN, INF = 2, 3, 5, float("nan"), float("inf")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def states(count: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Of some states, the last axis but one being queries; some without keys, which hold NaN, and rows of only such."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, BATCH, HEADS, ROWS, dim, generator=generator)
    lses = torch.randn(count, BATCH, HEADS, ROWS, generator=generator) * 20
    empty = torch.rand(count, BATCH, HEADS, ROWS, generator=generator) < 0.3
    empty[:, 0, 0, :2], empty[:, 1, 2, 4] = True, False
    return outs.masked_fill(empty[..., None], NAN), lses.masked_fill(empty, -INF)


def merged(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: every weight exists, and a state without keys has none."""
    lses = lses.double().masked_fill(lses.isinf(), -INF)
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0.0)
    return (weights[..., None] * outs.double().masked_fill(lses.isinf()[..., None], 0.0)).sum(0), lse


CASES = [  # states, head_dim, dtype, dtype of the result, layout, one tensor or several
    (1, 16, "fp32", "fp32", "bhsd", False),
    (2, 64, "bf16", "bf16", "bshd", False),
    (4, 24, "fp32", "bf16", "bhsd", False),
    (5, 40, "fp16", "fp16", "bhsd", False),
    (3, 128, "fp16", "fp32", "bhsd", True),
    (5, 1, "bf16", "bf16", "bshd", True),
    (2, 36, "bf16", "bf16", "thd", True),
    (3, 64, "fp32", "fp32", "thd", False),
]


@pytest.mark.parametrize(("count", "dim", "kind", "result", "layout", "is_stacked"), CASES)
def test_states_are_one_softmax(count: int, dim: int, kind: str, result: str, layout: str, is_stacked: bool) -> None:
    outs, lses = states(count, dim, seed=count)
    outs = outs.to(DTYPES[kind])
    if layout == "thd":
        outs, lses = outs[:, 0], lses[:, 0]
    expected, expected_lse = merged(outs, lses)
    if layout != "bhsd":
        outs = outs.transpose(-3, -2)
        expected = expected.transpose(-3, -2)
    dtype = None if kind == result else DTYPES[result]
    given = (outs, lses) if is_stacked else (list(outs), [lse.mT.contiguous().mT for lse in lses])
    out, lse = flashgen.merge_states(*given, layout=layout, dtype=dtype)
    assert (out.dtype, lse.dtype) == (DTYPES[result], torch.float32)
    tolerance = max(2 * torch.finfo(DTYPES[result]).eps, 2e-6)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    (is_empty,) = {bool(one) for one in expected_lse.isinf().flatten(-2)[..., 0].flatten()[:1]}
    assert is_empty
    assert (out.transpose(-3, -2) if layout != "bhsd" else out).flatten(0, -2)[0].eq(0).all()


def test_odd_strides_and_the_infinity_of_flash_attention_2() -> None:
    outs, lses = states(3, 20)
    expected, expected_lse = merged(outs, lses)
    wide = torch.full((BATCH, 3, ROWS, HEADS, 23), NAN)
    wide[..., :20] = outs.permute(1, 0, 3, 2, 4)
    given = wide[..., :20].permute(1, 0, 3, 2, 4)
    out, lse = flashgen.merge_states(
        given, lses.masked_fill(lses.isinf(), INF).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    )
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_rows_that_overlap_are_read_and_not_written() -> None:
    """`empty_like` of such strides has none that a kernel writes rows by."""
    out = torch.randn(200).unfold(0, 16, 1)[:8].view(1, 2, 4, 16)
    found, _ = flashgen.merge_states([out, out], [torch.zeros(1, 2, 4)] * 2)
    torch.testing.assert_close(found, out)


def test_parts_of_attention_are_the_whole() -> None:
    q, k, v = (torch.randn(1, 2, rows, 16, generator=torch.Generator().manual_seed(rows)) for rows in (3, 12, 13))
    v = v[:, :, :12]

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = q @ k[:, :, keys].mT / math.sqrt(16)
        return scores.softmax(-1) @ v[:, :, keys], scores.logsumexp(-1)

    parts = [attend(slice(0, 1)), attend(slice(1, 7)), attend(slice(7, 12))]
    out, lse = flashgen.merge_states([part[0] for part in parts], [part[1] for part in parts])
    torch.testing.assert_close(out, attend(slice(0, 12))[0])
    torch.testing.assert_close(lse, attend(slice(0, 12))[1])


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_gradients(layout: str) -> None:
    outs, lses = states(3, 8)
    if layout == "thd":
        outs, lses = outs[:, 0], lses[:, 0]
    outs, lses = outs.requires_grad_(), lses.requires_grad_()
    wide, wide_lses = outs.detach().double().requires_grad_(), lses.detach().double().requires_grad_()
    given = outs if layout == "bhsd" else outs.transpose(-3, -2)
    out, lse = flashgen.merge_states(given if layout == "bshd" else list(given), lses, layout=layout)
    expected, expected_lse = merged_with_gradient(wide, wide_lses)
    expected = expected if layout == "bhsd" else expected.transpose(-3, -2)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    seen = expected_lse.isfinite()
    ((out * weights).sum() + lse[seen].sin().sum()).backward()
    ((expected * weights.double()).sum() + expected_lse[seen].sin().sum()).backward()
    for one, other in ((outs.grad, wide.grad), (lses.grad, wide_lses.grad)):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.double(), other.nan_to_num(0.0), rtol=1e-4, atol=1e-5)


def merged_with_gradient(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over states that have keys, so that autograd meets no difference of infinities."""
    seen = lses.isfinite()
    weights = lses.masked_fill(~seen, -1e4).softmax(0) * seen
    out = (weights[..., None] * outs.masked_fill(~seen[..., None], 0.0)).sum(0)
    return out, torch.where(seen.any(0), lses.masked_fill(~seen, -1e4).logsumexp(0), -INF)


def test_second_derivatives_where_no_state_has_a_key_are_0() -> None:
    found = []
    for merge in (flashgen.merge_states, reference.merge_states):
        outs = [torch.zeros(1, 1, 2, 16, requires_grad=True) for _ in range(2)]
        lses = [torch.tensor([[[0.0, -INF]]], requires_grad=True) for _ in range(2)]
        out, _ = merge(outs, lses)
        first = torch.autograd.grad(out.exp().sum(), [*outs, *lses], create_graph=True)
        found.append(torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), lses))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_merged_states_have_gradients_under_transforms() -> None:
    outs, lses = torch.randn(2, BATCH, HEADS, ROWS, 16), torch.randn(2, BATCH, HEADS, ROWS)

    def loss(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        out, lse = flashgen.merge_states([outs[0], outs[1]], [lses[0], lses[1]])
        return out.square().sum() + lse.sum()

    leaves = [outs.clone().requires_grad_(), lses.clone().requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for one, other in zip(torch.func.grad(loss, (0, 1))(outs, lses), expected, strict=True):
        torch.testing.assert_close(one, other)
    twice = [torch.stack([one, one]) for one in (outs, lses)]
    for one, other in zip(torch.vmap(torch.func.grad(loss, (0, 1)))(*twice), expected, strict=True):
        torch.testing.assert_close(one[1], other)
    around = torch.func.grad(lambda x: torch.vmap(lambda one: flashgen.merge_states([one, outs[1]], lses)[0])(x).sum())
    plain = outs[:1].clone().requires_grad_()
    flashgen.merge_states([plain[0], outs[1]], lses)[0].sum().backward()
    torch.testing.assert_close(around(outs[:1]), plain.grad)
    found = torch.vmap(lambda a, b: flashgen.merge_states([a, a], [b, b]))(outs, lses)
    for number in range(2):
        right = flashgen.merge_states([outs[number]] * 2, [lses[number]] * 2)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one[number], other)
