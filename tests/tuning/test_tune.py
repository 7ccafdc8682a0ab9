"""The whole run on a fake GPU and a real database: resume, determinism, guards, failures, budgets, predictions."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.codegen import families
from flashgen.codegen.families import default_config, invalid, successor
from flashgen.codegen.space import search_space
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import MeasureError, TuningError
from flashgen.core.peak import least_ms
from flashgen.core.record import Failure, Measurement, Trial, TuningRecord, Versions, moment
from flashgen.core.settings import child_environment
from flashgen.core.workload import Specialization, Workload
from flashgen.db.store import Store
from flashgen.measure.executor import LocalExecutor, Patience
from flashgen.measure.protocol import HostInfo
from flashgen.tuning.budget import Budget
from flashgen.tuning.candidates import Candidates, by_prediction, nearest, ranking
from flashgen.tuning.compile_pool import Compiled
from flashgen.tuning.context import Options, timestamp
from flashgen.tuning.events import (
    CandidateRanked,
    Event,
    RunFinished,
    TrialFinished,
    Warned,
    WorkloadFinished,
    WorkloadStarted,
    to_json,
)
from flashgen.tuning.finals import Finals
from flashgen.tuning.report import report_rows
from flashgen.tuning.tune import grouped, plan, tune
from tests.tuning.fakes import H200, Clock, FakeCompiler, FakeExecutor, true_ms
from tests.tuning.faulty_service import fault

CAUSAL = Workload(batch=1, nheads=32, nheads_k=8, seqlen_q=4096, head_dim=128, causal=True)
LONGER = CAUSAL.with_shape(seqlen_q=8192, seqlen_k=8192)
PLAIN = Workload(batch=2, nheads=12, seqlen_q=1024, head_dim=64)
FINALS = Finals(rounds=3)


class Killed(BaseException):
    """Stands for kill -9: nothing of the run sees it coming or cleans up after it."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuning.sqlite3") as opened:
        yield opened


TWO_FAMILIES = ("hopper_forward", "portable_forward")


def run(
    store: Store,
    *workloads: Workload,
    executor: FakeExecutor | None = None,
    compiler: FakeCompiler | None = None,
    budget: Budget | None = None,
    events: list[Event] | None = None,
    **options: object,
) -> RunFinished:
    executor = executor or FakeExecutor()
    told = events if events is not None else []
    return tune(
        workloads or (CAUSAL,),
        device=H200,
        store=store,
        compiler=compiler or FakeCompiler(),
        executor=executor,
        budget=budget or Budget(trials=30),
        options=Options(**{"finals": FINALS, **options}),  # type: ignore[arg-type]
        on_event=told.append,
        clock=executor.clock,
    )


def chosen(store: Store, workload: Workload = CAUSAL) -> TuningRecord:
    record = store.record(workload, H200)
    assert record is not None
    return record


def test_a_run_stores_a_measured_record_with_everything(store: Store) -> None:
    finished = run(store)
    (outcome,) = finished.outcomes
    record = chosen(store)
    assert outcome.status == "tuned"
    assert outcome.record == record
    assert record.provenance == "measured"
    assert record.measurement is not None
    assert len(record.measurement.times_ms) == FINALS.rounds
    assert record.measurement.max_error == 1e-3
    assert record.measurement.sm_clock_mhz == 1700.0
    assert record.measurement.reference_ratio is not None
    assert record.versions.triton == "3.6.0"
    assert [baseline.impl for baseline in record.baselines] == ["sdpa-flash", "sdpa-cudnn"]
    assert record.source_digest
    assert true_ms(CAUSAL, record.config) < 0.9 * true_ms(CAUSAL, default_config(CAUSAL.specialization, H200))
    trials = store.trials(CAUSAL, H200)
    assert len(trials) == 30 == outcome.trials
    assert trials[0].source == "default"
    assert {trial.source for trial in trials} >= {"default", "model", "local"}


