"""Tensors of one backward call, their shapes and strides, and the arguments of kernels that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashgen.codegen.family import Sizes
from flashgen.core.errors import LaunchError
from flashgen.core.features.score_tensors import ALIGNMENT_BYTES, Shape4
from flashgen.core.features.values import Features
from flashgen.launch.geometry import Geometry, has_aligned_strides, scalars

FIELDS = {"q": "q", "k": "k", "v": "v", "o": "out", "do": "dout", "dq": "dq", "dk": "dk", "dv": "dv"}
"""The tensors that kernels read and write by strides or descriptors: id in the launch vocabulary, and field."""

_SHAPED_AS = {"do": "o", "dq": "q", "dk": "k", "dv": "v"}
_FORWARD_ONLY = ("lse_rows", "num_q_blocks", "num_k_blocks", "stride_block_b", "stride_block_h")
"""Scalars of a forward geometry that no backward kernel has."""


class BackwardTensors(NamedTuple):
    """The tensors of one backward call, in (batch, head, sequence, head_dim) order where they have four dimensions.

    A tuple, because every call makes one, and a frozen dataclass takes four times as long to make.

    Attributes:
        q: (batch, nheads, seqlen_q, head_dim).
        k: (batch, nheads_k, seqlen_k, head_dim).
        v: (batch, nheads_k, seqlen_k, head_dim_v).
        out: (batch, nheads, seqlen_q, head_dim_v), what the forward pass returned.
        lse: fp32 (batch, nheads, seqlen_q), contiguous; likewise.
        dout: the gradient of `out`.
        dq: is overwritten with the gradient of q.
        dk: is overwritten with the gradient of k.
        dv: is overwritten with the gradient of v.
        dlse: the gradient of `lse`, fp32, contiguous; None is 0.
        dbias: is overwritten with the gradient of the bias where one is compiled in, contiguous: of kind "full" in the
            bias's dtype, with four dimensions that are 1 where it broadcasts (but the last is seqlen_k); of kind "keys"
            in fp32, (batch, nheads, seqlen_k).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dlse: torch.Tensor | None = None
    dbias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardGeometry:
    """Shapes and strides (in elements) of a backward call's tensors.

    `forward` has those of q, k, v and out, and of features; every gradient has the shape of its tensor. `dbias_shape`
    is that of the gradient of a bias of kind "full", and None without one.
    """

    forward: Geometry
    do_strides: Shape4
    dq_strides: Shape4
    dk_strides: Shape4
    dv_strides: Shape4
    dbias_shape: Shape4 | None = None

    @classmethod
    def of(cls, tensors: BackwardTensors, features: Features | None = None) -> BackwardGeometry:
        """The geometry of these tensors, and of what comes beside them.

        Raises:
            LaunchError: a gradient has another shape than its tensor, or a tensor without strides is not contiguous.
        """
        forward = Geometry.of(tensors.q, tensors.k, tensors.v, tensors.out, features)
        given = {name: getattr(tensors, FIELDS[name]) for name in _SHAPED_AS}
        for name, tensor in given.items():
            expected = forward.tensor(_SHAPED_AS[name])[0]
            if tuple(tensor.shape) != expected:
                raise LaunchError(
                    f"a gradient has the shape of its tensor, {FIELDS[name]} {expected}, got {tuple(tensor.shape)}"
                )
        for name in ("lse", "dlse", "dbias"):
            flat = getattr(tensors, name)
            if flat is not None and not flat.is_contiguous():
                raise LaunchError(f"{name} is contiguous, got shape {tuple(flat.shape)} and strides {flat.stride()}")
        dbias = tensors.dbias
        return cls(
            forward=forward,
            **{f"{name}_strides": tensor.stride() for name, tensor in given.items()},
            dbias_shape=tuple(dbias.shape) if dbias is not None and dbias.dim() == 4 else None,  # type: ignore[arg-type]
        )

    @property
    def sizes(self) -> Sizes:
        """What grids and scratch memory depend on."""
        return self.forward.sizes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query row, or no key at all."""
        return self.forward.is_empty

    def tensor(self, name: str) -> tuple[Shape4, Shape4]:
        """Shape and strides of the tensor with this id: q, k, v, o, do, dq, dk or dv."""
        if name not in _SHAPED_AS:
            return self.forward.tensor(name)
        strides: Shape4 = getattr(self, f"{name}_strides")
        return self.forward.tensor(_SHAPED_AS[name])[0], strides


def backward_aligned16(geometry: BackwardGeometry, pointers: int, element_bytes: int) -> bool:
    """Whether every pointer (or-ed together in `pointers`) and every stride in use is a multiple of 16 bytes.

    That is of q, k, v, out and dout, and of the gradients dq, dk and dv; elements have `element_bytes` bytes.
    """
    if pointers % ALIGNMENT_BYTES:
        return False
    return all(has_aligned_strides(*geometry.tensor(name), element_bytes) for name in FIELDS)


def backward_scalars(geometry: BackwardGeometry) -> dict[str, int]:
    """The integer arguments of the launch vocabulary that a geometry fixes, and `q_offset` by default."""
    found = {name: value for name, value in scalars(geometry.forward).items() if name not in _FORWARD_ONLY}
    for name in FIELDS:
        for axis, stride in zip("bhs", geometry.tensor(name)[1], strict=False):
            found[f"stride_{name}{axis}"] = stride
    sizes = geometry.sizes
    if geometry.dbias_shape is None:  # of kind "keys": a row for every head, where there is a gradient at all
        batch, heads = sizes.batch, sizes.nheads
        steps = (heads * sizes.seqlen_k, sizes.seqlen_k, 0)
    else:
        batch, heads, rows, keys = geometry.dbias_shape
        steps = (heads * rows * keys if batch > 1 else 0, rows * keys if heads > 1 else 0, keys if rows > 1 else 0)
    found |= zip(("stride_dbias_b", "stride_dbias_h", "stride_dbias_q"), steps, strict=True)
    return found | {"bias_batch": batch, "bias_heads": heads}
