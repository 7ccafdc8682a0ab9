"""The races of tiles under load that goes on, and that the factors of the estimate are those that the times make."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from benchmarks import sustained_tiles, tile_races
from benchmarks.search_files import read
from benchmarks.sustained_tiles import factors, workloads
from benchmarks.tiles import times_of
from flashgen.codegen.hopper_forward.tiles import SUSTAINED, TILES
from flashgen.core.workload import Workload
from tests.tuning.fakes import Clock, FakeCompiler, FakeExecutor

TIMES = Path(__file__).parents[1] / "codegen/sustained_tiles_nvidia_h200.csv"


@pytest.mark.parametrize("key", SUSTAINED)
def test_the_factors_are_what_the_times_make(key: tuple[int, bool]) -> None:
    made = factors(TILES[key], times_of(read(TIMES))[key], 132)
    assert made == pytest.approx(SUSTAINED[key], abs=5e-4)


def test_a_shape_is_raced_once_and_short_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executor = FakeExecutor(clock=Clock())
    monkeypatch.setattr(sustained_tiles, "FIRST_SHAPES", ("b1-h20-s6144",))
    monkeypatch.setattr(sustained_tiles, "SHAPES", ("b1-h8-s1024", "b1-h20-s6144"))
    monkeypatch.setattr(sustained_tiles, "MORE_SHAPES", ("b2-h32-hk8-s8192",))
    monkeypatch.setattr(tile_races, "make_executor", lambda gpu: executor)
    compiler = FakeCompiler(failing=0.0)
    monkeypatch.setattr(tile_races, "make_compiler", lambda device, jobs: contextlib.nullcontext(compiler))
    path = tmp_path / "tiles.csv"
    assert sustained_tiles.main([str(path), "--limit-seconds", "-1"]) == 3
    assert sustained_tiles.main([str(path)]) == 0
    rows, raced = read(path), list(workloads(132))
    assert [workload.key for workload in raced[: len(TILES)]] == [
        Workload.parse(f"b1-h20-s6144-d{head_dim}{'-causal' if causal else ''}").key for head_dim, causal in TILES
    ]
    assert len(raced) == 2 * len(TILES)
    assert [row["workload"] for row in rows] == [
        workload.key for workload in raced for _ in TILES[workload.head_dim, workload.causal]
    ]
    assert sustained_tiles.main([str(path)]) == 0
    assert read(path) == rows
    assert sustained_tiles.main([str(path), "--dtype", "fp16"]) == 0
    assert len(read(path)) == 2 * len(rows)
    assert sustained_tiles.main([str(path), "--fit", "--dtype", "fp16"]) == 0
    assert capsys.readouterr().out.count("left out") == len(TILES)


def test_what_was_raced_is_among_the_shapes() -> None:
    raced = {row["workload"] for row in read(TIMES)} - {"fwd-bf16-b1-h12-hk12-sq4096-sk20480-d128-causal"}
    assert raced <= {workload.key for workload in workloads(132)}


def test_what_is_chosen_with_each_shape_left_out_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sustained_tiles.main([str(TIMES), "--fit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("6 shapes; left out 1.0000, at most 1.000; without factors 1.0357, at most 1.102")
