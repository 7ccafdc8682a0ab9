"""Searches of a database as data: each with its trials and the races of its finals, and both as JSON and as tables.

`search_logs` is what reports, exports and models read. Times of trials are stored as they came, so
those of one search compare beside their `reference_ms` alone; the races of its finals compare as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Protocol

from flashgen.core.device import Device
from flashgen.core.record import Failure, Measurement, Trial
from flashgen.core.search_log import Finalist, SearchLog, SearchRun
from flashgen.core.workload import Workload

CSV_COLUMNS = (
    *("workload", "device", "run", "number", "source", "family", "knobs", "median_ms", "times_ms", "profile_times_ms"),
    *("reference_ms", "sm_clock_mhz", "max_error", "mean_error", "stage", "reason", "registers", "spills"),
    *("shared_bytes", "occupancy", "compile_ms", "source_digest", "predicted_ms", "evaluate_s", "elapsed_s", "created"),
)


class Kept(Protocol):
    """A database that keeps searches: a `Store` or a `ServerStore`."""

    def trials(self, workload: Workload, device: Device) -> list[Trial]:
        """Every trial of a workload on a device identity, in the order they were stored."""
        ...

    def searches(self, workload: Workload, device: Device) -> list[SearchRun]:
        """How every search was asked for, in the order they began."""
        ...

    def finalists(self, workload: Workload, device: Device) -> list[Finalist]:
        """What every config did in each race."""
        ...


def search_logs(
    store: Kept, workloads: list[Workload], devices: list[Device], run: str | None = None
) -> Iterator[SearchLog]:
    """Every search for one of the workloads on one of the devices, those of one workload in the order they began.

    Trials of before schema 0009 are those of one search without a run.

    Args:
        store: where they are kept.
        workloads: which ones; `Store.workloads()` are all.
        devices: which ones, by identity; `Store.devices()` are all.
        run: of this run alone, if it is given.

    Raises:
        DatabaseError: the database cannot be read.
    """
    for workload in workloads:
        for device in devices:
            for log in _logs(store, workload, device):
                if run is None or run == _run_of(log):
                    yield log


def _logs(store: Kept, workload: Workload, device: Device) -> list[SearchLog]:
    searches = {search.run: search for search in store.searches(workload, device)}
    trials: dict[str, list[Trial]] = {}
    for trial in store.trials(workload, device):
        trials.setdefault(trial.run, []).append(trial)
    finalists: dict[str, list[Finalist]] = {}
    for finalist in store.finalists(workload, device):
        finalists.setdefault(finalist.run, []).append(finalist)
    return [
        SearchLog(
            search=searches.get(run),
            trials=tuple(sorted(trials.get(run, ()), key=lambda trial: trial.number or 0)),
            finalists=tuple(sorted(finalists.get(run, ()), key=lambda each: each.race)),
        )
        for run in sorted({*trials, *searches, *finalists}, key=lambda run: _began(run, searches, trials))
    ]


def _began(run: str, searches: dict[str, SearchRun], trials: dict[str, list[Trial]]) -> tuple[str, str]:
    """By when the runs of a workload are in order; every moment is written in UTC."""
    if run in searches:
        return searches[run].created, run
    return (trials[run][0].created if run in trials else ""), run


def _run_of(log: SearchLog) -> str:
    known = (log.search, *log.trials[:1], *log.finalists[:1])
    return next((each.run for each in known if each is not None), "")


def without_copies(logs: Iterable[tuple[SearchLog, str]]) -> list[tuple[SearchLog, str]]:
    """Each search of several files, by their names, once: the copy with the most rows, of equal ones the first.

    A file may have been copied while a search went on. Copies have the same run, workload and device; of searches
    without a run, as before schema 0009, only those with the same trials are copies.
    """
    found: dict[tuple[object, ...], tuple[SearchLog, str]] = {}
    for log, name in logs:
        search = _run_of(log) or log.trials, _owner(log).workload.key, _owner(log).device.identity
        if search not in found or _rows(log) > _rows(found[search][0]):
            found[search] = log, name
    return list(found.values())


def _rows(log: SearchLog) -> int:
    return len(log.trials) + len(log.finalists)


def search_json(log: SearchLog) -> dict[str, object]:
    """A search as plain values, for JSON."""
    search = log.search
    return {
        "run": _run_of(log),
        "workload": _owner(log).workload.key,
        "device": _owner(log).device.identity,
        "search": None if search is None else _asked_json(search),
        "trials": [trial_json(trial) for trial in log.trials],
        "finals": [finalist_json(finalist) for finalist in log.finalists],
    }


def trial_json(trial: Trial) -> dict[str, object]:
    """A trial as plain values; the workload and the device are those of its search."""
    compiled = trial.compiled
    return {
        "number": trial.number,
        "source": trial.source,
        **_config_json(trial),
        **_outcome_json(trial.outcome),
        "registers": compiled and compiled.registers,
        "spills": compiled and compiled.spills,
        "shared_bytes": compiled and compiled.shared_bytes,
        "occupancy": compiled and compiled.occupancy,
        "compile_ms": compiled and compiled.compile_ms,
        "source_digest": compiled.source_digest if compiled else "",
        "parts": {
            entry: [part.registers, part.spills, part.shared_bytes, part.occupancy]
            for entry, part in (compiled.parts if compiled else ())
        },
        "predicted_ms": trial.predicted_ms,
        "evaluate_s": trial.evaluate_s,
        "elapsed_s": trial.elapsed_s,
        "created": trial.created,
    }


def finalist_json(finalist: Finalist) -> dict[str, object]:
    """What a config did in a race, as plain values."""
    outcome = finalist.outcome
    hard = list(outcome.hard_times_ms) if isinstance(outcome, Measurement) else []
    return {
        "race": finalist.race,
        "stage": finalist.stage,
        **_config_json(finalist),
        **_outcome_json(outcome),
        "hard_times_ms": hard,
        "created": finalist.created,
    }


def _owner(log: SearchLog) -> SearchRun | Trial | Finalist:
    return next(each for each in (log.search, *log.trials[:1], *log.finalists[:1]) if each is not None)


def _asked_json(search: SearchRun) -> dict[str, object]:
    versions = search.versions
    return {
        "host": search.host,
        "seed": search.seed,
        "budget": search.budget,
        "candidates": search.candidates,
        "settings": dict(search.settings),
        "versions": {name: getattr(versions, name) for name in ("flashgen", "triton", "torch", "driver")},
        "state": dict(search.state),
        "created": search.created,
    }


def _config_json(tried: Trial | Finalist) -> dict[str, object]:
    return {"family": tried.config.family, "knobs": dict(tried.config.knobs)}


def _outcome_json(outcome: Measurement | Failure) -> dict[str, object]:
    measured = outcome if isinstance(outcome, Measurement) else None
    failure = outcome if isinstance(outcome, Failure) else None
    return {
        "median_ms": measured and measured.median_ms,
        "times_ms": list(measured.times_ms) if measured else [],
        "profile_times_ms": {name: list(times) for name, times in measured.profile_times_ms} if measured else {},
        "reference_ms": measured and measured.reference_ms,
        "sm_clock_mhz": measured and measured.sm_clock_mhz,
        "max_error": measured and measured.max_error,
        "mean_error": measured and measured.mean_error,
        "stage": failure and failure.stage,
        "reason": failure and failure.reason,
    }


def csv_row(trial: Trial) -> list[object]:
    """A trial as cells under `CSV_COLUMNS`; several values are one JSON text, and what is not known is empty."""
    owner = {"workload": trial.workload.key, "device": trial.device.identity, "run": trial.run}
    cells = {**owner, **trial_json(trial)}
    return [_cell(cells[name]) for name in CSV_COLUMNS]


def _cell(value: object) -> object:
    if isinstance(value, (list, dict)):
        return json.dumps(value, separators=(",", ":")) if value else ""
    return "" if value is None else value