def test_finals_have_the_best_the_default_and_baselines(store: Store) -> None:
    executor = FakeExecutor()
    run(store, executor=executor, finals=dataclasses.replace(FINALS, guard_share=9.0))
    last = executor.races[-1]
    assert last.baselines
    assert last.window_s == 0.3
    assert default_config(CAUSAL.specialization, H200) in last.configs
    assert len(last.configs) <= FINALS.last + 2
    fastest = min(true_ms(CAUSAL, config) for _, config in executor.evaluated)
    assert min(true_ms(CAUSAL, config) for config in last.configs) <= 1.01 * fastest


@pytest.mark.parametrize("after", [1, 12, 20])
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


def test_two_runs_agree(tmp_path: Path) -> None:
    winners = []
    for name in ("one", "two"):
        with Store.open(tmp_path / f"{name}.sqlite3") as opened:
            run(opened, CAUSAL, PLAIN)
            winners.append([chosen(opened, w).config for w in (CAUSAL, PLAIN)])
            configs = [trial.config for trial in opened.trials(CAUSAL, H200)]
        winners[-1].extend(configs)
    assert winners[0] == winners[1]


def test_other_noise_leads_to_winners_of_nearly_the_same_speed(tmp_path: Path) -> None:
    times = []
    for seed in range(4):
        with Store.open(tmp_path / f"{seed}.sqlite3") as opened:
            run(opened, executor=FakeExecutor(seed=seed), budget=Budget(trials=80))
            times.append(true_ms(CAUSAL, chosen(opened).config))
    assert max(times) / min(times) < 1.05


def test_an_incumbent_stays_within_the_noise(store: Store) -> None:
    """The fastest config of all is the incumbent; others may look faster by luck and must not replace it."""
    run(store, budget=Budget(trials=60))
    incumbent = chosen(store).config
    for seed in range(1, 4):
        executor = FakeExecutor(seed=seed, noise=0.01)
        (outcome,) = run(store, executor=executor, retune=True, seed=seed).outcomes
        assert incumbent in executor.races[-1].configs
        now = chosen(store).config
        assert true_ms(CAUSAL, now) < 1.01 * true_ms(CAUSAL, incumbent)
        assert outcome.status == ("kept" if now == incumbent else "tuned")
        incumbent = now


def test_failures_are_counted_and_do_not_end_a_search(store: Store) -> None:
    def broken(config: Config) -> Failure | None:
        return Failure(stage="timeout", reason="hung") if dict(config.knobs).get("loads") == "pointer" else None

    events: list[Event] = []
    (outcome,) = run(store, executor=FakeExecutor(broken=broken), events=events).outcomes
    failed = [e.trial.outcome for e in events if isinstance(e, TrialFinished) and isinstance(e.trial.outcome, Failure)]
    assert sum(dict(outcome.failures).values()) == len(failed) > 0
    assert {"timeout", "resources"} <= set(dict(outcome.failures))
    assert dict(chosen(store).config.knobs).get("loads") != "pointer"


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


def test_what_fails_in_the_finals_is_replaced_and_remembered(store: Store) -> None:
    run(store)
    winner = chosen(store).config
    fails = Failure(stage="verify", reason="wrong after the timing")
    (outcome,) = run(
        store, executor=FakeExecutor(broken_in_race=lambda c: fails if c == winner else None), retune=True
    ).outcomes
    assert outcome.status == "tuned"
    assert chosen(store).config != winner
    remembered = {t.config: t.outcome for t in store.trials(CAUSAL, H200)}
    assert remembered[winner] == fails


def test_all_failing_in_the_finals_is_a_failed_workload(store: Store) -> None:
    fails = Failure(stage="launch", reason="lost")
    (outcome,) = run(store, executor=FakeExecutor(broken_in_race=lambda config: fails)).outcomes
    assert outcome.status == "failed"
    assert store.record(CAUSAL, H200) is None


HOPPER = ("hopper_forward",)


def uneven_executor(hard_factor: float = 2.0) -> FakeExecutor:
    """The default is the best by 3% on normal data, and alone takes `hard_factor` times as long on hard data."""

    def time_ms(workload: Workload, config: Config) -> float:
        default = default_config(workload.specialization, H200)
        differing = len(set(config.knobs) - set(default.knobs))
        return workload.flops / 500e9 * (1 + 0.004 * differing) * (1.0 if differing else 0.97)

    defaults = {default_config(workload.specialization, H200) for workload in (CAUSAL, PLAIN)}
    return FakeExecutor(time_ms=time_ms, hard_factor=lambda c: hard_factor if c in defaults else 1.02)


