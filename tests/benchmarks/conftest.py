"""What tests of benchmarks of searches share: the records that ship, a bench and a command without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import search_bench
from benchmarks.search_bench import Bench
from flashgen.db.layers import Layers
from tests.tuning.fakes import Clock, FakeCompiler, FakeExecutor


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[Layers]:
    with Layers.open([tmp_path / "none.sqlite3"]) as opened:
        yield opened


@pytest.fixture
def bench(layers: Layers, tmp_path: Path) -> Callable[[FakeExecutor], Bench]:
    """One that says nothing, whose file is `rows.csv`, and whose compiler fails at nothing."""
    return lambda executor: Bench(
        path=tmp_path / "rows.csv",
        executor=executor,
        compiler=FakeCompiler(failing=0.0, spilling=0.0),
        layers=layers,
        jobs=2,
        say=lambda line: None,
        clock=executor.clock,
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    """What commands measure on in place of a GPU."""
    executor = FakeExecutor(clock=Clock())
    monkeypatch.setattr(search_bench, "make_executor", lambda index: executor)
    monkeypatch.setattr(search_bench, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))
    return executor
