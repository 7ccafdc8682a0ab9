"""Races that end when they are sure, and records timed again, on a GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.record import Measurement
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.past import past_of
from flashgen.db.store import Store
from flashgen.measure.executor import LocalExecutor
from flashgen.measure.protocol import RaceJob, specialization
from flashgen.measure.sequential import LEAST_ROUNDS, Rule, beats, confidence
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import CompilePool
from flashgen.tuning.context import Options
from flashgen.tuning.known_searches import learned_from
from flashgen.tuning.tune import tune

pytestmark = pytest.mark.gpu

WORKLOAD = Workload.parse("b2-h8-hk2-s2048-d64-causal")


@pytest.mark.alone
def test_a_race_ends_when_it_is_sure_and_keeps_an_equal_champion() -> None:
    with LocalExecutor() as executor:
        device = executor.describe().device
        usual = default_config(specialization(WORKLOAD), device)
        portable = default_config(specialization(WORKLOAD), device, ["portable_forward"])
        slow = portable.replace(num_stages=1)
        job = RaceJob(
            workload=WORKLOAD,
            configs=(usual, slow),
            rounds=40,
            warm_s=0.05,
            window_s=0.1,
            baselines=True,
            hard=True,
            rule=Rule(champion=0, limit_s=20.0),
        )
        started = time.monotonic()
        champion, other = executor.race(job).outcomes
        assert time.monotonic() - started < 60
    assert isinstance(champion, Measurement)
    assert isinstance(other, Measurement)
    assert LEAST_ROUNDS <= len(champion.times_ms) < 40
    assert not beats(other.balanced.times_ms, champion.balanced.times_ms)
    assert confidence(champion.balanced.times_ms, [other.balanced.times_ms]) > 0.9
    assert champion.reference_ms is not None


def test_a_record_of_another_triton_is_timed_again(tmp_path: Path) -> None:
    with LocalExecutor() as executor, Store.open(tmp_path / "user.sqlite3") as store:
        device = executor.describe().device
        with CompilePool(device, jobs=4) as compiler:
            shared = {"device": device, "store": store, "compiler": compiler, "executor": executor}
            (made,) = tune([WORKLOAD], budget=Budget(seconds=10.0), **shared).outcomes  # type: ignore[arg-type]
            assert made.record is not None
            assert made.record.limits.power_limit_w
            old = replace(made.record, versions=replace(made.record.versions, triton="3.0.0"))
            store.put_record(old)
            again = {"options": Options(reverify=3), "budget": Budget(trials=1), **shared}
            started = time.monotonic()
            (outcome,) = tune([WORKLOAD], **again).outcomes  # type: ignore[arg-type]
            print(f"{outcome.status} after {time.monotonic() - started:.1f} s: {outcome.reason}")
            assert outcome.status in ("kept", "tuned")
            assert tune([WORKLOAD], **again).outcomes[0].status == "skipped"  # type: ignore[arg-type]
        assert old in [each.record for each in past_of(store.reader, WORKLOAD).replaced]


def test_a_model_that_learned_elsewhere_proposes_candidates(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    with LocalExecutor() as executor, Store.open(tmp_path / "user.sqlite3") as store, Layers.open() as layers:
        device, learned = executor.describe().device, learned_from(layers)
        with CompilePool(device, jobs=8) as compiler:
            shared = {"device": device, "store": store, "compiler": compiler, "executor": executor, "learned": learned}
            (made,) = tune([WORKLOAD], budget=Budget(trials=40), **shared).outcomes  # type: ignore[arg-type]
        trials = store.trials(WORKLOAD, device)
    assert made.record is not None
    by_model = [trial for trial in trials if trial.source == "learned"]
    assert len(by_model) > 10
    right = [trial for trial in by_model if isinstance(trial.outcome, Measurement)]
    assert len(right) > len(by_model) // 2, "most of what it proposes works"