@pytest.mark.parametrize("workload", [CAUSAL, PLAIN], ids=["causal", "plain"])
@pytest.mark.parametrize("hard_factor", [2.0, 1.0])
def test_no_record_wins_by_ignoring_hard_data(store: Store, workload: Workload, hard_factor: float) -> None:
    executor = uneven_executor(hard_factor)
    (outcome,) = run(store, workload, executor=executor, compiler=willing(), families=HOPPER).outcomes
    record, default = chosen(store, workload), default_config(workload.specialization, H200)
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
    former = old.config.replace(softmax_reference="first_block")
    assert invalid(former, CAUSAL.specialization, H200) is not None
    store.put_record(dataclasses.replace(old, config=former))
    outcome = Measurement(times_ms=(0.001,), reference_ms=1.0)
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


def willing() -> FakeCompiler:
    return FakeCompiler(failing=0.0, spilling=0.0)


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


@pytest.mark.parametrize("seconds", [8.0, 20.0, 60.0])
def test_a_budget_in_seconds_holds_for_search_and_finals_together(store: Store, seconds: float) -> None:
    executor = FakeExecutor()
    (outcome,) = run(store, executor=executor, budget=Budget(seconds=seconds)).outcomes
    # two rounds of the last race are the least that tells a difference from noise
    least = 2 * (2 * 7 + 3) * 0.4 + Finals().near_s(12)
    # the first candidate is free
    assert outcome.seconds <= max(seconds, 0.4 * seconds + least) + 2 * executor.evaluate_s
    assert len(executor.evaluated) >= 0.4 * seconds / executor.evaluate_s - 1
    assert outcome.status == "tuned"


def test_what_is_served_is_measured_however_short_the_budget_is(store: Store) -> None:
    """Else the default, the only one that a process has time for while it starts, would take its place unraced."""
    run(store, budget=Budget(trials=60))
    incumbent = chosen(store).config
    default = default_config(CAUSAL.specialization, H200)
    executor = FakeExecutor()
    run(store, executor=executor, retune=True, budget=Budget(seconds=executor.evaluate_s / 2))
    assert incumbent != default
    assert [config for _, config in executor.evaluated] == [default, incumbent]
    assert incumbent in executor.races[-1].configs
    assert chosen(store).config == incumbent


def test_a_short_budget_leaves_time_to_search(store: Store) -> None:
    """With few configs near the best the finals are short, and the search gets what they do not need."""
    executor = FakeExecutor()
    finals = Finals(rounds=2)
    (outcome,) = run(
        store, executor=executor, budget=Budget(seconds=12.0), finals=finals, families=TWO_FAMILIES
    ).outcomes
    assert outcome.status == "tuned"
    assert len(executor.evaluated) >= 14
    # the last trial may bring one more config to the finals: two rounds of two windows
    assert outcome.seconds <= 12.0 + 2 * 2 * (finals.warm_s + finals.window_s) + 1e-9
    assert executor.races[-1].rounds == 2


def test_the_wait_for_the_first_candidate_takes_nothing_from_the_search(store: Store, tmp_path: Path) -> None:
    """Inputs, right answers and a cold compiler: a search of 8 seconds behind a wait of 20 is one of 8 seconds."""
    prompt, slow = FakeExecutor(), FakeExecutor()

    def wait_once(number: int) -> None:
        slow.clock.now += 0.0 if number else 20.0

    slow.on_evaluate = wait_once
    budget = Budget(seconds=8.0)
    (quick,) = run(store, executor=prompt, budget=budget).outcomes
    with Store.open(tmp_path / "other.sqlite3") as other:  # without the record of the first, which finals would race
        (delayed,) = run(other, executor=slow, budget=budget).outcomes
    assert len(slow.evaluated) >= len(prompt.evaluated) > 5
    assert 20.0 < delayed.seconds <= quick.seconds + 20.0 + 1.0


