"""Tuning what a program calls: the longest share of its time first, and what was gained, as measured in the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.core.calls import CallRecord, usual_ms
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Measurement, TuningRecord
from flashgen.core.workload import Workload
from flashgen.tuning.events import Event, RunFinished, TrialFinished, WorkloadFinished

LEAST_S = 5.0
"""Of a budget for all workloads: with less than this left, no search begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What the tuning of one workload changed for the program.

    Attributes:
        workload: the workload.
        calls: how many there were.
        before_ms: what a call took by what served it.
        after_ms: what it takes by what serves it now.
        is_measured: whether the run has measured both; else `before_ms` is what the recording took it for.
    """

    workload: Workload
    calls: int
    before_ms: float
    after_ms: float
    is_measured: bool

    @property
    def total_before_ms(self) -> float:
        """Time of all calls before."""
        return self.calls * self.before_ms

    @property
    def total_after_ms(self) -> float:
        """Time of all calls now."""
        return self.calls * self.after_ms


def total_ms(record: CallRecord, device: Device | None) -> float:
    """What all calls of a record are taken to need on a device; by the data sheet where they ran on another one."""
    if device is None or (record.call_ms is not None and record.device == device.identity):
        return record.total_ms
    return record.calls * usual_ms(record.workload, device)


def by_share(records: Iterable[CallRecord], device: Device | None) -> tuple[Workload, ...]:
    """Each workload once, the one with the longest time of all its calls first."""
    times: dict[Workload, float] = {}
    for record in records:
        times[record.workload] = times.get(record.workload, 0.0) + total_ms(record, device)
    return tuple(sorted(times, key=lambda workload: (-times[workload], workload.key)))


def exact_record(workload: Workload, device: Device, known: Iterable[TuningRecord]) -> TuningRecord | None:
    """The measured record of just this workload on this device, of any layer, whose kernel is still the same."""
    from flashgen.tuning.history import is_current

    exact = (one for one in known if one.workload == workload and one.device.identity == device.identity)
    return next((one for one in exact if one.provenance == "measured" and is_current(one)), None)


class Gains:
    """Listens to a run, and says what it gained for the calls of a file."""

    def __init__(self, records: Iterable[CallRecord]) -> None:
        """Keep the calls whose workloads may be tuned."""
        self._records = tuple(records)
        self._times: dict[tuple[Workload, Config], Measurement] = {}

    def __call__(self, event: Event) -> None:
        """Keep the times of candidates, among which is what served before."""
        if isinstance(event, TrialFinished) and isinstance(event.trial.outcome, Measurement):
            self._times.setdefault((event.trial.workload, event.trial.config), event.trial.outcome)

    def of(self, finished: RunFinished) -> tuple[Gain, ...]:
        """Those of the workloads that were measured in the run, the longest time before first."""
        outcomes = {one.workload: one for one in finished.outcomes if one.status in ("tuned", "kept")}
        found = [
            self._gain(record, outcomes[record.workload], finished.device)
            for record in self._records
            if record.workload in outcomes
        ]
        known = [gain for gain in found if gain is not None]
        return tuple(sorted(known, key=lambda gain: -gain.total_before_ms))

    def _gain(self, record: CallRecord, outcome: WorkloadFinished, device: Device) -> Gain | None:
        tuned = outcome.record
        if tuned is None or tuned.measurement is None or not record.server:
            return None
        before_ms = self._before_ms(record, tuned, tuned.measurement)
        is_measured = before_ms is not None and record.device == device.identity
        if before_ms is None:
            before_ms = total_ms(record, device) / record.calls
        after_ms = tuned.measurement.median_ms
        if record.config is None:
            after_ms = min(after_ms, before_ms)  # the backend of torch goes on where it is faster
        return Gain(
            workload=record.workload,
            calls=record.calls,
            before_ms=before_ms,
            after_ms=after_ms,
            is_measured=is_measured,
        )

    def _before_ms(self, record: CallRecord, tuned: TuningRecord, now: Measurement) -> float | None:
        """The time of what served before, as the clocks of the last comparison have it."""
        if record.config is None:
            return next((one.median_ms for one in tuned.baselines if one.impl == record.server), None)
        if record.config == tuned.config:
            return now.median_ms
        before = self._times.get((record.workload, record.config))
        if before is None:
            return None
        if before.reference_ratio is None or now.reference_ms is None:
            return before.median_ms
        return before.reference_ratio * now.reference_ms
