"""What is fast on normal data alone neither wins nor goes on being served."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.codegen.families import default_config, invalid, successor, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.peak import least_ms
from flashgen.core.record import Measurement, Trial, timestamp
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.report import report_rows
from tests.tiers import first
from tests.tuning.fakes import H200, FakeExecutor
from tests.tuning.runs import CAUSAL, FINALS, PLAIN, chosen, run, willing

HOPPER = ("hopper_forward",)


def usual_default(workload: Workload) -> Config:
    spec = workload.specialization
    return usual(default_config(spec, H200), spec, Sizes.of(workload), H200)


def uneven_executor(hard_factor: float = 2.0) -> FakeExecutor:
    """The default is the best by 3% on normal data, and alone takes `hard_factor` times as long on hard data."""

    def time_ms(workload: Workload, config: Config) -> float:
        default = usual_default(workload)
        differing = len(set(config.knobs) - set(default.knobs))
        return workload.flops / 500e9 * (1 + 0.004 * differing) * (1.0 if differing else 0.97)

    defaults = {usual_default(workload) for workload in (CAUSAL, PLAIN)}
    return FakeExecutor(time_ms=time_ms, hard_factor=lambda c: hard_factor if c in defaults else 1.02)


@pytest.mark.parametrize("workload", first(1, [CAUSAL, PLAIN]), ids=["causal", "plain"])
@pytest.mark.parametrize("hard_factor", first(1, [2.0, 1.0]))
def test_no_record_wins_by_ignoring_hard_data(store: Store, workload: Workload, hard_factor: float) -> None:
    executor = uneven_executor(hard_factor)
    (outcome,) = run(store, workload, executor=executor, compiler=willing(), families=HOPPER).outcomes
    record, default = chosen(store, workload), usual_default(workload)
    assert min(executor.evaluated, key=lambda job: executor.time_ms(*job))[1] == default, "on normal data alone it wins"
    if hard_factor == 1.0:
        assert record.config == default
        return
    assert outcome.status == "tuned"
    assert record.config != default
    assert record.measurement is not None
    assert len(record.measurement.hard_times_ms) == len(record.measurement.times_ms) == FINALS.rounds
    assert record.hard_ms == pytest.approx(1.02 * record.measurement.median_ms, rel=0.02)
    assert record.time_ms == pytest.approx(executor.time_ms(workload, record.config), rel=0.06)
    even = [executor.time_ms(workload, c) for _, c in executor.evaluated if c != default]
    assert executor.time_ms(workload, record.config) < 1.03 * min(even)
    (row,) = report_rows([outcome], H200)
    assert row.hard_share == pytest.approx(1.02, rel=0.02)


def test_what_a_family_offers_no_more_is_followed_by_its_successor(store: Store) -> None:
    """A record of an earlier version, and a search that such a version began: neither serves, nor is measured."""
    run(store, compiler=willing(), families=HOPPER, budget=Budget(trials=8))
    old = chosen(store)
    former = old.config.replace(heads_per_group=16, softmax_reference="first_block")  # not the default's group
    assert invalid(former, CAUSAL.specialization, H200) is not None
    store.put_record(dataclasses.replace(old, config=former))
    outcome = Measurement(times_ms=(1.01 * least_ms(CAUSAL, H200),), reference_ms=1.0)
    trial = Trial(workload=CAUSAL, device=H200, config=former, source="random", outcome=outcome)
    store.put_trial(dataclasses.replace(trial, created=timestamp()))
    executor, budget = FakeExecutor(), Budget(trials=2)
    (finished,) = run(
        store, executor=executor, compiler=willing(), retune=True, families=HOPPER, budget=budget
    ).outcomes
    wanted = {default_config(CAUSAL.specialization, H200), successor(former, CAUSAL.specialization)}
    assert {config for _, config in executor.evaluated} == wanted
    assert finished.status == "tuned"
    assert chosen(store).config in wanted
