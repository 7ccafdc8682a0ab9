"""Dropout of the weights of attention: how much of it, and the bits that say where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.core.checks import real_number
from flashgen.core.errors import LaunchError, WorkloadError
from flashgen.core.features.declaration import (
    Argument,
    CallFacts,
    Feature,
    KernelNumbers,
    KernelTensor,
    OpArgument,
    Support,
    Value,
    Variant,
)
from flashgen.core.features.dtypes import dtype_name
from flashgen.core.features.values import Features

BITS = 1 << 16
"""A weight is dropped where its 16 random bits, as a number, lie below `threshold`: probabilities are multiples of
1 / BITS."""


def threshold(dropout_p: float) -> int:
    """How many of `BITS` values drop a weight: the nearest number, and never all of them."""
    return min(round(dropout_p * BITS), BITS - 1)


def keep_scale(dropout_p: float) -> float:
    """What weights that are left are multiplied by, so that their expectation is that of all: 1 / (1 - p)."""
    return BITS / (BITS - threshold(dropout_p))


def _checked_p(dropout_p: float) -> float:
    if type(dropout_p) is float and 0.0 <= dropout_p < 1.0:
        return dropout_p
    if not 0 <= real_number("dropout_p", dropout_p) < 1:
        raise WorkloadError(f"dropout_p is at least 0 (off) and below 1, got {dropout_p}")
    return float(dropout_p)


def _checked(features: Features, facts: CallFacts) -> dict[str, Any]:
    state, q = features.rng_state, facts.q
    if not features.dropout_p:
        return {}
    if state is None:
        raise WorkloadError("a call with dropout has rng_state, int64 (2,), got None")
    if (
        dtype_name(state) != "int64"
        or tuple(state.shape) != (2,)
        or state.device != q.device
        or not state.is_contiguous()
    ):
        raise WorkloadError(
            f"rng_state is int64 (2,), seed and offset, on the device of q ({q.device}) and contiguous, got "
            f"{state.dtype} {tuple(state.shape)} with strides {tuple(state.stride())} on {state.device}"
        )
    return {}


def _threshold(features: Features, scale: float, sizes: Mapping[str, int], causal: bool) -> tuple[int]:
    """For the upper halves of words of 32 bits, as the signed number of the same bits."""
    found = threshold(_given_p(features)) * BITS
    return (found - (1 << 32) if found >= 1 << 31 else found,)


def _scale(features: Features, scale: float, sizes: Mapping[str, int], causal: bool) -> tuple[float]:
    return (keep_scale(_given_p(features)),)


def _given_p(features: Features) -> float:
    if not features.dropout_p:
        raise LaunchError(f"a kernel with dropout is launched with dropout_p above 0, got {features.dropout_p}")
    return features.dropout_p


DROPOUT = Feature(
    name="dropout",
    fields=("dropout",),
    absent="it has no dropout",
    arguments=(Argument(name="dropout_p", default=0.0, check=_checked_p), Argument(name="rng_state")),
    values=(
        Value(
            name="dropout_p",
            default=0.0,
            chooses_code="is_on",
            op=(OpArgument(schema="float dropout_p=0.0", default=0.0),),
            is_late=True,
        ),
        Value(name="rng_state", op=(OpArgument(schema="Tensor? rng_state=None", default=None),), is_late=True),
    ),
    checked=_checked,
    specialization=lambda features: {"dropout": features.dropout_p > 0},
    variants=(Variant(text="dropout", field="dropout", value=True, place="gradient"),),
    tensors=(KernelTensor(name="RngState", of=lambda features: features.rng_state),),
    numbers=(
        KernelNumbers(
            names=("dropout_threshold",), type="i32", of=_threshold, follows=lambda features, scale: features.dropout_p
        ),
        KernelNumbers(
            names=("dropout_scale",), type="fp32", of=_scale, follows=lambda features, scale: features.dropout_p
        ),
    ),
    no_gradient="rng_state is a seed and an offset, which have no gradient, and it requires one",
    specialization_words=lambda spec: ("dropout",) if spec.dropout else (),
    support=(Support(group="Scores", name="dropout", fields={"dropout": True}),),
)
"""No workload has it: a call with dropout is served by the config of the same call without."""
