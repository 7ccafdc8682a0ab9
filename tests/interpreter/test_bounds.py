"""The checks that all other tests here run under, of addresses and of integers, find what they should, and no more."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _shift(X, Y, n, by, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at + by, mask=at < n, other=0.0), mask=at < n)


@triton.jit
def _add(X, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(X + at, at * 1.0, mask=at < n)


@triton.jit
def _combine(X, a, b, limit):
    tl.device_assert(a < limit)
    tl.store(X, (a * b).to(tl.int64) + (a + b) - (b - a))


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _four_times(X, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at)
    tl.store(X + at, tl.sum(_twice(_twice(x)) + at, axis=0) + at)


def test_what_lies_in_the_arguments_is_read_and_written() -> None:
    x = torch.arange(12.0)
    y = torch.zeros(10)
    _shift[(1,)](x, y, 10, 2, BLOCK=16)
    assert torch.equal(y, x[2:])
    _add[(1,)](y, 10, BLOCK=16)
    assert torch.equal(y, x[2:] + torch.arange(10.0))


@pytest.mark.parametrize(("by", "n"), [(1, 10), (-1, 10), (3, 9)])
def test_a_read_next_to_a_tensor_is_found(by: int, n: int) -> None:
    whole = torch.arange(32.0)
    with pytest.raises(Exception, match="a read of 1 of"):
        _shift[(1,)](whole[8:18] if by < 3 else whole[8:19], torch.zeros(16), n, by, BLOCK=16)


def test_a_write_and_an_atomic_next_to_a_tensor_are_found() -> None:
    whole = torch.zeros(32)
    with pytest.raises(Exception, match="a write of 2 of"):
        _shift[(1,)](torch.zeros(16), whole[4:12], 10, 0, BLOCK=16)
    with pytest.raises(Exception, match="an atomic of 3 of"):
        _add[(1,)](whole[4:12], 11, BLOCK=16)


def test_a_strided_view_ends_at_its_last_element() -> None:
    whole = torch.arange(64.0).reshape(8, 8)
    with pytest.raises(Exception, match="a read of 7 of"):
        _shift[(1,)](whole[:, 0], torch.zeros(64), 64, 0, BLOCK=64)


def test_integers_that_overflow_are_found() -> None:
    x, most = torch.zeros(1, dtype=torch.int64), 2**31 - 1
    _combine[(1,)](x, 46340, 46340, most)
    assert int(x) == 46340 * 46342
    with pytest.raises(Exception, match="mul of int32 overflows"):
        _combine[(1,)](x, 46341, 46341, most)
    with pytest.raises(Exception, match="add of int32 overflows"):
        _combine[(1,)](x, 1, most, most)
    with pytest.raises(Exception, match="sub of int32 overflows"):
        _combine[(1,)](x, -1, most, most)


def test_what_a_kernel_asserts_is_checked() -> None:
    with pytest.raises(Exception, match="AssertionError"):
        _combine[(1,)](torch.zeros(1, dtype=torch.int64), 3, 1, 3)


def test_device_functions_and_those_of_triton_run_in_every_launch() -> None:
    """The language is patched by the first call of each; a launch after another has to patch it again."""
    for _ in range(2):
        x = torch.arange(4.0)
        _four_times[(1,)](x, BLOCK=4)
        assert torch.equal(x, 30 + torch.arange(4.0))
