"""The whole run on a fake GPU and a real database: records, winners, neighbours, events, plans."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.device import find_device
from flashgen.core.errors import MeasureError, TuningError
from flashgen.core.record import Failure, Measurement, TuningRecord, Versions, moment, timestamp
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.measure.protocol import HostInfo
from flashgen.tuning.budget import Budget
from flashgen.tuning.candidates import Candidates, nearest
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, Warned, WorkloadFinished, to_json
from flashgen.tuning.finals import Finals
from flashgen.tuning.plan import plan
from flashgen.tuning.report import report_rows
from flashgen.tuning.tune import grouped, tune
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200, Clock, FakeCompiler, FakeExecutor, true_ms
from tests.tuning.runs import CAUSAL, FINALS, LONGER, PLAIN, chosen, run, willing


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


def test_a_record_names_its_run_and_whom_it_beat(store: Store) -> None:
    executor = FakeExecutor()
    run(store, CAUSAL, PLAIN, executor=executor, seed=7, budget=Budget(trials=12))
    ((record, origin),) = store.past(CAUSAL).records
    assert (origin.host, origin.seed, origin.budget) == ("gpu-7", 7, "12 trials")
    assert re.fullmatch("[0-9a-f]{16}", origin.run)
    assert [other.run for _, other in store.past(PLAIN).records] == [origin.run]
    (last,) = [race for race in executor.races if race.workload == CAUSAL and race.baselines]
    assert {record.config, *(rival.config for rival in origin.runners_up)} == set(last.configs)
    assert [len(rival.hard_times_ms) for rival in origin.runners_up] == [FINALS.rounds] * (len(last.configs) - 1)
    assert store.past(CAUSAL).replaced == ()


def test_a_search_leaves_a_trace_of_the_record_that_it_replaces(store: Store) -> None:
    run(store, PLAIN, budget=Budget(trials=5))
    ((first, origin),) = store.past(PLAIN).records
    run(store, PLAIN, budget=Budget(trials=5), retune=True)
    past = store.past(PLAIN)
    (replaced,) = past.replaced
    ((_, newer),) = past.records
    assert (replaced.record, replaced.origin, replaced.reason) == (first, origin, "search")
    assert replaced.source == f"run {newer.run}" != f"run {origin.run}"


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


def test_both_races_settle_and_the_first_has_no_other_kernel_beside_its_configs(store: Store) -> None:
    executor = FakeExecutor()
    run(store, executor=executor, finals=dataclasses.replace(FINALS, last=1, near_share=0.5))
    near, last = executor.races
    assert near.settle_s == FINALS.near_settle_s > 0
    assert last.settle_s == FINALS.settle_s > 0
    assert (near.reference, last.reference) == (False, True), "behind another kernel the clock is another one"


def test_a_time_that_no_kernel_reaches_is_a_failure_of_its_config_and_ends_no_search(store: Store) -> None:
    """A timer that fails once: such a time would win, and no database takes it."""
    calls = itertools.count()
    executor = FakeExecutor(time_ms=lambda *given: 1e-6 if next(calls) == 3 else true_ms(*given))
    (outcome,) = run(store, executor=executor, budget=Budget(trials=8)).outcomes
    assert outcome.status == "tuned"
    failures = [trial.outcome for trial in store.trials(CAUSAL, H200) if isinstance(trial.outcome, Failure)]
    (reason,) = (each.reason for each in failures if each.stage == "verify")
    assert re.search(rf"{CAUSAL.key} takes at least 0\.\d+ ms on sm90.*, got .*e-0[67]", reason)


def test_who_had_a_time_that_no_kernel_reaches_wins_no_race(store: Store) -> None:
    executor = FakeExecutor()
    executor.time_ms = lambda workload, config: (
        1e-6 if executor.races and config == executor.races[-1].configs[-1] else true_ms(workload, config)
    )
    (outcome,) = run(store, executor=executor, budget=Budget(trials=8)).outcomes
    assert outcome.status == "tuned"
    record = chosen(store)
    assert record.measurement is not None
    assert record.measurement.median_ms > 0.5 * true_ms(CAUSAL, record.config)
    assert all(record.config != race.configs[-1] for race in executor.races)


@EXHAUSTIVE
def test_two_runs_agree(tmp_path: Path) -> None:
    winners = []
    for name in ("one", "two"):
        with Store.open(tmp_path / f"{name}.sqlite3") as opened:
            run(opened, CAUSAL, PLAIN)
            winners.append([chosen(opened, w).config for w in (CAUSAL, PLAIN)])
            configs = [trial.config for trial in opened.trials(CAUSAL, H200)]
        winners[-1].extend(configs)
    assert winners[0] == winners[1]


@EXHAUSTIVE
def test_other_noise_leads_to_winners_of_nearly_the_same_speed(tmp_path: Path) -> None:
    times = []
    for seed in range(3):
        with Store.open(tmp_path / f"{seed}.sqlite3") as opened:
            run(opened, executor=FakeExecutor(seed=seed), budget=Budget(trials=160))
            times.append(true_ms(CAUSAL, chosen(opened).config))
    assert max(times) / min(times) < 1.05


@EXHAUSTIVE
def test_an_incumbent_stays_within_the_noise(store: Store) -> None:
    """The fastest config of all is the incumbent; others may look faster by luck and must not replace it."""
    run(store, budget=Budget(trials=60))
    incumbent = chosen(store).config
    for seed in range(1, 3):
        executor = FakeExecutor(seed=seed, noise=0.01)
        (outcome,) = run(store, executor=executor, retune=True, seed=seed).outcomes
        assert incumbent in executor.races[-1].configs
        now = chosen(store).config
        assert true_ms(CAUSAL, now) < 1.01 * true_ms(CAUSAL, incumbent)
        assert outcome.status == ("kept" if now == incumbent else "tuned")
        incumbent = now


def test_what_another_gpu_of_the_architecture_serves_is_raced(store: Store) -> None:
    """Without a search its record would serve, however small a budget is; it is no incumbent that others must beat."""
    default = default_config(CAUSAL.specialization, H200)
    theirs = default.replace(heads_per_group=16)
    times = Measurement(times_ms=(1.0,))
    record = TuningRecord(
        workload=CAUSAL, device=find_device("h100"), config=theirs, provenance="measured", measurement=times
    )
    for number, (other, from_nothing, gain, is_raced) in enumerate(
        (
            ("h100", False, 0.9, True),
            ("h100", False, 1.0, True),
            ("h100", True, 0.9, False),
            ("rtx4090", False, 0.9, False),
        )
    ):
        executor = FakeExecutor(time_ms=lambda _, config, gain=gain: gain if config == theirs else 1.0)  # type: ignore[misc]
        with Store.open(store.path.with_name(f"{number}.sqlite3")) as fresh:
            fresh.put_record(dataclasses.replace(record, device=find_device(other)))
            (outcome,) = run(
                fresh,
                executor=executor,
                compiler=willing(),
                budget=Budget(trials=1),
                families=("hopper_forward",),
                from_nothing=from_nothing,
                neighbours=0,
            ).outcomes
            assert (theirs in executor.races[-1].configs) == is_raced
            assert (chosen(fresh).config == theirs) == (is_raced and gain < 1)
            assert outcome.status == "tuned"


@EXHAUSTIVE
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
