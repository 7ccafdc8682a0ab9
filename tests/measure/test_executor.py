from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.core.config import Config
from flashgen.core.errors import MeasureError
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Workload
from flashgen.measure import worker
from flashgen.measure.executor import LocalExecutor, Patience
from flashgen.measure.protocol import EvaluateJob, Executor, RaceJob
from tests.tiers import EXHAUSTIVE

WORKLOAD = Workload.parse("b1-h1-s16-d64")


def config(act: str) -> Config:
    return Config.of("portable_forward", {"act": act})


def evaluate(act: str) -> EvaluateJob:
    return EvaluateJob(workload=WORKLOAD, config=config(act))


def race(*acts: str, baselines: bool = False) -> RaceJob:
    return RaceJob(
        workload=WORKLOAD,
        configs=tuple(map(config, acts)),
        rounds=1,
        warm_s=0.0,
        window_s=0.01,
        baselines=baselines,
    )


@pytest.fixture
def executor() -> Iterator[Executor]:
    patience = Patience(start_s=60, evaluate_s=10, race_s=3, slowdown=1)
    with LocalExecutor(service="tests.measure.services:FakeGpu", patience=patience) as made:
        yield made


def test_it_says_where_it_measures(executor: Executor) -> None:
    assert executor.describe().device.slug == "nvidia_h200"


def test_a_crash_costs_one_candidate(executor: Executor) -> None:
    crash = executor.evaluate(evaluate("abort"))
    assert isinstance(crash, Failure)
    assert (crash.stage, "SIGABRT" in crash.reason) == ("build", True)
    assert executor.evaluate(evaluate("2")) == Measurement(times_ms=(2.0,))
    assert executor.evaluate(evaluate("wrong")) == Failure(stage="verify", reason="wrong")


@EXHAUSTIVE
def test_a_config_that_ends_a_race_is_taken_out_and_the_others_race_again(executor: Executor) -> None:
    outcomes = executor.race(race("1", "abort", "wrong", "hang", "3")).outcomes
    assert outcomes[0] == Measurement(times_ms=(1.0,))
    assert isinstance(outcomes[1], Failure)
    assert "SIGABRT" in outcomes[1].reason
    assert outcomes[2] == Failure(stage="verify", reason="wrong")
    assert isinstance(outcomes[3], Failure)
    assert outcomes[3].stage == "timeout"
    assert outcomes[4] == Measurement(times_ms=(3.0,))


def test_a_race_in_which_everybody_crashes_ends(executor: Executor) -> None:
    outcomes = executor.race(race("abort", "abort")).outcomes
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [True, True]


def test_an_anchor_that_crashes_does_not_take_the_race_with_it(executor: Executor) -> None:
    result = executor.race(race("1", "2", baselines=True))
    assert result.outcomes == (Measurement(times_ms=(1.0,)), Measurement(times_ms=(2.0,)))
    assert result.baselines == ()


@EXHAUSTIVE
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STARTS", 1)  # tests/measure/test_worker.py has the second one
    with LocalExecutor() as executor, pytest.raises(MeasureError, match="GPU"):
        executor.evaluate(evaluate("1"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: EvaluateJob(workload=WORKLOAD, config=config("1"), window_s=0.0),
        lambda: EvaluateJob(workload=WORKLOAD, config=config("1"), drop_above_ms=0.0),
        lambda: RaceJob(workload=WORKLOAD, configs=()),
        lambda: RaceJob(workload=WORKLOAD, configs=(config("1"),), rounds=0),
        lambda: RaceJob(workload=WORKLOAD, configs=(config("1"),), window_s=100.0),
    ],
)
def test_jobs_are_checked_at_birth(wrong: object) -> None:
    with pytest.raises(MeasureError):
        wrong()  # type: ignore[operator]
