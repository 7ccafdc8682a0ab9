"""Memory traffic without a GPU or a profiler: what is asked for, what belongs to which call, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import io
from benchmarks.counters import CountersError, Kernel
from benchmarks.impls import Call
from benchmarks.io import SWEEP, calls_counted, calls_of, config_of, row_of
from benchmarks.io_cases import BLOCK_WORKLOADS, BLOCKS, BLOCKS_SUITE, SUITES, Case, block_config, cases, prepare
from benchmarks.io_chart import io_chart
from benchmarks.io_tables import growth, hbm_bytes, io_parts
from benchmarks.io_worker import DONE, SWEEP_BYTES, WARM_CALLS, outcome
from benchmarks.provenance import Provenance
from benchmarks.results import IO_COLUMNS, ResultsFile, Row, read_rows
from benchmarks.traffic import standard_traffic_bytes, tiled_bytes
from flashgen.codegen.families import invalid
from flashgen.core.device import find_device
from flashgen.core.errors import BuildError
from flashgen.core.workload import Workload
from tests.benchmarks.rows import SHARED

H200 = find_device("h200")
SMALL = Workload(batch=1, nheads=2, seqlen_q=64, head_dim=64)


def kernel(name: str, read: int = 0, written: int = 0, l2: int = 0, ms: float = 0.0) -> Kernel:
    return Kernel(name=name, hbm_read_bytes=read, hbm_write_bytes=written, l2_bytes=l2, ms=ms)


def sweep(written: int) -> Kernel:
    return kernel(SWEEP, read=SWEEP_BYTES - 1000, written=written, l2=1000, ms=9.0)


def test_every_length_head_and_pass_is_counted() -> None:
    every = cases()
    assert len({case.subject for case in every}) == len(every)
    lengths = [case for case in every if case.suite != BLOCKS_SUITE]
    assert {(c.workload.direction, c.workload.head_dim, c.workload.seqlen_k, c.impl) for c in lengths} == {
        (direction, d, 1024 << n, impl)
        for direction in ("forward", "backward")
        for d in (64, 128)
        for n in range(5)
        for impl in ("flashgen", "sdpa-flash", "standard")
    }
    assert [case for case in every if Case.parse(str(case)) != case] == []
    assert {case.suite for case in cases([BLOCKS_SUITE])} == {BLOCKS_SUITE}


def test_blocks_are_those_of_valid_configs_and_lengths_lie_on_both_sides_of_l2() -> None:
    for blocks in BLOCKS:
        config = block_config(*blocks)
        assert (config["block_m"], config["block_n"]) == blocks
        assert invalid(config, BLOCK_WORKLOADS[0].specialization, H200) is None
        case = Case(suite=BLOCKS_SUITE, workload=BLOCK_WORKLOADS[0], impl=f"{blocks[0]}x{blocks[1]}")
        assert config_of(case, H200) == config
    short, long = (4 * w.seqlen_k * w.head_dim for w in BLOCK_WORKLOADS)
    assert 20 * short < H200.l2_bytes < long / 2


def test_what_a_call_left_in_l2_is_counted_as_written() -> None:
    one, two = cases()[:2]
    kernels = [sweep(7), kernel("a", 10, 1, 20, 0.5), kernel("b", 5, 2, 30, 0.25), sweep(64)]
    found = calls_of([one, two], [*kernels, sweep(0), kernel("c", 3), sweep(128)])
    row = row_of(one, found[one], SHARED)
    assert (row.hbm_read_bytes, row.hbm_write_bytes, row.l2_bytes, row.kernels) == (15, 67, 50, 2)
    assert row.median_ms == pytest.approx(0.75)
    assert (row.tflops, row.gbps) == (None, None)
    assert hbm_bytes(row_of(two, found[two], SHARED)) == 131
    uncounted = [replace(kernel("c", 3), l2_bytes=None), sweep(1)]
    assert row_of(one, uncounted, SHARED).l2_bytes is None


@pytest.mark.parametrize(
    "kernels",
    [
        [sweep(0), kernel("a"), sweep(0)],
        [sweep(0), kernel("a"), sweep(0), sweep(0), sweep(0)],
        [sweep(0), kernel("a"), sweep(0), kernel("b"), sweep(0), kernel("a"), sweep(0)],
        [sweep(0), kernel("a"), sweep(0), sweep(0), kernel("a")],
        [sweep(0), kernel("a"), kernel(SWEEP, read=9), sweep(0), kernel("a"), sweep(0)],
    ],
    ids=["one call of two", "no kernel in a call", "a kernel between calls", "a call without an end", "a short sweep"],
)
def test_kernels_that_belong_to_no_call_are_not_guessed_at(kernels: list[Kernel]) -> None:
    with pytest.raises(CountersError):
        calls_of(cases()[:2], kernels)


def test_a_case_that_was_not_counted_has_its_reason(tmp_path: Path) -> None:
    good, bad, lost = cases()[:3]

    def count(program: Sequence[str], trial: Sequence[str], log: Path) -> list[Kernel]:
        assert program[1:3] == trial[1:3] == ["-m", "benchmarks.io_worker"]
        assert Path(trial[3]).read_text().splitlines() == [str(good)]
        assert trial[4] != program[4]
        assert Path(program[3]).read_text().splitlines() == [str(good), str(bad), str(lost)]
        Path(program[4]).write_text(f"{good}\t{DONE}\n{bad}\tRuntimeError: no memory\n")
        return [sweep(0), kernel("a", 10), sweep(1)]

    found = calls_counted([good, bad, lost], count, tmp_path)
    assert [each if isinstance(each, str) else len(each) for each in found.values()] == [
        2,
        "RuntimeError: no memory",
        "the worker did not reach it",
    ]
    assert calls_counted([], count, tmp_path) == {}


class Recorder:
    """A profiler that writes down what happens."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self) -> None:
        self.seen.append("start")

    def stop(self) -> None:
        self.seen.append("stop")

    def sweep(self) -> None:
        self.seen.append("sweep")


