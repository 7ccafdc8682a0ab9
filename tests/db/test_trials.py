"""Searches are data: what was asked for, every trial and every race of the finals are kept and read back."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.record import Trial
from flashgen.core.search_log import SearchLog
from flashgen.db.store import Store
from flashgen.db.trials import search_json, search_logs
from tests.db.samples import CAUSAL, FAILED, FINALISTS, H100, H200, KNOWN_TRIAL, PREDICTION, SEARCH, SHORT, TRIAL

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one search, written once."""
    path = tmp_path_factory.mktemp("stored") / "tuning.sqlite3"
    with Store.open(path) as store:
        store.put_search(SEARCH)
        store.put_trial(replace(FAILED, run=SEARCH.run, number=1))
        store.put_trial(KNOWN_TRIAL)
        store.put_finalists(FINALISTS)
    return path


@pytest.fixture
def path(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(stored, tmp_path / "tuning.sqlite3"))


def tamper(path: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(statement, values).rowcount == 1


def logs(path: Path, run: str | None = None) -> list[SearchLog]:
    with Store.open(path, read_only=True) as store:
        return list(search_logs(store, store.workloads(), store.devices(), run))


def test_a_search_is_read_back_with_its_trials_and_its_finals(path: Path) -> None:
    (log,) = logs(path)
    assert log.search == SEARCH
    assert log.trials == (replace(FAILED, run=SEARCH.run, number=1), KNOWN_TRIAL)
    assert log.finalists == FINALISTS
    assert json.loads(json.dumps(search_json(log)))["trials"][1]["parts"] == {"one": [168, 0, 98304, 2]}


def test_the_next_search_writes_over_nothing(path: Path) -> None:
    later = replace(SEARCH, run="f" * 16, created="2026-11-21T10:59:00+00:00")
    with Store.open(path) as store:
        store.put_trial(replace(KNOWN_TRIAL, run=later.run))
        store.put_search(later)
        store.put_trial(replace(KNOWN_TRIAL, number=7))  # once more in its own run
        store.put_finalists(FINALISTS[:1])  # as the first race of it, once more
    first, second = logs(path)
    assert [trial.number for trial in first.trials] == [1, 7]
    assert first.finalists == (FINALISTS[0], FINALISTS[2])
    assert (second.search, len(second.trials)) == (later, 1)
    assert logs(path, later.run) == [second]
    with Store.open(path) as store:
        assert len(store.trials(CAUSAL, H200)) == 3
        assert store.searches(CAUSAL, H100) == store.finalists(SHORT, H200) == []


def test_a_prediction_of_a_config_goes_when_it_is_measured(path: Path) -> None:
    with Store.open(path) as store:
        workload = PREDICTION.workload.with_shape(seqlen_q=64)
        store.put_prediction(replace(PREDICTION, workload=workload, outcome=9.0))
        store.put_trial(replace(KNOWN_TRIAL, workload=workload))
        assert store.predictions(workload, H200) == []
        assert len(store.trials(workload, H200)) == 1


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"number": 0}, "number must be in"),
        ({"evaluate_s": float("nan")}, "finite"),
        ({"elapsed_s": -1.0}, "elapsed_s must be in"),
        ({"predicted_ms": 1e12}, "predicted_ms must be in"),
        ({"run": "a\x1b[2J"}, "printable"),
    ],
)
def test_a_trial_that_could_not_be_read_back_is_not_written(path: Path, change: dict[str, object], rule: str) -> None:
    with Store.open(path) as store, pytest.raises(DatabaseError, match=rule):
        store.put_trial(replace(KNOWN_TRIAL, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("number", "first", "type int"),
        ("number", 2**40, "number must be in"),
        ("registers", -1, "registers must be in"),
        ("spills", None, "all of them or none"),
        ("occupancy", 2.5, "type int"),
        ("compile_ms", -1.0, "compile_ms must be in"),
        ("source_digest", b"ab", "type str"),
        ("parts", "[]", "JSON object"),
        ("parts", "{}", "1 to 16 kernels"),
        ("parts", json.dumps({str(n): [1, 2, 3, 4] for n in range(17)}), "1 to 16 kernels"),
        ("parts", '{"one": [1, 2, 3]}', "a kernel of parts has"),
        ("parts", '{"one": [1, 2, 3, true]}', "type int"),
        ("parts", '{"\\u001b[2J": [1, 2, 3, 4]}', "printable"),
        ("parts", "[" * 9000, "JSON object"),
        ("parts", " " * 100_000, "printable characters"),
        ("evaluate_s", float("inf"), "finite"),
        ("elapsed_s", "soon", "type float"),
        ("run", b"\x00", "type str"),
    ],
)
def test_a_bad_trial_costs_itself(path: Path, column: str, value: object, rule: str) -> None:
    tamper(path, f"UPDATE trials SET {column} = ? WHERE number = 2", value)
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match=rule):
        assert store.trials(CAUSAL, H200) == [replace(FAILED, run=SEARCH.run, number=1)]


