"""Revision 0002: bias and mask are kinds; what was there or not has a value for every pair."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from tests.db.samples import CAUSAL
from tests.db.schemas import DATA, contents, execute, taken_back


@pytest.fixture
def yes_and_no(tmp_path: Path) -> Path:
    """A file of schema 0001 whose only workload has a bias and a mask."""
    path = tmp_path / "yes_and_no.sqlite3"
    shutil.copyfile(DATA / "schema_0001.sqlite3", path)
    workload = replace(CAUSAL, bias="full", mask="full")
    names = (workload.key, workload.specialization.workload_class)
    execute(path, "UPDATE workloads SET bias = 1, mask = 1, key = ?, specialization = ?", *names)
    return path


@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_a_bias_that_was_there_or_not_has_a_value_for_every_pair(yes_and_no: Path, how: dict[str, bool]) -> None:
    with Store.open(yes_and_no, **how) as store:
        assert store.workloads() == [replace(CAUSAL, bias="full", mask="full")]
        assert [record.provenance for record in store.records()] == ["measured", "predicted"]
        assert len(store.records()[0].baselines) == 2


def test_what_was_no_yes_or_no_stays_for_the_checks_of_a_row(yes_and_no: Path) -> None:
    execute(yes_and_no, "UPDATE workloads SET bias = 7, mask = x'00'")
    with Store.open(yes_and_no) as store, pytest.warns(UserWarning, match="is ignored"):
        assert store.records() == []


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE workloads",
        "ALTER TABLE workloads DROP COLUMN mask",
        "ALTER TABLE workloads RENAME TO work",
    ],
)
def test_an_older_file_without_its_tables_is_refused_by_name(yes_and_no: Path, statement: str) -> None:
    execute(yes_and_no, statement)
    with pytest.raises(DatabaseError, match="yes_and_no"):
        Store.open(yes_and_no)
    with pytest.warns(UserWarning, match=r"yes_and_no.sqlite3 is not used"), Layers.open([yes_and_no]) as layers:
        assert str(yes_and_no) not in [layer.name for layer in layers.layers]


def test_rows_that_point_nowhere_do_not_stop_a_migration(yes_and_no: Path) -> None:
    execute(yes_and_no, "UPDATE records SET workload_id = 999 WHERE provenance = 'predicted'")
    with Store.open(yes_and_no) as store, pytest.warns(UserWarning, match="point to its workload"):
        assert [record.provenance for record in store.records()] == ["measured"]


def test_a_migration_can_be_taken_back(yes_and_no: Path) -> None:
    before = contents(yes_and_no)
    assert taken_back(yes_and_no, "0002", "0001") == before
