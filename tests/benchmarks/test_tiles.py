"""The races of tiles, and that the constants of the estimate are those that the committed times make."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from benchmarks import tile_races, tiles
from benchmarks.search_files import read
from benchmarks.tiles import CANDIDATES, Fit, configs
from flashgen.codegen.families import invalid
from flashgen.codegen.hopper_forward.tiles import TILES
from flashgen.measure.protocol import specialization
from tests.tile_times import TIMES, tile_times
from tests.tuning.fakes import H200, Clock, FakeCompiler, FakeExecutor


@pytest.mark.parametrize("key", TILES)
def test_the_constants_are_what_the_times_make(key: tuple[int, bool]) -> None:
    times = tile_times()[key]
    for tile in TILES[key]:
        found = Fit.of(tile, times, 132, causal=key[1])
        assert found.off_by < 0.14
        made = found.tile
        assert (tile.overhead, tile.lone, tile.tail) == (made.overhead, made.lone, made.tail), tile
        assert tile.step == pytest.approx(made.step, abs=5e-4)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, compiler = FakeExecutor(clock=Clock()), FakeCompiler(failing=0.0)
    monkeypatch.setattr(tile_races, "make_executor", lambda gpu: executor)
    monkeypatch.setattr(tile_races, "make_compiler", lambda device, jobs: contextlib.nullcontext(compiler))


@pytest.mark.usefixtures("fakes")
def test_every_tile_of_every_class_races_and_a_shape_is_raced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiles, "SHAPES", ("b1-h8-s2048", "b1-h12-s1664"))
    monkeypatch.setattr(tiles, "LONG_KEYS", ("b1-h8-sq512-sk2048",))
    path = tmp_path / "tiles.csv"
    assert tiles.main([str(path)]) == 0
    rows = read(path)
    assert len(rows) == sum((2 + causal) * len(each) for (_, causal), each in TILES.items())
    assert all(float(row["ms"]) > 0 for row in rows)
    assert tiles.main([str(path)]) == 0
    assert read(path) == rows
    assert tiles.main([str(path), "--fit"]) == 0
    assert capsys.readouterr().out.count("left out:") == len(TILES)
    assert tiles.main([str(path), "--candidates"]) == 0
    others = sum((2 + causal) * len(each) for (_, causal), each in CANDIDATES.items())
    assert len(read(path)) == len(rows) + others
    assert tiles.main([str(path), "--fit"]) == 0
    assert capsys.readouterr().out.count("left out:") == len(TILES) + len(CANDIDATES)


@pytest.mark.usefixtures("fakes")
def test_some_classes_race_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SHAPES", ("b1-h8-s2048",))
    path = tmp_path / "tiles.csv"
    assert tiles.main([str(path), "--head-dim", "64", "--head-dim", "128", "--mask", "full"]) == 0
    assert {row["workload"].removeprefix("fwd-bf16-b1-h8-hk8-sq2048-sk2048-") for row in read(path)} == {"d64", "d128"}


def test_what_serves_is_printed_by_the_tile_that_it_takes_the_place_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiles.main([str(TIMES), "--served"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, TILES.values()))
    assert "d128 causal by 128 x 128: 1.012, at most 1.102, of 31" in lines
    assert tiles.main([str(TIMES), "--served", "--dtype", "fp16"]) == 0
    assert not capsys.readouterr().out.strip(), "which was not raced"
    assert {workload.dtype for workload in tiles.workloads(dtype="fp16")} == {"fp16"}


def test_the_configs_of_a_shape_are_valid_and_differ() -> None:
    for workload in tiles.workloads(candidates=True, short=True):
        ours = configs(workload, H200)
        assert len(set(ours.values())) == len(ours)
        for shape, config in ours.items():
            assert shape == (config.integer("warpgroups"), config.integer("block_n"))
            assert invalid(config, specialization(workload), H200) is None
