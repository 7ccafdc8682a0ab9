"""What a budget in seconds leaves to the search and to the finals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.config import Config
from flashgen.core.record import Measurement
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.measure.protocol import EvaluateJob, Outcome, RaceJob, RaceResult
from flashgen.measure.sequential import LEAST_ROUNDS
from flashgen.tuning.budget import Budget
from flashgen.tuning.finals import LEAST_WINDOW_S, Finals
from tests.tiers import EXHAUSTIVE, first
from tests.tuning.fakes import H200, FakeExecutor, chance
from tests.tuning.runs import CAUSAL, TWO_FAMILIES, Killed, chosen, run, willing


@pytest.mark.parametrize("seconds", first(1, [20.0, 8.0, 60.0]))
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


@EXHAUSTIVE
def test_what_is_served_is_measured_however_few_trials_there_are(store: Store) -> None:
    run(store, budget=Budget(trials=60))
    before = chosen(store)
    executor = FakeExecutor()
    run(store, executor=executor, retune=True, budget=Budget(trials=1))
    default = default_config(CAUSAL.specialization, H200)
    assert [config for _, config in executor.evaluated] == [default, before.config]
    assert before.config in executor.races[-1].configs
    assert chosen(store).config == before.config != default


@EXHAUSTIVE
def test_what_serves_since_a_search_was_stopped_is_measured_by_the_next_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials are all that the budget has, and the record of somebody else has come since."""

    def killed(executor: FakeExecutor, job: RaceJob) -> RaceResult:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(FakeExecutor, "race", killed)
        with pytest.raises(Killed):
            run(store, budget=Budget(trials=6))
    tried = {trial.config for trial in store.trials(CAUSAL, H200)}
    with Store.open(store.path.with_name("theirs.sqlite3")) as other:
        run(other, budget=Budget(trials=40), seed=1)
        theirs = chosen(other)
    assert theirs.config not in tried
    versions = dataclasses.replace(theirs.versions, triton="3.5.0")  # or nothing would be searched
    store.put_record(dataclasses.replace(theirs, created="2026-01-01T00:00:00+00:00", versions=versions))
    executor = FakeExecutor()
    run(store, executor=executor, budget=Budget(trials=6))
    assert [config for _, config in executor.evaluated] == [theirs.config]
    assert theirs.config in executor.races[-1].configs


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


@dataclasses.dataclass
class Verifying(FakeExecutor):
    """Steps of decoding on three profiles, which take as long to verify as on an H200, before a race, too."""

    verify_s: float = 0.4
    finals_s: float = 0.0
    rounds: int = 0

    def evaluate(self, job: EvaluateJob) -> Outcome:
        self.clock.now += self.verify_s + job.windows_s
        self.evaluated.append((job.workload, job.config))
        return self._measured([self._round(job.config) for _ in range(3)])

    def race(self, job: RaceJob) -> RaceResult:
        began = self.clock()
        self.races.append(job)
        self.clock.now += self.verify_s * len(job.configs)
        referee, racing = self._referee(job, list(job.configs)), list(range(len(job.configs)))
        times: list[list[float]] = [[] for _ in job.configs]
        self.rounds = 0
        while racing and self.rounds < job.rounds:
            self.rounds += 1
            self.clock.now += (3 * len(racing) + 1) * (job.warm_s + job.window_s)
            for index in racing:
                times[index].append(self._round(job.configs[index]))
            if referee is not None:
                racing = referee(times)
        self.finals_s += self.clock() - began
        return RaceResult(outcomes=tuple(self._measured(each) for each in times))

    def _round(self, config: Config) -> float:
        return (1 + 0.02 * chance(config)) * self._noise()

    def _measured(self, times: Sequence[float]) -> Measurement:
        every = tuple(times)
        return Measurement(times_ms=every, profile_times_ms=(("ramp", every), ("tail", every)))


@pytest.mark.parametrize("seconds", first(1, [13.0, 20.0, 30.0, 60.0]))
def test_finals_of_three_profiles_fit_into_a_short_budget(store: Store, seconds: float) -> None:
    """All configs are within 2%, so that each is close to the best and a race is unsure for long."""
    executor = Verifying(noise=0.02)
    (outcome,) = run(
        store,
        Workload.parse("dec-b64-h32-hk8-sk8192-d128"),
        executor=executor,
        compiler=willing(),
        budget=Budget(seconds=seconds),
        finals=Finals(),
    ).outcomes
    assert outcome.status == "tuned"
    assert outcome.seconds <= seconds + 2.0, "what it overshoots is a round or an evaluation"
    assert executor.rounds >= LEAST_ROUNDS
    assert 2 <= len(executor.races[-1].configs) <= 7
    assert executor.finals_s <= 0.65 * seconds
    assert executor.races[-1].window_s >= LEAST_WINDOW_S
