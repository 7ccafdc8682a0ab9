"""Searches in a storage of Optuna: what a study has, and what a storage that fails costs."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages._rdb import models

import flashgen
from flashgen.core.errors import DatabaseError
from flashgen.core.record import Failure, Measurement
from flashgen.core.settings import settings
from flashgen.db.store import Store
from flashgen.tuning import runs, studies
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, TrialFinished, Warned
from flashgen.tuning.studies import Mirror, Studies, export_studies, study_name
from tests.cli.conftest import Invoke
from tests.cli.conftest import invoke as invoke  # noqa: PLC0414 - a fixture
from tests.db.samples import CONFIG, FAILED, TRIAL
from tests.tuning.fakes import FakeCompiler, FakeExecutor
from tests.tuning.runs import PLAIN


def study_in(path: Path) -> optuna.Study:
    """The only study of a journal."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


def test_a_run_keeps_its_trials_in_a_storage_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "make_executor", lambda index: FakeExecutor())
    monkeypatch.setattr(runs, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))
    path = tmp_path / "studies.log"
    events: list[Event] = []
    flashgen.tune(
        [PLAIN], budget="8", study=str(path), database=tmp_path / "own.sqlite3", on_event=events.append,
        options=Options(families=("portable_forward",)),
    )  # fmt: skip
    tried = [event.trial for event in events if isinstance(event, TrialFinished)]
    study = study_in(path)
    assert study.study_name == study_name(tried[0])
    assert [each.user_attrs["source"] for each in study.trials] == [trial.source for trial in tried]
    values = [trial.outcome.median_ms if isinstance(trial.outcome, Measurement) else None for trial in tried]
    assert [each.value for each in study.trials] == values
    best = min((trial for trial in tried if isinstance(trial.outcome, Measurement)), key=lambda t: t.outcome.median_ms)
    assert study.best_params["family"] == best.config.family
    assert study.best_params[f"{best.config.family}.block_n"] == dict(best.config.knobs)["block_n"]


def test_a_file_of_sqlite_is_a_storage_too_and_gets_no_trial_twice(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    later = replace(TRIAL, created="2026-11-21T11:00:00+00:00", config=CONFIG.replace(block_n=64))
    assert export_studies([TRIAL, FAILED], url) == (2, 2)
    assert export_studies([TRIAL, FAILED, later], url) == (1, 3)
    study = optuna.load_study(study_name=study_name(TRIAL), storage=url)
    assert [each.state.name for each in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[1].user_attrs["failure"] == str(FAILED.outcome)
    assert study.trials[2].datetime_complete is not None
    assert study.metric_names == ["ms"]


def test_processes_that_make_the_same_storage_at_once_all_open_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    made = []

    def beside(*args: object, **kwargs: object) -> None:
        """Between Optuna's look for tables and its making of them."""
        if not made:
            made.append(True)
            made.append(Studies.open(url))

    tables = models.BaseModel.metadata
    sa.event.listen(tables, "before_create", beside)
    try:
        assert Studies.open(url).put(TRIAL)
    finally:
        sa.event.remove(tables, "before_create", beside)
    assert len(made) == 2
    assert export_studies([TRIAL], url) == (0, 1)


@pytest.mark.parametrize("url", ["sqlite:////nowhere/at/all/x.db", "nonsense://x", "/nowhere/at/all/x.log"])
def test_a_storage_that_is_not_there_is_an_error_before_anything_is_measured(url: str) -> None:
    with pytest.raises(DatabaseError, match="a study needs a storage that Optuna can open"):
        Studies.open(url)


@pytest.mark.parametrize(
    "form",
    [
        *("sqlite:///{}", "sqlite:///{}?timeout=1", "sqlite+pysqlite:///{}", "{}"),
        *("sqlite:///file:{}?uri=true", "sqlite:///file:{}?mode=rwc&uri=true&timeout=1", "sqlite:///{}?uri=true"),
        *("sqlite:///file://localhost{}?uri=true", "sqlite:///file:{}%00?uri=1", "sqlite:///file:{}#x?uri=true"),
    ],
)
def test_a_tuning_database_is_no_storage_and_stays_as_it_is(form: str, tmp_path: Path) -> None:
    path = tmp_path / "own.sqlite3"
    with Store.open(path) as store:
        store.put_trial(TRIAL)
    before = path.read_bytes()
    for name in (str(path), str(path).replace("own", "%6fwn")) if "file:" in form else (str(path),):
        with pytest.raises(DatabaseError, match="a study has a file of its own"):
            Studies.open(form.format(name))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("form", ["sqlite:///{}", "sqlite:///file:{}?uri=true", "{}"])
def test_a_tuning_database_that_is_not_there_yet_is_no_storage_either(form: str) -> None:
    path = settings().db_layers[0]
    with pytest.raises(DatabaseError, match="that of a tuning database"):
        Studies.open(form.format(path))
    assert not path.exists()


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///file::memory:?uri=true", "sqlite:///?uri=true"),
        *("sqlite:///file:x?mode=memory&cache=shared&uri=true", "sqlite:///file:/x?vfs=memdb&uri=true"),
    ],
)
def test_a_storage_in_memory_keeps_nothing_and_is_refused(url: str) -> None:
    with pytest.raises(DatabaseError, match="one in memory is lost"):
        export_studies([TRIAL], url)


