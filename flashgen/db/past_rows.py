"""Rows of the history to values and back: reading trusts nothing here either.

The config of a replaced record is not checked against the knobs of today: nothing serves it, and it need not be known.
Everything else passes the rules of a record (`flashgen.db.reading`).
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from flashgen.core.config import Config
from flashgen.core.errors import DatabaseError
from flashgen.core.history import MAX_RUNNERS_UP, Origin, Replaced, RunnerUp
from flashgen.core.quoting import printable, shown
from flashgen.db.reading import MAX_BASELINES, MAX_NAME, MAX_TEXT, as_moment, record_of, typed


def origin_of(row: Any) -> Origin:
    """The origin in a row of `origins` or of `history`.

    Raises:
        FlashgenError: the row breaks a rule, here and in the function below.
    """
    return Origin(
        run=typed("run", row.run, "str"),
        host=typed("host", row.host, "str"),
        seed=typed("seed", row.seed, "int | None"),
        budget=typed("budget", row.budget, "str"),
        runners_up=_runners_up(row.runners_up),
    )


def replaced_of(row: Any) -> Replaced:
    """The replaced record of a row of `history`, whose `workload` and `device` are the rows that it points to."""
    row.baselines = _baselines(row.anchors)
    return Replaced(
        record=record_of(row, lambda config: config),
        origin=origin_of(row),
        moment=as_moment("moment", row.moment),
        reason=typed("reason", row.reason, "str"),
        source=typed("source", row.source, "str"),
    )


def origin_columns(origin: Origin) -> dict[str, Any]:
    """The columns of an origin; of more runners-up than a text may hold, the last ones are left out."""
    rivals = [_as_json(rival) for rival in origin.runners_up]
    while len(text := json.dumps(rivals, separators=(",", ":"))) > MAX_TEXT:
        rivals.pop()
    names = {"run": name_of(origin.run), "host": name_of(origin.host), "budget": name_of(origin.budget)}
    return {**names, "seed": origin.seed, "runners_up": text}


def name_of(text: str) -> str:
    """A text as a name in a row: printable, and the end of one that is too long."""
    return printable(text)[-MAX_NAME:]


def _as_json(rival: RunnerUp) -> dict[str, object]:
    """A runner-up in a row; one without profiles is written as it always was."""
    found: dict[str, object] = {
        "family": rival.config.family,
        "knobs": dict(rival.config.knobs),
        "times_ms": rival.times_ms,
        "hard_times_ms": rival.hard_times_ms,
    }
    return {**found, "profile_times_ms": dict(rival.profile_times_ms)} if rival.profile_times_ms else found


def _runners_up(value: object) -> tuple[RunnerUp, ...]:
    found = _parsed("runners_up", value)
    if not isinstance(found, list) or len(found) > MAX_RUNNERS_UP:
        raise DatabaseError(f"runners_up must be a JSON list of at most {MAX_RUNNERS_UP}, got {shown(value)}")
    return tuple(_runner_up(each) for each in found)


def _runner_up(value: Any) -> RunnerUp:
    names = {"family", "knobs", "times_ms", "hard_times_ms"}
    profiles = value.get("profile_times_ms", {}) if isinstance(value, dict) else None
    if not isinstance(value, dict) or value.keys() - {"profile_times_ms"} != names:
        raise DatabaseError(f"a runner-up has {', '.join(sorted(names))}, got {shown(value)}")
    if not isinstance(value["knobs"], dict) or not isinstance(profiles, dict):
        raise DatabaseError(f"knobs and times by profile of a runner-up are JSON objects, got {shown(value)}")
    knobs = typed("knobs", json.dumps(value["knobs"]), "str")
    return RunnerUp(
        config=Config.from_json(typed("family", value["family"], "str"), knobs),
        times_ms=_times(value["times_ms"]),
        hard_times_ms=_times(value["hard_times_ms"]),
        profile_times_ms=tuple((name, _times(times_ms)) for name, times_ms in profiles.items()),
    )


def _times(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise DatabaseError(f"times of a runner-up are a list, got {shown(value)}")
    try:
        return tuple(float(typed("a time", time, "float")) for time in value)
    except OverflowError as error:
        raise DatabaseError("a time must be finite") from error


def _baselines(value: object) -> list[SimpleNamespace]:
    found = _parsed("anchors", value)
    if not isinstance(found, dict) or len(found) > MAX_BASELINES:
        raise DatabaseError(f"anchors must be a JSON object of at most {MAX_BASELINES} times, got {shown(value)}")
    return [SimpleNamespace(impl=impl, median_ms=median_ms) for impl, median_ms in found.items()]


def _parsed(name: str, value: object) -> Any:
    text = typed(name, value, "str")
    assert len(text) <= MAX_TEXT
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatabaseError(f"{name} must be JSON, got {shown(text)}") from error
