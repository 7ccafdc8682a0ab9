"""Runs over what a program called: their order, their limit, what they skip, and what they say was gained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.calls import CallRecord
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, RunFinished
from flashgen.tuning.from_calls import LEAST_S, Gains
from flashgen.tuning.tune import tune
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200, FakeExecutor, true_ms
from tests.tuning.runs import CAUSAL, FINALS, LONGER, PLAIN, willing

DEFAULT = default_config(CAUSAL.specialization, H200)


def called(workload: Workload = CAUSAL, **changes: object) -> CallRecord:
    config = default_config(workload.specialization, H200)
    values = {"device": H200.identity, "rung": 8, "server": config.family, "config": config, "calls": 100, **changes}
    return CallRecord(workload=workload, call_ms=7.0, time_from="rate", **values)  # type: ignore[arg-type]


def run(
    store: Store, *workloads: Workload, limit_s: float, gains: Gains | None = None, retune: bool = False
) -> RunFinished:
    executor = FakeExecutor()
    events: list[Event] = []
    return tune(
        workloads,
        device=H200,
        store=store,
        compiler=willing(),
        executor=executor,
        budget=Budget(seconds=20.0),
        options=Options(finals=FINALS, retune=retune),
        on_event=gains or events.append,
        clock=executor.clock,
        limit_s=limit_s,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "tuning.sqlite3")


@EXHAUSTIVE
def test_a_run_ends_with_its_limit_and_the_next_one_goes_on(store: Store) -> None:
    order = (CAUSAL, PLAIN, LONGER)
    first = run(store, *order, limit_s=21.0)
    assert [one.workload for one in first.outcomes] == [CAUSAL]
    assert first.seconds < 21.0 + LEAST_S
    second = run(store, *order, limit_s=21.0)
    assert [(one.workload, one.status) for one in second.outcomes][:2] == [(CAUSAL, "skipped"), (PLAIN, "tuned")]
    again = run(store, CAUSAL, limit_s=24.0, retune=True)
    assert again.outcomes[0].status != "skipped"
    store.close()


def test_gains_compare_what_served_with_what_serves(store: Store) -> None:
    elsewhere = replace(called(), config=None, server="sdpa-flash", calls=3)
    unknown = replace(called(), config=DEFAULT.replace(num_warps=1) if "num_warps" in dict(DEFAULT.knobs) else None)
    gains = Gains([called(), elsewhere, unknown, called(PLAIN)])
    finished = run(store, CAUSAL, limit_s=24.0, gains=gains)
    (outcome,) = finished.outcomes
    assert outcome.record is not None
    found = {(one.calls, one.is_measured): one for one in gains.of(finished)}
    before, torch_before = found[100, True], found[3, True]
    assert before.before_ms == pytest.approx(true_ms(CAUSAL, DEFAULT), rel=0.02)
    assert before.after_ms == outcome.record.time_ms
    assert before.after_ms < before.before_ms
    assert torch_before.before_ms == CAUSAL.flops / 345e9
    assert all(one.workload == CAUSAL for one in found.values())
    store.close()
