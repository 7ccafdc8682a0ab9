"""The first call of a process whose kernel an earlier one has compiled: what it must not import."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops import log
from tests.fakes.gpu import FakeGpu, qkv
from tests.heavy import HEAVY

ROOT = Path(__file__).resolve().parents[2]


def modules_of_first_call() -> set[str]:
    """What the first calls of a new process import, torch being there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.first_call", "a100"],
        cwd=ROOT,
        env={**os.environ, "FLASHGEN_QUIET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_a_warm_first_call_imports_no_compiler_and_nothing_else_heavy() -> None:
    cold = modules_of_first_call()
    assert {"triton", "jinja2"} <= cold
    assert not {"sqlalchemy", "alembic", "optuna", "typer", "rich", "yaml"} & cold
    warm = modules_of_first_call()
    assert "flashgen" in warm
    assert not set(HEAVY) & warm


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_a_plan_is_made(
    gpu: FakeGpu, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = log.notice
    monkeypatch.setattr(log, "notice", lambda *given: (seen.append(gc.isenabled()), real(*given)))
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        flashgen.attention(*qkv())
        assert gc.isenabled() is is_on
        with pytest.raises(WorkloadError):
            flashgen.attention(qkv(nheads=3)[0], *qkv(nheads_k=2)[1:])
        assert gc.isenabled() is is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert seen == [False]
