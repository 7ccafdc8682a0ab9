"""Tensors that lie in memory in other ways than usual ones, and what else calls in turns share."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def shifted(tensor: Tensor) -> Tensor:
    """A copy whose address is no multiple of 16 bytes."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def odd(tensor: Tensor) -> Tensor:
    """A copy whose rows are no multiple of 16 bytes apart."""
    return tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)[..., :-1].copy_(tensor)


def swapped(tensor: Tensor) -> Tensor:
    """A copy with the dimensions in front of the columns in the other order in memory."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def cut(tensor: Tensor) -> Tensor:
    """Rows and heads of longer ones."""
    return torch.empty(*(size + 8 for size in tensor.shape), dtype=tensor.dtype)[tuple(slice(n) for n in tensor.shape)]


def odd_steps(tensor: Tensor) -> Tensor:
    """A copy whose batch elements are no multiple of 16 bytes apart."""
    batch, width = len(tensor), tensor[0].numel()
    whole = torch.zeros(batch + 1, width + 1, dtype=tensor.dtype)
    return whole[:, :-1].unflatten(1, tensor.shape[1:])[:batch]


def expanded(tensor: Tensor) -> Tensor:
    """One number in the place of all."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def same(tensor: Tensor) -> Tensor:
    return tensor


def evens(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return (k_idx % 2) == 0
