"""The races of heads side by side, without a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from benchmarks import packed_heads, tile_races
from benchmarks.search_files import read
from flashgen.codegen.hopper_forward.tiles import GROUPED, TILES
from tests.tuning.fakes import Clock, FakeCompiler, FakeExecutor

TIMES = Path(__file__).parents[1] / "codegen/packed_heads_nvidia_h200.csv"


def test_every_tile_races_with_one_head_and_several_and_a_shape_is_raced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, compiler = FakeExecutor(clock=Clock()), FakeCompiler(failing=0.0)
    monkeypatch.setattr(tile_races, "make_executor", lambda gpu: executor)
    monkeypatch.setattr(tile_races, "make_compiler", lambda device, jobs: contextlib.nullcontext(compiler))
    monkeypatch.setattr(packed_heads, "SHAPES", ("b2-h32-hk8-s300", "b1-h28-hk4-s200"))
    monkeypatch.setattr(packed_heads, "FEWER", 1)
    path = tmp_path / "heads.csv"
    assert packed_heads.main([str(path)]) == 0
    rows = read(path)
    assert len(rows) == 2 * (
        sum(len(TILES[key]) for key in packed_heads.CLASSES) + len(TILES[128, True] + TILES[128, False])
    )
    assert {row["packed_heads"] for row in rows} == {"1", "4", "8"}
    assert packed_heads.main([str(path)]) == 0
    assert read(path) == rows


def test_the_constants_are_printed_with_what_they_are_worth(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(packed_heads.CLASSES) == GROUPED.keys()
    assert packed_heads.main([str(TIMES), "--fit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(2 * len(TILES[key]) + 1 for key in GROUPED)
    assert "d128 full    64 x  64: (0.922, 3, 0.6, 0, 0), 1.026 with several heads" in lines
    assert "  the best tile with one head: 1.071, at most 1.323" in lines