def test_a_file_without_a_memory_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for url in ("/dev/null", "sqlite:////dev/null", str(tmp_path / "pipe"), f"sqlite:///{tmp_path}"):
        with pytest.raises(DatabaseError, match="the file of a study is an ordinary one"):
            Studies.open(url)


@pytest.mark.parametrize(
    "content",
    ["mine", "\n", "{", '{"op_code":0}', '{"calls":[]}\n', '{\n"op_code": 0}\n', '["op_code"]\n', "[" * 5000 + "\n"],
)
def test_a_file_that_is_no_journal_stays_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text(content)
    with pytest.raises(DatabaseError, match="is another file"):
        export_studies([TRIAL], str(path))
    assert path.read_text() == content


def test_a_journal_gets_more_trials_and_an_empty_file_becomes_one(tmp_path: Path) -> None:
    path = tmp_path / "studies.log"
    path.touch()
    assert export_studies([TRIAL], str(path)) == (1, 1)
    assert export_studies([TRIAL, FAILED], str(path)) == (1, 2)
    assert len(study_in(path).trials) == 2


def test_a_storage_that_fails_costs_one_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(trial: object) -> None:
        raise ValueError("CategoricalDistribution does not support dynamic value space.")

    mirror = Mirror(str(tmp_path / "studies.log"))
    monkeypatch.setattr(studies, "frozen", broken)
    event = TrialFinished(trial=TRIAL, number=1, best_ms=None, best_config=None)
    (warned,) = mirror(event)
    assert isinstance(warned, Warned)
    assert "dynamic value space.; the search goes on" in warned.message
    assert mirror(event) == ()
    assert Mirror(None)(event) == ()


def test_the_command_exports_trials_for_other_tools(invoke: Invoke, tmp_path: Path) -> None:
    with Store.open(settings().db_layers[0]) as store:
        store.put_trial(replace(TRIAL, run="a"))
        store.put_trial(replace(FAILED, run="b", outcome=Failure(stage="build", reason="no")))
    folder, journal = tmp_path / "t4", tmp_path / "studies.log"
    result = invoke("db", "export", folder, "--format", "t4")
    assert (result.exit_code, result.stdout) == (0, f"1 search spaces written to {folder}\n")
    result = invoke("db", "export", journal, "--format", "optuna", "--run", "b")
    assert result.exit_code == 0, result.output
    assert [each.state.name for each in study_in(journal).trials] == ["FAIL"]
    for wrong, rule in (
        (("--format", "optun"), "did you mean optuna?"),
        (("--format", "t4", "--history"), "no --history"),
        (("--run", "b"), "--run is about trials"),
    ):
        result = invoke("db", "export", tmp_path / "x.sqlite3", *wrong)
        assert result.exit_code == 2
        assert rule in result.stderr
    assert invoke("db", "export", folder, "--format", "t4", "--run", "none").exit_code == 1


def test_an_export_says_where_without_a_password(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(settings().db_layers[0]) as store:
        store.put_trial(TRIAL)
    monkeypatch.setattr(studies, "export_studies", lambda trials, url: (1, 1))
    result = invoke("db", "export", "mysql://me:secret@db/x?passwd=secret", "--format", "optuna")
    assert (result.exit_code, result.stdout) == (
        0,
        "1 of 1 trials written to mysql://me:***@db/x; the others were there\n",
    )