@pytest.mark.parametrize(
    ("statement", "value", "rule"),
    [
        ("UPDATE searches SET settings = ?", "[]", "JSON object"),
        ("UPDATE searches SET settings = ?", '{"seed": 1.5}', "integer, a string or a boolean"),
        ("UPDATE searches SET settings = ?", '{"seed": 1' + "0" * 30 + "}", "a number below"),
        ("UPDATE searches SET settings = ?", '{"seed": "\\u001b[2J"}', "printable"),
        ("UPDATE searches SET settings = ?", json.dumps({str(n): n for n in range(65)}), "at most 64 entries"),
        ("UPDATE searches SET state = ?", '{"power_limit_w": "much"}', "type float"),
        ("UPDATE searches SET state = ?", '{"power_limit_w": 1e300}', "must be below"),
        ("UPDATE searches SET candidates = ?", -1, "candidates must be in"),
        ("UPDATE searches SET created = ?", "today", "ISO 8601"),
        ("UPDATE searches SET workload_id = ?", 99, ""),
        ("UPDATE finalists SET race = ? WHERE id = 1", 0, "race must be in"),
        ("UPDATE finalists SET hard_times_ms = ? WHERE id = 1", "[1.0]", "same rounds"),
        ("UPDATE finalists SET knobs = ? WHERE id = 1", "{}", "has the knobs"),
        ("UPDATE finalists SET failed_stage = ? WHERE id = 2", "explode", "stage is one of"),
        ("UPDATE finalists SET times_ms = ? WHERE id = 1", "[1e-6, 1e-6]", "takes at least"),
    ],
)
def test_a_bad_row_of_a_search_costs_itself(path: Path, statement: str, value: object, rule: str) -> None:
    tamper(path, statement, value)
    with contextlib.nullcontext() if not rule else pytest.warns(UserWarning, match=rule):
        (log,) = logs(path)
    assert len(log.trials) == 2
    assert (log.search is None) != (len(log.finalists) < 3)


def test_trials_of_old_files_are_kept_and_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0008.sqlite3", path)
    with Store.open(path) as store:
        (log,) = search_logs(store, store.workloads(), store.devices())
        assert log.search is None
        assert [(trial.run, trial.number, trial.compiled) for trial in log.trials] == [("", None, None)] * 2
        store.put_trial(KNOWN_TRIAL)
        assert known(store) == [(TRIAL.source, ""), (FAILED.source, ""), (KNOWN_TRIAL.source, SEARCH.run)]


def test_a_row_that_breaks_a_rule_of_the_new_table_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0008.sqlite3", path)
    tamper(path, "UPDATE trials SET stage = 'launch' WHERE times_ms IS NOT NULL")
    with Store.open(path) as store:
        assert known(store) == [(FAILED.source, "")]


def known(store: Store) -> list[tuple[str, str]]:
    trials: list[Trial] = store.trials(CAUSAL, H200)
    return [(trial.source, trial.run) for trial in trials]
