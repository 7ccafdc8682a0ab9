"""The benchmark of random shapes without a GPU: what it draws, that all suites race, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import mixed_races, report, unseen
from benchmarks.exit_codes import STOPPED
from benchmarks.impls import Impl
from benchmarks.provenance import Provenance
from benchmarks.race import Result
from benchmarks.results import read_rows
from benchmarks.unseen import HEAD_DIMS, MOST_BYTES, MOST_HEADS, PEERS, SUITES, raced, workloads
from benchmarks.unseen_tables import PASSES, unseen_parts
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.workload import Workload
from flashgen.measure.timing import Window
from flashgen.tuning.shards import Shard
from tests.benchmarks.rows import SHARED


@pytest.mark.parametrize("name", SUITES)
def test_shapes_are_of_their_suite(name: str) -> None:
    suite, found = SUITES[name], workloads(name, seed=1, count=150)
    assert len(set(found)) == 150
    for workload in found:
        assert Workload.parse(workload.key) == workload
        assert workload.direction == suite.direction
        assert suite.least <= workload.flops <= suite.most
        assert workload.nheads <= MOST_HEADS
        assert 4 * workload.batch * workload.nheads_k * workload.seqlen_k * workload.head_dim <= MOST_BYTES
        assert workload.seqlen_q <= (MAX_SEQLEN_Q if suite.few_queries else 2**14)
        assert workload.window_left is None or (workload.causal and suite.has_windows)
    assert {workload.head_dim for workload in found} == set(HEAD_DIMS)
    assert {workload.dtype for workload in found} == {"bf16", "fp16"}
    assert {workload.causal for workload in found} == {False, True}
    assert any(workload.nheads > workload.nheads_k for workload in found)
    assert any(workload.seqlen_q < workload.seqlen_k for workload in found)
    assert any(workload.window_left for workload in found) == suite.has_windows
    spread = [workload.flops for workload in found]
    assert max(spread) > 4 * statistics.median(spread)


def test_a_seed_always_draws_the_same_and_another_seed_others() -> None:
    some = workloads("unseen", seed=1, count=20)
    assert workloads("unseen", seed=1, count=40)[:20] == some
    assert not set(some) & set(workloads("unseen", seed=2, count=20))
    assert not set(some) & set(workloads("unseen_small", seed=1, count=20))


def test_gradients_race_those_who_have_any() -> None:
    assert {impl.name for impl in raced("backward")} <= {impl.name for impl in raced("forward")}
    assert {"flashgen", "sdpa-cudnn", "fa4"} <= {impl.name for impl in raced("backward")}


class Races:
    """In the place of a GPU; flashgen takes 1 ms of one that another takes 2, but for backward passes."""

    def __init__(self) -> None:
        self.seen: list[Workload] = []

    def __call__(self, workload: Workload, wanted: Sequence[Impl]) -> list[Result]:
        self.seen.append(workload)
        return [
            Result(impl=impl, timing="graph", windows=(Window(ms=self._ms(impl.name, workload), sm_clock_mhz=None),))
            for impl in wanted
        ]

    def _ms(self, name: str, workload: Workload) -> float:
        if name == "flashgen":
            return 2.0 if workload.direction == "backward" else 1.0
        return 1.0 if name == "fa4" and workload.direction == "backward" else 2.0


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Races:
    found = Races()
    monkeypatch.setattr(mixed_races, "racer_of", lambda options, provenance: found)
    monkeypatch.setattr(mixed_races, "serve_generated", lambda db, scratch: None)
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    return found


def test_every_suite_is_raced_and_tabled(races: Races, tmp_path: Path) -> None:
    assert unseen.main(["--count", "3", "--results", str(tmp_path)]) == 0
    assert len(races.seen) == 3 * len(SUITES)
    rows = read_rows(tmp_path / SHARED.slug / "unseen.csv")
    assert {row.suite for row in rows} == set(SUITES) == set(PASSES)
    text = "\n".join(unseen_parts(rows))
    assert "| forward, small | 3 | 2.00 | 2.00 | 3 of 3 |" in text
    assert "| backward | 3 | 0.50 | 0.50 | 0 of 3 |" in text
    assert text.count("| 0.50 | FA4 |") == 3
    assert "### Random shapes" in report.page_of({SHARED.slug: rows}, "img")
    assert unseen_parts([row for row in rows if row.impl == "flashgen"]) == []


def test_a_run_can_be_cut_and_shared(races: Races, tmp_path: Path) -> None:
    given = ["--count", "4", "--suite", "unseen", "--results", str(tmp_path)]
    assert unseen.main([*given, "--limit-seconds", "0"]) == STOPPED
    assert unseen.main([*given, "--shard", "1/2", "--impls", "flashgen,fa3"]) == 0
    mine = list(workloads("unseen", seed=1, count=4)[1::2])
    assert races.seen == mine
    races.seen.clear()
    assert unseen.main([*given, "--only", mine[1].key]) == 0
    assert races.seen == mine[1:]
    races.seen.clear()
    assert unseen.main(["--count", "2", "--suite", "unseen_backward", "--results", str(tmp_path)]) == 0
    assert len(races.seen) == 2
    assert unseen.main([*given, "--shard", "1/2", "--impls", "flashgen,fa3"]) == 0
    assert {row.impl for row in read_rows(tmp_path / SHARED.slug / "unseen.csv")} == {"flashgen", "fa3"}


def test_an_unknown_peer_is_refused(races: Races, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        unseen.main(["--impls", "flashgen,flex"])
    assert "an implementation is one of flashgen, sdpa-flash, sdpa-cudnn, fa3, fa4, got flex" in capsys.readouterr().err


def test_what_is_raced_is_compiled_in_processes_of_the_same_shard(
    races: Races, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[tuple[Workload, ...]]()

    def compiled(part: Shard, shapes: Sequence[Workload], impls: Sequence[Impl], *others: object) -> None:
        assert str(part) == "2/3"
        assert {impl.name for impl in impls} <= set(PEERS)
        called.append(tuple(shapes))

    monkeypatch.setattr(mixed_races, "compile_part", compiled)
    given = ["--count", "4", "--shard", "1/2", "--results", str(tmp_path)]
    assert unseen.main([*given, "--compile-part", "2/3"]) == 0
    assert called == [workloads(name, seed=1, count=4)[1::2] for name in SUITES]
    assert not races.seen
    started = list[tuple[object, ...]]()
    monkeypatch.setattr(mixed_races, "prepare", lambda *given: started.append(given[:3]))
    assert unseen.main([*given, "--prepare", "3"]) == 0
    assert started == [("unseen", [*given, "--prepare", "3"], 3)]
    assert sorted(map(str, races.seen)) == sorted(str(shape) for shapes in called for shape in shapes)
    assert unseen.main([*given, "--prepare", "3", "--append"]) == 0
    assert len(started) == 1, "nothing is left to compile"
