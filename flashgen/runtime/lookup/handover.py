"""Whether a call goes to torch's own attention: to a backend that was measured faster beside the record that serves.

Records keep the times of torch's backends on their own workload. Beside an exact record any advantage counts. Another
workload of the same class is served by the nearest record, and what is carried over is the ratio of both times, which
types, head dimension and mask decide and sizes change little: of the shipped records, see `NEAR_SPEEDUP` and
`FAR_SPEEDUP`. Without any record of the class nothing is known of torch's kernels, and the default config serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.core.nearest import distance, position
from flashgen.core.record import Baseline, TuningRecord
from flashgen.core.settings import settings
from flashgen.core.workload import Specialization, Workload
from flashgen.runtime.lookup.ladder import NEAREST_HERE, Served

SDPA_IMPLS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
"""Names under which records keep the times of torch's backends: those of `measure.baselines`, without loading torch."""

SDPA_MASKED = "sdpa-efficient"
SDPA_PLANNED = "sdpa-cudnn"
"""The backend that plans every shape anew, for 38 ms on an H200, where the others take 25 us for a new length."""

NEAR = 1.0
"""Steps of `core.nearest` up to which a record is near: four times the heads or the batch, or one length doubled."""

NEAR_SPEEDUP = 1.25
"""What a near record has to show: of 120 ratios of shipped pairs that near, none changes by more than 1.21."""

FAR_SPEEDUP = 2.0
"""What any other record has to show: of 1315 ratios of shipped pairs of a class, none changes by more than 1.76."""

SHORT = 256
"""Fewer queries or keys than this are not told from records that are not near: there ratios change by up to 2.8."""

GRID_LIMIT = 65535
"""The most batches and heads that a backend which has a dimension of its grid for each can launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterBackend:
    """A backend of torch that was measured faster beside the record that serves.

    `speedup` is the time of the generated kernel over the backend's, there. `obstacle` says why the call is served by
    the generated kernel all the same, and is None for one that the backend gets.
    """

    impl: str
    speedup: float
    is_exact: bool
    obstacle: str | None

    def __str__(self) -> str:
        where = "on this workload" if self.is_exact else "on the workload of the record below"
        found = f"{self.impl} was measured {self.speedup:.2f} times as fast {where}"
        return f"{found}; not served by it: {self.obstacle}" if self.obstacle else found


def sdpa_backend(workload: Workload, spec: Specialization, served: Served) -> str | None:
    """The SDPA backend that a call goes to, or None where the generated kernel serves it."""
    found = faster_backend(workload, spec, served)
    return found.impl if found is not None and found.obstacle is None else None


def faster_backend(workload: Workload, spec: Specialization, served: Served) -> FasterBackend | None:
    """The backend of torch that was measured faster beside the record that serves, and what keeps the call from it."""
    record = served.record
    if record is None or workload.direction != "forward":
        return None
    best = faster_baseline(record, is_exact=served.is_exact)
    if best is None or record.measurement is None:
        return None
    speedup = record.measurement.median_ms / best.median_ms
    obstacle = _why_not_served(workload, spec, best.impl)
    if obstacle is None and not served.is_exact:
        obstacle = _why_not_carried_over(workload, spec, served.rung, record, best.impl, speedup)
    return FasterBackend(impl=best.impl, speedup=speedup, is_exact=served.is_exact, obstacle=obstacle)


def faster_baseline(record: TuningRecord, *, is_exact: bool) -> Baseline | None:
    """The backend of torch that was measured faster beside a record, whatever the sizes that it serves."""
    if not record.baselines or record.measurement is None:
        return None
    time_ms = record.measurement.median_ms
    best = _best_baseline(record, time_ms, is_exact=is_exact)
    return best if best is not None and best.impl in SDPA_IMPLS and best.median_ms < time_ms else None


def _best_baseline(record: TuningRecord, time_ms: float, *, is_exact: bool) -> Baseline | None:
    """The fastest one; for other workloads the fastest of those that plan nothing, if one of them was faster."""
    best = record.best_baseline
    if is_exact or best is None or best.impl != SDPA_PLANNED or best.median_ms >= time_ms:
        return best
    others = (one for one in record.baselines if one.impl != SDPA_PLANNED and one.impl in SDPA_IMPLS)
    return min((one for one in others if one.median_ms < time_ms), key=lambda one: one.median_ms, default=best)


def _why_not_served(workload: Workload, spec: Specialization, impl: str) -> str | None:
    """Why a backend does not serve a workload, whatever was measured.

    Tensors that are not aligned to 16 bytes are not what was measured, and not every backend takes them.
    """
    if settings().policy != "fastest":
        return f"FLASHGEN_POLICY={settings().policy}"
    if not spec.aligned16:
        return "pointers or strides are no multiples of 16 bytes"
    if not _sdpa_is_the_same(workload, spec, impl):
        return "torch's call does not compute this workload for any values of its tensors"
    return None


def _why_not_carried_over(
    workload: Workload, spec: Specialization, rung: int, record: TuningRecord, impl: str, speedup: float
) -> str | None:
    """Why a ratio that was measured on another workload of the class says nothing about this one."""
    measured = record.workload
    if impl == SDPA_PLANNED:
        return "it plans every shape anew, which takes longer than what one call gains"
    if not _sdpa_is_the_same(measured, spec, impl):
        return "torch's call was another one there"
    if (workload.nheads == workload.nheads_k) != (measured.nheads == measured.nheads_k):
        return "heads share keys in one of the two workloads only, which not every backend takes"
    if not min(workload.batch, workload.nheads, workload.seqlen_q, workload.seqlen_k):
        return "a tensor is empty, which not every backend takes"
    if max(workload.batch, workload.nheads) > GRID_LIMIT:
        return f"not every backend launches more than {GRID_LIMIT} batches or heads"
    near = rung == NEAREST_HERE and distance(position(workload), position(measured)) <= NEAR
    if speedup < (needed := NEAR_SPEEDUP if near else FAR_SPEEDUP):
        return f"that is less than the {needed:.2f} by which ratios change between {'near ' if near else ''}workloads"
    shortest = min(workload.seqlen_q, workload.seqlen_k, measured.seqlen_q, measured.seqlen_k)
    if shortest < SHORT and not near:
        return f"ratios change more where there are fewer than {SHORT} queries or keys"
    return None


def _sdpa_is_the_same(workload: Workload, spec: Specialization, impl: str) -> bool:
    """Whether torch's call, made the way it was measured, computes this workload for any values of its tensors."""
    if spec.window or spec.softcap or spec.alibi or spec.sink or spec.dropout or spec.mods is not None:
        return False
    if spec.bias or spec.mask:
        # one of them is `attn_mask`, with nothing beside it; rows that see no key are 0 in this backend alone
        alone = not (spec.bias and spec.mask) and not spec.causal and workload.nheads == workload.nheads_k
        return alone and impl == SDPA_MASKED and not spec.bias_dtype and spec.aligned_scores
    # top-left and bottom-right alignment agree, or the one query sees every key and the call has no mask
    return not (workload.causal and workload.seqlen_q not in (1, workload.seqlen_k))
