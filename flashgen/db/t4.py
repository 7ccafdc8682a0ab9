"""Trials in the T4 format of the auto-tuning community, which Kernel Tuner, KTT and the benchmark hub share.

A file is one search space: the trials of one kernel family for one workload on one device. Tosun et al., "FAIR sharing
of data in autotuning research" (ICPE 2024), has the format; its `time` is in milliseconds here, as Kernel Tuner's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flashgen.codegen.families import family
from flashgen.core.errors import DatabaseError
from flashgen.core.folders import write_public
from flashgen.core.record import Failure, Measurement, Trial, Versions
from flashgen.core.search_log import SearchLog

VERSION = "1.0.0"
"""Of the schema."""

OBJECTIVE = "time"

INVALIDITY = {
    "build": "compile",
    "launch": "runtime",
    "memory": "runtime",
    "resources": "constraints",
    "timeout": "timeout",
    "verify": "correctness",
}
"""What the stages of failures are called there."""

ERRORS = {"compile": "CompilationFailedConfig", "constraints": "InvalidConfig"}
"""What stands in place of a time where there is none, as Kernel Tuner writes it; RuntimeFailedConfig for the rest."""


def export_t4(logs: Iterable[SearchLog], folder: Path) -> list[Path]:
    """Write a file for each search space into a folder; of a config that several runs tried, the last trial counts.

    Raises:
        DatabaseError: there is no trial, or the folder cannot be written.
    """
    spaces: dict[tuple[str, ...], dict[str, Trial]] = {}
    versions: dict[str, Versions] = {}
    for log in logs:
        if log.search is not None:
            versions[log.search.run] = log.search.versions
        for trial in log.trials:
            space = (trial.workload.key, trial.device.folder, trial.device.identity, trial.config.family)
            tried = spaces.setdefault(space, {})
            tried.pop(str(trial.config), None)
            tried[str(trial.config)] = trial
    if not spaces:
        raise DatabaseError(
            "an export to T4 needs trials, and none is stored here: records and predictions are no trials"
        )
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for (workload, device, _, name), tried in sorted(spaces.items()):
            path = folder / f"{workload}_{device}_{name}_T4.json"
            text = json.dumps(space_of(list(tried.values()), versions), indent=1, allow_nan=False)
            write_public(path, f"{text}\n".encode())
            written.append(path)
    except (OSError, ValueError) as error:  # a path with a null is a ValueError
        raise DatabaseError(f"an export needs a folder that can be written, got {folder}: {error}") from error
    return written


def space_of(trials: list[Trial], versions: Mapping[str, Versions]) -> dict[str, Any]:
    """The trials of one family for one workload on one device as a T4 document; versions are by run."""
    first = trials[0]
    used = {name: values for name, values in _used(trials, versions).items() if values}
    return {
        "schema_version": VERSION,
        "metadata": {
            "timeunit": "milliseconds",
            "tool": "flashgen",
            "kernel": first.config.family,
            "workload": first.workload.key,
            "device": {"name": first.device.name, "identity": first.device.identity},
            "parameters": {knob.name: list(knob.values) for knob in family(first.config.family).knobs},
            "versions": used,
        },
        "results": [_result(trial) for trial in trials],
    }


def _result(trial: Trial) -> dict[str, Any]:
    outcome, compiled = trial.outcome, trial.compiled
    invalidity = "correct" if isinstance(outcome, Measurement) else INVALIDITY[outcome.stage]
    runtimes = list(outcome.times_ms) if isinstance(outcome, Measurement) else []
    compile_ms = compiled.compile_ms if compiled is not None else 0.0
    rest_ms = max(1000 * (trial.evaluate_s or 0.0) - sum(runtimes), 0.0)
    return {
        "timestamp": trial.created,
        "configuration": dict(trial.config.knobs),
        "times": {
            "compilation_time": compile_ms,  # the schema's name; tools read the next one
            "compilation": compile_ms,
            "runtimes": runtimes,
            "framework": rest_ms,  # verification, too, which is not timed on its own
            "search_algorithm": 0.0,
            "validation": 0.0,
        },
        "invalidity": invalidity,
        "correctness": 0 if invalidity == "correctness" else 1,
        "measurements": list(_measurements(trial, outcome, invalidity)),
        "objectives": [OBJECTIVE],
    }


def _measurements(trial: Trial, outcome: Measurement | Failure, invalidity: str) -> Iterator[dict[str, Any]]:
    if isinstance(outcome, Failure):
        yield {"name": OBJECTIVE, "value": ERRORS.get(invalidity, "RuntimeFailedConfig"), "unit": ""}
        yield {"name": "reason", "value": str(outcome), "unit": ""}
    else:
        yield {"name": OBJECTIVE, "value": outcome.median_ms, "unit": "ms"}
        if outcome.reference_ms is not None:
            yield {"name": "reference_time", "value": outcome.reference_ms, "unit": "ms"}
        if outcome.sm_clock_mhz is not None:
            yield {"name": "sm_clock", "value": outcome.sm_clock_mhz, "unit": "MHz"}
        yield {"name": "max_error", "value": outcome.max_error, "unit": ""}
    if trial.compiled is not None:
        for name, unit in (("registers", ""), ("spills", "B"), ("shared_bytes", "B"), ("occupancy", "")):
            yield {"name": name, "value": getattr(trial.compiled, name), "unit": unit}
    yield {"name": "source", "value": trial.source, "unit": ""}


def _used(trials: Iterable[Trial], versions: Mapping[str, Versions]) -> dict[str, list[str]]:
    known = [versions[run] for run in dict.fromkeys(trial.run for trial in trials) if run in versions]
    names = ("flashgen", "triton", "torch", "driver")
    return {name: list(dict.fromkeys(filter(None, (getattr(each, name) for each in known)))) for name in names}
