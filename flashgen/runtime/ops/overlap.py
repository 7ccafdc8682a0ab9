"""Whether strided tensors share memory, from shapes, strides and addresses alone."""

from __future__ import annotations

import functools

import torch

Step = tuple[int, int, int]
"""Bytes, and the least and the greatest number of such steps."""


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element of a tensor; 0 for one without elements."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def lies_in_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may share a place, as in an expanded one."""
    reach = 0
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in axes if size > 1):
        if stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of one tensor lies, in whole or in part, where one of the other does."""
    distance = other.data_ptr() - one.data_ptr()
    if not -span_bytes(other) < distance < span_bytes(one):
        return False
    return _meet(distance, tuple(sorted(_steps(one, 1) + _steps(other, -1), reverse=True)))


def _steps(tensor: torch.Tensor, sign: int) -> list[Step]:
    width = tensor.element_size()
    axes = [(stride * width, size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    ends = [(step, sign * most) for step, most in (*axes, (1, width - 1)) if step and most]
    return [(step, min(0, most), max(0, most)) for step, most in ends]


@functools.lru_cache(maxsize=1024)
def _meet(distance: int, steps: tuple[Step, ...]) -> bool:
    """Whether a distance is a sum of steps, the longest of which come first."""
    if not steps:
        return distance == 0
    (step, least, most), rest = steps[0], steps[1:]
    below, above = (sum(each[0] * each[end] for each in rest) for end in (1, 2))
    first, last = max(least, -((above - distance) // step)), min(most, (distance - below) // step)
    return any(_meet(distance - count * step, rest) for count in range(first, last + 1))
