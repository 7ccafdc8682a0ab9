"""What a report reads of files: each record and search once, and nothing of what cannot be read or compared."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.record import Measurement
from flashgen.core.settings import settings
from flashgen.db.store import Store
from flashgen.report.contents import read
from tests.db.schemas import execute
from tests.report import databases
from tests.report.databases import RUN, TRIALS


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return databases.write(tmp_path_factory.mktemp("contents") / "mine.sqlite3")


def test_a_search_that_several_files_have_is_one_search(database: Path, tmp_path: Path) -> None:
    """A copy made while it went on has fewer of its trials, and one of before runs were written down has no name."""
    (whole,) = read([database]).searches
    part, nameless = tmp_path / "part.sqlite3", tmp_path / "nameless.sqlite3"
    for path, run in ((part, RUN), (nameless, "")):
        with Store.open(path) as store:
            for trial in whole.trials[:5]:
                store.put_trial(replace(trial, run=run))
    assert read([part, database, part]).searches == (whole,)
    assert read([database, part]).searches == (whole,)
    again = tmp_path / "again.sqlite3"
    shutil.copy(nameless, again)
    found = read([nameless, database, again]).searches
    assert [(search.run, len(search.trials)) for search in found] == [("", 5), (RUN, TRIALS)]


def test_a_database_that_serves_and_cannot_be_read_costs_itself(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.sqlite3"
    content = bytearray(database.read_bytes())
    content[-4096:] = b"\xff" * 4096  # it opens, and its last page is none
    broken.write_bytes(content)
    with pytest.raises(DatabaseError, match="malformed"):
        read([database, broken])
    monkeypatch.setenv("FLASHGEN_DB", f"{broken}{os.pathsep}{database}")
    settings.cache_clear()
    with pytest.warns(UserWarning, match=f"tuning database {broken} is not used: .*malformed"):
        found = read([])
    assert str(broken) not in found.databases
    assert {search.run for search in found.searches} == {RUN}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE records SET times_ms = '[1e308, 1e308]', hard_times_ms = NULL",
        "UPDATE records SET reference_ms = 1e-300",
        "UPDATE anchors SET median_ms = 5e-324",
        "UPDATE trials SET times_ms = '[1e308]' WHERE times_ms IS NOT NULL",
        "UPDATE trials SET reference_ms = 1e300 WHERE times_ms IS NOT NULL",
    ],
)
def test_times_of_no_kernel_cost_their_rows_alone(statement: str, database: Path, tmp_path: Path) -> None:
    """Finite times above 0 whose ratios, means and products are neither."""
    path = tmp_path / "theirs.sqlite3"
    shutil.copy(database, path)
    execute(path, statement)
    with pytest.warns(UserWarning, match="times are from 1e-09 to 1e[+]09 ms"):
        found, whole = read([path]), read([database])
    if "trials" in statement:
        assert len(found.entries) == len(whole.entries)
        assert not any(isinstance(trial.outcome, Measurement) for search in found.searches for trial in search.trials)
    else:
        assert len(found.entries) < len(whole.entries)
        assert found.searches == whole.searches
