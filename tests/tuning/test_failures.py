"""Candidates and workloads that fail cost themselves and nothing else."""

from __future__ import annotations

import pytest

from flashgen.core.config import Config
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.measure.executor import LocalExecutor, Patience
from flashgen.measure.protocol import RaceJob, RaceResult
from flashgen.tuning.budget import Budget
from flashgen.tuning.events import Event, TrialFinished
from flashgen.tuning.finals import Finals
from flashgen.tuning.tune import tune
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor
from tests.tuning.faulty_service import fault
from tests.tuning.runs import CAUSAL, PLAIN, chosen, run


def test_failures_are_counted_and_do_not_end_a_search(store: Store) -> None:
    def broken(config: Config) -> Failure | None:
        return Failure(stage="timeout", reason="hung") if dict(config.knobs).get("loads") == "pointer" else None

    events: list[Event] = []
    compiler = FakeCompiler(spilling=0.3)
    (outcome,) = run(store, executor=FakeExecutor(broken=broken), compiler=compiler, events=events).outcomes
    failed = [e.trial.outcome for e in events if isinstance(e, TrialFinished) and isinstance(e.trial.outcome, Failure)]
    assert sum(dict(outcome.failures).values()) == len(failed) > 0
    assert {"timeout", "resources"} <= set(dict(outcome.failures))
    assert dict(chosen(store).config.knobs).get("loads") != "pointer"


@EXHAUSTIVE
def test_candidates_that_take_the_worker_down_cost_one_trial_each(store: Store) -> None:
    """The real worker process around a service whose candidates hang, abort, crash and run out of memory."""
    patience = Patience(start_s=60.0, evaluate_s=1.5)
    with LocalExecutor(service="tests.tuning.faulty_service:Service", patience=patience) as executor:
        finished = tune(
            [CAUSAL],
            device=H200,
            store=store,
            compiler=FakeCompiler(failing=0.0, spilling=0.0),
            executor=executor,
            budget=Budget(trials=20),
        )
    trials = store.trials(CAUSAL, H200)
    assert len(trials) == 20
    for trial in trials:
        kind = fault(trial.config)
        assert isinstance(trial.outcome, Measurement) == (kind == "well"), (kind, trial.outcome)
        if isinstance(trial.outcome, Failure):
            stages = {"hang": "timeout", "abort": "launch", "segfault": "launch", "memory": "memory", "error": "verify"}
            assert trial.outcome.stage == stages[kind], trial.outcome
    assert len(dict(finished.outcomes[0].failures)) >= 3, "the space must plant several kinds of faults"
    assert fault(chosen(store).config) == "well"


def test_spilling_candidates_are_not_measured(store: Store) -> None:
    executor, compiler = FakeExecutor(), FakeCompiler(failing=0.0, spilling=0.3)
    run(store, executor=executor, compiler=compiler)
    spilled = {t.config for t in store.trials(CAUSAL, H200) if isinstance(t.outcome, Failure)}
    assert spilled
    assert not spilled & {config for _, config in executor.evaluated}


def test_a_workload_without_any_valid_candidate_does_not_stop_the_others(store: Store) -> None:
    class Picky(FakeExecutor):
        def evaluate(self, job):  # type: ignore[no-untyped-def]
            if job.workload == CAUSAL:
                return Failure(stage="verify", reason="wrong answers")
            return super().evaluate(job)

    unsupported = Workload(batch=1, nheads=1, seqlen_q=64, head_dim=1024)
    finished = run(store, CAUSAL, unsupported, PLAIN, executor=Picky())
    assert [outcome.status for outcome in finished.outcomes] == ["failed", "unsupported", "tuned"]
    assert [outcome.workload for outcome in finished.failed] == [CAUSAL, unsupported]
    assert "wrong answers" in finished.outcomes[0].reason
    assert "head_dim" in finished.outcomes[1].reason
    assert store.record(CAUSAL, H200) is None


@pytest.mark.parametrize(
    "key", ["b0-h8-s128-d64", "b1-h8-sq128-sk0-d64", "bwd-b1-h8-sq0-sk128-d64", "dec-b4-h8-sk0-d64"]
)
def test_a_workload_without_anything_to_compute_is_not_tuned(store: Store, key: str) -> None:
    executor = FakeExecutor()
    (outcome,) = run(store, Workload.parse(key), executor=executor).outcomes
    assert outcome.status == "unsupported"
    assert outcome.reason == f"what is tuned has queries that see keys; {outcome.workload.key} has none"
    assert not executor.evaluated


def test_what_fails_in_the_finals_is_replaced_and_remembered(store: Store) -> None:
    run(store)
    winner = chosen(store).config
    fails = Failure(stage="verify", reason="wrong after the timing")
    executor = FakeExecutor(broken_in_race=lambda c: fails if c == winner else None)
    events: list[Event] = []
    (outcome,) = run(store, executor=executor, retune=True, events=events).outcomes
    assert outcome.status == "tuned"
    assert chosen(store).config != winner
    remembered = {t.config: t.outcome for t in store.trials(CAUSAL, H200)}
    assert remembered[winner] == fails
    told = [event.trial for event in events if isinstance(event, TrialFinished) and event.trial.source == "finals"]
    assert [(trial.config, trial.outcome) for trial in told] == [(winner, fails)]


def test_where_all_fail_in_the_first_race_the_next_best_have_their_turn(store: Store) -> None:
    fails, broken = Failure(stage="verify", reason="wrong on hard data"), set[Config]()

    class Strict(FakeExecutor):
        def race(self, job: RaceJob) -> RaceResult:
            if not self.races:
                broken.update(job.configs)
            return super().race(job)

    executor = Strict(broken_in_race=lambda config: fails if config in broken else None)
    finals = Finals(rounds=3, near_share=0.5, guard_share=0.02)
    (outcome,) = run(store, executor=executor, finals=finals).outcomes
    assert not executor.races[0].baselines
    assert len(broken) == finals.near_most
    assert outcome.status == "tuned"
    assert chosen(store).config not in broken


@EXHAUSTIVE
def test_all_failing_in_the_finals_is_a_failed_workload(store: Store) -> None:
    fails = Failure(stage="launch", reason="lost")
    (outcome,) = run(store, executor=FakeExecutor(broken_in_race=lambda config: fails)).outcomes
    assert outcome.status == "failed"
    assert store.record(CAUSAL, H200) is None
