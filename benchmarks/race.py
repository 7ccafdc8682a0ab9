"""One workload, several implementations: each is checked, then they take turns in balanced order, on a warm card.

The device's time is measured in the same way for all of them: from CUDA graphs up to `GRAPH_BELOW_MS`, where the time
that some of them take on the host (FlashAttention-3 and -4 about 0.1 ms a call) could not be hidden, and queued above.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from benchmarks.gpu_turns import my_turn
from benchmarks.impls import Call, Impl, results_of
from benchmarks.problems import Problem, problem
from benchmarks.variants import Entrant, fastest
from flashgen.core.device import Device
from flashgen.core.workload import Workload
from flashgen.measure.baselines import SAME_FUNCTION
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.inputs import rotation_copies
from flashgen.measure.protocol import SETTLE_S
from flashgen.measure.timing import QUEUE, Stopwatch, Unit, Window, make_unit, measure
from flashgen.measure.turns import orders

GRAPH_BELOW_MS = 2.0
"""Many times what any implementation takes on the host for a call, autograd and the wrappers of torch.compile included.
The estimate that is held against it contains the host's time, so that a short call of a slow host is below it, too."""

SLOW = 1.25
"""Times of the fastest one: what is slower draws so much less power that whoever comes next begins on a higher clock
than it can hold, and then falls below it. Such implementations take turns behind the others, with those as slow."""

HOST_SHARE = 0.5
"""Of the device's time: a host that takes more to launch a call may not be hidden by a queue."""

T = TypeVar("T")


class RaceStopwatch(Stopwatch, Protocol):
    """What a race needs of a stopwatch beside windows and graphs."""

    def stream(self) -> AbstractContextManager[object]:
        """Surrounds the whole race, so that a backward pass is prepared where it is recorded."""
        ...

    def host_ms(self, call: Callable[[], object]) -> float:
        """How long the host takes to launch `call` while the device is idle."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Length of a visit: `warm_ms` unmeasured, then `window_ms` measured, `rounds` times; before all, `settle_ms`."""

    warm_ms: float
    window_ms: float
    rounds: int
    settle_ms: float = 1e3 * SETTLE_S


TRIAL = Pace(warm_ms=20.0, window_ms=40.0, rounds=2)
"""Of a variant, before the race that the fastest one enters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The windows of one implementation, or the reason why it has none.

    `timing` is "graph" or "queue", `queued_because` the reason why a short call could not be recorded into a graph.
    `extra_bytes` is what a call held beside inputs and output, where that was asked for; `trials` says of each variant
    what its trial gave.
    """

    impl: Impl
    windows: tuple[Window, ...] = ()
    timing: str = ""
    queued_because: str | None = None
    extra_bytes: int | None = None
    reason: str | None = None
    trials: tuple[str, ...] = ()

    @property
    def median_ms(self) -> float:
        """The median over the windows."""
        return statistics.median(window.ms for window in self.windows)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median over the windows."""
        times = [window.ms for window in self.windows]
        return (max(times) - min(times)) / self.median_ms


def race(
    workload: Workload,
    impls: Sequence[Impl],
    *,
    device: Device,
    where: torch.device,
    stopwatch: RaceStopwatch,
    pace: Pace,
    data: str = NORMAL,
) -> list[Result]:
    """Time `impls` against each other on one workload and one kind of data; one result each, in their order.

    An implementation that refuses the workload, fails, or computes something else gets no time but a reason. The result
    of one with variants has the variant that raced.
    """
    copies = rotation_copies(workload, device.l2_bytes)
    make = partial(problem, workload, copies=copies, where=where, data=data)
    return race_on(make, workload, impls, stopwatch=stopwatch, pace=pace)


def race_on(
    make: Callable[[], Problem], workload: Workload, impls: Sequence[Impl], *, stopwatch: RaceStopwatch, pace: Pace
) -> list[Result]:
    """As `race`, on a problem that `make` makes on the stream of the race."""
    with stopwatch.stream():
        found = _race(workload, impls, make(), stopwatch, pace)
    gc.collect()  # graphs and their memory, where a cycle holds them
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a window of an implementation repeats; `queued_because` as in `Result`."""

    unit: Unit
    queued_because: str | None = None


def _race(
    workload: Workload,
    impls: Sequence[Impl],
    task: Problem,
    stopwatch: RaceStopwatch,
    pace: Pace,
) -> list[Result]:
    entrants = [_entrant(impl, workload, task, stopwatch) for impl in impls]
    entries = {each.impl.name: each.made for each in entrants if isinstance(each.made, Entry)}
    reasons = {each.impl.name: each.made for each in entrants if isinstance(each.made, str)}
    runners = [each.impl for each in entrants if each.impl.name in entries]
    windows: dict[str, list[Window]] = {impl.name: [] for impl in runners}
    heats = by_load([entries[impl.name].unit.call_ms for impl in runners])
    with my_turn():
        if heats and pace.settle_ms > 0:
            first = entries[runners[heats[0][0]].name].unit  # where this fails, its first window does and says so
            attempt(partial(measure, first, stopwatch, warm_ms=0.0, window_ms=pace.settle_ms))
        for index in turns(heats, pace.rounds):
            impl = runners[index]
            if impl.name in reasons:
                continue
            seen = attempt(partial(_visit, entries[impl.name].unit, stopwatch, pace, impl.share))
            if isinstance(seen, Window):
                windows[impl.name].append(seen)
            else:
                reasons[impl.name] = seen
    return [
        Result(impl=each.impl, reason=reasons[each.impl.name], trials=each.trials)
        if each.impl.name in reasons
        else replace(_result(each.impl, entries[each.impl.name], windows[each.impl.name]), trials=each.trials)
        for each in entrants
    ]


