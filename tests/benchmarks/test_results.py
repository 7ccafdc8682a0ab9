"""Results files: the promised columns, whole groups at once, and what a later run finds in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.results import (
    COLUMNS,
    MEMORY_COLUMNS,
    OUTCOME_COLUMNS,
    RACE_COLUMNS,
    ResultsFile,
    latest,
    read_rows,
)
from flashgen.core.workload import Workload
from tests.benchmarks.rows import memory_row, row

WORKLOAD = Workload(batch=2, nheads=4, seqlen_q=256, head_dim=64, causal=True)
OTHER = WORKLOAD.with_shape(batch=4)
HEADER = "suite,workload,impl,impl_version,median_ms,tflops,gbps,device,torch,triton,commit,date"


def test_columns_are_the_promised_ones(tmp_path: Path) -> None:
    ResultsFile(tmp_path / "deep" / "forward.csv").write([row(WORKLOAD, "flashgen", 123.456)])
    header, line = (tmp_path / "deep" / "forward.csv").read_text().splitlines()
    assert header == HEADER
    assert line.startswith("forward,fwd-bf16-b2-h4-hk4-sq256-sk256-d64-causal,flashgen,1.0,")
    assert ",123.5," in line
    assert line.endswith(",Test GPU,2.11.0,3.6.0,0123456789ab,2026-11-20")
    assert [name for name in RACE_COLUMNS if name != "timing"] == list(COLUMNS)
    assert [name for name in MEMORY_COLUMNS if name != "extra_bytes"] == list(RACE_COLUMNS)
    assert [name for name in OUTCOME_COLUMNS if name != "outcome"] == list(RACE_COLUMNS)


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "memory.csv"
    rows = [memory_row(WORKLOAD, "flashgen", 0), dataclasses.replace(memory_row(OTHER, "x", 7), impl_version='a,"b"')]
    ResultsFile(path, MEMORY_COLUMNS).write(rows)
    assert read_rows(path) == rows
    again = ResultsFile(tmp_path / "again.csv", MEMORY_COLUMNS)
    again.write(read_rows(path))
    assert again.path.read_bytes() == path.read_bytes()


def test_append_goes_on_and_a_plain_run_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "forward.csv"
    ResultsFile(path).write([row(WORKLOAD, "flashgen", 1.0)])
    more = ResultsFile(path, append=True)
    more.write([row(WORKLOAD, "flex", 1.0, commit="other")])
    assert path.read_text().count(HEADER) == 1
    assert [r.impl for r in read_rows(path)] == ["flashgen", "flex"]
    assert more.done("other") == {("forward", WORKLOAD.key, "flex")}
    assert ResultsFile(path).rows == []
    assert path.read_text() == HEADER + "\n"


def test_foreign_and_damaged_files_are_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "forward.csv"
    path.write_text("suite,workload\nx,y\n")
    with pytest.raises(ValueError, match="must have the columns suite,workload,impl"):
        ResultsFile(path, append=True)
    path.write_text(f"{HEADER}\nforward,fwd\n")
    with pytest.raises(ValueError, match="a row has 12 cells, got 2"):
        ResultsFile(path, append=True)


def test_only_rows_of_one_commit_are_compared() -> None:
    old = [row(WORKLOAD, impl, 1.0, commit="old") for impl in ("flashgen", "fa3")]
    new = [row(WORKLOAD, "flashgen", 2.0, commit="new")]
    untouched = row(OTHER, "fa3", 3.0, commit="old")
    assert latest([*old, untouched, *new]) == [untouched, *new]
    assert latest([*old, row(WORKLOAD, "fa3", 9.0, commit="old")])[1].tflops == 9.0


def test_dates_decide_which_commit_was_measured_last_whatever_the_order_of_the_file() -> None:
    old = [dataclasses.replace(row(WORKLOAD, impl, 1.0, commit="old"), date="2026-11-21") for impl in ("fa3", "fa4")]
    new = [dataclasses.replace(row(WORKLOAD, impl, 2.0, commit="new"), date="2026-11-22") for impl in ("fa3", "flex")]
    for rows in ([*new, *old], [old[0], *new, old[1]], [*old, *new]):
        assert latest(rows) == new
    again = dataclasses.replace(new[0], date="2026-11-23", tflops=3.0)
    assert latest([again, *old, *new]) == [again, new[1]]
