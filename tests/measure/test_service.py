"""The order of work on candidates, with emulated kernels on the CPU and a stopwatch that counts calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from flashgen.codegen.families import exact_sibling
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import BuildError, UnsupportedError
from flashgen.core.features.score_tensors import aligned_scores
from flashgen.core.record import Failure, Measurement
from flashgen.core.workload import Specialization, Workload
from flashgen.measure import directions, timing
from flashgen.measure.bench import Bench
from flashgen.measure.inputs import make_inputs
from flashgen.measure.odd_shapes import HARD_SHAPES, ODD_SHAPES
from flashgen.measure.protocol import EvaluateJob, RaceJob, RaceResult, specialization
from flashgen.measure.sequential import ANCHOR_ROUNDS, LEAST_ROUNDS, Rule
from flashgen.measure.service import Judge
from flashgen.measure.verify import KernelFactory
from tests.fakes.attention import Emulated
from tests.measure.clocks import SMALL, Clocked, CountingStopwatch
from tests.tiers import EXHAUSTIVE, first

ODD_PROBLEMS = functools.cache(directions.DIRECTIONS["forward"].odd_problems)


@pytest.fixture(autouse=True)
def odd_problems_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right answers of the odd shapes, which no kernel writes to, are computed once and not for each judge."""
    forward = replace(directions.DIRECTIONS["forward"], odd_problems=ODD_PROBLEMS)
    monkeypatch.setitem(directions.DIRECTIONS, "forward", forward)


def config(**knobs: int | str | bool) -> Config:
    return Config.of("portable_forward", knobs)


BRIEF: Any = {"warm_s": 0.002, "window_s": 0.004, "settle_s": 0.0}
"""A race of few calls, each of which is computed by torch on the CPU."""


@dataclass
class EmulatedToolchain:
    """Reads the behaviour of a kernel from its knobs."""

    kernels: dict[Config, Clocked] = field(default_factory=dict)
    default_config: Config | None = None

    def factory(self, spec: Specialization, config: Config) -> KernelFactory:
        knobs = dict(config.knobs)
        if "build_error" in knobs:
            raise BuildError("ptxas says no")
        if "no_memory" in knobs:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if config not in self.kernels:
            right = Emulated(causal=spec.causal)
            inner = replace(right, drop_last_key=True) if "wrong" in knobs else right
            limits = {name: int(knobs[name]) for name in ("wrong_from_call", "error_at_call") if name in knobs}
            limits |= {name: knobs[name] for name in ("hard_ms", "wrong_on_hard") if name in knobs}
            self.kernels[config] = Clocked(inner=inner, ms=float(knobs["ms"]), **limits)
        return self.kernels[config].factory

    def is_deterministic(self, config: Config) -> bool:
        return True

    def exact_sibling(self, spec: Specialization, config: Config) -> Config:
        return exact_sibling(config, spec)

    def most_keys(self, config: Config) -> int | None:
        return None

    def default(self, workload: Workload) -> Config:
        if self.default_config is None:
            raise UnsupportedError("nothing serves this")
        return self.default_config


@dataclass
class Table:
    """A judge with everything it needs, and what it announced."""

    toolchain: EmulatedToolchain = field(default_factory=EmulatedToolchain)
    announced: list[tuple[str, int | None]] = field(default_factory=list)
    keep_bytes: float = 1e9

    def __post_init__(self) -> None:
        stopwatch = CountingStopwatch()
        device = replace(find_device("h200"), l2_bytes=20_000)
        self.bench = Bench(device, torch.device("cpu"), self.toolchain, stopwatch, self.keep_bytes)
        self.judge = Judge(self.bench, stopwatch, lambda stage, subject: self.announced.append((stage, subject)))

    def evaluate(self, config: Config, drop_above_ms: float | None = None) -> Measurement | Failure:
        return self.judge.evaluate(
            EvaluateJob(workload=SMALL, config=config, drop_above_ms=drop_above_ms, window_s=0.012)
        )

    def race(self, *configs: Config, hard: bool = False) -> RaceResult:
        result = self.judge.race(RaceJob(workload=SMALL, configs=configs, rounds=3, **BRIEF, baselines=True, hard=hard))
        assert isinstance(result, RaceResult), result
        return result


