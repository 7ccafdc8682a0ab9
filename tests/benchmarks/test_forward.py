"""The forward benchmark without a GPU: its grid, what it writes and when, what it skips, and when it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import backward, data, features, forward, models
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.forward import chosen, line_of, run
from benchmarks.gpu_turns import VARIABLE
from benchmarks.impls import IMPLS, Impl
from benchmarks.race import Result, attempt
from benchmarks.results import ResultsFile, read_rows
from benchmarks.suites import FP16_SUITE, SUITES, paper_grid, select
from flashgen.core.workload import Workload
from flashgen.measure.timing import Window
from flashgen.tuning.shards import Shard
from tests.benchmarks.rows import SHARED

FEW = paper_grid()[:3]
PEERS = chosen("flashgen,flex,standard")
Racer = Callable[[Workload, Sequence[Impl]], list[Result]]


def times(**reasons: str) -> Racer:
    """A racer in which every implementation takes 1, 2, 3 ms, except those that have a reason not to run."""

    def racer(workload: Workload, impls: Sequence[Impl]) -> list[Result]:
        return [
            Result(impl=impl, reason=reasons[impl.name])
            if impl.name in reasons
            else Result(impl=impl, windows=tuple(Window(ms=ms) for ms in (1.0, 3.0, 2.0)))
            for impl in impls
        ]

    return racer


def runs(file: ResultsFile, racer: Racer, **options: float) -> tuple[int, list[str]]:
    said: list[str] = []
    code = run([("forward", FEW)], PEERS, file, SHARED, racer, say=said.append, **options)  # type: ignore[arg-type]
    return code, said


def test_grid_is_the_papers() -> None:
    grid = paper_grid()
    assert len(grid) == len(set(grid)) == 36
    for workload in grid:
        assert workload.batch * workload.seqlen_q == 16384
        assert workload.nheads * workload.head_dim == 2048
        assert (workload.dtype, workload.nheads_k, workload.seqlen_k) == ("bf16", workload.nheads, workload.seqlen_q)
    assert {w.head_dim for w in grid} == {64, 128, 256}
    assert sum(w.causal for w in grid) == 18
    assert [len(select(grid, [p])) for p in ("*-d128-causal", "*sq16384*", "nothing")] == [6, 6, 0]
    assert select(grid, []) == grid
    assert all(len(set(make())) == len(make()) for make in SUITES.values())


def test_the_grid_in_fp16_stands_beside_the_papers() -> None:
    assert [replace(w, dtype="bf16") for w in SUITES[FP16_SUITE]()] == list(paper_grid())
    assert {w.dtype for w in SUITES[FP16_SUITE]()} == {"fp16"}
    assert forward.DEFAULT_SUITES == ("forward", FP16_SUITE)


def test_rows_are_medians_with_rates(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "forward.csv")
    assert runs(file, times())[0] == 0
    rows = read_rows(file.path)
    assert [(r.workload, r.impl) for r in rows] == [(w.key, impl.name) for w in FEW for impl in PEERS]
    assert rows[0].median_ms == 2.0
    assert rows[0].tflops == pytest.approx(FEW[0].flops / 2.0 / 1e9, abs=0.05)
    assert rows[0].gbps == pytest.approx(FEW[0].bytes / 2.0 / 1e6, abs=0.05)
    assert (rows[0].commit, rows[0].device, len(rows[0].date)) == (SHARED.commit, SHARED.device, 10)


def test_a_killed_run_keeps_the_races_that_ended(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "forward.csv")

    def killed(workload: Workload, impls: Sequence[Impl]) -> list[Result]:
        if workload == FEW[1]:
            assert len(read_rows(file.path)) == len(PEERS)  # on the disk already
            raise KeyboardInterrupt
        return times()(workload, impls)

    with pytest.raises(KeyboardInterrupt):
        runs(file, killed)
    seen: list[Workload] = []

    def watched(workload: Workload, impls: Sequence[Impl]) -> list[Result]:
        seen.append(workload)
        return times()(workload, impls)

    more = ResultsFile(file.path, append=True)
    runs(more, watched)
    assert seen == list(FEW[1:])
    assert len(read_rows(file.path)) == 3 * len(PEERS)
    runs(ResultsFile(file.path, append=True), lambda workload, impls: pytest.fail("everything is done"))


@pytest.mark.parametrize("shares", [False, True])
def test_what_lacked_memory_beside_others_is_raced_once_more(
    shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path) if shares else "")
    seen: list[Workload] = []

    def racer(workload: Workload, impls: Sequence[Impl]) -> list[Result]:
        seen.append(workload)
        lacks = workload == FEW[2] or seen == list(FEW[:1])  # one as often as it is tried, one the first time
        reason = attempt(lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34 GiB")))
        return times(**({"flex": reason} if lacks else {}))(workload, impls)

    def raised(error: Exception) -> str:
        raise error

    file = ResultsFile(tmp_path / "forward.csv")
    assert runs(file, racer)[0] == 0
    assert seen == [*FEW, *((FEW[0], FEW[2]) if shares else ())]
    without = {row.workload for row in file.rows} - {row.workload for row in file.rows if row.impl == "flex"}
    assert without == ({FEW[2].key} if shares else {FEW[0].key, FEW[2].key})
    assert len(file.rows) == len({row.subject for row in file.rows})


def test_shards_part_the_workloads(tmp_path: Path) -> None:
    """Every workload is in one shard; lengths and masks take turns, so that shards take about as long."""
    seen: list[list[Workload]] = []
    jobs = [("forward", paper_grid()), ("presets", paper_grid()[:4])]
    for index in range(3):
        raced: list[Workload] = []

        def racer(workload: Workload, impls: Sequence[Impl], raced: list[Workload] = raced) -> list[Result]:
            raced.append(workload)
            return times()(workload, impls)

        file = ResultsFile(tmp_path / str(index) / "forward.csv")
        run(jobs, PEERS, file, SHARED, racer, shard=Shard(index=index, count=3), say=lambda line: None)
        again = ResultsFile(file.path, append=True)
        run(jobs, PEERS, again, SHARED, racer, shard=Shard(index=index, count=3), say=lambda line: None)
        seen.append(raced)
    assert sorted(w.key for part in seen for w in part) == sorted(w.key for _, grid in jobs for w in grid)
    assert [len(part) for part in seen] == [14, 13, 13]
    assert all(len({w.head_dim for w in part}) == 3 for part in seen)


def test_a_wrong_shard_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (forward.main, backward.main, models.main, features.main, data.main):
        with pytest.raises(SystemExit) as done:
            main(["--shard", "2/2", "--commit", "abc"])
        assert done.value.code == 2
        assert "a shard is i/n with i from 0 to n - 1, got 2/2" in capsys.readouterr().err


def test_a_peer_that_cannot_run_has_no_row_but_a_reason(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "forward.csv")
    code, said = runs(file, times(flex="it has no such thing"))
    assert code == 0
    assert {row.impl for row in file.rows} == {"flashgen", "standard"}
    assert sum("flex         no row: it has no such thing" in line for line in said) == len(FEW)


def test_flashgen_without_a_row_is_an_error(tmp_path: Path) -> None:
    assert runs(ResultsFile(tmp_path / "forward.csv"), times(flashgen="BuildError: no"))[0] == MISSING


def test_no_race_starts_that_would_end_after_the_limit(tmp_path: Path) -> None:
    ticks = iter(range(0, 10_000, 10))
    file = ResultsFile(tmp_path / "forward.csv")
    code, said = runs(file, times(), limit_s=45, clock=lambda: float(next(ticks)))  # type: ignore[arg-type]
    assert code == STOPPED
    assert len(file.rows) == 2 * len(PEERS)
    assert "1 workloads left" in " ".join(said)


def test_names_of_implementations() -> None:
    assert [impl.name for impl in IMPLS] == [
        "flashgen",
        "sdpa-flash",
        "sdpa-cudnn",
        "sdpa-masked",
        "flex",
        "fa3",
        "fa4",
        "standard",
    ]
    assert [impl.name for impl in chosen("fa3,flashgen")] == ["fa3", "flashgen"]
    with pytest.raises(ValueError, match=r"an implementation is one of flashgen, .*, got flash"):
        chosen("flash,flashgen")


def test_a_line_shows_speed_spread_and_clock() -> None:
    windows = tuple(Window(ms=ms, sm_clock_mhz=1500.0) for ms in (1.0, 1.1, 1.2))
    line = line_of(FEW[0], Result(impl=IMPLS[0], windows=windows))
    assert "1.1000 ms" in line
    assert "spread 18.2% (1 1.1 1.2)" in line, "in the order in which they were measured"
    assert "1500 MHz" in line
