"""Timing on a card that changes its clock: windows of back-to-back calls, interleaved in balanced order.

What a number means: mean device time per call, in ms, of calls that follow one another without a gap, with inputs
rotated over at least twice the L2 cache, between two device events. Host time is no part of it: a call below a limit
is recorded into a CUDA graph of many calls (each with its own set of inputs) that is replayed; a longer one is queued,
which the host does faster than the device works it off. `Unit.timing` says which of the two.

Under a power cap the clock follows what ran in the last tenths of a second. So candidates take turns, every one of
them runs for a while before its measured window starts, and the order of the turns changes from round to round. A race
may begin with load that does not count.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flashgen.measure import graph_capture
from flashgen.measure.turns import Turns

GRAPH_BELOW_MS = 0.3
"""The limit in a search. Its candidates cost the host 5 to 25 us a call, torch's backward passes 50, and on a host that
compiles on every core 130: well above what a shorter call could not hide. Where others are timed who cost it more, the
limit has to be higher."""

GRAPH_MS = 2.0
"""Length of one graph: the gap of some microseconds between two replays stays under half a per cent."""

MAX_GRAPH_CALLS = 1024
ESTIMATES = 3
LONG_MS = 1.0
"""Of a call this long the host's share is small."""

GRAPH, QUEUE = "graph", "queue"
"""How a unit is timed: replayed from a CUDA graph, or launched call by call."""

Run = Callable[[int], object]
"""Launches one call on the n-th set of inputs, without waiting for it."""


class Stopwatch(Protocol):
    """Device time; a fake one makes this module testable without a GPU."""

    def elapsed_ms(self, warm: Callable[[], object], measured: Callable[[], object]) -> float:
        """Queue `warm`, then `measured`, and return the device time of `measured` in ms."""
        ...

    def capture(self, calls: Callable[[], object]) -> Callable[[], object]:
        """Record what `calls` launches; the result replays it."""
        ...

    def sm_clock_mhz(self) -> float | None:
        """The clock right now, None where it cannot be read."""
        ...


