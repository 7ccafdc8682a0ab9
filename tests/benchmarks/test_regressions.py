"""The shapes that were behind once: none is raced elsewhere, all are raced beside whom they were behind, and tabled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import mixed_races, regressions, report
from benchmarks.impls import Impl
from benchmarks.merge import GRIDS
from benchmarks.provenance import Provenance
from benchmarks.race import Result
from benchmarks.regressions import BACKWARD_SUITE, EFFICIENT, FORWARD_SUITE, WORKLOADS, raced
from benchmarks.results import read_rows
from flashgen.core.workload import Workload
from flashgen.measure.timing import Window
from tests.benchmarks.rows import SHARED


def test_no_shape_is_in_another_suite_that_is_committed() -> None:
    every = [workload for workloads in WORKLOADS.values() for workload in workloads]
    assert len(set(every)) == len(every)
    others = {each for name, grid in GRIDS.items() if name not in (*WORKLOADS, "presets") for each in grid()}
    assert not set(every) & others
    assert all(Workload.parse(each.key) == each for each in every)


def test_each_suite_is_of_its_direction_and_has_peers_of_it() -> None:
    for name, direction in ((FORWARD_SUITE, "forward"), (BACKWARD_SUITE, "backward")):
        assert {each.direction for each in WORKLOADS[name]} == {direction}
        by_name = {impl.name: impl for impl in raced(name)}
        assert {"flashgen", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "fa4"} <= set(by_name)
        for each in WORKLOADS[name]:
            assert by_name["flashgen"].unsupported(each) is None
            if each.dtype == "fp32":
                assert by_name["sdpa-efficient"].unsupported(each) is None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """What was raced, by flashgen in 1 ms, by the efficient kernel in 3 and by others in 2."""
    found = list[Workload]()

    def racer(workload: Workload, wanted: Sequence[Impl]) -> list[Result]:
        found.append(workload)
        times = {"flashgen": 1.0, EFFICIENT.name: 0.5 if workload.dtype == "fp32" else 3.0}
        return [
            Result(impl=impl, timing="graph", windows=(Window(ms=times.get(impl.name, 2.0), sm_clock_mhz=None),))
            for impl in wanted
        ]

    monkeypatch.setattr(mixed_races, "racer_of", lambda options, provenance: racer)
    monkeypatch.setattr(mixed_races, "serve_generated", lambda db, scratch: None)
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    return found


def test_all_are_raced_and_tabled(seen: list[Workload], tmp_path: Path) -> None:
    assert regressions.main(["--results", str(tmp_path)]) == 0
    assert seen == [workload for workloads in WORKLOADS.values() for workload in workloads]
    rows = read_rows(tmp_path / SHARED.slug / "regressions.csv")
    page = report.page_of({SHARED.slug: rows}, "img")
    in_fp32 = sum(workload.dtype == "fp32" for workload in seen)
    assert f"lowest 0.50, ahead on {len(seen) - in_fp32} of {len(seen)}." in page
    assert "| forward | bf16 | 1 | 71/1 | 64 | 2100 x 2100 | yes | 1.0000 | SDPA flash | 2.00 |" in page
    assert "| backward | float32 | 2 | 32 | 64 | 2048 x 2048 | yes | 1.0000 | SDPA efficient | 0.50 |" in page


def test_one_suite_can_be_a_run(seen: list[Workload], tmp_path: Path) -> None:
    assert regressions.main(["--results", str(tmp_path), "--suite", BACKWARD_SUITE, "--only", "*-fp32-*"]) == 0
    assert seen == [each for each in WORKLOADS[BACKWARD_SUITE] if each.dtype == "fp32"]
