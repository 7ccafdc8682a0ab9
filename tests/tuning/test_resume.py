"""What was done is kept: a killed run loses the candidate in flight, and the next one goes on."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.record import Failure, Measurement, TuningRecord, Versions
from flashgen.core.settings import child_environment
from flashgen.db.store import Store
from flashgen.measure.protocol import RaceJob, RaceResult
from flashgen.tuning.budget import Budget
from tests.tiers import EXHAUSTIVE, first
from tests.tuning.fakes import H200, FakeExecutor
from tests.tuning.runs import CAUSAL, PLAIN, Killed, chosen, run, willing


@pytest.mark.parametrize("after", first(1, [12, 1, 20]))
def test_a_killed_run_loses_the_trial_in_flight_alone(store: Store, after: int) -> None:
    def kill(number: int) -> None:
        if number == after:
            raise Killed

    with pytest.raises(Killed):
        run(store, executor=FakeExecutor(on_evaluate=kill))
    kept = store.trials(CAUSAL, H200)
    assert sum(isinstance(trial.outcome, Measurement) for trial in kept) == after
    assert store.record(CAUSAL, H200) is None
    executor = FakeExecutor()
    run(store, executor=executor)
    assert len(store.trials(CAUSAL, H200)) == 30
    assert not {t.config for t in kept} & {config for _, config in executor.evaluated}
    assert chosen(store).provenance == "measured"


@EXHAUSTIVE
def test_a_search_from_nothing_goes_on_from_none_that_lists_began(store: Store) -> None:
    def stopped(from_nothing: bool, after: int) -> None:
        def kill(number: int) -> None:
            if number == after:
                raise Killed

        with pytest.raises(Killed):
            run(store, executor=FakeExecutor(on_evaluate=kill), compiler=willing(), from_nothing=from_nothing)

    stopped(from_nothing=False, after=12)
    ordinary = {trial.config for trial in store.trials(CAUSAL, H200)}
    stopped(from_nothing=True, after=8)
    assert {trial.source for trial in store.trials(CAUSAL, H200)[12:]} <= {"random", "local", "sampler", "learned"}
    own = {trial.config for trial in store.trials(CAUSAL, H200)[12:]}
    executor = FakeExecutor()
    run(store, executor=executor, compiler=willing(), from_nothing=True)
    evaluated = {config for _, config in executor.evaluated}
    assert (len(own), len(evaluated)) == (8, 22), "of 30 it had 8, and of the ordinary search none"
    assert not own & evaluated
    assert default_config(CAUSAL.specialization, H200) in ordinary - evaluated


@EXHAUSTIVE
def test_a_search_of_one_family_goes_on_from_its_own_trials(store: Store) -> None:
    """Those of another one that are faster must not win it."""

    def kill(number: int) -> None:
        if number == 12:
            raise Killed

    with pytest.raises(Killed):
        run(store, executor=FakeExecutor(on_evaluate=kill), compiler=willing())
    kept = [trial.config.family for trial in store.trials(CAUSAL, H200)]
    (other,) = {"hopper_forward", "portable_forward"} - {kept[0]}
    executor = FakeExecutor()
    run(store, executor=executor, compiler=willing(), families=(other,))
    raced = {config.family for job in executor.races for config in job.configs}
    assert (kept[0] != other, raced) == (True, {other})
    assert len(executor.evaluated) == 30 - kept.count(other)


def test_kill_9_loses_the_trial_in_flight_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    Store.open(path).close()
    script = "from tests.tuning import slow_run; slow_run.main()"
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], env=child_environment(PYTHONPATH=os.getcwd()))
    with Store.open(path, read_only=True) as watched:
        while len(watched.trials(CAUSAL, H200)) < 5:
            assert process.poll() is None, "the run must not end by itself"
            time.sleep(0.05)
        process.kill()
        process.wait()
        kept = watched.trials(CAUSAL, H200)
    with Store.open(path) as opened:
        executor = FakeExecutor()
        (outcome,) = run(opened, executor=executor).outcomes
        assert outcome.status == "tuned"
        assert {trial.config for trial in kept} <= {trial.config for trial in opened.trials(CAUSAL, H200)}
        assert not {trial.config for trial in kept} & {config for _, config in executor.evaluated}


def test_ctrl_c_ends_the_run_and_keeps_what_was_done(store: Store) -> None:
    def interrupt(number: int) -> None:
        if number == 40:
            raise KeyboardInterrupt

    finished = run(store, CAUSAL, PLAIN, executor=FakeExecutor(on_evaluate=interrupt))
    assert finished.interrupted
    assert [outcome.workload for outcome in finished.outcomes] == [CAUSAL]
    assert store.trials(PLAIN, H200)
    again = run(store, CAUSAL, PLAIN)
    assert [outcome.status for outcome in again.outcomes] == ["skipped", "tuned"]


def test_a_finished_workload_is_skipped_until_it_is_retuned(store: Store) -> None:
    run(store)
    executor = FakeExecutor()
    (skipped,) = run(store, executor=executor).outcomes
    assert (skipped.status, executor.evaluated) == ("skipped", [])
    (again,) = run(store, executor=executor, retune=True).outcomes
    assert again.status in ("tuned", "kept")
    assert executor.evaluated


def test_a_changed_template_is_tuned_again_with_the_old_winner_as_incumbent(store: Store) -> None:
    run(store)
    old = chosen(store)
    store.put_record(dataclasses.replace(old, source_digest="of another template"))
    executor = FakeExecutor()
    (outcome,) = run(store, executor=executor, budget=Budget(trials=2)).outcomes
    assert [config for _, config in executor.evaluated] == [default_config(CAUSAL.specialization, H200), old.config]
    assert outcome.status == "kept"
    assert chosen(store).source_digest == old.source_digest


def test_a_run_that_is_killed_in_its_finals_goes_on_with_them(store: Store) -> None:
    class Dying(FakeExecutor):
        def race(self, job):  # type: ignore[no-untyped-def]
            if job.baselines:
                raise Killed
            return super().race(job)

    with pytest.raises(Killed):
        run(store, executor=Dying())
    assert len(store.trials(CAUSAL, H200)) == 30
    executor = FakeExecutor()
    run(store, executor=executor)
    assert executor.evaluated == []
    assert all(job.hard for job in executor.races)
    assert chosen(store).hard_ms is not None


def test_where_nothing_was_valid_a_search_is_told_to_try_it_again(store: Store) -> None:
    """Another process had the memory of the card; today it has gone."""
    full = FakeExecutor(broken=lambda config: Failure(stage="memory", reason="another process has it"))
    run(store, executor=full, budget=Budget(trials=10))
    executor = FakeExecutor()
    (same,) = run(store, executor=executor, budget=Budget(trials=10)).outcomes
    assert (same.status, executor.evaluated) == ("failed", [])
    assert same.reason.endswith("; 10 trials of earlier runs, made again with --retune")
    (again,) = run(store, executor=executor, budget=Budget(trials=10), retune=True).outcomes
    assert (again.status, executor.evaluated) == ("tuned", full.evaluated)


def test_trials_of_other_software_are_not_gone_on_from(store: Store) -> None:
    """Another Triton makes other kernels, of which none was measured, nor has failed."""

    def kill(number: int) -> None:
        if number == 12:
            raise Killed

    was = Versions(flashgen="0", triton="3.5.1", torch="2.11", driver="580")
    with pytest.raises(Killed):
        run(store, executor=FakeExecutor(on_evaluate=kill, versions=was), compiler=willing())
    before = {trial.config for trial in store.trials(CAUSAL, H200)}
    executor = FakeExecutor()
    run(store, executor=executor, compiler=willing())
    evaluated = {config for _, config in executor.evaluated}
    assert len(before) == 12
    assert len(evaluated) == 30
    assert before <= evaluated


@pytest.mark.parametrize("during", ["search", "finals"])
def test_a_record_that_another_run_stores_at_the_same_time_is_raced(store: Store, during: str) -> None:
    """Both begin without one, and the longer search, which has the better config, ends first."""
    others: list[TuningRecord] = []

    class Beside(FakeExecutor):
        def race(self, job: RaceJob) -> RaceResult:
            if during == "finals":
                self.other_run(6)
            return super().race(job)

        def other_run(self, number: int) -> None:
            if number == 6 and not others:
                run(store, compiler=willing(), budget=Budget(trials=60))
                others.append(chosen(store))

    executor = Beside()
    if during == "search":
        executor.on_evaluate = executor.other_run
    (outcome,) = run(store, executor=executor, compiler=willing(), budget=Budget(trials=8)).outcomes
    assert outcome.status == "kept"
    assert chosen(store).config == others[0].config
    assert others[0].config in executor.races[-1].configs
    assert len(executor.evaluated) == 9
