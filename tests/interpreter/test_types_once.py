"""Types that are made once give what types made anew give, and refuse what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.interpreter import types_once


@triton.jit
def _mixed(Out, X, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    halves = tl.load(X + at)
    pairs = at[:, None] * 2 + at[None, :].to(tl.int64)
    pairs += 0 * (1 - at)[None, :] + 0 * (1.0 - halves)[:, None].to(tl.int64) + 0 * at[:, None]
    sums = tl.sum(pairs, 1) + halves / (halves + 3)  # a quotient of halves is a float
    tl.store(Out + at, tl.where(at < count, sums, -1.0))


@triton.jit
def _other_sizes(Out, SIZE: tl.constexpr):
    tl.store(Out + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))


@triton.jit
def _numbers(Out, X, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    whole, halves = tl.load(X + at).to(tl.int32), tl.load(X + at)
    # the same number beside other types, on both sides, beside scalars, and where the operand takes its type
    found = (
        2 * whole.to(tl.float32) + 2 * halves + 2 * whole + (whole + 2) + (2 + count) + (whole + 2.5) + (True + whole)
    )
    tl.store(2 + (Out + at) - 2, found + tl.where(at < 2, 2, whole - 2))


@triton.jit
def _too_large(Out, SIZE: tl.constexpr):
    tl.store(Out + tl.arange(0, SIZE), tl.arange(0, SIZE) + 1099511627776)


def numbers() -> torch.Tensor:
    out = torch.full((16,), 7.0)
    _numbers[(1,)](out, torch.arange(16).half(), 13, SIZE=16)
    return out


def mixed() -> torch.Tensor:
    out = torch.full((16,), 7.0)
    _mixed[(1,)](out, torch.arange(16).half(), 13, SIZE=16)
    return out


def test_results_are_those_of_types_made_anew() -> None:
    at = torch.arange(16)
    expected = (32 * at + 120 + (at / (at + 3)).float()).masked_fill(at >= 13, -1.0)
    torch.testing.assert_close(mixed(), expected, rtol=1e-3, atol=0)
    at = at.float()
    sums = 2 * at + 2 * at + 2 * at + (at + 2) + 15 + (at + 2.5) + (1 + at)
    torch.testing.assert_close(numbers(), sums + torch.where(at < 2, 2, at - 2), rtol=0, atol=0)
    quick = [kernel() for kernel in (mixed, numbers) for _ in range(2)]  # of what is new, and of what is known
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.block_type, "__init__", types_once.MAKE_BLOCK)
        patch.setattr(core.tensor, "__init__", types_once.MAKE_TENSOR)
        patch.setattr(interpreter.TensorHandle, "__init__", types_once.MAKE_HANDLE)
        patch.setattr(TritonSemantic, "broadcast_impl_value", types_once.BROADCAST)
        patch.setattr(TritonSemantic, "binary_op_type_checking_impl", types_once.PROMOTE)
        for kernel, (first, second) in ((mixed, quick[:2]), (numbers, quick[2:])):
            assert torch.equal(kernel(), first)
            assert torch.equal(first, second)


def test_numbers_that_an_operand_has_no_room_for_are_refused() -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="out of range"):
            _too_large[(1,)](torch.zeros(16), SIZE=16)


def test_data_wider_than_its_type_is_refused() -> None:
    with pytest.raises(ValueError, match="64 bits"):
        interpreter.TensorHandle(np.zeros(2, dtype=np.int64), tl.int32)
    with pytest.raises(ValueError, match="16 bits"):
        interpreter.TensorHandle(np.zeros(2, dtype=np.int16), tl.int1)


def test_sizes_that_do_not_fit_are_refused() -> None:
    for _ in range(2):  # of types that are new, and that are known
        with pytest.raises(Exception, match="incompatible dimensions"):
            _other_sizes[(1,)](torch.zeros(16), SIZE=16)
