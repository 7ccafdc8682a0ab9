"""`Call`: the arguments of one attention call that choose code; `CheckedCall`: what they ask for, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flashgen.core.config import Config
from flashgen.core.errors import WorkloadError
from flashgen.core.features import table
from flashgen.core.features.declaration import CallFacts
from flashgen.core.features.pages import MAX_PAGE_STRIDE, is_paged
from flashgen.core.features.sequences import is_packed, sequences_of
from flashgen.core.features.values import Features
from flashgen.core.input_copies import may_copy, of_copies
from flashgen.core.score_mods import ScoreMods
from flashgen.core.workload import DTYPE_BYTES, Specialization, Workload
from flashgen.launch.geometry import Geometry, aligned16
from flashgen.runtime.ops.outputs import META, aligned_like, empty_output

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
NO_FEATURES = Features()
_NOTHING_IN_WORKLOAD = table.workload_fields(
    NO_FEATURES, CallFacts(q=torch.empty(0, device="meta"), sizes=(0, 0, 0, 0))
)
_NOTHING_IN_SPECIALIZATION = table.specialization_fields(NO_FEATURES)
"""What a call without features is, whatever its tensors: found out once, because every new length pays for it."""

MAX_ROW_STRIDE = 2**23
"""In elements, exclusive: inside a tile of at most 256 rows places are 32-bit numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of one attention call that choose code; tensors are in the layout that `bshd` names.

    `features` is None for a call without features; `tf32` says that products of float32 tensors may be of TF32.
    `open_key` is what calls of other sizes have in common with this one, where they may be served without the slow path
    (`flashgen.runtime.ops.open_calls`).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    bshd: bool = False
    offset_tensor: bool = False
    explicit_offset: bool = False
    with_lse: bool = False
    tf32: bool = False
    features: Features | None = None
    mods: ScoreMods | None = None
    config: Config | None = None
    open_key: tuple[Any, ...] | None = None

    def checked(self) -> CheckedCall:
        """The call, its rules checked; raises as `CheckedCall.of` does."""
        return CheckedCall.of(self)

    def exact(self) -> Call:
        """The call with exact products."""
        return replace(self, tf32=False)

    def of_copies(self) -> Call:
        """The call with aligned copies of q, k and v, which have no memory yet."""
        q, k, v = (aligned_like(tensor, META) for tensor in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    @property
    def generated_only(self) -> bool:
        """Whether SDPA would not compute the same: it returns no LSE and knows no query offset."""
        return self.with_lse or self.explicit_offset or self.offset_tensor or is_packed(self.features)

    @property
    def batch_invariant(self) -> bool:
        """Whether bits must not depend on the batch, and so neither the config."""
        return self.features is not None and self.features.batch_invariant

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v in (batch, head, sequence, head_dim) order."""
        return in_bhsd(self.q, self.k, self.v) if self.bshd else (self.q, self.k, self.v)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A call whose rules hold: its workload, what is compiled in, and the shapes and strides of its tensors.

    `features` are those of the call with bias and mask in four dimensions. `copies` says that kernels get copies of q,
    k and v, which `geometry` is of, and `workload`, too: their heads may be wider.
    """

    call: Call
    workload: Workload
    spec: Specialization
    geometry: Geometry
    features: Features | None = None
    copies: bool = False

    @classmethod
    def of(cls, call: Call) -> CheckedCall:
        """Check a call.

        Raises:
            WorkloadError: shapes, dtypes or arguments do not fit together; the message names the rule and the values.
        """
        q, k, v = call.views
        check_inputs(q, k, v, packed=is_packed(call.features), paged=is_paged(call.features))
        _check_strides(q, k, v, paged=is_paged(call.features))
        features, of_workload, of_spec = _features(call, q, k)
        workload = _workload(call, (q, k, v), of_workload)
        out = empty_output(call.q, call.v, bshd=call.bshd)
        geometry = _geometry(call, out, features)
        pointers = q.data_ptr() | k.data_ptr() | v.data_ptr()
        size = DTYPE_BYTES[workload.dtype]
        fits, copies = aligned16(geometry, pointers, size), False
        if not fits and call.config is None and may_copy(workload, batch_invariant=call.batch_invariant):
            wider = of_copies(workload)
            copied = _geometry(call.of_copies(), out if wider == workload else aligned_like(out, META), features)
            if aligned16(copied, 0, size):
                workload, geometry, fits, copies = wider, copied, True, True
        spec = Specialization.of(
            workload,
            aligned16=fits,
            offset_tensor=call.offset_tensor,
            mods=call.mods,
            **of_spec,
        )
        return cls(call=call, workload=workload, spec=spec, geometry=geometry, features=features, copies=copies)

    @property
    def pads(self) -> bool:
        """Whether heads of the copies are wider."""
        widths = self.call.q.shape[-1], self.call.v.shape[-1]
        return (self.workload.head_dim, self.workload.head_dim_v) != widths


def _geometry(call: Call, out: torch.Tensor, features: Features | None) -> Geometry:
    """That of a call whose kernel writes into `out`."""
    return Geometry.of(*call.views, out.transpose(1, 2) if call.bshd else out, features)


def in_bhsd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of a call in bshd order in the other one; those of a wrong rank as they are, to be refused."""
    if q.dim() == k.dim() == v.dim() == 4:
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def _features(call: Call, q: torch.Tensor, k: torch.Tensor) -> tuple[Features | None, dict[str, Any], dict[str, Any]]:
    """The features of a call, checked, and what they are in its workload and in its specialization."""
    if call.features is None:
        return None, _NOTHING_IN_WORKLOAD, _NOTHING_IN_SPECIALIZATION
    facts = CallFacts(
        q=q,
        sizes=sizes_of(q, k, call.features),
        mods=call.mods,
        page_size=k.shape[2] if is_paged(call.features) else None,
        has_own_offset=call.explicit_offset or call.offset_tensor,
    )
    features = table.checked(call.features, facts)
    return features, table.workload_fields(features, facts), table.specialization_fields(features)


def sizes_of(q: torch.Tensor, k: torch.Tensor, features: Features) -> tuple[int, int, int, int]:
    """Batch, nheads, seqlen_q and seqlen_k of a call in bhsd order; of packed sequences, their number and bounds."""
    if is_packed(features):
        return (sequences_of(features), q.shape[1], *features.max_seqlens)
    return (*q.shape[:3], k.shape[2])


def _workload(
    call: Call, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], features: dict[str, Any]
) -> Workload:
    q, k, v = inputs
    batch, nheads, seqlen_q, head_dim = q.shape
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": k.shape[2]}
    if "varlen" in features:
        sizes |= {"total_q": seqlen_q} if is_paged(call.features) else {"total_q": seqlen_q, "total_k": k.shape[2]}
    return Workload(
        dtype="tf32" if call.tf32 and q.dtype == torch.float32 else DTYPES[q.dtype],
        nheads=nheads,
        nheads_k=k.shape[1],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        causal=call.causal,
        **{**sizes, **features},
    )


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, packed: bool = False, paged: bool = False
) -> None:
    """Check what q, k and v, in bhsd order, must be wherever they are: also of tensors without memory.

    `packed` says that they are packed sequences as one batch element, `paged` that k and v are pages of such.

    Raises:
        WorkloadError: a number of dimensions, a dtype, a device or a shape does not fit.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise WorkloadError(f"q, k and v have 4 dimensions, got {name} with shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise WorkloadError(f"dtype is bfloat16, float16 or float32, got {name} with {tensor.dtype}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise WorkloadError(
                f"q, k and v share dtype and device, got q {q.dtype} on {q.device}, "
                f"{name} {tensor.dtype} on {tensor.device}"
            )
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3] or (k.shape[0] != q.shape[0] and not paged):
        rule = _PAGED_SHAPES if paged else _PACKED_SHAPES if packed else _DENSE_SHAPES
        raise WorkloadError(f"{rule}, got {_shapes(q, k, v, packed=packed, paged=paged)}")
    if not (q.shape[1] and k.shape[1] and q.shape[3] and v.shape[3]):
        raise WorkloadError(
            "nheads, nheads_k, head_dim and head_dim_v must be at least 1, got "
            f"{_shapes(q, k, v, packed=packed, paged=paged)}{'' if packed else ' in bhsd order'}"
        )
    if q.shape[1] % k.shape[1]:
        raise WorkloadError(f"nheads must be a multiple of nheads_k, got {q.shape[1]} and {k.shape[1]}")


_DENSE_SHAPES = (
    "q is (batch, nheads, seqlen_q, head_dim), k (batch, nheads_k, seqlen_k, head_dim) and v (batch, nheads_k, "
    "seqlen_k, head_dim_v) in bhsd order"
)
_PACKED_SHAPES = (
    "q is (total_q, nheads, head_dim), k (total_k, nheads_k, head_dim) and v (total_k, nheads_k, head_dim_v)"
)
_PAGED_SHAPES = (
    "q is (total_q, nheads, head_dim), k (pages, page_size, nheads_k, head_dim) and v (pages, page_size, nheads_k, "
    "head_dim_v)"
)


def _shapes(*tensors: torch.Tensor, packed: bool, paged: bool) -> str:
    """Shapes as a message has them; those of packed sequences in the order of the call."""
    first, second, third = (
        tuple(tensor.transpose(1, 2).shape[int(not paged or number == 0) :]) if packed else tuple(tensor.shape)
        for number, tensor in enumerate(tensors)
    )
    return f"{first}, {second} and {third}"


def check_offset(q: torch.Tensor, offset: torch.Tensor) -> None:
    """Check a tensor of query offsets, for queries in either order of dimensions.

    Raises:
        WorkloadError: it is not int32 (batch,) on the device of q.
    """
    if offset.dtype != torch.int32 or offset.shape != q.shape[:1] or offset.device != q.device:
        raise WorkloadError(
            f"a q_offset tensor is int32 (batch,) on the device of q, got {offset.dtype} {tuple(offset.shape)} "
            f"on {offset.device} for batch {q.shape[0] if q.dim() else None} on {q.device}"
        )


def check_lse(name: str, lse: torch.Tensor, q: torch.Tensor, *, bshd: bool) -> None:
    """Check the LSE of a call, or its gradient, for a q that is right.

    Raises:
        WorkloadError: it is not fp32 (batch, nheads, seqlen_q) on the device of q.
    """
    batch, one, two, _ = q.shape
    shape = (batch, two, one) if bshd else (batch, one, two)
    if tuple(lse.shape) != shape or lse.dtype != torch.float32 or lse.device != q.device:
        raise WorkloadError(
            f"{name} is float32 {shape} on the device of q, got {lse.dtype} {tuple(lse.shape)} on {lse.device} and q "
            f"on {q.device}"
        )


def _check_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, paged: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[3] > 1 and tensor.stride(3) != 1 and tensor.numel():
            raise WorkloadError(f"the last dimension is contiguous, got {name} with strides {tensor.stride()}")
        if tensor.shape[2] > 1 and tensor.stride(2) >= MAX_ROW_STRIDE:
            raise WorkloadError(
                f"rows lie less than {MAX_ROW_STRIDE} elements apart, got {name} with {tensor.stride(2)} between rows; "
                f"{name}.contiguous() brings them together"
            )
        if paged and name != "q" and max(tensor.stride(0), tensor.shape[2] * tensor.stride(2)) >= MAX_PAGE_STRIDE:
            raise WorkloadError(
                f"pages lie less than {MAX_PAGE_STRIDE} elements apart, and so do the ends of one, got {name} with "
                f"strides {tensor.stride()} of (pages, heads, rows, head_dim)"
            )
