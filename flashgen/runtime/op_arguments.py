"""From the flat arguments of an op to `Features`, and from a block mask to arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from flashgen.core.features.values import BlockMask, Features


def features_of(
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    aux: Sequence[torch.Tensor] | None = None,
    block_mask: Sequence[torch.Tensor] | None = None,
    block_sizes: Sequence[int] = (),
    block_mask_mod: str = "",
) -> Features:
    """The features of a call as the launches take them."""
    if alibi_slopes is None and sinks is None and bias is None and mask is None and not aux and not block_mask:
        return without_tensors(window_left, window_right, softcap)
    return Features(
        window=(window_left, window_right),
        softcap=softcap,
        alibi_slopes=_packed(alibi_slopes),
        sinks=_packed(sinks),
        bias=bias,
        mask=mask,
        aux=tuple(aux or ()),
        block_mask=_block_mask(block_mask, block_sizes, block_mask_mod) if block_mask else None,
    )


@functools.lru_cache(maxsize=1024)
def without_tensors(window_left: int | None, window_right: int | None, softcap: float) -> Features:
    """The features of a call whose features are numbers: one object for equal numbers."""
    return Features(window=(window_left, window_right), softcap=softcap)


def split_block_mask(mask: BlockMask) -> tuple[list[torch.Tensor], list[int], str]:
    """A block mask as arguments of an op: `block_mask`, `block_sizes`, `block_mask_mod`."""
    tensors = [mask.partial_counts, mask.partial_indices, mask.full_counts, mask.full_indices]
    return tensors, [mask.seqlen_q, mask.seqlen_k, mask.block_size], mask.mask_mod


def _packed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of one number for every head, without gaps between them: kernels know no stride of it."""
    if tensor is None or not tensor.dim() or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def _block_mask(tensors: Sequence[torch.Tensor], sizes: Sequence[int], mask_mod: str) -> BlockMask:
    """What `split_block_mask` took apart."""
    partial_counts, partial_indices, full_counts, full_indices = tensors
    seqlen_q, seqlen_k, block_size = sizes
    return BlockMask(
        partial_counts=partial_counts,
        partial_indices=partial_indices,
        full_counts=full_counts,
        full_indices=full_indices,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        block_size=block_size,
        mask_mod=mask_mod,
    )
