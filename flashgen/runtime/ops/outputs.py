"""Where a call writes: its output and its LSE, uninitialised; and copies of inputs that kernels do not read well."""

from __future__ import annotations

import torch

META = torch.device("meta")
"""Where tensors have strides and no memory."""


def empty_output(q: torch.Tensor, v: torch.Tensor, *, bshd: bool) -> torch.Tensor:
    """The uninitialised output of a call: q's layout in memory, with v's head_dim."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    if bshd or q.stride(1) >= q.stride(2):
        return q.new_empty((*q.shape[:3], v.shape[-1]))
    # (batch, nheads, seqlen, head_dim) as a view of memory in bshd order
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)


def empty_lse(q: torch.Tensor, *, bshd: bool) -> torch.Tensor:
    """The uninitialised LSE of a call: fp32 (batch, nheads, seqlen_q), whatever the layout of q."""
    batch, one, two, _ = q.shape
    return q.new_empty((batch, two, one) if bshd else (batch, one, two), dtype=torch.float32)


def dense_like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Uninitialised, dense, in the memory order of a tensor, the last dimension contiguous; None is its device.

    So gradients of q, k and v are laid out, which torch's accumulation then never has to copy.
    """
    found = torch.empty_like(tensor, device=device)
    # of an expanded tensor, whose strides have no order, any may come out
    return found if found.stride(-1) == 1 else torch.empty_like(found, memory_format=torch.contiguous_format)


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy laid out as `dense_like`, which torch allocates at a multiple of 512 bytes."""
    return dense_like(tensor).copy_(tensor)
