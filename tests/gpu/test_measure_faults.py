"""Real faults on a real GPU: each costs one candidate, and the next one is measured as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.config import Config
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Workload
from flashgen.measure.executor import LocalExecutor, Patience
from flashgen.measure.protocol import EvaluateJob, Executor, RaceJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WORKLOAD = Workload.parse("bf16-b1-h8-hk2-s512-d64-causal")


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    patience = Patience(evaluate_s=30.0, race_s=60.0)
    with LocalExecutor(service="tests.fakes.planted:PlantedService", patience=patience) as made:
        yield made


@pytest.fixture
def good(executor: Executor) -> Config:
    return default_config(WORKLOAD.specialization, executor.describe().device)


def planted(act: str) -> Config:
    return Config.of("planted", {"act": act})


def evaluate(executor: Executor, config: Config) -> Measurement | Failure:
    return executor.evaluate(EvaluateJob(workload=WORKLOAD, config=config))


@pytest.mark.parametrize(
    ("act", "stage", "reason"),
    [
        ("store_far_away", "verify", "illegal memory access"),
        ("load_far_away", "verify", "illegal memory access"),
        ("trap", "verify", "CUDA error|Triton Error|unspecified launch failure|illegal instruction"),
        ("spin_for_ever", "timeout", "no answer within 30 s in stage verify"),
        ("abort", "verify", "died of SIGABRT"),
        ("segfault", "verify", "died of SIGSEGV"),
        ("allocate", "memory", "out of memory"),
        ("zeros", "verify", "at 1x1"),
        ("nothing", "verify", "unwritten"),
    ],
)
def test_a_planted_fault_is_one_failure_and_the_next_candidate_is_measured(
    executor: Executor, good: Config, act: str, stage: str, reason: str
) -> None:
    failure = evaluate(executor, planted(act))
    assert isinstance(failure, Failure)
    assert failure.stage == stage, failure
    assert any(part in failure.reason for part in reason.split("|")), failure
    assert isinstance(evaluate(executor, good), Measurement)


def test_a_fault_in_the_middle_of_a_race_costs_one_racer(executor: Executor, good: Config) -> None:
    job = RaceJob(
        workload=WORKLOAD,
        configs=(good, planted("store_far_away"), planted("abort"), good),
        rounds=2,
        warm_s=0.02,
        window_s=0.05,
    )
    outcomes = executor.race(job).outcomes
    assert [type(outcome) for outcome in outcomes] == [Measurement, Failure, Failure, Measurement]
    assert "illegal memory access" in str(outcomes[1])
    assert "SIGABRT" in str(outcomes[2])
