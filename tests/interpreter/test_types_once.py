"""Types that are made once give what types made anew give, and refuse what they refuse."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic

from tests.interpreter import types_once


@triton.jit
def _mixed(Out, X, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    halves = tl.load(X + at)
    pairs = at[:, None] * 2 + at[None, :].to(tl.int64)
    sums = tl.sum(pairs, 1) + halves / (halves + 3)  # a quotient of halves is a float
    tl.store(Out + at, tl.where(at < count, sums, -1.0))


@triton.jit
def _other_sizes(Out, SIZE: tl.constexpr):
    tl.store(Out + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))


def mixed() -> torch.Tensor:
    out = torch.full((16,), 7.0)
    _mixed[(1,)](out, torch.arange(16).half(), 13, SIZE=16)
    return out


def test_results_are_those_of_types_made_anew() -> None:
    at = torch.arange(16)
    expected = (32 * at + 120 + (at / (at + 3)).float()).masked_fill(at >= 13, -1.0)
    quick = mixed()
    torch.testing.assert_close(quick, expected, rtol=1e-3, atol=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.block_type, "__init__", types_once.MAKE_BLOCK)
        patch.setattr(core.tensor, "__init__", types_once.MAKE_TENSOR)
        patch.setattr(TritonSemantic, "broadcast_impl_value", types_once.BROADCAST)
        patch.setattr(TritonSemantic, "binary_op_type_checking_impl", types_once.PROMOTE)
        assert torch.equal(mixed(), quick)


def test_sizes_that_do_not_fit_are_refused() -> None:
    for _ in range(2):  # of types that are new, and that are known
        with pytest.raises(Exception, match="incompatible dimensions"):
            _other_sizes[(1,)](torch.zeros(16), SIZE=16)