def test_a_good_candidate_gets_times_errors_and_a_clock() -> None:
    table = Table()
    found = table.evaluate(config(ms=2))
    assert isinstance(found, Measurement)
    assert found.times_ms == (2.0, 2.0, 2.0)
    assert 0 < found.mean_error < found.max_error < 0.05
    assert found.sm_clock_mhz == 1500.0
    assert found.reference_ms is None
    assert table.announced == [("launch", None), ("build", 0), ("verify", 0), ("launch", 0)]


def test_a_slow_candidate_is_dropped_after_one_probe() -> None:
    table = Table()
    dropped = table.evaluate(config(ms=9), drop_above_ms=4.0)
    assert isinstance(dropped, Measurement)
    assert dropped.times_ms == (9.0,)
    kept = table.evaluate(config(ms=3), drop_above_ms=4.0)
    assert isinstance(kept, Measurement)
    assert len(kept.times_ms) == 3


@dataclass
class StumblingStopwatch(CountingStopwatch):
    """Its host is kept from its work in some of the first windows, by so many ms."""

    gaps_ms: list[float] = field(default_factory=list)

    def elapsed_ms(self, warm: Callable[[], object], measured: Callable[[], object]) -> float:
        is_estimate = warm is timing._nothing
        return super().elapsed_ms(warm, measured) + (self.gaps_ms.pop(0) if self.gaps_ms and not is_estimate else 0.0)


@pytest.mark.parametrize(
    ("gaps_ms", "windows"),
    [([9.0], 3), ([9.0, 8.0], 3), ([9.0, 9.0, 9.0], 1), ([90.0], 1)],
    ids=["one", "two", "too many", "more than a host loses"],
)
def test_a_host_that_stumbles_costs_no_candidate(gaps_ms: list[float], windows: int) -> None:
    table = Table()
    table.judge = Judge(table.bench, StumblingStopwatch(gaps_ms=[*gaps_ms]), lambda stage, subject: None)
    found = table.evaluate(config(ms=3), drop_above_ms=3.5)
    assert isinstance(found, Measurement)
    assert len(found.times_ms) == windows
    assert found.times_ms == ((3.0,) * 3 if windows == 3 else (3.0 + gaps_ms[0],))


@pytest.mark.parametrize(
    ("knobs", "stage", "reason"),
    [
        ({"build_error": True}, "build", "ptxas says no"),
        ({"no_memory": True}, "memory", "CUDA out of memory"),
        ({"ms": 1, "wrong": True}, "verify", "at 1x1"),
        ({"ms": 1, "error_at_call": 3}, "verify", "something of the driver's"),
        ({"ms": 1, "error_at_call": 18}, "launch", "something of the driver's"),
    ],
)
def test_whatever_goes_wrong_is_one_failure(knobs: dict[str, int | bool], stage: str, reason: str) -> None:
    table = Table()
    failure = table.evaluate(config(**knobs))
    assert isinstance(failure, Failure)
    assert failure.stage == stage
    assert reason in failure.reason
    assert isinstance(table.evaluate(config(ms=1)), Measurement)


def test_nothing_is_timed_before_it_is_verified() -> None:
    table = Table()
    table.evaluate(config(ms=1, wrong=True))
    assert ("launch", 0) not in table.announced


def test_odd_shapes_are_checked_once_for_a_config() -> None:
    table = Table()
    table.evaluate(config(ms=1))
    first = table.toolchain.kernels[config(ms=1)].calls
    table.evaluate(config(ms=1))
    second = table.toolchain.kernels[config(ms=1)].calls - first
    assert first - second == len(ODD_SHAPES) + len(HARD_SHAPES)


