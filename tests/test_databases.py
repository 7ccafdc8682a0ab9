"""`make databases` brings older files to the newest schema with all they hold, and leaves everything else alone."""

from __future__ import annotations

import csv
import shutil
import sqlite3
from pathlib import Path

import pytest

from flashgen.core.record import Trial, TuningRecord
from flashgen.core.settings import settings
from flashgen.db import files
from flashgen.db.layout import SCHEMA_VERSION
from flashgen.db.store import Store
from scripts import databases

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests/db/data").glob("schema_*.sqlite3"))
OLDER = [path for path in FILES if path.stem != f"schema_{SCHEMA_VERSION}"]


def contents(path: Path) -> tuple[list[TuningRecord], list[Trial]]:
    with Store.open(path, shipped=True) as store:
        records = store.all_records()
        owners = {(record.workload, record.device) for record in records}
        return records, [trial for owner in owners for trial in store.trials(*owner)]


@pytest.mark.parametrize("old", OLDER, ids=lambda path: path.stem)
def test_an_older_file_becomes_one_that_can_be_shipped(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nvidia_h200.sqlite3"
    shutil.copyfile(old, path)
    expected = contents(old)
    assert len(expected[0]) == len(expected[1]) == 2
    assert databases.main([str(tmp_path)]) == 0
    assert f"schema {old.stem[-4:]} to {SCHEMA_VERSION}" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"nvidia_h200.sqlite3", "nvidia_h200.csv"}
    assert files.read_version(path, "shipped") == SCHEMA_VERSION
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
    assert contents(path) == expected
    assert not list((settings().cache_dir / "databases").glob("nvidia_h200*")), "nobody's first look-up migrates it"
    rows = list(csv.DictReader((tmp_path / "nvidia_h200.csv").read_text().splitlines()))
    assert [row["workload"] for row in rows] == [record.workload.key for record in expected[0]]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert databases.main([str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_every_device_has_a_folder() -> None:
    """A file beside the folders would not be read."""
    entries = sorted((ROOT / "tuning_db").iterdir())
    assert [path.name for path in entries if path.is_file()] == ["README.md"]
    assert all((path / "records.sqlite3").is_file() for path in entries if path.is_dir())


def test_the_shipped_files_are_what_it_leaves(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT / "tuning_db", tmp_path / "tuning_db")
    assert databases.main([str(copy)]) == 0
    names = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    assert {Path("nvidia_h200", name) for name in ("records.sqlite3", "records.csv", "README.md")} < names
    for name in names:
        shipped = ROOT / "tuning_db" / name
        assert shipped.is_file(), f"{name}: run `make databases`"
        assert (copy / name).read_bytes() == shipped.read_bytes(), f"{name}: run `make databases`"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "schema 9999"),
        ("UPDATE records SET knobs = replace(knobs, '128', '127')", "127"),
        ("PRAGMA application_id = 7", "made by something else"),
    ],
    ids=["newer", "a row that breaks a rule", "foreign"],
)
def test_a_file_that_is_refused_stays_as_it_is(
    statement: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "a_bad.sqlite3", tmp_path / "good.sqlite3"
    for path in (bad, good):
        shutil.copyfile(FILES[0], path)
    connection = sqlite3.connect(bad)
    connection.execute(statement)
    connection.commit()
    connection.close()
    before = bad.read_bytes()
    assert databases.main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert bad.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"a_bad.sqlite3", "good.sqlite3", "good.csv"}
    assert files.read_version(good, "shipped") == SCHEMA_VERSION