def test_a_default_far_behind_is_not_raced_again(store: Store) -> None:
    class Slow(FakeExecutor):
        def evaluate(self, job):  # type: ignore[no-untyped-def]
            outcome = super().evaluate(job)
            if job.config == default_config(CAUSAL.specialization, H200) and isinstance(outcome, Measurement):
                return dataclasses.replace(outcome, times_ms=tuple(2 * time for time in outcome.times_ms))
            return outcome

    executor = Slow()
    run(store, executor=executor)
    assert default_config(CAUSAL.specialization, H200) not in executor.races[-1].configs


def test_workloads_of_a_specialization_share_compiles_and_winners(store: Store) -> None:
    compiler, executor = FakeCompiler(), FakeExecutor()
    run(store, CAUSAL, PLAIN, LONGER, compiler=compiler, executor=executor)
    assert grouped([CAUSAL, PLAIN, LONGER, CAUSAL]) == (CAUSAL, LONGER, PLAIN)
    first = [config for workload, config in executor.evaluated if workload == CAUSAL]
    second = [config for workload, config in executor.evaluated if workload == LONGER]
    assert chosen(store).config in second[:2]
    assert len(set(first) & set(second)) >= 10
    assert len(compiler.submitted) == len(set(compiler.submitted))


def test_compiles_run_ahead_of_measurements(store: Store) -> None:
    compiler = FakeCompiler()
    ahead = []
    executor = FakeExecutor(on_evaluate=lambda number: ahead.append(len(compiler.submitted) - number))
    run(store, CAUSAL, PLAIN, compiler=compiler, executor=executor, lookahead=6)
    assert min(ahead[:20]) >= 6
    first_plain = next(n for n, (workload, _) in enumerate(executor.evaluated) if workload == PLAIN)
    assert ahead[first_plain] >= 6


def test_neighbours_come_from_this_device_first() -> None:
    other = find_device("rtx4090")
    default = default_config(CAUSAL.specialization, H200)

    def record(device: object, workload: Workload, stages: int) -> TuningRecord:
        return TuningRecord(
            workload=workload,
            device=device,  # type: ignore[arg-type]
            config=default.replace(num_stages=stages),
            provenance="measured",
            measurement=Measurement(times_ms=(1.0,)),
        )

    near, far = LONGER, CAUSAL.with_shape(seqlen_q=512, seqlen_k=512)
    records = [record(other, CAUSAL, 1), record(H200, far, 2), record(H200, near, 3), record(H200, near, 3)]
    stages = [config["num_stages"] for config in nearest(records, CAUSAL, H200, 9)]
    assert stages == [3, 2, 1]


def test_another_process_on_the_gpu_is_a_warning(store: Store) -> None:
    events: list[Event] = []
    run(store, executor=FakeExecutor(others=("process 1 (2.0 GB)",)), events=events, budget=Budget(trials=2))
    assert any(isinstance(event, Warned) and "process 1" in event.message for event in events)


def test_a_gpu_without_nvml_is_one_warning(store: Store) -> None:
    class Blind(FakeExecutor):
        def describe(self) -> HostInfo:
            return dataclasses.replace(super().describe(), versions=Versions(triton="3.6.0"))

    warned = []
    for executor in (FakeExecutor(), Blind()):
        events: list[Event] = []
        run(store, CAUSAL, PLAIN, executor=executor, events=events, budget=Budget(trials=2), retune=True)
        warned.append([event.message for event in events if isinstance(event, Warned)])
    without, (message,) = warned
    assert without == []
    assert "nvidia-ml-py" in message


def test_an_executor_of_another_device_is_refused(store: Store) -> None:
    with pytest.raises(MeasureError, match="device that is tuned"):
        run(store, executor=FakeExecutor(device=find_device("a100")))


