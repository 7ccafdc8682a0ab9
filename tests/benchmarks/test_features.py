"""The features benchmark without a GPU: its grids, what it writes, what it skips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.exit_codes import MISSING
from benchmarks.features import PEERS
from benchmarks.forward import chosen, run
from benchmarks.impls import Impl
from benchmarks.race import Result
from benchmarks.results import MEMORY_COLUMNS, ResultsFile, read_rows
from benchmarks.suites import FEATURES, features_grid, window_grid
from flashgen.codegen.families import applicable
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.measure.timing import Window
from tests.benchmarks.rows import SHARED

JOBS = [("features", features_grid()[:2])]


def measurer(workload: Workload, impls: Sequence[Impl]) -> list[Result]:
    """FlexAttention takes 2 ms and 4 KiB, flashgen 1 ms and nothing; the rest refuses."""
    fast = {"flashgen": (1.0, 0), "flex": (2.0, 4096)}
    return [
        Result(impl=impl, windows=(Window(ms=fast[impl.name][0]),), extra_bytes=fast[impl.name][1])
        if impl.name in fast
        else Result(impl=impl, reason="no")
        for impl in impls
    ]


def test_each_feature_is_there_at_4k_and_16k() -> None:
    grid = features_grid()
    assert len(grid) == len(set(grid)) == 2 * len(FEATURES)
    assert {w.seqlen_q for w in grid} == {4096, 16384}
    assert all(w.batch * w.seqlen_q == 16384 and w.nheads % w.nheads_k == 0 for w in grid)
    for flag in ("softcap", "alibi", "sink", "bias", "mask"):
        assert any(getattr(w, flag) for w in grid), flag
    assert any(w.window_right for w in grid)
    assert any(w.head_dim_v != w.head_dim for w in grid)


@pytest.mark.parametrize("workload", [*features_grid(), *window_grid()], ids=lambda w: w.key)
def test_every_row_has_a_kernel(workload: Workload) -> None:
    assert applicable(workload.specialization, find_device("h200"))


def test_rows_hold_time_and_memory(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "features.csv", MEMORY_COLUMNS)
    assert run(JOBS, chosen(",".join(PEERS)), file, SHARED, measurer, say=print) == 0
    rows = read_rows(file.path, MEMORY_COLUMNS)
    assert [(row.impl, row.median_ms, row.extra_bytes) for row in rows] == [
        ("flashgen", 1.0, 0),
        ("flex", 2.0, 4096),
    ] * 2
    assert rows[0].tflops == pytest.approx(JOBS[0][1][0].flops / 1e9, rel=0.01)
    assert run(JOBS, chosen(",".join(PEERS)), file, SHARED, measurer, say=print) == 0
    assert len(read_rows(file.path, MEMORY_COLUMNS)) == 4  # all of this commit was there


def test_a_missing_row_of_flashgen_is_a_failure(tmp_path: Path) -> None:
    def refusing(workload: Workload, impls: Sequence[Impl]) -> list[Result]:
        return [Result(impl=impl, reason="no") for impl in impls]

    file = ResultsFile(tmp_path / "features.csv", MEMORY_COLUMNS)
    assert run(JOBS, chosen("flashgen,flex"), file, SHARED, refusing, say=print) == MISSING
    assert read_rows(file.path, MEMORY_COLUMNS) == []


def test_it_stops_at_the_time_limit(tmp_path: Path) -> None:
    file, ticks = ResultsFile(tmp_path / "features.csv", MEMORY_COLUMNS), iter(range(0, 1000, 100))
    assert run(JOBS, chosen("flashgen"), file, SHARED, measurer, limit_s=250, say=print, clock=lambda: next(ticks)) == 3
    assert len(read_rows(file.path, MEMORY_COLUMNS)) == 1
