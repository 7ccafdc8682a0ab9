"""Tune both passes of a shape, then train with it, on a GPU: the records of the searches are what `backward()` runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.codegen.families import family
from flashgen.core.record import TuningRecord
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from tests.gpu.command import run

pytestmark = pytest.mark.gpu

SHAPE = "b2-h8-hk2-s1000-d64-causal"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "user.sqlite3"
    monkeypatch.setenv("FLASHGEN_DB", str(path))
    monkeypatch.setenv("FLASHGEN_POLICY", "generated")
    settings.cache_clear()
    return path


def tuned(database: Path, *arguments: str) -> list[TuningRecord]:
    """The records of a run, the backward pass first."""
    done = run("tune", "--shape", SHAPE, *arguments, "--budget", "8", "--json", FLASHGEN_DB=str(database))
    assert done.returncode == 0, done.stderr
    with Store.open(database, read_only=True) as store:
        return sorted(store.records(), key=lambda record: record.workload.direction)


def gradients(*, deterministic: bool) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((2, 8, 1000, 64), (2, 2, 1000, 64), (2, 2, 1000, 64))
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for size in sizes)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flashgen.attention(*leaves, causal=True, deterministic=deterministic)
    weight = torch.randn(out.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
    return list(torch.autograd.grad(out, leaves, weight))


def test_tune_both_passes_then_train(database: Path) -> None:
    backward, forward = tuned(database, "--direction", "both")
    assert [record.workload.direction for record in (backward, forward)] == ["backward", "forward"]
    for record in (backward, forward):
        assert record.provenance == "measured"
        assert family(record.config.family).direction == record.workload.direction
        assert record.measurement is not None
        assert record.measurement.reference_ms is not None
        assert record.baselines
    with Store.open(database, read_only=True) as store:
        trials = store.trials(backward.workload, backward.device)
    assert len({trial.config.family for trial in trials}) > 1
    shown = run("explain", f"bwd-{SHAPE}", "--json", FLASHGEN_DB=str(database))
    facts = json.loads(shown.stdout)
    assert (facts["rung"], facts["family"], facts["stale"]) == (3, backward.config.family, False)
    assert facts["knobs"] == dict(backward.config.knobs)
    flashgen.reload()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(deterministic=False))
    flashgen.reload()


def test_a_deterministic_search_ends_with_the_same_bits(database: Path) -> None:
    (record,) = tuned(database, "--direction", "backward", "--deterministic")
    assert record.workload == Workload.parse(f"bwd-{SHAPE}-deterministic")
    assert family(record.config.family).is_deterministic
    flashgen.reload()
    first = gradients(deterministic=True)
    for _ in range(3):
        assert all(map(torch.equal, gradients(deterministic=True), first))
    flashgen.reload()