def test_every_event_is_a_line_of_json(store: Store) -> None:
    events: list[Event] = []
    run(store, CAUSAL, Workload(batch=1, nheads=1, seqlen_q=8, head_dim=1024), events=events)
    lines = [to_json(event) for event in events]
    parsed = [json.loads(line) for line in lines]
    assert all("\n" not in line for line in lines)
    assert parsed[0]["event"] == "run_started"
    assert parsed[-1]["event"] == "run_finished"
    kinds = {p["event"] for p in parsed}
    assert kinds == {"run_started", "workload_started", "trial", "finals", "workload_finished", "run_finished"}
    done = next(p for p in parsed if p["event"] == "workload_finished")
    assert done["workload"] == CAUSAL.key
    assert done["record"]["measurement"]["median_ms"] > 0
    assert done["record"]["config"]["knobs"]["block_m"] > 0


def predicted(store: Store, *workloads: Workload, target: str = "h100", **changes: object) -> RunFinished:
    values = {"budget": Budget(trials=25), "compiler": FakeCompiler(), "options": Options(), **changes}
    return tune(
        workloads or (CAUSAL,),
        device=find_device(target),
        store=store,
        executor=None,
        versions=Versions(triton="3.7.1"),
        **values,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("target", ["h100", "sm_86", "rtx 4090", "gfx942"])
def test_without_a_gpu_records_are_predicted(store: Store, target: str) -> None:
    (outcome,) = predicted(store, target=target).outcomes
    assert outcome.status == "predicted"
    assert outcome.reason == "nothing was measured"
    record = store.record(CAUSAL, find_device(target))
    assert record is not None
    assert record.provenance == "predicted"
    assert record.predicted_ms is not None
    assert record.measurement is None
    assert record.versions.triton == "3.7.1"
    (row,) = report_rows([outcome], find_device(target))
    assert (row.source, row.sdpa_ratio, row.spread) == ("predicted", None, None)
    assert row.peak_share is not None
    assert 0.05 < row.peak_share < 1


def test_predictions_never_outrank_measurements(store: Store) -> None:
    run(store)
    measured = chosen(store)
    (outcome,) = tune(
        [CAUSAL],
        device=H200,
        store=store,
        compiler=FakeCompiler(),
        executor=None,
        budget=Budget(trials=10),
        options=Options(retune=True),
    ).outcomes
    assert outcome.status == "predicted"
    assert chosen(store) == measured


def test_a_prediction_does_not_count_as_tuned_where_there_is_a_gpu(store: Store) -> None:
    device = H200
    tune([CAUSAL], device=device, store=store, compiler=FakeCompiler(), executor=None, budget=Budget(trials=5))
    assert chosen(store).provenance == "predicted"
    (outcome,) = run(store).outcomes
    assert outcome.status == "tuned"
    assert chosen(store).provenance == "measured"


def test_predicted_runs_agree_and_reject_what_spills(store: Store, tmp_path: Path) -> None:
    compiler = FakeCompiler(spilling=0.4)
    (one,) = predicted(store, compiler=compiler).outcomes
    with Store.open(tmp_path / "again.sqlite3") as other:
        (two,) = predicted(other, compiler=FakeCompiler(spilling=0.4)).outcomes
    assert one.record is not None
    assert two.record is not None
    assert one.record.config == two.record.config
    assert dict(one.failures)["resources"] > 0
    assert len(compiler.submitted) == 25


class DyingCompiler(FakeCompiler):
    """Ends the process, as kill -9 would, when the n-th result is asked for."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().result(spec, config)


@pytest.mark.parametrize("after", [1, 12, 24])
def test_a_killed_ranking_loses_the_candidate_in_flight_alone(store: Store, tmp_path: Path, after: int) -> None:
    device = find_device("h100")
    with pytest.raises(Killed):
        predicted(store, compiler=DyingCompiler(after))
    kept = {prediction.config for prediction in store.predictions(CAUSAL, device)}
    assert len(kept) == after
    assert store.record(CAUSAL, device) is None
    compiler, events = FakeCompiler(), list[Event]()
    (outcome,) = predicted(store, compiler=compiler, on_event=events.append).outcomes
    (started,) = [event for event in events if isinstance(event, WorkloadStarted)]
    assert (outcome.status, outcome.trials, started.resumed_trials) == ("predicted", 25, after)
    with Store.open(tmp_path / "whole.sqlite3") as other:
        (whole,) = predicted(other).outcomes
    assert outcome.record is not None
    assert whole.record is not None
    assert (outcome.record.config, outcome.record.predicted_ms) == (whole.record.config, whole.record.predicted_ms)
    # what was ranked before is compiled again only if it won
    assert {config for _, config in compiler.submitted} & kept <= {outcome.record.config}
    assert predicted(store).outcomes[0].status == "skipped"


def test_a_stored_prediction_does_not_win_by_itself(store: Store) -> None:
    """The file may be older than the model, or by somebody else."""
    device = find_device("h100")
    with pytest.raises(Killed):
        predicted(store, compiler=DyingCompiler(12))
    slow, *_ = store.predictions(CAUSAL, device)[::-1]
    store.put_prediction(dataclasses.replace(slow, outcome=1.01 * least_ms(CAUSAL, device)))
    (outcome,) = predicted(store).outcomes
    assert outcome.record is not None
    assert outcome.record.predicted_ms is not None
    assert outcome.record.predicted_ms > 1.1 * least_ms(CAUSAL, device)


def test_a_finished_ranking_is_not_resumed(store: Store) -> None:
    predicted(store)
    events: list[Event] = []
    predicted(store, options=Options(retune=True), on_event=events.append)
    assert [e.resumed_trials for e in events if isinstance(e, WorkloadStarted)] == [0]


def test_predictions_are_no_trials_of_a_search(store: Store) -> None:
    with pytest.raises(Killed):
        predicted(store, target="h200", compiler=DyingCompiler(12))
    events: list[Event] = []
    run(store, events=events)
    assert [e.resumed_trials for e in events if isinstance(e, WorkloadStarted)] == [0]
    assert chosen(store).provenance == "measured"


def test_nothing_compiles_means_failed_not_an_exception(store: Store) -> None:
    (outcome,) = predicted(store, compiler=FakeCompiler(failing=1.0)).outcomes
    assert outcome.status == "failed"
    assert "planted" in outcome.reason


def test_plan_tells_candidates_and_time_and_does_nothing(store: Store) -> None:
    def planned(budget: Budget, measured: bool = True) -> list[tuple[str, int, float]]:
        rows = plan([CAUSAL, PLAIN], device=H200, store=store, budget=budget, measured=measured, jobs=4)
        return [(row.status, row.candidates, row.expected_s) for row in rows]

    (first, second) = planned(Budget(seconds=20))
    assert first == ("tune", Candidates.of(CAUSAL, H200).count, 20.0)
    assert planned(Budget(trials=40))[0][2] == pytest.approx(40 * 0.5 + Finals().expected_s)
    assert planned(Budget(trials=40), measured=False)[0][2] == pytest.approx(10.0)
    run(store)
    assert [status for status, _, _ in planned(Budget(seconds=20))] == ["skip", "tune"]
    bad = Workload(batch=1, nheads=1, seqlen_q=8, head_dim=1024)
    (row,) = plan([bad], device=H200, store=None, budget=Budget(trials=1), measured=True, jobs=1)
    assert row.status == "unsupported"
    assert second[0] == "tune"


def test_a_small_prediction_budget_meets_different_tiles() -> None:
    candidates = Candidates.of(CAUSAL, H200)
    (space,) = [space for space in candidates.spaces if ranking(space.configs[0])]
    order = by_prediction(space.configs, candidates.default, CAUSAL, H200)
    assert len(order) == len(space.configs)
    tiles = {(c["block_m"], c["block_n"], c["num_warps"]) for c in order[:8]}
    assert len(tiles) == 8


def test_report_rows_say_how_good_a_choice_is(store: Store) -> None:
    finished = run(store)
    (row,) = report_rows(finished.outcomes, H200)
    record = chosen(store)
    assert row.ms == record.time_ms
    assert row.peak_share == pytest.approx((record.tflops or 0) / H200.peak_tflops)
    assert row.sdpa_impl == "sdpa-cudnn"
    assert row.sdpa_ratio == pytest.approx(CAUSAL.flops / 600e9 / (record.time_ms or 1))
    assert row.source == "measured"
    failed = WorkloadFinished(
        workload=PLAIN, status="failed", record=None, trials=3, failures=(), reason="why", seconds=1.0
    )
    (row,) = report_rows([failed], H200)
    assert (row.ms, row.config, row.reason) == (None, "", "why")


def test_moments_of_any_writer_compare() -> None:
    assert moment("") < moment("2026-01-01T00:00:00Z") < moment("2026-01-01T00:00:01+00:00") < moment(timestamp())
    assert moment("2026-01-01T00:00:00") == moment("2026-01-01T00:00:00Z")


def test_bad_options_are_refused() -> None:
    with pytest.raises(TuningError, match="ahead"):
        Options(lookahead=0)
    with pytest.raises(TuningError, match="at least 0"):
        Options(neighbours=-1)


# --- families that the model does not rank ------------------------------------------------------------------------


def without_cost_models(monkeypatch: pytest.MonkeyPatch, *ids: str) -> None:
    rows = [dataclasses.replace(row, cost_model=None) if row.id in ids else row for row in families.FAMILIES]
    monkeypatch.setattr(families, "FAMILIES", tuple(rows))


def test_a_family_without_a_cost_model_is_tried_in_knob_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cost_models(monkeypatch, "portable_forward")
    events: list[Event] = []
    a100 = find_device("a100")
    compiler = FakeCompiler(failing=0.5, spilling=0.5)
    alone = Options(families=("portable_forward",))
    (outcome,) = predicted(store, target="a100", compiler=compiler, options=alone, on_event=events.append).outcomes
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "portable_forward has no cost model: its candidates are tried in knob order, its default first, and the first "
        "that compiles is taken"
    ]
    assert (outcome.status, outcome.reason) == ("predicted", "nothing was measured, and no model ranked it")
    assert outcome.record is not None
    assert outcome.record.predicted_ms is None
    assert store.record(CAUSAL, a100) == outcome.record
    ranked = [event for event in events if isinstance(event, CandidateRanked)]
    order = search_space(families.family("portable_forward"), CAUSAL.specialization, a100)
    assert [event.config for event in ranked] == list(order[: len(ranked)])
    assert len(ranked) > 1  # some failed to compile before
    assert ranked[-1].best_config == outcome.record.config == ranked[-1].config
    assert report_rows([outcome], a100)[0].ms is None


def test_a_family_without_a_cost_model_is_said_to_be_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cost_models(monkeypatch, "hopper_forward")
    events: list[Event] = []
    (outcome,) = predicted(store, options=Options(families=TWO_FAMILIES), on_event=events.append).outcomes
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "hopper_forward has no cost model, so none of its candidates is compared with those of other families"
    ]
    assert outcome.record is not None
    assert outcome.record.config.family == "portable_forward"


def test_a_family_of_which_only_the_default_is_predicted_is_named(store: Store) -> None:
    events: list[Event] = []
    predicted(store, CAUSAL, PLAIN, options=Options(families=TWO_FAMILIES), on_event=events.append)
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "the cost model of hopper_forward does not tell its candidates apart: only its default is predicted"
    ]


def test_a_run_searches_the_families_that_it_is_told(store: Store) -> None:
    options = Options(families=("portable_forward",))
    clock = Clock()
    executor = FakeExecutor(clock=clock)
    tune(
        [CAUSAL],
        device=H200,
        store=store,
        compiler=FakeCompiler(),
        executor=executor,
        budget=Budget(trials=20),
        options=options,
        clock=clock,
    )
    assert {config.family for _, config in executor.evaluated} == {"portable_forward"}
    assert chosen(store).config.family == "portable_forward"
    both, one = (
        plan([CAUSAL], device=H200, store=None, budget=Budget(trials=5), measured=True, jobs=1, options=each)[0]
        for each in (Options(), options)
    )
    assert 0 < one.candidates < both.candidates
    (row,) = plan(
        [CAUSAL],
        device=find_device("a100"),
        store=None,
        budget=Budget(trials=5),
        measured=True,
        jobs=1,
        options=Options(families=("hopper_forward",)),
    )
    assert row.status == "unsupported"
    assert "portable_forward" not in row.reason