@dataclass
class InexactToolchain(EmulatedToolchain):
    """Where a config's tanh is the hardware's, its kernel writes an LSE that is off, and says whether it was asked."""

    asked: list[bool] = field(default_factory=list)

    def factory(self, spec: Specialization, config: Config) -> KernelFactory:
        kernel = super().factory(spec, config)
        if config.get("tanh", "exact") == "exact":
            return kernel

        def launch(*arguments: torch.Tensor | None) -> None:
            q, k, v, out, lse, *rest = arguments
            self.asked.append(lse is not None)
            assert q is not None
            sums = torch.empty(q.shape[:3]) if lse is None else lse
            kernel(q, k, v, out)(q, k, v, out, sums, *rest)  # type: ignore[arg-type]
            sums += 0.1

        return lambda *_: launch


def test_of_an_inexact_lse_the_output_alone_is_judged_once_the_exact_sibling_has_passed() -> None:
    table = Table(toolchain=InexactToolchain())
    assert isinstance(table.evaluate(config(ms=1, tanh="hardware")), Measurement)
    assert isinstance(table.toolchain, InexactToolchain)
    odd_and_workload = table.toolchain.asked[: len(ODD_SHAPES) + len(HARD_SHAPES) + 1]
    assert not any(odd_and_workload), "no LSE is asked for where it is judged"
    exact = config(ms=1, tanh="exact")
    assert table.toolchain.kernels[exact].calls >= len(odd_and_workload)


def test_what_has_a_wrong_exact_sibling_fails() -> None:
    class Wrong(InexactToolchain):
        def factory(self, spec: Specialization, config: Config) -> KernelFactory:
            return super().factory(spec, config.replace(wrong=True) if config["tanh"] == "exact" else config)

    found = Table(toolchain=Wrong()).evaluate(config(ms=1, tanh="hardware"))
    assert isinstance(found, Failure)
    assert found.reason.startswith("with an LSE, by portable_forward(ms=1, tanh=exact): at ")


@EXHAUSTIVE
def test_windows_are_levelled_by_the_default_config_where_torch_has_no_kernel() -> None:
    table = Table(toolchain=EmulatedToolchain(default_config=config(ms=4)))
    found = table.evaluate(config(ms=1))
    assert isinstance(found, Measurement)
    assert (found.median_ms, found.reference_ms) == (1.0, 4.0)
    result = table.race(config(ms=2), config(ms=4))
    times = [outcome.reference_ms for outcome in result.outcomes if isinstance(outcome, Measurement)]
    assert times == [4.0, 4.0]
    assert result.baselines == ()


@pytest.mark.parametrize("default", first(1, [None, config(ms=4, wrong=True), config(build_error=True)]))
def test_without_any_reference_times_stay_as_they_are(default: Config | None) -> None:
    table = Table(toolchain=EmulatedToolchain(default_config=default))
    found = table.evaluate(config(ms=1))
    assert isinstance(found, Measurement)
    assert found.reference_ms is None
    result = table.race(config(ms=2), config(ms=1))
    assert all(isinstance(outcome, Measurement) for outcome in result.outcomes)


def test_a_race_has_an_outcome_for_each_config_in_order() -> None:
    result = Table().race(config(ms=2), config(build_error=True), config(ms=1), config(ms=1, wrong=True), config(ms=3))
    medians = [outcome.median_ms if isinstance(outcome, Measurement) else outcome.stage for outcome in result.outcomes]
    assert medians == [2.0, "build", 1.0, "verify", 3.0]
    assert all(len(o.times_ms) == 3 for o in result.outcomes if isinstance(o, Measurement))
    assert result.baselines == ()


@pytest.mark.parametrize("reference", [True, False])
def test_a_race_has_the_reference_kernel_beside_it_unless_it_is_told_not_to(reference: bool) -> None:
    table = Table(toolchain=EmulatedToolchain(default_config=config(ms=8)))
    job = RaceJob(workload=SMALL, configs=(config(ms=2), config(ms=3)), rounds=2, **BRIEF, reference=reference)
    result = table.judge.race(job)
    assert isinstance(result, RaceResult)
    first, second = result.outcomes
    assert isinstance(first, Measurement)
    assert isinstance(second, Measurement)
    assert (first.times_ms, second.times_ms) == ((2.0, 2.0), (3.0, 3.0))
    assert first.reference_ms == second.reference_ms == (8.0 if reference else None)


