"""A run of all benchmarks that was committed before its end, which another machine is to go on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.everything import Done
from benchmarks.jobs import planned
from benchmarks.results import ResultsFile, header_of, read_rows

FOLDER = Path(__file__).parents[2] / "benchmarks/unfinished"
RUN = FOLDER / "done.json"

pytestmark = pytest.mark.skipif(not RUN.exists(), reason="there is none")


def test_it_can_be_gone_on_with() -> None:
    noted = json.loads(RUN.read_text())
    done = Done(RUN, **noted["run"])
    lists = planned(noted["run"]["shards"])
    assert {name for name in noted["done"] if name not in done} == set()
    assert set(noted["done"]) < {job.name for jobs in lists for job in jobs}, "what is finished is merged"
    for number, jobs in enumerate(lists):
        for path in sorted(FOLDER.glob(f"shard{number}/*/*.csv")):
            file = ResultsFile(path, header_of(path), append=True, commit=noted["run"]["commit"])
            assert file.rows
            assert path.stem in {job.benchmark.module for job in jobs}


def test_no_row_is_in_two_lists_and_all_are_of_one_device() -> None:
    """As merging asks of them in the end."""
    rows = [row for path in sorted(FOLDER.glob("*/*/*.csv")) for row in read_rows(path)]
    assert len({row.subject for row in rows}) == len(rows)
    assert len({(row.device, row.torch, row.triton) for row in rows}) <= 1, "none where all that is whole is merged"
