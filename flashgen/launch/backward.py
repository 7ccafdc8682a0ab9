"""What only a backward pass has: its tensors, their shapes and strides, and what its family must leave and write."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.geometry import Geometry
from flashgen.launch.scratch import ScratchPlan

NEG_DELTA = "neg_delta"
"""The piece that every family leaves: fp32 (batch, nheads, padded rows), gradient of the LSE minus rowsum(dO * O)."""

FIELDS = {"q": "q", "k": "k", "v": "v", "o": "out", "do": "dout", "dq": "dq", "dk": "dk", "dv": "dv"}
"""The tensors with strides: id in the launch vocabulary, and field of `BackwardTensors`."""

_SHAPED_AS = {"do": "o", "dq": "q", "dk": "k", "dv": "v"}


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

    def named(self) -> dict[str, torch.Tensor | None]:
        """By their ids in the launch vocabulary."""
        strided = {name: getattr(self, field) for name, field in FIELDS.items()}
        return {**strided, "lse": self.lse, "dlse": self.dlse, "dbias": self.dbias}


def backward_geometry(tensors: BackwardTensors, features: Features | None = None) -> Geometry:
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
    return forward._replace(
        tensors=forward.tensors | {name: (tuple(tensor.shape), tensor.stride()) for name, tensor in given.items()},
        dbias_shape=tuple(dbias.shape) if dbias is not None and dbias.dim() == 4 else None,  # type: ignore[arg-type]
    )


def check_backward(spec: Specialization, family_id: str, geometry: Geometry, scratch: ScratchPlan) -> None:
    """Refuse what no backward pass can be launched with.

    Raises:
        LaunchError: the family leaves no `neg_delta`, or the gradient of the bias has an impossible shape.
    """
    _check_neg_delta(family_id, scratch)
    _check_dbias(spec, geometry)


def neg_delta_view(scratch: ScratchPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of `neg_delta` without its padding, at the start of the scratch memory."""
    sizes, rows = scratch.sizes, scratch.pieces[NEG_DELTA].scratch.shape[2]
    return (sizes.batch, sizes.nheads, sizes.seqlen_q), (sizes.nheads * rows, rows, 1)


def _check_neg_delta(family_id: str, scratch: ScratchPlan) -> None:
    sizes, piece = scratch.sizes, scratch.pieces.get(NEG_DELTA)
    left = None if piece is None else piece.scratch
    rows = left.shape[2] if left is not None and left.dtype == "fp32" and len(left.shape) == 3 else 0
    if left is None or left.shape[:2] != (sizes.batch, sizes.nheads) or rows < sizes.seqlen_q:
        raise LaunchError(
            f"a backward family leaves {NEG_DELTA}, fp32 ({sizes.batch}, {sizes.nheads}, {sizes.seqlen_q} or more "
            f"rows), got {left or [*scratch.pieces]} of {family_id}"
        )


def _check_dbias(spec: Specialization, geometry: Geometry) -> None:
    """The gradient of a full bias has an axis of the scores, or 1 where the bias broadcasts."""
    if not spec.bias_grad or spec.bias != "full":
        return
    shape, sizes = geometry.dbias_shape, geometry.sizes
    scores = (sizes.batch, sizes.nheads, sizes.seqlen_q, sizes.seqlen_k)
    if shape is None or shape[3] != scores[3] or any(a not in (1, b) for a, b in zip(shape, scores, strict=True)):
        raise LaunchError(
            f"the gradient of a full bias has four dimensions, those of the scores {scores} or 1 in the first three, "
            f"got {shape}"
        )
