"""The benchmark of kinds of data without a GPU: its races, its rows, and what the pages say of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import data, forward, report
from benchmarks.data import NAMES, PEERS, data_jobs, main
from benchmarks.data_tables import data_parts, data_sentence
from benchmarks.forward import Job, run_jobs
from benchmarks.impls import Impl
from benchmarks.provenance import Provenance
from benchmarks.race import Result
from benchmarks.results import DATA_COLUMNS, ResultsFile, Row, read_rows
from benchmarks.suites import DATA_SUITE, data_grid
from flashgen.codegen.families import applicable
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS
from flashgen.measure.timing import Window
from flashgen.tuning.shards import Shard
from tests.benchmarks.rows import SHARED, row, write_data, write_fp16, write_results
from tests.tiers import EXHAUSTIVE

README = f"# Title\n\n{report.START}\n{report.END}\n"


def times(job: Job, impls: Sequence[Impl]) -> list[Result]:
    """Everybody takes 1 ms on normal data, 2 ms on the next kind, and so on; FA4 refuses."""
    ms = 1.0 + list(DATA_KINDS).index(job.data)
    windows = (Window(ms=ms),)
    return [
        Result(impl=impl, reason="no") if impl.name == "fa4" else Result(impl=impl, windows=windows, timing="graph")
        for impl in impls
    ]


def test_the_grid_has_both_dtypes_short_and_long() -> None:
    grid = data_grid()
    assert len(grid) == len(set(grid)) == 32
    assert {(w.dtype, w.head_dim, w.seqlen_k, w.causal) for w in grid} == {
        (dtype, d, s, causal)
        for dtype in ("bf16", "fp16")
        for d in (64, 96, 128, 256)
        for s in (2048, 16384)
        for causal in (False, True)
    }
    assert all(w.batch * w.seqlen_q == 16384 for w in grid)
    assert {(w.head_dim, w.nheads) for w in grid} == {(64, 32), (96, 21), (128, 16), (256, 8)}
    assert all(applicable(w.specialization, find_device("h200")) for w in grid)


def test_a_shard_has_all_kinds_of_its_workloads() -> None:
    parts = [data_jobs(data_grid(), DATA_KINDS, Shard(index=index, count=2)) for index in range(2)]
    assert [len(part) for part in parts] == [80, 80]
    assert [job.data for job in parts[0][:5]] == list(DATA_KINDS)
    assert {job.workload.causal for job in parts[0]} == {False}, "each shard compiles the kernels of one mask"
    assert {job.workload for part in parts for job in part} == set(data_grid())


def test_a_kind_of_data_is_a_row_of_its_own(tmp_path: Path) -> None:
    jobs = data_jobs(data_grid()[:2], DATA_KINDS, Shard(index=0, count=1))
    file = ResultsFile(tmp_path / "data.csv", DATA_COLUMNS)
    assert run_jobs(jobs[:7], PEERS, file, SHARED, times, say=print) == 0
    seen: list[Job] = []

    def watched(job: Job, impls: Sequence[Impl]) -> list[Result]:
        seen.append(job)
        return times(job, impls)

    more = ResultsFile(file.path, DATA_COLUMNS, append=True, commit=SHARED.commit)
    assert run_jobs(jobs, PEERS, more, SHARED, watched, say=print) == 0
    assert seen == jobs[7:]
    rows = read_rows(file.path, DATA_COLUMNS)
    there = [impl.name for impl in PEERS if impl.name != "fa4"]
    assert [each.subject for each in rows] == [job.subject(name) for job in jobs for name in there]
    assert [each.median_ms for each in rows[:: len(there)]] == [1.0, 2.0, 3.0, 4.0, 5.0] * 2
    assert {each.timing for each in rows} == {"graph"}


def test_the_command_line_races_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[tuple[str, str, list[str]]] = []

    def racer(workload: Workload, wanted: Sequence[Impl], /, *, data: str) -> list[Result]:
        raced.append((workload.key, data, [impl.name for impl in wanted]))
        return times(Job(suite=DATA_SUITE, workload=workload, data=data), wanted)

    paces: list[tuple[float, float, int]] = []
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    monkeypatch.setattr(data, "serve_generated", lambda db, scratch: None)
    monkeypatch.setattr(
        data, "racer_of", lambda options, _: paces.append((options.warm, options.window, options.rounds)) or racer
    )
    options = ["--results", str(tmp_path), "--only", "*-d96*", "--data", "peak", "--data", "std8"]
    assert main([*options, "--shard", "1/2", "--impls", "flashgen,fa3"]) == 0
    wanted = [w.key for w in data_grid() if w.head_dim == 96 and w.causal]
    assert raced == [(key, kind, ["flashgen", "fa3"]) for key in wanted for kind in ("peak", "std8")]
    assert paces == [(0.045, 0.07, 4)]
    rows = read_rows(tmp_path / SHARED.slug / "data.csv", DATA_COLUMNS)
    assert len(rows) == 2 * len(raced)


def test_a_race_is_told_its_data_and_serving_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(forward, "current_device", lambda: find_device("h200"))
    monkeypatch.setattr(forward, "CudaStopwatch", lambda clock: None)
    monkeypatch.setattr(forward, "served_by", lambda workload: f"rung 1 for {workload.key}")
    monkeypatch.setattr(forward, "race", lambda *_, data, **__: seen.append(data) or [])
    racer = forward.racer_of(argparse.Namespace(warm=0.05, window=0.1, rounds=2), SHARED)
    for workload in data_grid()[:2]:
        assert [racer(workload, PEERS, data=kind) for kind in DATA_KINDS] == [[]] * len(DATA_KINDS)
    assert racer(data_grid()[0], PEERS) == []
    assert seen == [*DATA_KINDS, *DATA_KINDS, "randn"]
    assert capsys.readouterr().out.count("rung 1 for") == 2


@pytest.mark.parametrize("wrong", [["--data", "zeros"], ["--impls", "flex"]])
def test_a_wrong_command_line_is_told(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([*wrong, "--commit", "abc"])
    assert done.value.code == 2
    assert set(NAMES) == {impl.name for impl in PEERS}


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    write_data(tmp_path / "results")
    return read_rows(tmp_path / "results" / SHARED.slug / "data.csv", DATA_COLUMNS)


def test_the_section_compares_on_the_same_data(rows: list[Row]) -> None:
    """flashgen has 800, 600, 480, 360 and 200, cuDNN always 500, FA3 400 in bf16 alone."""
    lines = "\n".join(data_parts(SHARED.slug, rows, [])).splitlines()
    at = lines.index("|  | randn | std8 | std20 | peak | rising | all |")
    assert lines[at + 2 : at + 7] == [
        "| bf16, against the fastest peer, geometric mean | 1.60 | 1.20 | 0.96 | 0.72 | 0.40 | 0.88 |",
        "| bf16, lowest | 1.60 | 1.20 | 0.96 | 0.72 | 0.40 | 0.40 |",
        "| bf16, at 0.97 or above | 16 of 16 | 16 of 16 | 0 of 16 | 0 of 16 | 0 of 16 | 32 of 80 |",
        "| bf16, speed of flashgen over that on normal data | 1.00 | 0.75 | 0.60 | 0.45 | 0.25 | 0.55 |",
        "| bf16, speed of the fastest peer over that on normal data | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |",
    ]
    assert lines[at + 7].startswith("| fp16, against the fastest peer, geometric mean | 1.60 |")
    assert "<details><summary>All 16 shapes in fp16</summary>" in lines
    cells = [f"{speed} ({ratio} of SDPA cuDNN)" for speed, ratio in ((800, "1.60"), (600, "1.20"))]
    cells.append("**480 (0.96 of SDPA cuDNN)**")
    assert sum(line.startswith(f"| 96 | 16384 | yes | {' | '.join(cells)} | **360 (") for line in lines) == 2
    assert "`rising`: scores that rise by 200 towards the first keys" in lines[1]
    assert "bf16 and fp16, head_dim 64, 96, 128, 256, seqlen 2048, 16384, no mask and causal" in lines[1]


def test_the_fastest_peer_is_that_of_the_same_data(rows: list[Row]) -> None:
    faster = [replace(each, tflops=600.0) if (each.impl, each.data) == ("fa3", "peak") else each for each in rows]
    text = "\n".join(data_parts(SHARED.slug, faster, []))
    assert "| **360 (0.60 of FA3)** | **200 (0.40 of SDPA cuDNN)** |" in text
    assert "| bf16, speed of the fastest peer over that on normal data | 1.00 | 1.00 | 1.00 | 1.20 | 1.00 |" in text


def test_the_sentence_says_what_the_rows_say(rows: list[Row]) -> None:
    (text,) = data_sentence(rows)
    # of hard data: (0.75 * 0.6 * 0.45 * 0.25) ** 0.25
    assert "keeps 0.47 of its forward speed on normal random numbers (lowest 0.25)" in text
    assert "the fastest peer 1.00 (lowest 1.00)." in text
    assert "flashgen is at 1.60 on normal and 0.76 on hard data (lowest 0.40)" in text
    assert "at 0.97 or above in 64 of 160 races." in text
    assert "/blob/main/docs/benchmarks.md#kinds-of-data)" in text


def test_nothing_is_said_of_what_was_not_measured(rows: list[Row]) -> None:
    other = [row(data_grid()[0], "flashgen", 1.0)]
    assert data_parts(SHARED.slug, other, []) == data_sentence(other) == []
    for part in (["randn"], ["peak", "std8"]):
        some = [each for each in rows if each.data in part]
        assert data_sentence(some) == []
        assert "### Kinds of data" in data_parts(SHARED.slug, some, [])
    alone = [each for each in rows if each.impl == "flashgen"]
    assert data_sentence(alone) == []
    assert "| 800 | 600 | 480 | 360 | 200 |" in "\n".join(data_parts(SHARED.slug, alone, []))


def test_pages_have_data_and_fp16_where_they_were_measured(tmp_path: Path) -> None:
    def pages() -> tuple[str, str, list[str]]:
        devices = report.load(tmp_path)
        (names,) = (report.charts_of(slug, rows) for slug, rows in devices.items())
        return report.summary_of(devices), report.page_of(devices, "img"), names

    write_results(tmp_path)
    summary, page, charts = pages()
    assert not any(word in summary + page for word in ("fp16", "Kinds of data", "On [hard data]"))
    write_data(tmp_path)
    write_fp16(tmp_path)
    summary, page, more = pages()
    assert set(more) - set(charts) == {"data_test_gpu.png", "forward_fp16_test_gpu.png"}
    assert "![Forward pass in TFLOP/s on every kind of data](img/data_test_gpu.png)" in page
    assert "### Forward pass in fp16\n\nForward pass in fp16 in TFLOP/s: fp16, 16k tokens" in page
    assert "| Forward, fp16 | 36 | 0.80 | 0.80 | 1.10 | 1.33 | 0.80 | - | 8.00 |" in summary
    assert summary.count("On [hard data](") == 1


@EXHAUSTIVE
def test_a_run_draws_the_chart_of_data(tmp_path: Path, rows: list[Row]) -> None:
    """A peer may have no time on some data."""
    (tmp_path / "README.md").write_text(README)
    few = [each for each in rows if "-d128" in each.workload and (each.data, each.impl[:2]) != ("peak", "fa")]
    file = tmp_path / "results" / SHARED.slug / "data.csv"
    ResultsFile(file, DATA_COLUMNS).write(few)
    options = ["--results", str(tmp_path / "results"), "--readme", str(tmp_path / "README.md")]
    assert report.main(options) == 0
    image = tmp_path / "docs/img/data_test_gpu.png"
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 10_000
    assert report.main([*options, "--check"]) == 0
