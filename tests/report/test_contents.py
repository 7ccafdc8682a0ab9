"""What a report reads of files: each record and search once, and nothing of what cannot be read or compared."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.history import Origin, RunnerUp
from flashgen.core.record import Baseline, Measurement
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.db.writing import Incoming
from flashgen.report.contents import read
from tests.db.samples import MEASURED
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


def test_times_of_no_kernel_cost_their_rows_alone(database: Path, tmp_path: Path) -> None:
    """Finite times above 0 whose ratios, means and products are neither."""
    path = tmp_path / "theirs.sqlite3"
    shutil.copy(database, path)
    far = Measurement(times_ms=(1e308, 1e308), reference_ms=1e-6)
    rival = RunnerUp(config=MEASURED.config, times_ms=(5e-324,) * 3)
    near = [Workload.parse(f"b{batch}-h32-s4096-d128") for batch in (1, 2, 3)]
    records = (
        replace(MEASURED, workload=near[0], measurement=far),
        replace(MEASURED, workload=near[1], baselines=(Baseline(impl="sdpa-flash", median_ms=5e-324),)),
        replace(MEASURED, workload=near[2]),
    )
    with Store.open(path) as store:
        store.put_records(records, Incoming(origins={records[2].identity: Origin(run=RUN, runners_up=(rival,))}))
        store.put_trial(databases.trial(TRIALS + 1, databases.configs(TRIALS + 1)[-1], outcome=far))
    with pytest.warns(UserWarning, match="a report has times from 1e-06 to 1e[+]09 ms") as caught:
        found = read([path])
    assert [re.findall(r": (\w+) .* (\d+) have others", str(each.message)) for each in caught] == [
        [("records", "3")],
        [("trials", "1")],
    ]
    whole = read([database])
    assert (found.entries, found.searches) == (
        tuple(replace(entry, database=str(path)) for entry in whole.entries),
        whole.searches,
    )
