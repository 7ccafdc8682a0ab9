"""What a tuning run tells while it goes on: frozen events, and their form as JSON lines for machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Failure, Measurement, Trial, TuningRecord
from flashgen.core.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A run begins: its workloads in the order they are tuned, and whether anything will be measured."""

    device: Device
    workloads: tuple[Workload, ...]
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something a user should know that stops nothing."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadStarted:
    """The search for a workload begins with so many candidates, some tried before by a run that was stopped."""

    workload: Workload
    candidates: int
    resumed_trials: int
    budget_trials: int | None
    budget_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A candidate was measured or failed; `best_ms` is the best time of the workload so far.

    `expected_gain` is the share of it that going on for as long again is expected to save, None while too few tell.
    """

    trial: Trial
    number: int
    best_ms: float | None
    best_config: Config | None
    expected_gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRanked:
    """Without a GPU: a candidate was compiled and predicted (`predicted_ms`), or failed."""

    workload: Workload
    config: Config
    predicted_ms: float | None
    failure: Failure | None
    number: int
    best_ms: float | None
    best_config: Config | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalsStarted:
    """Good candidates are measured again against each other: first `near` the best in short windows, then `last`."""

    workload: Workload
    stage: str
    configs: tuple[Config, ...]
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFinished:
    """How a workload ended.

    `status` is `tuned`, `kept` (the incumbent was not beaten), `predicted` (nothing was measured), `skipped` (a current
    record exists), `failed` (no valid candidate) or `unsupported` (no family applies). `record` is what the database
    now holds, if anything.
    """

    workload: Workload
    status: str
    record: TuningRecord | None
    trials: int
    failures: tuple[tuple[str, int], ...]
    reason: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether nothing can be served from this run for the workload."""
        return self.status in ("failed", "unsupported")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """A run ended, by itself or by an interrupt; `outcomes` has the workloads that ended before."""

    device: Device
    outcomes: tuple[WorkloadFinished, ...]
    interrupted: bool
    seconds: float

    @property
    def failed(self) -> tuple[WorkloadFinished, ...]:
        """The workloads without a valid candidate."""
        return tuple(outcome for outcome in self.outcomes if outcome.failed)


Event = (
    RunStarted
    | Warned
    | WorkloadStarted
    | TrialFinished
    | CandidateRanked
    | FinalsStarted
    | WorkloadFinished
    | RunFinished
)
OnEvent = Callable[[Event], None]

_NAMES = {
    RunStarted: "run_started",
    Warned: "warning",
    WorkloadStarted: "workload_started",
    TrialFinished: "trial",
    CandidateRanked: "ranked",
    FinalsStarted: "finals",
    WorkloadFinished: "workload_finished",
    RunFinished: "run_finished",
}


def to_json(event: Event, **where: str) -> str:
    """One line of JSON: `event` names its kind, values are keys, names, numbers, or objects of these."""
    values = {field.name: _plain(getattr(event, field.name)) for field in fields(event)}
    return json.dumps({"event": _NAMES[type(event)], **where, **values}, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Workload):
        return value.key
    if isinstance(value, Device):
        return {"name": value.name, "identity": value.identity}
    if isinstance(value, Config):
        return {"family": value.family, "knobs": dict(value.knobs)}
    if isinstance(value, Measurement):
        return {**_fields(value), "median_ms": value.median_ms, "hard_ms": value.hard_ms, "spread": value.spread}
    if isinstance(value, TuningRecord):
        return {**_fields(value), "device": value.device.identity, "time_ms": value.time_ms, "tflops": value.tflops}
    if isinstance(value, Trial):
        return {**_fields(value), "device": value.device.identity}
    if isinstance(value, Failure):
        return {"stage": value.stage, "reason": value.reason}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return _fields(value) if hasattr(value, "__dataclass_fields__") else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
