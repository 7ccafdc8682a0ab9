"""The closing table of a run: one row for each workload, with everything a reader compares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.core.device import Device
from flashgen.core.feature_words import describe
from flashgen.core.record import TuningRecord
from flashgen.tuning.events import WorkloadFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """What was chosen for a workload and how good it is; None where it is not known.

    `peak_share` is of the data sheet's matrix rate. `sdpa_ratio` is the time of torch's best SDPA backend over ours
    (above 1 means that ours is faster). `spread` is (slowest - fastest) / median of the windows. `hard_share` is the
    time on hard data over that on normal data. `source` is measured, predicted or empty.
    """

    workload: str
    direction: str
    features: str
    status: str
    config: str
    ms: float | None
    tflops: float | None
    peak_share: float | None
    sdpa_ratio: float | None
    sdpa_impl: str
    spread: float | None
    hard_share: float | None
    source: str
    reason: str


def report_rows(outcomes: Iterable[WorkloadFinished], device: Device) -> tuple[ReportRow, ...]:
    """The rows of a run's outcomes, in their order."""
    return tuple(_row(outcome, device) for outcome in outcomes)


def peak_share(tflops: float | None, device: Device) -> float | None:
    """Share of the device's peak, None where either is not known."""
    return tflops / device.peak_tflops if tflops is not None and device.peak_tflops else None


def short_config(record: TuningRecord) -> str:
    """The knob values in the order of their names, without those that are off: `block_m=128 loads=descriptor ...`."""
    return " ".join(f"{name}={value}" for name, value in record.config.knobs if value not in (0, False))


def _row(outcome: WorkloadFinished, device: Device) -> ReportRow:
    record = outcome.record
    baseline = record.best_baseline if record else None
    time_ms = record.time_ms if record else None
    return ReportRow(
        workload=outcome.workload.key,
        direction=outcome.workload.direction,
        features=describe(outcome.workload),
        status=outcome.status,
        config=short_config(record) if record else "",
        ms=time_ms,
        tflops=record.tflops if record else None,
        peak_share=peak_share(record.tflops, device) if record else None,
        sdpa_ratio=baseline.median_ms / time_ms if baseline and time_ms else None,
        sdpa_impl=baseline.impl if baseline else "",
        spread=record.measurement.spread if record and record.measurement else None,
        hard_share=record.hard_ms / time_ms if record and record.hard_ms and time_ms else None,
        source=record.provenance if record else "",
        reason=outcome.reason,
    )
