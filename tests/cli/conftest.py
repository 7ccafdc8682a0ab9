"""Running commands: in this process with typer's runner, or as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashgen.cli import arguments
from flashgen.cli.main import app
from flashgen.core.device import Device, find_device
from flashgen.core.settings import settings
from flashgen.db.store import Store
from flashgen.tuning import runs
from tests.db.samples import FAILED, MEASURED, PREDICTED, SHORT, TRIAL, timed
from tests.tuning.fakes import FakeCompiler, FakeExecutor

Invoke = Callable[..., Any]
"""Returns typer's result: exit_code, stdout, stderr."""

Measure = Callable[[FakeExecutor], FakeExecutor]

ROOT = Path(__file__).parents[2]


def own(stdout: str) -> list[dict[str, object]]:
    """The records of the user's database among those that `--json` printed."""
    return [row for row in json.loads(stdout) if not str(row["layer"]).startswith("shipped/")]


@pytest.fixture
def invoke() -> Invoke:
    """Run `flashgen <arguments>` in this process."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `flashgen <arguments>` as a process, with the test's own database and cache."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "flashgen", *map(str, arguments)]
        return subprocess.run(
            line, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def tuned() -> Path:
    """The user database with a measured and a predicted record, a second workload, and two trials."""
    path = settings().db_layers[0]
    with Store.open(path) as store:
        store.put_records([MEASURED, PREDICTED, replace(timed(MEASURED, 0.1), workload=SHORT, baselines=())])
        store.put_trial(TRIAL)
        store.put_trial(FAILED)
    return path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(arguments, "device_here", lambda: None)


@pytest.fixture
def nothing_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    """No database ships, of an H100 either."""
    monkeypatch.setattr("flashgen.db.layers.shipped_databases", dict)


@pytest.fixture
def h100_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H100."""
    monkeypatch.setattr(arguments, "device_here", lambda: find_device("h100"))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command find a compiler that needs no time."""

    @contextlib.contextmanager
    def compiler(device: Device, jobs: int) -> Iterator[FakeCompiler]:
        yield FakeCompiler()

    monkeypatch.setattr(runs, "make_compiler", compiler)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, compiles: None) -> Measure:
    """Let the command find this executor instead of a GPU, and a compiler that needs no time."""

    def use(executor: FakeExecutor) -> FakeExecutor:
        monkeypatch.setattr(runs, "make_executor", lambda index: executor)
        return executor

    return use
