"""Packed sequences of different lengths: where each one begins, and how much of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flashgen.core.checks import whole_number
from flashgen.core.errors import LaunchError, WorkloadError
from flashgen.core.features.declaration import (
    CallFacts,
    Feature,
    KernelNumbers,
    KernelTensor,
    OpArgument,
    Support,
    Token,
    Value,
)
from flashgen.core.features.dtypes import dtype_name
from flashgen.core.features.values import Features

if TYPE_CHECKING:
    import torch

ENDS = ("cu_seqlens_q", "cu_seqlens_k")
"""Where sequences begin and end, of queries and of keys."""

USED = ("seqused_q", "seqused_k")
"""How many rows of each sequence are used."""


def is_packed(features: Features | None) -> bool:
    """Whether a call has packed sequences."""
    return features is not None and features.cu_seqlens_q is not None


def sequences_of(features: Features) -> int:
    """How many sequences there are; 0 where what should say so has not one dimension."""
    ends = features.cu_seqlens_q
    return ends.shape[0] - 1 if ends is not None and len(ends.shape) == 1 else 0


def _checked(features: Features, facts: CallFacts) -> dict[str, Any]:
    if not is_packed(features):
        return {}
    for name in ENDS:
        _check_integers(name, getattr(features, name), facts.q, None)
    batch = sequences_of(features)
    _check_integers("cu_seqlens_k", features.cu_seqlens_k, facts.q, batch + 1)
    for name in USED:
        if getattr(features, name) is not None:
            _check_integers(name, getattr(features, name), facts.q, batch)
    for name, value in zip(("max_seqlen_q", "max_seqlen_k"), features.max_seqlens, strict=True):
        whole_number(name, value, 0)
    return {}


def _check_integers(name: str, tensor: torch.Tensor | None, q: torch.Tensor, size: int | None) -> None:
    shape = "(batch + 1,)" if name in ENDS else "(batch,)"
    if tensor is None:
        raise WorkloadError(f"packed sequences have {name}, int32 {shape}, got None")
    fits = len(tensor.shape) == 1 and tensor.shape[0] >= 1 if size is None else tuple(tensor.shape) == (size,)
    if dtype_name(tensor) != "int32" or not fits or tensor.device != q.device or not tensor.is_contiguous():
        wanted = "" if size is None else f", here ({size},),"
        raise WorkloadError(
            f"{name} is int32 {shape}{wanted} on the device of q ({q.device}) and contiguous, got {tensor.dtype} "
            f"{tuple(tensor.shape)} with strides {tuple(tensor.stride())} on {tensor.device}"
        )


def _workload(features: Features, facts: CallFacts) -> dict[str, Any]:
    if not is_packed(features):
        return {}
    batch, _, seqlen_q, seqlen_k = facts.sizes
    return {"varlen": True, "batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}


def _used_q(features: Features) -> torch.Tensor | None:
    """Where all rows are used, a pointer that is not null and that no kernel reads."""
    return features.cu_seqlens_q if features.seqused_q is None else features.seqused_q


def _used_k(features: Features) -> torch.Tensor | None:
    return features.cu_seqlens_k if features.seqused_k is None else features.seqused_k


def _which_are_used(features: Features, scale: float, sizes: Mapping[str, int], causal: bool) -> tuple[int, int]:
    if not is_packed(features):
        raise LaunchError("a kernel of packed sequences is launched with cu_seqlens_q, got None")
    return int(features.seqused_q is not None), int(features.seqused_k is not None)


VARLEN = Feature(
    name="varlen",
    fields=("varlen",),
    absent="it has no varlen",
    values=(
        *(
            Value(name=name, op=(OpArgument(schema=f"Tensor? {name}=None", default=None),), is_late=True)
            for name in (*ENDS, *USED)
        ),
        Value(
            name="max_seqlens",
            default=(0, 0),
            chooses_code="value",
            op=(
                OpArgument(schema="SymInt max_seqlen_q=0", default=0, read=lambda lengths: lengths[0]),
                OpArgument(schema="SymInt max_seqlen_k=0", default=0, read=lambda lengths: lengths[1]),
            ),
            restore=lambda q, k: (q, k),
            is_late=True,
        ),
        Value(
            name="batch_invariant",
            default=False,
            chooses_code="value",
            op=(OpArgument(schema="bool batch_invariant=False", default=False),),
            is_late=True,
        ),
    ),
    checked=_checked,
    workload=_workload,
    tokens=(Token(text="varlen", field="varlen", value=True),),
    tensors=(
        KernelTensor(name="CuSeqlensQ", of=attrgetter("cu_seqlens_q")),
        KernelTensor(name="CuSeqlensK", of=attrgetter("cu_seqlens_k")),
        KernelTensor(name="SeqUsedQ", of=_used_q),
        KernelTensor(name="SeqUsedK", of=_used_k),
    ),
    numbers=(
        KernelNumbers(
            names=("has_seqused_q", "has_seqused_k"),
            type="i32",
            of=_which_are_used,
            follows=lambda features, scale: (features.seqused_q is None, features.seqused_k is None),
        ),
    ),
    sizes=("sequences", "total_q", "total_k"),
    no_gradient="cu_seqlens and seqused are lengths, which have no gradient, and one requires it",
    words=lambda workload: ("varlen",) if workload.varlen else (),
    support=(Support(group="Memory", name="packed sequences of different lengths (varlen)", fields={"varlen": True}),),
)
"""`flashgen.attention_varlen` brings it: to kernels a call is one batch element with the rows of all sequences."""
