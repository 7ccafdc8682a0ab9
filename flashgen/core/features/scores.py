"""Features of scores: softcap, ALiBi, sinks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashgen.core.checks import real_number
from flashgen.core.errors import LaunchError, WorkloadError
from flashgen.core.features.declaration import (
    Argument,
    CallFacts,
    Feature,
    Gradient,
    KernelNumbers,
    KernelTensor,
    OpArgument,
    Support,
    Token,
    Value,
    Variant,
)
from flashgen.core.features.dtypes import FLOATS, dtype_name
from flashgen.core.features.values import Features

if TYPE_CHECKING:
    import torch

SOFTCAP_END, LARGEST_RATE = 2.0**126, 2.0**127
"""What a softcap is below, and the most that scores are multiplied with before tanh, which is 1 there: in float32,
which kernels have both in, twice their log2(e) is finite."""

LOG2E = math.log2(math.e)


def _checked_softcap(softcap: float) -> float:
    if type(softcap) is float and 0.0 <= softcap < SOFTCAP_END:
        return softcap
    if not 0 <= real_number("softcap", softcap) < math.inf:
        raise WorkloadError(f"softcap is finite and at least 0 (off), got {softcap}")
    if softcap >= SOFTCAP_END:
        raise WorkloadError(f"softcap is below 2 ** 126, as kernels have it in float32, got {softcap}")
    return float(softcap)


def _softcap_factors(features: Features, scale: float, sizes: Mapping[str, int], causal: bool) -> tuple[float, float]:
    if not features.softcap:
        raise LaunchError(f"a kernel with a softcap is launched with one above 0, got {features.softcap}")
    return min(2 * LOG2E * scale / features.softcap, LARGEST_RATE), 2 * LOG2E * features.softcap


def _check_slopes(features: Features, facts: CallFacts) -> dict[str, Any]:
    if features.alibi_slopes is not None:
        check_slopes(features.alibi_slopes, facts.q, *facts.sizes[:2])
    return {}


def check_slopes(slopes: torch.Tensor, q: torch.Tensor, batch: int, nheads: int) -> None:
    """Check ALiBi's slopes beside the queries of a call.

    Raises:
        WorkloadError: they are not float32 (nheads,) or (batch, nheads) on the device of q.
    """
    if dtype_name(slopes) != "float32" or slopes.device != q.device or slopes.shape not in ((nheads,), (batch, nheads)):
        raise WorkloadError(
            f"alibi_slopes are float32 (nheads,) or (batch, nheads) on the device of q, got {slopes.dtype} "
            f"{tuple(slopes.shape)} on {slopes.device} for batch {batch} and {nheads} heads on {q.device}"
        )


def _check_sinks(features: Features, facts: CallFacts) -> dict[str, Any]:
    sinks, q, (_, nheads, _, _) = features.sinks, facts.q, facts.sizes
    if sinks is not None and (
        dtype_name(sinks) not in ("float32", dtype_name(q)) or sinks.device != q.device or sinks.shape != (nheads,)
    ):
        raise WorkloadError(
            f"sinks are (nheads,) in float32 or the dtype of q on its device, got {sinks.dtype} {tuple(sinks.shape)} "
            f"on {sinks.device} for {nheads} heads in {q.dtype} on {q.device}"
        )
    return {}


SOFTCAP = Feature(
    name="softcap",
    fields=("softcap",),
    absent="it has no softcap",
    arguments=(Argument(name="softcap", default=0.0, check=_checked_softcap),),
    values=(
        Value(
            name="softcap",
            default=0.0,
            chooses_code="is_on",
            op=(OpArgument(schema="float softcap=0.0", default=0.0),),
        ),
    ),
    workload=lambda features, facts: {"softcap": features.softcap > 0},
    tokens=(Token(text="softcap", field="softcap", value=True),),
    numbers=(
        KernelNumbers(
            names=("softcap_rate", "softcap_scale_log2"),
            type="fp32",
            of=_softcap_factors,
            follows=lambda features, scale: (features.softcap, scale),
        ),
    ),
    words=lambda workload: ("softcap",) if workload.softcap else (),
    first_words=True,
    support=(Support(group="Scores", name="softcap", fields={"softcap": True}),),
)

ALIBI = Feature(
    name="alibi",
    fields=("alibi",),
    absent="it has no alibi",
    arguments=(Argument(name="alibi_slopes"),),
    values=(
        Value(name="alibi_slopes", op=(OpArgument(schema="Tensor? alibi_slopes=None", default=None),), packed=True),
    ),
    checked=_check_slopes,
    workload=lambda features, facts: {"alibi": features.alibi_slopes is not None},
    tokens=(Token(text="alibi", field="alibi", value=True),),
    tensors=(KernelTensor(name="AlibiSlopes", of=lambda features: features.alibi_slopes),),
    sizes=("stride_alibi_b",),
    has_far_reach=True,
    no_gradient=("alibi_slopes have no gradient here, and these require one; detach them, or add the slopes as a bias"),
    words=lambda workload: ("ALiBi",) if workload.alibi else (),
    support=(Support(group="Scores", name="ALiBi", fields={"alibi": True}),),
)

SINKS = Feature(
    name="sinks",
    fields=("sink",),
    absent="it has no sinks",
    arguments=(Argument(name="sinks"),),
    values=(Value(name="sinks", op=(OpArgument(schema="Tensor? sinks=None", default=None),), packed=True),),
    checked=_check_sinks,
    workload=lambda features, facts: {"sink": features.sinks is not None},
    specialization=lambda features: {
        "sink_dtype": "" if features.sinks is None else FLOATS[dtype_name(features.sinks)]
    },
    tokens=(Token(text="sink", field="sink", value=True),),
    variants=tuple(
        Variant(text=f"sink_{dtype}", field="sink_dtype", value=dtype, place="dtype") for dtype in ("bf16", "fp16")
    ),
    tensors=(KernelTensor(name="Sinks", of=lambda features: features.sinks),),
    gradient=Gradient(
        field="sinks", by="formula", needed=OpArgument(schema="bool needs_sink_grad=False", default=False)
    ),
    words=lambda workload: ("sinks",) if workload.sink else (),
    first_words=True,
    support=(Support(group="Scores", name="sinks", fields={"sink": True}),),
)
