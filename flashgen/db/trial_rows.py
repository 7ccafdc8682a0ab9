"""Rows of searches to values: trials, how searches were asked for, and the races of their finals.

Reading trusts nothing here either (`flashgen.db.reading`). What is known of a trial beside its outcome is bounded as
the columns of a record are; a figure that no compiler or clock gives spoils its row.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from flashgen.core.compiled import Compiled, Taken
from flashgen.core.config import Config
from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import shown
from flashgen.core.record import Failure, Measurement, Trial, Versions
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.db.reading import (
    PREDICTED_SOURCE,
    Validate,
    as_moment,
    config_of,
    device_of,
    failure_of,
    measurement_of,
    parsed,
    present,
    refuse_impossible,
    typed,
    workload_of,
)

if TYPE_CHECKING:
    from flashgen.db.schema import FinalistRow, SearchRow, TrialRow

MAX_PARTS = 16
"""Kernels of one config; a backward pass has four."""

MAX_ENTRIES = 64
"""Settings of a search, or figures of a device."""

MAX_COUNT = 2**31
"""Above every place, number of candidates, and size in bytes."""

MAX_SECONDS = 1e7
"""Four months; no compile or search takes longer."""

TAKEN = tuple(field.name for field in fields(Taken))


def trial_of(row: TrialRow, validate: Validate) -> Trial:
    """The trial of a row; `validate` has accepted its config.

    Raises:
        FlashgenError: the row breaks a rule, here and in the functions below.
    """
    source = typed("source", row.source, "str")
    if source == PREDICTED_SOURCE:
        raise DatabaseError(f"a trial's source is what proposed it, got {source!r}, which nothing measured")
    trial = Trial(
        workload=workload_of(present(row.workload, "workload")),
        device=device_of(present(row.device, "device")),
        config=config_of(row, validate),
        source=source,
        outcome=_outcome(row, row.stage),
        created=as_moment("created", row.created),
        run=typed("run", row.run, "str"),
        number=_count("number", row.number, 1),
        compiled=_compiled(row),
        predicted_ms=_amount("predicted_ms", row.predicted_ms),
        evaluate_s=_amount("evaluate_s", row.evaluate_s),
        elapsed_s=_amount("elapsed_s", row.elapsed_s),
    )
    refuse_impossible(trial.workload, trial.device, trial.outcome)
    return trial


def search_of(row: SearchRow) -> SearchRun:
    """The search of a row."""
    versions = {field.name: getattr(row, f"{field.name}_version") for field in fields(Versions)}
    return SearchRun(
        workload=workload_of(present(row.workload, "workload")),
        device=device_of(present(row.device, "device")),
        run=typed("run", row.run, "str"),
        host=typed("host", row.host, "str"),
        seed=typed("seed", row.seed, "int | None"),
        budget=typed("budget", row.budget, "str"),
        candidates=_count("candidates", typed("candidates", row.candidates, "int"), 0) or 0,
        settings=_settings(row.settings),
        versions=Versions(**{name: typed(name, version, "str") for name, version in versions.items()}),
        state=_state(row.state),
        created=as_moment("created", row.created),
    )


def finalist_of(row: FinalistRow, validate: Validate) -> Finalist:
    """The finalist of a row; `validate` has accepted its config."""
    finalist = Finalist(
        workload=workload_of(present(row.workload, "workload")),
        device=device_of(present(row.device, "device")),
        run=typed("run", row.run, "str"),
        race=_count("race", typed("race", row.race, "int"), 1) or 1,
        stage=typed("stage", row.stage, "str"),
        config=config_of(row, validate),
        outcome=_outcome(row, row.failed_stage),
        created=as_moment("created", row.created),
    )
    refuse_impossible(finalist.workload, finalist.device, finalist.outcome)
    return finalist


def _outcome(row: Any, stage: object) -> Measurement | Failure:
    if row.times_ms is None:
        return failure_of(stage, row.reason)
    return measurement_of(row, getattr(row, "hard_times_ms", None))


def _compiled(row: TrialRow) -> Compiled | None:
    cells = {name: _count(name, getattr(row, name), 0) for name in TAKEN}
    taken = {name: cell for name, cell in cells.items() if cell is not None}
    if not taken:
        return None
    if taken.keys() != cells.keys():
        raise DatabaseError(f"what a kernel takes is {', '.join(TAKEN)}, all of them or none, got {shown(str(cells))}")
    return Compiled(
        **taken,
        compile_ms=_amount("compile_ms", row.compile_ms, 1e3 * MAX_SECONDS) or 0.0,
        source_digest=typed("source_digest", row.source_digest, "str"),
        parts=() if row.parts is None else _parts(row.parts),
    )


def _parts(value: object) -> tuple[tuple[str, Taken], ...]:
    found = parsed("parts", value, dict)
    if not 0 < len(found) <= MAX_PARTS:
        raise DatabaseError(f"parts has 1 to {MAX_PARTS} kernels, got {len(found)}")
    return tuple((typed("a kernel", entry, "str"), _taken(cells)) for entry, cells in found.items())


def _taken(cells: object) -> Taken:
    if not isinstance(cells, list) or len(cells) != len(TAKEN):
        raise DatabaseError(f"a kernel of parts has {', '.join(TAKEN)}, got {shown(str(cells))}")
    counts = {name: _count(name, typed(name, cell, "int"), 0) or 0 for name, cell in zip(TAKEN, cells, strict=True)}
    return Taken(**counts)


def _settings(value: object) -> tuple[tuple[str, int | str | bool], ...]:
    knobs = Config.from_json("settings", typed("settings", value, "str")).knobs  # the same kinds of values
    for name, setting in knobs:
        typed("the name of a setting", name, "str")
        if isinstance(setting, str):
            typed(name, setting, "str")
        elif abs(setting) >= MAX_COUNT:
            raise DatabaseError(f"a setting is a number below {MAX_COUNT}, got {name}")
    return _few("settings", knobs)


def _state(value: object) -> tuple[tuple[str, float], ...]:
    found = parsed("state", value, dict)
    return _few("state", tuple((typed("a figure", name, "str"), float(_number(name, n))) for name, n in found.items()))


def _number(name: str, value: object) -> float:
    found: float = typed(name, value, "float")
    if abs(found) >= MAX_COUNT:
        raise DatabaseError(f"{name} must be below {MAX_COUNT}, got {found}")
    return found


def _few(name: str, entries: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(entries) > MAX_ENTRIES:
        raise DatabaseError(f"{name} has at most {MAX_ENTRIES} entries, got {len(entries)}")
    return entries


def _count(name: str, value: object, least: int) -> int | None:
    """A cell with an integer, or with nothing."""
    if value is None:
        return None
    count: int = typed(name, value, "int")
    if not least <= count < MAX_COUNT:
        raise DatabaseError(f"{name} must be in [{least}, {MAX_COUNT}), got {shown(str(count))}")
    return count


def _amount(name: str, value: object, most: float = MAX_SECONDS) -> float | None:
    """A cell with milliseconds or seconds, or with nothing."""
    amount: float | None = typed(name, value, "float | None")
    if amount is not None and not 0 <= amount <= most:
        raise DatabaseError(f"{name} must be in [0, {most:g}], got {amount}")
    return amount
