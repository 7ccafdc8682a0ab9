from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from flashgen.measure.protocol import SETTLE_S
from flashgen.measure.timing import (
    GRAPH,
    GRAPH_BELOW_MS,
    GRAPH_MS,
    MAX_GRAPH_CALLS,
    QUEUE,
    Unit,
    Window,
    interleave,
    make_unit,
    measure,
    median_clock,
)


@dataclass
class FakeGpu:
    """Device time that calls add to; the host's time for a launch counts unless it comes from a graph."""

    host_ms: float = 0.02
    now_ms: float = 0.0
    in_graph: bool = False
    clock: float | None = None

    def kernel(self, ms: float) -> None:
        self.now_ms += ms if self.in_graph else max(ms, self.host_ms)

    def elapsed_ms(self, warm: Callable[[], object], measured: Callable[[], object]) -> float:
        warm()
        start = self.now_ms
        measured()
        return self.now_ms - start

    def capture(self, calls: Callable[[], object]) -> Callable[[], object]:
        def replay() -> None:
            self.in_graph = True
            calls()
            self.in_graph = False

        return replay

    def sm_clock_mhz(self) -> float | None:
        return self.clock


@dataclass
class LaunchFunction:
    """Takes `ms` of device time, and `cold_ms` more for a set of inputs that it has not just seen."""

    gpu: FakeGpu
    ms: float
    sets: list[int] = field(default_factory=list)

    def __call__(self, n: int) -> None:
        self.sets.append(n)
        self.gpu.kernel(self.ms)


@pytest.mark.parametrize("ms", [0.003, 0.02, 0.29, 0.31, 1.0, 40.0])
def test_a_time_is_the_kernels_and_not_the_hosts(ms: float) -> None:
    gpu = FakeGpu()
    unit = make_unit(LaunchFunction(gpu, ms), 4, gpu)
    window = measure(unit, gpu, warm_ms=5.0, window_ms=50.0)
    assert window.ms == pytest.approx(ms)
    assert unit.call_ms == pytest.approx(ms)
    assert (unit.calls > 1) == (ms < GRAPH_BELOW_MS)


@pytest.mark.parametrize("ms", [0.004, 0.05, 0.15, 0.5, 1.5])
def test_a_higher_limit_keeps_a_slow_host_out_of_the_time(ms: float) -> None:
    """Host beside half as much device time again: above the limit of a search, and a queue that runs dry shows it."""
    gpu = FakeGpu(host_ms=0.35)
    unit = make_unit(LaunchFunction(gpu, ms), 4, gpu, graph_below_ms=2.0)
    assert unit.timing == GRAPH
    assert measure(unit, gpu, warm_ms=5.0, window_ms=50.0).ms == pytest.approx(ms)
    assert unit.ms >= 0.5 * GRAPH_MS  # recorded anew where the estimate was the host's
    assert make_unit(LaunchFunction(gpu, ms), 4, gpu, graph_below_ms=0.0).timing == QUEUE


@pytest.mark.parametrize("ms", [0.004, 0.03, 0.1])
def test_a_host_that_compiles_meanwhile_does_not_show(ms: float) -> None:
    gpu = FakeGpu(host_ms=0.13)
    unit = make_unit(LaunchFunction(gpu, ms), 4, gpu)
    assert unit.timing == GRAPH
    assert measure(unit, gpu, warm_ms=5.0, window_ms=50.0).ms == pytest.approx(ms)


def test_every_set_of_inputs_takes_its_turn() -> None:
    gpu = FakeGpu()
    long = LaunchFunction(gpu, 1.0)
    unit = make_unit(long, 3, gpu)
    long.sets.clear()
    measure(unit, gpu, warm_ms=0.0, window_ms=7.0)
    assert len(long.sets) == 7
    assert set(long.sets) == {0, 1, 2}
    assert all((b - a) % 3 == 1 for a, b in itertools.pairwise(long.sets))


