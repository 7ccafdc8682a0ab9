"""Shapes and strides of one call, and the arguments of a kernel that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 16
"""What the copy engine demands of base addresses and strides, and the widest load of a thread."""

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shapes and strides (in elements) of q, k, v and out, each in (batch, head, sequence, head_dim) order."""

    q_shape: Shape4
    k_shape: Shape4
    v_shape: Shape4
    q_strides: Shape4
    k_strides: Shape4
    v_strides: Shape4
    o_strides: Shape4

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Geometry:
        """The geometry of four tensors in bhsd order."""
        shapes = {f"{name}_shape": tuple(tensor.shape) for name, tensor in (("q", q), ("k", k), ("v", v))}
        named = (("q", q), ("k", k), ("v", v), ("o", out))
        strides = {f"{name}_strides": tuple(tensor.stride()) for name, tensor in named}
        return cls(**shapes, **strides)  # type: ignore[arg-type]

    @property
    def o_shape(self) -> Shape4:
        """Shape of the output: that of q with v's head_dim."""
        return (*self.q_shape[:3], self.v_shape[3])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query row, or no key at all."""
        return 0 in self.q_shape or 0 in self.k_shape

    def tensor(self, letter: str) -> tuple[Shape4, Shape4]:
        """Shape and strides of the tensor named q, k, v or o."""
        return getattr(self, f"{letter}_shape"), getattr(self, f"{letter}_strides")


def aligned16(geometry: Geometry, pointers: int, element_bytes: int) -> bool:
    """Whether every pointer (or-ed together in `pointers`) and every stride in use is a multiple of 16 bytes."""
    if pointers % ALIGNMENT_BYTES:
        return False
    for letter in "qkvo":
        shape, strides = geometry.tensor(letter)
        if any(
            size > 1 and stride * element_bytes % ALIGNMENT_BYTES
            for size, stride in zip(shape[:3], strides, strict=False)
        ):
            return False
    return True


def scalars(geometry: Geometry) -> dict[str, int]:
    """The integer arguments of the launch vocabulary that a geometry fixes."""
    _, nheads, seqlen_q, _ = geometry.q_shape
    _, nheads_k, seqlen_k, _ = geometry.k_shape
    found = {
        "nheads": nheads,
        "group_size": nheads // nheads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "q_offset": seqlen_k - seqlen_q,
        "lse_rows": 0,
    }
    for letter in "qkvo":
        for axis, stride in zip("bhs", geometry.tensor(letter)[1], strict=False):
            found[f"stride_{letter}{axis}"] = stride
    return found


def clamp_offset(q_offset: int, geometry: Geometry) -> int:
    """Beyond these bounds nothing changes, and within them 32-bit arithmetic in the kernel cannot overflow."""
    return max(-geometry.q_shape[2], min(q_offset, geometry.k_shape[2]))


def legal_strides(geometry: Geometry, letter: str) -> Shape4:
    """Strides that a tensor descriptor takes: a dimension of size 1 is never stepped over, so any stride will do."""
    shape, strides = geometry.tensor(letter)
    batch, head, row = (s if n > 1 else ALIGNMENT_BYTES for n, s in zip(shape[:3], strides, strict=False))
    return batch, head, row, 1
