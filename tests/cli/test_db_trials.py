"""`flashgen db trials`: what searches tried, as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.settings import settings
from flashgen.db.log_files import read_log
from flashgen.db.store import Store
from tests.cli.conftest import Invoke
from tests.db.samples import CAUSAL, FAILED, FINALISTS, H200, KNOWN_TRIAL, MEASURED, SEARCH, SHORT, TRIAL
from tests.db.schemas import execute


@pytest.fixture
def path() -> Path:
    """The user's database with a search of today, and a trial of one that nobody wrote down."""
    path = settings().db_layers[0]
    with Store.open(path) as store:
        store.put_record(MEASURED)
        store.put_search(SEARCH)
        store.put_trial(replace(FAILED, run=SEARCH.run, number=1))
        store.put_trial(KNOWN_TRIAL)
        store.put_trial(replace(TRIAL, workload=SHORT))
        store.put_finalists(FINALISTS)
    return path


def test_trials_are_listed_in_their_order(invoke: Invoke, path: Path) -> None:
    lines = invoke("db", "trials", "--workload", CAUSAL.key).stdout.splitlines()
    assert len(lines) == 3
    for text in (SEARCH.run, "sampler", "launch"):
        assert text in lines[1]
    for text in ("default", "1.4", "168", "3.5", "block_m=128"):
        assert text in lines[2]
    assert len(invoke("db", "trials").stdout.splitlines()) == 4
    assert len(invoke("db", "trials", "--run", SEARCH.run).stdout.splitlines()) == 3


def test_json_has_the_search_and_its_finals(invoke: Invoke, path: Path) -> None:
    known, unknown = json.loads(invoke("db", "trials", "--json").stdout)
    assert (known["layer"], known["search"]["seed"], known["search"]["state"]) == (str(path), 3, {"power_limit_w": 700})
    assert [trial["number"] for trial in known["trials"]] == [1, 2]
    assert [(each["race"], each["hard_times_ms"]) for each in known["finals"]] == [(1, [2.5, 2.6]), (1, []), (2, [])]
    assert (unknown["search"], unknown["run"], len(unknown["trials"])) == (None, "", 1)


def test_csv_has_a_line_for_each_trial(invoke: Invoke, path: Path) -> None:
    failed, measured, _ = csv.DictReader(io.StringIO(invoke("db", "trials", "--csv").stdout))
    assert (failed["stage"], failed["median_ms"], failed["registers"]) == ("launch", "", "")
    assert (measured["median_ms"], measured["times_ms"]) == ("1.4", "[1.4]")
    assert json.loads(measured["knobs"])["block_m"] == 128
    assert (measured["predicted_ms"], measured["evaluate_s"]) == ("1.1", "0.25")


def test_a_search_in_several_files_is_listed_and_exported_once(
    invoke: Invoke, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that was made while the search went on has fewer trials, and stands before the file in one order."""
    part, whole = tmp_path / "part.sqlite3", tmp_path / "whole.sqlite3"
    shutil.copyfile(path, whole)
    shutil.copyfile(path, part)
    execute(part, "DELETE FROM trials WHERE number = 2")
    for files in ((path, whole), (whole, part), (part, whole)):
        monkeypatch.setenv("FLASHGEN_DB", os.pathsep.join(map(str, files)))
        settings.cache_clear()
        known, unknown = json.loads(invoke("db", "trials", "--json").stdout)
        assert [len(each["trials"]) for each in (known, unknown)] == [2, 1]
        assert known["layer"] == str(files[files[0] == part])
        assert len(list(csv.DictReader(io.StringIO(invoke("db", "trials", "--csv").stdout)))) == 3
        done = invoke("db", "export", tmp_path / "tables", "--format", "tables", "--all")
        assert "1 search written" in done.stdout
        assert "1 searches are without their settings" in done.stdout
    assert "2 (1 failed in launch)" in invoke("db", "show", CAUSAL.key).stdout
    (table,) = (tmp_path / "tables" / H200.folder).iterdir()
    assert len(read_log(table).trials) == 2
    assert invoke("db", "export", tmp_path / "tables", "--format", "tables").exit_code == 0
    assert len(read_log(table).trials) == 1, "without --all it is the search as the first file has it"


def test_what_is_not_there_says_so(invoke: Invoke, path: Path) -> None:
    for arguments, code, rule in (
        (["--run", "nobody"], 1, "without --target, and stored; none match"),
        (["--workload", "b4-h32"], 2, "a shape needs"),
        (["--device", "h100"], 1, "none match"),
        (["--json", "--csv"], 2, "both were asked for"),
    ):
        result = invoke("db", "trials", *arguments)
        assert (result.exit_code, rule in result.stderr) == (code, True), result.stderr