def by_load(times_ms: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Who takes turns with whom, by what a call takes of each: who loads the card about alike, the fastest first."""
    heats: list[list[int]] = []
    for index in sorted(range(len(times_ms)), key=lambda each: times_ms[each]):
        if heats and times_ms[index] <= SLOW * times_ms[heats[-1][0]]:
            heats[-1].append(index)
        else:
            heats.append([index])
    return tuple(tuple(sorted(heat)) for heat in heats)


def turns(heats: Iterable[Sequence[int]], rounds: int) -> Iterator[int]:
    """Whose turn it is: all rounds of the first ones in balanced order, then those of the next."""
    for heat in heats:
        for order in there_and_back(len(heat), rounds):
            yield from (heat[place] for place in order)


def there_and_back(count: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """Orders of which the second half is the first one backwards; the one in the middle of an odd number is alone.

    So everybody's turns lie around the middle of an even number of rounds: a card that becomes slower, or faster, from
    window to window does the same to all medians. Whoever follows whom in the first half precedes them in the second.
    """
    first = orders(count, (rounds + 1) // 2)
    return (*first, *(order[::-1] for order in first[: rounds // 2][::-1]))


def in_turns(
    units: Sequence[Unit],
    stopwatch: Stopwatch,
    *,
    rounds: int,
    warm_ms: float,
    window_ms: float,
    settle_ms: float = 0.0,
) -> list[list[Window]]:
    """The windows of units that take turns; before all of them, the first one runs for `settle_ms`."""
    windows: list[list[Window]] = [[] for _ in units]
    if units and settle_ms > 0:
        measure(units[0], stopwatch, warm_ms=0.0, window_ms=settle_ms)
    for index in turns([range(len(units))], rounds):
        windows[index].append(measure(units[index], stopwatch, warm_ms=warm_ms, window_ms=window_ms))
    return windows


def _result(impl: Impl, entry: Entry, windows: Sequence[Window]) -> Result:
    return Result(impl=impl, windows=tuple(windows), timing=entry.unit.timing, queued_because=entry.queued_because)


def _visit(unit: Unit, stopwatch: RaceStopwatch, pace: Pace, share: float) -> Window:
    return measure(unit, stopwatch, warm_ms=share * pace.warm_ms, window_ms=share * pace.window_ms)


def _entrant(impl: Impl, workload: Workload, task: Problem, stopwatch: RaceStopwatch) -> Entrant[Impl, Entry]:
    return fastest(
        impl,
        workload,
        enter=lambda each: attempt(partial(_entry, each, workload, task, stopwatch)),
        trial=lambda each, entry: attempt(partial(trial_ms, entry.unit, stopwatch, each.share)),
    )


def trial_ms(unit: Unit, stopwatch: RaceStopwatch, share: float = 1.0) -> float:
    """Ms of a call in the trial of a variant, whose visits have a share of their usual length."""
    with my_turn():
        return min(_visit(unit, stopwatch, TRIAL, share).ms for _ in range(TRIAL.rounds))


def _entry(impl: Impl, workload: Workload, task: Problem, stopwatch: RaceStopwatch) -> Entry | str:
    """What a window of `impl` repeats, once its results have been checked; or the reason why there is none."""
    reason = impl.unsupported(workload)
    if reason is not None:
        return reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains at length why a backend was left out
        call = impl.prepare(workload, task.inputs)
        wrong = _why_wrong(call, task)
        return wrong or timed(call, task.inputs.copies, stopwatch)


def timed(call: Call, copies: int, stopwatch: RaceStopwatch) -> Entry | str:
    """How the device's time of a call is measured, or why it cannot be told from the host's.

    To be called on the stream of the race, on which forward passes whose backward pass is recorded have to run.
    """
    with my_turn():
        return _timed(call, copies, stopwatch)


def _timed(call: Call, copies: int, stopwatch: RaceStopwatch) -> Entry | str:
    unit = attempt(lambda: make_unit(call.run, copies, stopwatch, call.context, graph_below_ms=GRAPH_BELOW_MS))
    because = None if isinstance(unit, Unit) else f"it cannot be recorded into a CUDA graph ({unit})"
    if not isinstance(unit, Unit):
        unit = make_unit(call.run, copies, stopwatch, call.context, graph_below_ms=0.0)
    if unit.timing == QUEUE:
        with unit.context():
            host_ms = min(stopwatch.host_ms(unit.run) for _ in range(3))
        if host_ms > HOST_SHARE * unit.ms:
            slow = f"the host takes {host_ms:.3f} ms to launch a call of {unit.ms:.3f} ms, which a queue does not hide"
            return f"{because}, and {slow}" if because else slow
    return Entry(unit=unit, queued_because=because)


def _why_wrong(call: Call, task: Problem) -> str | None:
    """Compare each result with what its last heads must be; a call may return fewer of them than are known."""
    with call.context():
        found = call.run(0)
    for result, right in zip(results_of(found), task.expected, strict=False):
        if not bool(torch.isfinite(result).all()):
            return "its output is not finite everywhere"
        distance = task.distance(result, right)
        if not distance <= SAME_FUNCTION:
            return f"it computes something else (relative error {distance:.3g})"
    return None


def attempt(work: Callable[[], T | str]) -> T | str:
    """An implementation that fails costs its own row only."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever another project raises is the reason of a missing row
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {first}" if first else type(error).__name__


def lacked_memory(reason: str) -> bool:
    """Whether a reason that `attempt` gave is that the GPU's memory was not enough."""
    return reason.startswith(torch.OutOfMemoryError.__name__)