def test_other_kernels_come_behind_a_race() -> None:
    """One that draws less power lifts the clock of whoever has the next turn, and lowers it half a second later."""
    table = Table(toolchain=EmulatedToolchain(default_config=config(ms=8)))
    job = RaceJob(workload=SMALL, configs=(config(ms=2), config(ms=3)), rounds=4, **BRIEF)
    assert isinstance(table.judge.race(job), RaceResult)
    launches = [subject for stage, subject in table.announced if stage == "launch"]
    assert launches[-ANCHOR_ROUNDS:] == [2] * ANCHOR_ROUNDS
    assert sorted(launches[-ANCHOR_ROUNDS - 8 : -ANCHOR_ROUNDS]) == [0] * 4 + [1] * 4


def test_a_race_begins_with_load_that_nobody_measures() -> None:
    """The first config runs for `settle_s`, and no window is longer or missing for that."""
    one, calls = config(ms=2), []
    for settle_s in (0.0, 0.1):
        table = Table()
        job = RaceJob(workload=SMALL, configs=(one,), rounds=2, warm_s=0.002, window_s=0.004, settle_s=settle_s)
        result = table.judge.race(job)
        assert isinstance(result, RaceResult)
        (outcome,) = result.outcomes
        assert isinstance(outcome, Measurement)
        assert outcome.times_ms == (2.0, 2.0)
        calls.append(table.toolchain.kernels[one].calls)
    assert calls[1] - calls[0] == 50


@EXHAUSTIVE
def test_a_race_with_a_rule_ends_when_it_is_sure_and_lets_go_who_is_behind() -> None:
    table = Table(toolchain=EmulatedToolchain(default_config=config(ms=8)))
    configs = (config(ms=4), config(build_error=True), config(ms=2), config(ms=3))
    job = RaceJob(workload=SMALL, configs=configs, rounds=40, **BRIEF, rule=Rule(champion=0), hard=True)
    result = table.judge.race(job)
    assert isinstance(result, RaceResult)
    served, failed, fast, _ = result.outcomes
    assert isinstance(failed, Failure)
    assert isinstance(served, Measurement)
    assert isinstance(fast, Measurement)
    assert LEAST_ROUNDS <= len(fast.times_ms) < 6
    assert len(fast.hard_times_ms) == len(fast.times_ms)
    assert fast.reference_ms == 8.0
    assert job.without(0).rule == Rule()
    assert job.windows_s < RaceJob(workload=SMALL, configs=configs, rounds=40).windows_s


def test_a_kernel_that_becomes_wrong_during_a_race_loses() -> None:
    result = Table().race(config(ms=2), config(ms=1, wrong_from_call=20))
    assert isinstance(result.outcomes[0], Measurement)
    assert isinstance(result.outcomes[1], Failure)
    assert "wrong after it" in result.outcomes[1].reason


@EXHAUSTIVE
def test_a_race_has_times_on_hard_data_where_they_are_asked_for() -> None:
    table = Table(toolchain=EmulatedToolchain(default_config=config(ms=8)))
    result = table.race(config(ms=2), config(build_error=True), config(ms=1, hard_ms=4), hard=True)
    even, failed, uneven = result.outcomes
    assert isinstance(even, Measurement)
    assert isinstance(failed, Failure)
    assert isinstance(uneven, Measurement)
    assert (even.times_ms, even.hard_times_ms) == ((2.0,) * 3, (2.0,) * 3)
    assert (uneven.times_ms, uneven.hard_times_ms) == ((1.0,) * 3, (4.0,) * 3)
    assert even.reference_ms == uneven.reference_ms == 8.0
    for outcome in table.race(config(ms=2), config(ms=1, hard_ms=4)).outcomes:
        assert isinstance(outcome, Measurement)
        assert outcome.hard_times_ms == ()


