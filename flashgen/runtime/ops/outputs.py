"""Where a call writes: its output and its LSE, uninitialised; and copies of inputs that kernels do not read well."""

from __future__ import annotations

import torch

from flashgen.core.alignment import padded_columns

META = torch.device("meta")
"""Where tensors have strides and no memory."""


def empty_output(q: torch.Tensor, v: torch.Tensor, *, bshd: bool) -> torch.Tensor:
    """The uninitialised output of a call: q's layout in memory, with v's head_dim."""
    if q.shape[-1] == v.shape[-1]:
        return dense_like(q)
    if bshd or q.stride(1) >= q.stride(2):
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
    # (batch, nheads, seqlen, head_dim) as a view of memory in bshd order
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)


def empty_lse(q: torch.Tensor, *, bshd: bool) -> torch.Tensor:
    """The uninitialised LSE of a call: fp32 (batch, nheads, seqlen_q), whatever the layout of q."""
    batch, one, two, _ = q.shape
    return q.new_empty((batch, two, one) if bshd else (batch, one, two), dtype=torch.float32)


def dense_like(
    tensor: torch.Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Uninitialised, dense, in the memory order of a tensor, the last dimension contiguous; None are its own.

    So gradients of q, k and v are laid out, which torch's accumulation then never has to copy.
    """
    found = torch.empty_like(tensor, device=device, dtype=dtype)
    # of an expanded or overlapping tensor, whose strides have no order, any may come out
    return found if found.stride(-1) == 1 else torch.empty_like(found, memory_format=torch.contiguous_format)


def aligned_like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The same with rows of the next multiple of 16 bytes, at which torch allocates, and so further columns."""
    found = dense_like(tensor, META)
    columns = tensor.shape[-1]
    wider = padded_columns(columns, tensor.element_size())
    shape = (*found.shape[:-1], wider)
    strides = (*(stride // columns * wider for stride in found.stride()[:-1]), 1)
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device if device is None else device)


def aligned_copy(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A copy laid out as `aligned_like`, of itself or of another one of its shape; its further columns are 0."""
    found, columns = aligned_like(tensor if like is None else like), tensor.shape[-1]
    if found.shape[-1] == columns:
        return found.copy_(tensor)
    found[..., :columns].copy_(tensor)
    found[..., columns:].zero_()
    return found


def without_padding(wider: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out`, with the first columns of a result of aligned copies."""
    return out.copy_(wider[..., : out.shape[-1]])
