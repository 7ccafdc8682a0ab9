"""Results files: the promised columns, whole groups at once, and what a later run finds in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.results import (
    COLUMNS,
    DATA_COLUMNS,
    MEMORY_COLUMNS,
    OUTCOME_COLUMNS,
    RACE_COLUMNS,
    ResultsFile,
    read_rows,
)
from flashgen.core.workload import Workload
from tests.benchmarks.rows import SHARED, memory_row, row

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
    assert [name for name in DATA_COLUMNS if name != "data"] == list(RACE_COLUMNS)
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
    more = ResultsFile(path, append=True, commit=SHARED.commit)
    more.write([row(WORKLOAD, "flex", 1.0)])
    assert path.read_text().count(HEADER) == 1
    assert [r.impl for r in read_rows(path)] == ["flashgen", "flex"]
    assert more.done(SHARED.commit) == {("forward", WORKLOAD.key, impl) for impl in ("flashgen", "flex")}
    assert ResultsFile(path, commit="other").rows == []
    assert path.read_text() == HEADER + "\n"


def test_a_file_has_rows_of_one_commit(tmp_path: Path) -> None:
    path = tmp_path / "forward.csv"
    file = ResultsFile(path, commit=SHARED.commit)
    file.write([row(WORKLOAD, "flashgen", 1.0)])
    rule = r"all rows of a results file are of one commit: \S+forward.csv has rows of 0123456789ab, not of other"
    with pytest.raises(ValueError, match=rule):
        ResultsFile(path, append=True, commit="other")
    with pytest.raises(ValueError, match=rule):
        file.write([row(OTHER, "flashgen", 1.0, commit="other")])
    with pytest.raises(ValueError, match="are of one commit"):
        ResultsFile(tmp_path / "new.csv").write([row(OTHER, impl, 1.0, commit=impl) for impl in ("fa3", "fa4")])
    assert len(read_rows(path)) == 1


def test_a_file_has_one_row_for_each_subject(tmp_path: Path) -> None:
    path = tmp_path / "forward.csv"
    ResultsFile(path).write([row(WORKLOAD, "flashgen", 1.0), row(WORKLOAD, "flashgen", 2.0)])
    with pytest.raises(ValueError, match=f"one row for each suite.* more for .*{WORKLOAD.key}"):
        read_rows(path)


def test_foreign_and_damaged_files_are_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "forward.csv"
    path.write_text("suite,workload\nx,y\n")
    with pytest.raises(ValueError, match="must have the columns suite,workload,impl"):
        ResultsFile(path, append=True)
    path.write_text(f"{HEADER}\nforward,fwd\n")
    with pytest.raises(ValueError, match="a row has 12 cells, got 2"):
        ResultsFile(path, append=True)
