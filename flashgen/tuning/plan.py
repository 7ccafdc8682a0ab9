"""`plan`: what a tuning run would do, and how long it would take; nothing is compiled or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.core.checks import flag, instance, whole_number
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError, TuningError
from flashgen.core.record import Versions
from flashgen.core.workload import Workload
from flashgen.tuning.budget import Budget
from flashgen.tuning.candidates import Candidates
from flashgen.tuning.context import AnyStore, Options
from flashgen.tuning.history import why_not_current
from flashgen.tuning.predicted import why_not_ranked
from flashgen.tuning.tune import check_arguments, grouped

EVALUATE_S = 0.5
"""Typical seconds of one measured trial: oracle shared, verification, probe and short windows."""

COMPILE_S = 1.0
"""Typical seconds of one compile on one CPU: 0.5 to 1.3 s on average, by architecture and head dimension."""

BACKWARD_FACTOR = 3.0
"""A backward pass has three or four kernels to compile, three gradients to verify, and takes 2.5 times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a run would do for a workload: `status` is `tune`, `skip` (for the reason) or `unsupported`."""

    workload: Workload
    status: str
    candidates: int
    stored_trials: int
    expected_s: float
    reason: str = ""


def plan(
    workloads: Sequence[Workload],
    *,
    device: Device,
    store: AnyStore | None,
    budget: Budget,
    measured: bool,
    jobs: int,
    options: Options | None = None,
    versions: Versions | None = None,
) -> tuple[Planned, ...]:
    """What `tune` would do, in its order, and about how long it would take; nothing is compiled or measured.

    `store` is None where there is no database yet, and `versions` where nobody knows what would measure.

    Raises:
        TuningError: an argument is of a wrong type.
    """
    check_arguments(workloads, device, store, budget, options)
    if versions is not None:
        instance("versions", versions, Versions, TuningError)
    measured, jobs = flag("measured", measured, TuningError), whole_number("jobs", jobs, 1, error=TuningError)
    chosen = options or Options()
    return tuple(_planned(w, device, store, budget, measured, jobs, chosen, versions) for w in grouped(workloads))


def _planned(
    workload: Workload,
    device: Device,
    store: AnyStore | None,
    budget: Budget,
    measured: bool,
    jobs: int,
    options: Options,
    versions: Versions | None,
) -> Planned:
    try:
        candidates = Candidates.of(workload, device, options.families)
    except FlashgenError as error:
        return Planned(
            workload=workload, status="unsupported", candidates=0, stored_trials=0, expected_s=0.0, reason=str(error)
        )
    if not measured and (why := why_not_ranked(workload)):
        return Planned(
            workload=workload, status="skip", candidates=candidates.count, stored_trials=0, expected_s=0.0, reason=why
        )
    stored = _stored(workload, device, store, measured)
    record = store.record(workload, device) if store and not options.retune else None
    stale = () if record is None else why_not_current(record, versions)
    if record is not None and not stale and (record.provenance == "measured" or not measured):
        reason = f"a {record.provenance} record of {record.created[:10]} is current"
        return Planned(
            workload=workload,
            status="skip",
            candidates=candidates.count,
            stored_trials=stored,
            expected_s=0.0,
            reason=reason,
        )
    return Planned(
        workload=workload,
        status="tune",
        candidates=candidates.count,
        stored_trials=stored,
        expected_s=_expected_s(workload, candidates.count, budget, measured, jobs, options),
        reason="; ".join(stale),
    )


def _stored(workload: Workload, device: Device, store: AnyStore | None, measured: bool) -> int:
    """How many candidates were measured, or ranked, before."""
    if store is None:
        return 0
    return len(store.trials(workload, device) if measured else store.predictions(workload, device))


def _expected_s(
    workload: Workload, candidates: int, budget: Budget, measured: bool, jobs: int, options: Options
) -> float:
    if budget.seconds is not None:
        return budget.seconds
    trials = min(budget.trials or candidates, candidates) * (BACKWARD_FACTOR if workload.direction == "backward" else 1)
    if not measured:
        return trials * COMPILE_S / jobs
    return trials * max(EVALUATE_S, COMPILE_S / jobs) + options.finals.expected_s
