"""A step of decoding from its search to a record that serves every profile of lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from flashgen.core.config import Config
from flashgen.core.record import Measurement
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.measure.protocol import EvaluateJob, Outcome, RaceJob, RaceResult
from flashgen.tuning.budget import Budget
from flashgen.tuning.plan import plan
from tests.tuning.fakes import H200, REFERENCE_MS, FakeExecutor, chance
from tests.tuning.runs import FINALS, chosen, run, willing

STEP = Workload.parse("dec-b64-h16-hk8-sk8192-d256-page64")
BEST = {"same": (1.0, 64), "ramp": (0.9, 32), "tail": (0.8, 16)}
"""Of each profile its least time, and the keys of a step that have it."""


def time_ms(config: Config, profile: str) -> float:
    least, block_n = BEST[profile]
    steps = abs(math.log2(config.integer("block_n") / block_n))
    return least * (1 + 0.2 * steps) * (1 + 0.02 * chance(config, profile))


def behind(config: Config) -> float:
    return max(time_ms(config, profile) / least for profile, (least, _) in BEST.items())


@dataclass
class Steps(FakeExecutor):
    """Measures steps of decoding on all of their profiles."""

    def evaluate(self, job: EvaluateJob) -> Outcome:
        self.clock.now += 0.1
        self.evaluated.append((job.workload, job.config))
        return self._measured(job.config, 3)

    def race(self, job: RaceJob) -> RaceResult:
        self.races.append(job)
        self.clock.now += job.rounds * (job.windows + 1) * (job.warm_s + job.window_s)
        return RaceResult(outcomes=tuple(self._measured(config, job.rounds) for config in job.configs))

    def _measured(self, config: Config, rounds: int) -> Measurement:
        first, *others = (tuple(time_ms(config, profile) * self._noise() for _ in range(rounds)) for profile in BEST)
        named = tuple(zip(list(BEST)[1:], others, strict=True))
        return Measurement(times_ms=first, reference_ms=REFERENCE_MS, profile_times_ms=named)


def test_one_config_is_good_on_all_profiles(store: Store) -> None:
    executor = Steps(noise=0.001)
    run(store, STEP, executor=executor, compiler=willing(), budget=Budget(trials=25))
    record = chosen(store, STEP)
    assert record.config["block_n"] == 32, "the best of neither profile with all lengths the same nor with one long"
    assert behind(record.config) < 1.25
    assert record.measurement is not None
    assert list(record.measurement.profile_ms) == ["ramp", "tail"]
    assert record.time_ms == pytest.approx(time_ms(record.config, "same"), rel=0.01)
    assert {race.windows for race in executor.races} <= {3 * len(race.configs) for race in executor.races}
    trials = store.trials(STEP, H200)
    assert all(isinstance(trial.outcome, Measurement) and trial.outcome.profile_ms for trial in trials)
    assert {config["batch_pad"] for _, config in executor.evaluated} <= {16, 128}


def test_a_record_that_is_current_is_kept(store: Store) -> None:
    run(store, STEP, executor=Steps(), compiler=willing(), budget=Budget(trials=6))
    known = len(store.trials(STEP, H200))
    again = Steps()
    run(store, STEP, executor=again, compiler=willing(), budget=Budget(trials=6))
    assert known == 6
    assert again.evaluated == [], "its record is current"
    (planned,) = plan([STEP], device=H200, store=store, budget=Budget(trials=6), measured=True, jobs=1)
    assert (planned.status, planned.stored_trials) == ("skip", 6)


def test_finals_count_a_window_for_each_profile() -> None:
    assert RaceJob(workload=STEP, configs=(willing_config(),) * 2, hard=True).windows == 6
    assert FINALS.last_s(2, 3) > FINALS.last_s(2)


def willing_config() -> Config:
    return Config.of("portable_decode", {"block_n": 64})
