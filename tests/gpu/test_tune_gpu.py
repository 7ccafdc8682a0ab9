"""Tune, then serve, on a GPU: the record of a search is what the next call runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.codegen.families import applicable, fitted
from flashgen.codegen.family import Sizes
from flashgen.core.record import Failure
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.launch.gpu import current_device
from flashgen.measure.data_kinds import HARD_KINDS
from flashgen.measure.directions import DIRECTIONS
from flashgen.measure.protocol import specialization
from flashgen.measure.toolchain import GpuToolchain
from tests.gpu.command import run

pytestmark = pytest.mark.gpu

SHAPE = "b2-h8-hk2-s1024-d64-causal"


@pytest.mark.alone
def test_a_winner_is_as_fast_on_hard_data(tmp_path: Path) -> None:
    """Of a workload whose default on Hopper takes twice as long there."""
    database = tmp_path / "user.sqlite3"
    shape = "b1-h32-s8192-d64-causal"
    done = run("tune", "--shape", shape, "--budget", "12", "--json", FLASHGEN_DB=str(database))
    assert done.returncode == 0, done.stderr
    with Store.open(database, read_only=True) as store:
        (record,) = store.records()
    assert record.measurement is not None
    assert record.time_ms is not None
    assert record.hard_ms is not None
    assert len(record.measurement.hard_times_ms) == len(record.measurement.times_ms) >= 2
    assert 0.9 < record.hard_ms / record.time_ms < 1.1, record


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("data", HARD_KINDS)
@pytest.mark.parametrize(
    "key", ["bf16-b1-h4-s2048-d64-causal", "fp16-b1-h4-s2048-d128", "bf16-b1-h4-s2048-d256-causal"]
)
def test_defaults_are_right_on_hard_data_of_usual_sizes(key: str, data: str, direction: str) -> None:
    workload, device = Workload.parse(f"{direction}-{key}"), current_device()
    spec = specialization(workload)
    case = DIRECTIONS[workload.direction].problem(workload, 1, 7, torch.device("cuda"), data)
    for row in applicable(spec, device):
        config = fitted(row.default(spec, device), spec, Sizes.of(workload), device)
        verdict = case.run(GpuToolchain(device, 0).factory(spec, config))
        assert not isinstance(verdict, Failure), (str(config), str(verdict))


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