def test_every_round_has_windows_on_both_kinds_of_data() -> None:
    table = Table()
    table.race(config(ms=2), config(ms=3), hard=True)
    turns = [subject for stage, subject in table.announced if stage == "launch"][-3 * 4 :]
    assert all(sorted(turns[first : first + 4]) == [0, 0, 1, 1] for first in (0, 4, 8))


def test_a_kernel_that_is_wrong_on_hard_data_loses() -> None:
    table = Table()
    found = table.race(config(ms=2), config(ms=1, wrong_on_hard=True), hard=True)
    assert isinstance(found.outcomes[0], Measurement)
    assert isinstance(found.outcomes[1], Failure)
    assert found.outcomes[1].stage == "verify"
    assert "on hard data" in found.outcomes[1].reason


def test_without_memory_for_hard_data_a_race_is_on_normal_data_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: object, **options: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    table = Table()
    state = table.bench.state(SMALL)
    monkeypatch.setitem(directions.DIRECTIONS, "forward", replace(directions.DIRECTIONS["forward"], problem=make))
    (outcome,) = table.race(config(ms=2), hard=True).outcomes
    assert isinstance(outcome, Measurement)
    assert (outcome.times_ms, outcome.hard_times_ms) == ((2.0,) * 3, ())
    assert table.bench.state(SMALL) is state


def test_hard_data_are_made_once_and_count_as_memory() -> None:
    table = Table()
    state = table.bench.state(SMALL)
    before = state.nbytes
    case = table.bench.hard_case(state)
    assert case is not None
    assert table.bench.hard_case(state) is case
    assert state.nbytes == 2 * before


def test_an_error_in_the_middle_of_a_race_can_be_blamed() -> None:
    table = Table()
    job = RaceJob(
        workload=SMALL,
        configs=(config(ms=2), config(ms=1, error_at_call=20)),
        rounds=3,
        **BRIEF,
    )
    failure = table.judge.race(job)
    assert isinstance(failure, Failure)
    assert table.announced[-1] == ("launch", 1)


def test_inputs_and_right_answers_are_kept_while_there_is_room() -> None:
    roomy, tight = Table(), Table(keep_bytes=1.0)
    other = Workload.parse("bf16-b1-h1-s32-d16")
    for table, same in ((roomy, True), (tight, False)):
        state = table.bench.state(SMALL)
        assert table.bench.state(SMALL) is state
        table.bench.state(other)
        assert (table.bench.state(SMALL) is state) == same


def test_the_bench_starts_again_after_memory_has_run_out() -> None:
    table = Table()
    state = table.bench.state(SMALL)
    table.evaluate(config(no_memory=True))
    assert table.bench.state(SMALL) is not state


def test_a_workload_that_cannot_be_measured_is_a_failure() -> None:
    table = Table()
    failure = table.judge.evaluate(EvaluateJob(workload=Workload.parse("b1-h1-s8-d16-page16"), config=config(ms=1)))
    assert isinstance(failure, Failure)
    assert "pages" in failure.reason


@pytest.mark.parametrize(("key", "aligned"), [("bf16-b1-h1-s8-d64", True), ("bf16-b1-h1-s8-d60", False)])
def test_alignment_follows_the_head_dim(key: str, aligned: bool) -> None:
    assert specialization(Workload.parse(key)).aligned16 is aligned


@pytest.mark.parametrize(
    "key",
    ["s16-bias", "s24-bias", "s20-bias", "s24-mask", "s32-mask", "s24-bias-mask", "s17-keybias", "s17-keymask", "s17"],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_measured_are_the_inputs_as_they_are(key: str, batch: int) -> None:
    workload = Workload.parse(f"bf16-b{batch}-h2-d16-{key}")
    inputs = make_inputs(workload, copies=2, seed=0, device="cpu")
    for features in inputs.features:
        assert specialization(workload).aligned_scores is aligned_scores((features.bias, features.mask))