class CudaStopwatch:
    """Events and graphs of the current CUDA (or HIP) device; `clock` reads its SM clock."""

    def __init__(self, clock: Callable[[], float | None] = lambda: None) -> None:
        self._clock = clock
        self._last_clock: float | None = None

    def elapsed_ms(self, warm: Callable[[], object], measured: Callable[[], object]) -> float:
        """Queue `warm`, then `measured`, and return the device time of `measured` in ms."""
        start, end = _event(), _event()
        warm()
        start.record()
        measured()
        end.record()
        self._last_clock = self._clock()  # the queue is still being worked off
        end.synchronize()
        return float(start.elapsed_time(end))

    def capture(self, calls: Callable[[], object]) -> Callable[[], object]:
        """Record what `calls` launches into a CUDA graph; the result replays it."""
        return graph_capture.capture(calls)

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """The side stream that graphs are recorded on: what is prepared on it can be recorded, backward passes too."""
        return graph_capture.on_side_stream()

    def host_ms(self, call: Callable[[], object]) -> float:
        """How long the host takes to launch `call` while the device is idle."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        took = time.perf_counter() - started
        torch.cuda.synchronize()
        return 1e3 * took

    def sm_clock_mhz(self) -> float | None:
        """The clock seen during the last window, None where it cannot be read."""
        return self._last_clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a window repeats: one call, or one graph of many. `ms` is the estimated time of one unit.

    `context` surrounds every window (it chooses a backend of torch, for one) and costs nothing per call. `keeps` is
    what was recorded: a graph knows only addresses, and the tensors behind them (workspaces, what a forward pass left)
    must live as long as it does. Torch unmaps freed memory at each capture. `timing` is `GRAPH` or `QUEUE`.
    """

    run: Callable[[], object]
    calls: int
    ms: float
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    keeps: object = None
    timing: str = QUEUE

    @property
    def call_ms(self) -> float:
        """Estimated time of one call."""
        return self.ms / self.calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One measured window: mean ms per call, and the SM clock in it."""

    ms: float
    sm_clock_mhz: float | None = None


def make_unit(
    run: Run,
    copies: int,
    stopwatch: Stopwatch,
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    *,
    graph_below_ms: float = GRAPH_BELOW_MS,
) -> Unit:
    """Estimate a call and decide whether it is queued or replayed from a graph.

    Args:
        run: launches call n; it has run at least once before (nothing is compiled or loaded here).
        copies: sets of inputs to rotate.
        stopwatch: measures.
        context: surrounds the calls.
        graph_below_ms: calls whose estimate is below are recorded. An estimate is never below the host's time of a
            call, so a limit far above that of the slowest host leaves no time to any of them.

    Raises:
        Exception: what the call raised, or what prevented its recording.
    """
    turn = 0

    def queue() -> None:
        nonlocal turn
        run(turn % copies)
        turn += 1

    with context():
        estimate = _estimate_ms(queue, stopwatch)
        if estimate >= graph_below_ms:
            return Unit(run=queue, calls=1, ms=estimate, context=context)
        calls, replay, ms = _recorded(run, copies, stopwatch, estimate)
    return Unit(run=replay, calls=calls, ms=max(ms, 1e-6), context=context, keeps=run, timing=GRAPH)


def measure(unit: Unit, stopwatch: Stopwatch, *, warm_ms: float, window_ms: float) -> Window:
    """Run `unit` for about `warm_ms` unmeasured and `window_ms` measured (each at least once, warm-up unless 0)."""
    warm = 0 if warm_ms <= 0 else max(1, round(warm_ms / unit.ms))
    repeats = max(1, round(window_ms / unit.ms))
    with unit.context():
        total = stopwatch.elapsed_ms(lambda: _repeat(unit.run, warm), lambda: _repeat(unit.run, repeats))
    return Window(ms=total / (repeats * unit.calls), sm_clock_mhz=stopwatch.sm_clock_mhz())


def interleave(
    units: Sequence[Unit],
    stopwatch: Stopwatch,
    *,
    rounds: int,
    warm_ms: float,
    window_ms: float,
    settle_ms: float = 0.0,
    before: Callable[[int], None] = lambda index: None,
    going_on: Callable[[Sequence[Sequence[Window]]], Sequence[int]] | None = None,
) -> tuple[tuple[Window, ...], ...]:
    """Time `units` against each other; for each of them one window a round.

    The first of them runs for `settle_ms` before all windows, because the clock is another one after a pause.

    `before` is told the index of the unit whose turn starts, so that a crash can be blamed. `going_on` is asked after
    each round, told all windows so far, which units have another one; none of them ends the race.
    """
    windows: list[list[Window]] = [[] for _ in units]
    racing: Sequence[int] = range(len(units))
    if units and settle_ms > 0:
        before(0)
        measure(units[0], stopwatch, warm_ms=0.0, window_ms=settle_ms)
    turns = Turns()
    for _ in range(rounds):
        for index in turns.next(racing):
            before(index)
            windows[index].append(measure(units[index], stopwatch, warm_ms=warm_ms, window_ms=window_ms))
        racing = racing if going_on is None else sorted(going_on(windows))
        if not racing:
            break
    return tuple(tuple(each) for each in windows)


def median_clock(windows: Sequence[Window]) -> float | None:
    """The median SM clock over windows that know it."""
    clocks = [w.sm_clock_mhz for w in windows if w.sm_clock_mhz is not None]
    return statistics.median(clocks) if clocks else None


def _estimate_ms(call: Callable[[], object], stopwatch: Stopwatch) -> float:
    """The least of a few single calls; two are enough where the host's share is small: the first may build its plan."""
    estimate = min(stopwatch.elapsed_ms(_nothing, call) for _ in range(2))
    if estimate >= LONG_MS:
        return estimate
    return min(estimate, *(stopwatch.elapsed_ms(_nothing, call) for _ in range(ESTIMATES - 2)))


def _nothing() -> None:
    pass


def _recorded(
    run: Run, copies: int, stopwatch: Stopwatch, estimate_ms: float
) -> tuple[int, Callable[[], object], float]:
    """A graph of about `GRAPH_MS`: its calls, its replay and its ms.

    An estimate that was mostly the host's gives a graph of a fraction of that, which is recorded anew.
    """

    def record(calls: int) -> tuple[int, Callable[[], object], float]:
        def all_calls() -> None:
            for n in range(calls):
                run(n % copies)

        replay = stopwatch.capture(all_calls)
        return calls, replay, stopwatch.elapsed_ms(replay, replay)

    calls, replay, ms = record(_graph_calls(estimate_ms, copies))
    wanted = _graph_calls(ms / calls, copies)
    return record(wanted) if wanted >= 2 * calls else (calls, replay, ms)


def _graph_calls(estimate_ms: float, copies: int) -> int:
    """Calls for a graph of about `GRAPH_MS`: whole rotations if they fit."""
    calls = min(MAX_GRAPH_CALLS, max(1, round(GRAPH_MS / max(estimate_ms, 1e-3))))
    rotations = max(1, -(-calls // copies))
    return min(MAX_GRAPH_CALLS, rotations * copies)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()
