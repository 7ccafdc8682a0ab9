"""Shapes and strides of one call, and the arguments of a kernel that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashgen.codegen.family import Sizes
from flashgen.core.errors import LaunchError
from flashgen.core.features.positions import MAX_OFFSET
from flashgen.core.features.score_tensors import ALIGNMENT_BYTES, Shape4, broadcast_strides
from flashgen.core.features.values import BlockMask, Features

__all__ = ["ALIGNMENT_BYTES", "Geometry", "Shape4", "aligned16", "clamp_offset", "legal_strides", "scalars"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrid:
    """Sizes of a block mask: its blocks, and how far apart the query blocks of batches and heads are (0: shared)."""

    query_blocks: int = 0
    key_blocks: int = 0
    stride_b: int = 0
    stride_h: int = 0

    @classmethod
    def of(cls, block_mask: BlockMask) -> BlockGrid:
        """The sizes of a block mask whose counts are contiguous."""
        batch, nheads, query_blocks = block_mask.partial_counts.shape
        return cls(
            query_blocks=query_blocks,
            key_blocks=block_mask.partial_indices.shape[-1],
            stride_b=nheads * query_blocks if batch > 1 else 0,
            stride_h=query_blocks if nheads > 1 else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shapes and strides (in elements) of a call's tensors, in (batch, head, sequence, head_dim) order.

    Of the features only what their tensors' sizes fix is here: the strides of bias and mask (0 where broadcast), the
    stride of the slopes along the batch, the blocks of a block mask.
    """

    q_shape: Shape4
    k_shape: Shape4
    v_shape: Shape4
    q_strides: Shape4
    k_strides: Shape4
    v_strides: Shape4
    o_strides: Shape4
    bias_strides: Shape4 | None = None
    mask_strides: Shape4 | None = None
    alibi_batch_stride: int = 0
    blocks: BlockGrid | None = None

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, features: Features | None = None
    ) -> Geometry:
        """The geometry of four tensors in bhsd order, and of what comes beside them."""
        named = (("q", q), ("k", k), ("v", v), ("o", out))
        values: dict[str, Any] = {f"{name}_strides": tensor.stride() for name, tensor in named}
        values |= {f"{name}_shape": tuple(tensor.shape) for name, tensor in named[:3]}
        if features is not None:
            slopes = features.alibi_slopes
            values["bias_strides"] = None if features.bias is None else broadcast_strides(features.bias)
            values["mask_strides"] = None if features.mask is None else broadcast_strides(features.mask)
            values["alibi_batch_stride"] = slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
            values["blocks"] = None if features.block_mask is None else BlockGrid.of(features.block_mask)
        return cls(**values)

    @property
    def o_shape(self) -> Shape4:
        """Shape of the output: that of q with v's head_dim."""
        return (*self.q_shape[:3], self.v_shape[3])

    @property
    def sizes(self) -> Sizes:
        """What grids depend on."""
        batch, nheads, seqlen_q, _ = self.q_shape
        _, nheads_k, seqlen_k, _ = self.k_shape
        return Sizes(batch=batch, nheads=nheads, nheads_k=nheads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query row, or no key at all."""
        return 0 in self.q_shape or 0 in self.k_shape

    def tensor(self, name: str) -> tuple[Shape4, Shape4]:
        """Shape and strides of the tensor named q, k, v, o, bias or mask."""
        if name in ("bias", "mask"):
            return self._scores(name)
        return getattr(self, f"{name}_shape"), getattr(self, f"{name}_strides")

    def described(self, name: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a tensor as a descriptor of some rank describes it.

        Of rank 5 it has the heads that share keys in an axis of their own: (batch, nheads_k, group, seqlen, head_dim).
        """
        shape, strides = self.tensor(name)
        if rank == len(shape):
            return shape, legal_strides(shape, strides)
        (batch, nheads, *rest), (stride_b, *inner) = shape, strides
        nheads_k = self.k_shape[1]
        group = nheads // nheads_k
        grouped = (batch, nheads_k, group, *rest)
        return grouped, legal_strides(grouped, (stride_b, group * inner[0], *inner))

    def _scores(self, name: str) -> tuple[Shape4, Shape4]:
        """Those of a bias or a mask of its own, in which every axis but the keys has size 1 where it is broadcast.

        Raises:
            LaunchError: the call has none.
        """
        strides = getattr(self, f"{name}_strides")
        if strides is None:
            raise LaunchError(f"the kernel reads {name.capitalize()}, and the features of the call have none")
        scores = (*self.q_shape[:3], self.k_shape[2])
        batch, nheads, rows = (size if stride else 1 for size, stride in zip(scores[:3], strides, strict=False))
        return (batch, nheads, rows, scores[3]), strides


def aligned16(geometry: Geometry, pointers: int, element_bytes: int) -> bool:
    """Whether every pointer (or-ed together in `pointers`) and every stride in use is a multiple of 16 bytes."""
    if pointers % ALIGNMENT_BYTES:
        return False
    return all(has_aligned_strides(*geometry.tensor(letter), element_bytes) for letter in "qkvo")


def has_aligned_strides(shape: Shape4, strides: Shape4, element_bytes: int) -> bool:
    """Whether every stride in use of a tensor is a multiple of 16 bytes."""
    step = ALIGNMENT_BYTES // element_bytes
    return not any(size > 1 and stride % step for size, stride in zip(shape[:3], strides, strict=False))


def scalars(geometry: Geometry) -> dict[str, int]:
    """The integer arguments of the launch vocabulary that a geometry fixes."""
    batch, nheads, seqlen_q, _ = geometry.q_shape
    _, nheads_k, seqlen_k, _ = geometry.k_shape
    blocks = geometry.blocks or BlockGrid()
    found = {
        "batch": batch,
        "nheads": nheads,
        "group_size": nheads // nheads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "q_offset": seqlen_k - seqlen_q,
        "lse_rows": 0,
        "stride_alibi_b": geometry.alibi_batch_stride,
        "num_q_blocks": blocks.query_blocks,
        "num_k_blocks": blocks.key_blocks,
        "stride_block_b": blocks.stride_b,
        "stride_block_h": blocks.stride_h,
    }
    for letter in "qkvo":
        for axis, stride in zip("bhs", geometry.tensor(letter)[1], strict=False):
            found[f"stride_{letter}{axis}"] = stride
    for name, strides in (("bias", geometry.bias_strides), ("mask", geometry.mask_strides)):
        for axis, stride in zip("bhqk", strides or (0, 0, 0, 0), strict=True):
            found[f"stride_{name}_{axis}"] = stride
    return found


def clamp_offset(q_offset: int, geometry: Geometry, *, is_far: bool = False) -> int:
    """A query offset as 32 bits: with a causal mask alone, nothing changes beyond the lengths.

    `is_far` is for kernels with a window or ALiBi, whose scores go on changing.
    """
    if is_far:
        return max(-MAX_OFFSET, min(q_offset, MAX_OFFSET))
    return max(-geometry.q_shape[2], min(q_offset, geometry.k_shape[2]))


def legal_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides that a tensor descriptor takes: a dimension of size 1 is never stepped over, so any stride will do."""
    return (*(s if n > 1 else ALIGNMENT_BYTES for n, s in zip(shape[:-1], strides, strict=False)), 1)
