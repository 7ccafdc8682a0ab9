"""Tune, then serve, on a GPU: the record of a search is what the next call runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.core.settings import child_environment
from flashgen.db.store import Store

pytestmark = pytest.mark.gpu

SHAPE = "b2-h8-hk2-s1024-d64-causal"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashgen", *arguments],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_tune_then_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tmp_path / "user.sqlite3"
    monkeypatch.setenv("FLASHGEN_DB", str(database))
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    done = run("tune", "--shape", SHAPE, "--budget", "12", "--json", FLASHGEN_DB=str(database))
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(events) > 3
    with Store.open(database, read_only=True) as store:
        record = store.records()[0]
        trials = store.trials(record.workload, record.device)
    assert record.provenance == "measured"
    assert record.measurement is not None
    assert record.measurement.reference_ms is not None
    assert len(trials) >= 5
    assert {baseline.impl for baseline in record.baselines} >= {"sdpa-flash"}
    flashgen.reload()
    q = torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    explanation = flashgen.explain(q, k, v, causal=True)
    assert explanation.served.rung == 3
    assert explanation.served.config == record.config
    assert not explanation.is_stale
    assert torch.isfinite(flashgen.attention(q, k, v, causal=True)).all()
    flashgen.reload()
