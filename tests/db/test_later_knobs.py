"""A config older than a knob of its family means the knob's default: when it is read, exported and imported."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen import families
from flashgen.codegen.family import Knob
from flashgen.core.config import Config
from flashgen.core.errors import ConfigError
from flashgen.db.exchange import export_records, import_records
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, CONFIG, H200, MEASURED, TRIAL
from tests.families import use_families

COMPLETE = CONFIG.replace(later=2)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A file whose record and trial were written before the knob `later` came."""
    path = tmp_path / "before.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
        store.put_trial(TRIAL)
    return path


@pytest.fixture(autouse=True)
def _later(before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family gets a knob more."""
    knob = Knob(name="later", values=(1, 2), meaning="a test", default=2)
    rows = [replace(row, knobs=(*row.knobs, knob)) if row.id == CONFIG.family else row for row in families.FAMILIES]
    use_families(monkeypatch, rows)


def stored(path: Path, table: str) -> list[Config]:
    connection = sqlite3.connect(path)
    found = connection.execute(f"SELECT family, knobs FROM {table}").fetchall()
    connection.close()
    return [Config.from_json(family, knobs) for family, knobs in found]


def test_an_old_row_is_read_as_complete(before: Path) -> None:
    with Store.open(before, read_only=True) as store:
        assert store.records() == [replace(MEASURED, config=COMPLETE)]
        assert store.trials(CAUSAL, H200) == [replace(TRIAL, config=COMPLETE)]
    assert stored(before, "records") == [CONFIG]


def test_exports_and_imports_write_the_complete_config(before: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out.sqlite3", tmp_path / "other.sqlite3"
    with Store.open(before, read_only=True) as store:
        export_records(store.records(), out)
    assert stored(out, "records") == [COMPLETE]
    assert " later=2 " in out.with_suffix(".csv").read_text()
    with Store.open(other) as store:
        assert import_records(store, before).added == 1
    assert stored(other, "records") == [COMPLETE]


def test_what_is_put_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
        store.put_trial(TRIAL)
    assert stored(path, "records") == stored(path, "trials") == [COMPLETE]


def test_a_wrong_value_of_the_later_knob_is_refused(before: Path) -> None:
    with Store.open(before) as store, pytest.raises(ConfigError, match="later"):
        store.put_record(replace(MEASURED, config=CONFIG.replace(later=3)))