@pytest.mark.parametrize(("ms", "copies"), [(0.01, 7), (0.05, 100), (0.001, 256), (0.01, MAX_GRAPH_CALLS)])
def test_a_graph_holds_whole_rotations(ms: float, copies: int) -> None:
    gpu = FakeGpu(host_ms=ms)
    short = LaunchFunction(gpu, ms)
    unit = make_unit(short, copies, gpu)
    short.sets.clear()
    unit.run()
    assert len(short.sets) == unit.calls <= MAX_GRAPH_CALLS
    assert all(short.sets.count(n) == unit.calls // copies for n in range(copies))
    assert unit.ms == pytest.approx(unit.calls * ms)
    assert unit.ms >= 0.5 * GRAPH_MS


class AddressesOnly(FakeGpu):
    """A graph of it knows what to do and holds nothing, as CUDA's."""

    def capture(self, calls: Callable[[], object]) -> Callable[[], object]:
        before, self.in_graph = self.now_ms, True
        calls()
        self.in_graph, ms, self.now_ms = False, self.now_ms - before, before

        def replay() -> None:
            self.now_ms += ms

        return replay


def test_what_a_graph_recorded_lives_as_long_as_its_unit() -> None:
    """A workspace that is freed may be unmapped before the next replay, or become another tensor."""
    gpu = AddressesOnly()
    kernel = LaunchFunction(gpu, 0.02)
    owner = weakref.ref(kernel)
    unit = make_unit(kernel, 2, gpu)
    assert unit.calls > 1
    del kernel
    gc.collect()
    assert owner() is not None
    unit.run()
    del unit
    gc.collect()
    assert owner() is None


def test_a_slow_call_is_estimated_twice_and_no_more() -> None:
    gpu = FakeGpu()
    slow = LaunchFunction(gpu, 500.0)
    assert make_unit(slow, 2, gpu).ms == 500.0
    assert len(slow.sets) == 2


def test_a_first_call_that_builds_a_plan_does_not_make_a_short_call_long() -> None:
    gpu = FakeGpu()
    short = LaunchFunction(gpu, 0.02)
    first = [True]

    def run(n: int) -> None:
        if first:
            gpu.kernel(4.0)
            first.clear()
        short(n)

    unit = make_unit(run, 2, gpu)
    assert unit.calls > 1
    assert unit.call_ms == pytest.approx(0.02)


@pytest.mark.parametrize(("warm_ms", "window_ms", "calls"), [(0.0, 300.0, 30), (100.0, 300.0, 40), (1.0, 1.0, 2)])
def test_a_window_lasts_as_long_as_asked_and_warms_up_unmeasured(warm_ms: float, window_ms: float, calls: int) -> None:
    gpu = FakeGpu()
    kernel = LaunchFunction(gpu, 10.0)
    unit = Unit(run=lambda: kernel(0), calls=1, ms=10.0)
    assert measure(unit, gpu, warm_ms=warm_ms, window_ms=window_ms).ms == pytest.approx(10.0)
    assert len(kernel.sets) == calls


def test_the_context_surrounds_estimates_graphs_and_windows() -> None:
    gpu = FakeGpu()
    inside = False

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    def run(_: int) -> None:
        assert inside
        gpu.kernel(0.01)

    measure(make_unit(run, 1, gpu, context), gpu, warm_ms=1.0, window_ms=1.0)
    assert not inside


def test_interleaving_cancels_a_card_that_slows_down() -> None:
    """Two equal kernels on a card that gets 0.2 % slower with every call."""

    @dataclass
    class Warming(FakeGpu):
        calls: int = 0

        def kernel(self, ms: float) -> None:
            self.calls += 1
            super().kernel(ms * (1 + 0.002 * self.calls))

    gpu = Warming()
    kernels = [Unit(run=lambda: gpu.kernel(1.0), calls=1, ms=1.0) for _ in range(2)]
    seen: list[int] = []
    a, b = interleave(kernels, gpu, rounds=4, warm_ms=2.0, window_ms=10.0, before=seen.append)
    assert len(a) == len(b) == 4
    assert sorted(seen) == [0] * 4 + [1] * 4
    mean_a, mean_b = (sum(w.ms for w in each) / 4 for each in (a, b))
    assert mean_a == pytest.approx(mean_b, rel=0.005)
    assert a[3].ms > 1.1 * a[0].ms


RESTED = ((400.0, 0.98), (900.0, 1.07), (1500.0, 1.0), (1800.0, 1.04))
"""Of load on a card that was idle: until when a kernel takes how much of its time (docs/decisions/settled-races.md)."""


@pytest.mark.parametrize("settle_ms", [0.0, 700.0, 1e3 * SETTLE_S])
def test_a_race_that_settles_begins_after_what_a_pause_does_to_the_clock(settle_ms: float) -> None:
    """Four equal kernels, three rounds: without load before, the one whose window falls into the slump is behind."""

    class Rested(FakeGpu):
        def kernel(self, ms: float) -> None:
            super().kernel(ms * next((share for until, share in RESTED if self.now_ms < until), 1.0))

    gpu = Rested()
    seen: list[int] = []
    kernels = [Unit(run=lambda: gpu.kernel(1.0), calls=1, ms=1.0) for _ in range(4)]
    pace = {"warm_ms": 33.0, "window_ms": 100.0, "settle_ms": settle_ms}
    windows = interleave(kernels, gpu, rounds=3, before=seen.append, **pace)
    means = [sum(each.ms for each in found) / len(found) for found in windows]
    assert seen[:2] == ([0, 0] if settle_ms else [0, 1]), "who settles is announced, so that a crash can be blamed"
    if settle_ms == 1e3 * SETTLE_S:
        assert means == pytest.approx([1.0] * 4)
    else:
        assert max(means) > 1.01 * min(means), "else nothing was there to settle"


def test_a_race_of_nobody_settles_nothing() -> None:
    assert interleave([], FakeGpu(), rounds=2, warm_ms=1.0, window_ms=1.0, settle_ms=700.0) == ()


def test_the_clock_is_the_median_of_those_that_know_it() -> None:
    windows = [Window(ms=1.0, sm_clock_mhz=clock) for clock in (1400.0, None, 1500.0, 1980.0)]
    assert median_clock(windows) == 1500.0
    assert median_clock([Window(ms=1.0)]) is None