def test_a_call_is_warmed_up_and_counted_between_two_sweeps() -> None:
    profiler = Recorder()
    call = Call(run=lambda n: profiler.seen.append(f"call {n}") or torch.empty(0))
    assert outcome(cases()[0], lambda case: call, profiler) == DONE
    assert profiler.seen == ["call 0"] * WARM_CALLS + ["start", "sweep", "call 0", "sweep", "stop"]


def test_what_cannot_be_made_ready_is_not_counted() -> None:
    profiler = Recorder()

    def refused(case: Case) -> Call:
        raise BuildError("it spills\nand more")

    assert outcome(cases()[0], refused, profiler) == "BuildError: it spills"
    assert profiler.seen == []


def test_standard_attention_is_made_ready_for_both_passes() -> None:
    for suite, direction, results in (("io_forward", "forward", 1), ("io_backward", "backward", 3)):
        case = Case(suite=suite, workload=replace(SMALL, direction=direction), impl="standard")
        call = prepare(case, H200, torch.device("cpu"))
        with torch.no_grad(), call.context():
            found = call.run(0)
        assert len(found if isinstance(found, tuple) else (found,)) == results


def test_without_counters_the_rows_of_before_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> list[Kernel]:
        raise CountersError("ERR_NVGPUCTRPERM")

    file = ResultsFile(tmp_path / SHARED.slug / "io.csv", IO_COLUMNS)
    file.write(rows_of(cases()[:3]))
    before = file.path.read_bytes()
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    monkeypatch.setattr(io, "find_ncu", lambda given: "ncu")
    monkeypatch.setattr(io, "current_device", lambda: H200)
    monkeypatch.setattr(io, "serve_generated", lambda *_: None)
    monkeypatch.setattr(io, "compile_ahead", lambda jobs, device: None)
    monkeypatch.setattr(io, "counted", refuse)
    assert io.main(["--results", str(tmp_path), "--suite", BLOCKS_SUITE]) == 1
    assert file.path.read_bytes() == before
    counted = [sweep(0), kernel("a", 10), sweep(1)] * 16

    def count(ncu: str, program: Sequence[str], **_: object) -> list[Kernel]:
        cases_of = Path(program[3]).read_text().splitlines()
        Path(program[4]).write_text("".join(f"{case}\t{DONE}\n" for case in cases_of))
        return counted

    monkeypatch.setattr(io, "counted", count)
    assert io.main(["--results", str(tmp_path), "--suite", BLOCKS_SUITE, "--append"]) == 0
    assert [row.subject for row in read_rows(file.path)] == [
        *(case.subject for case in cases()[:3]),
        *(case.subject for case in cases([BLOCKS_SUITE])),
    ]


def rows_of(some: Sequence[Case]) -> list[Row]:
    """Rows as the models have them, every flash kernel at twice the least."""
    found = []
    for case in some:
        w = case.workload
        moved = standard_traffic_bytes(w) if case.impl == "standard" else 2 * w.bytes
        l2 = tiled_bytes(w, int(case.impl.split("x")[0])) if case.suite == BLOCKS_SUITE else 3 * moved
        row = SHARED.row(case.suite, w, case.impl, "1.0", median_ms=1.5, rates=False)
        found.append(replace(row, hbm_read_bytes=moved - 100, hbm_write_bytes=100, l2_bytes=l2, kernels=4))
    return found


def test_the_tables_set_models_beside_what_was_counted() -> None:
    rows = rows_of(cases(SUITES))
    assert growth(rows, "io_forward", "flashgen", 128) == pytest.approx(1.0)
    assert 8 < (growth(rows, "io_forward", "standard", 128) or 0) < 16
    _, text, table, _, blocks_text, blocks = io_parts("test_gpu", rows, [])
    assert "to 16384 tokens a sequence it grows 13.6 to 14.8 times for standard and 1.0 times for flashgen." in text
    assert "| forward | 128 | 16384 | 0.269 | 0.539 | 0.539 | 34.8 | 34.8 | 64.5 | 1.62 |" in table
    assert len(table.splitlines()) == 2 + 20
    assert "Measured bytes of L2 are 1.00 to 1.00 times the model's." in blocks_text
    assert "| 262144 | 128 | 16 | 32 | 2199 | 2199 |" in blocks
    assert "| 262144 | 128 | 64 | 32 | 550 | 550 | 0.539 | 1e-07 | 0.269 | 1.5 |" in blocks
    assert io_parts("test_gpu", [], []) == []


def test_rows_survive_the_file_and_give_a_chart(tmp_path: Path) -> None:
    rows = rows_of(cases(SUITES))
    ResultsFile(tmp_path / "io.csv", IO_COLUMNS).write(rows)
    assert read_rows(tmp_path / "io.csv", IO_COLUMNS) == rows
    io_chart(tmp_path / "io.png", rows)
    assert (tmp_path / "io.png").stat().st_size > 10_000
    io_chart(tmp_path / "some.png", [row for row in rows if row.impl == "flashgen" and row.suite == "io_forward"])
