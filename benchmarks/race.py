"""One workload, several implementations: each is checked, then they take turns in balanced order."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.impls import Call, Impl, results_of
from benchmarks.problems import Problem, problem
from flashgen.core.device import Device
from flashgen.core.workload import Workload
from flashgen.measure.baselines import SAME_FUNCTION
from flashgen.measure.inputs import rotation_copies
from flashgen.measure.timing import Stopwatch, Unit, Window, make_unit, measure, orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Length of a visit: `warm_ms` unmeasured, then `window_ms` measured, `rounds` times."""

    warm_ms: float
    window_ms: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The windows of one implementation, or the reason why it has none.

    `extra_bytes` is what a call held beside inputs and output, where that was asked for.
    """

    impl: Impl
    windows: tuple[Window, ...] = ()
    extra_bytes: int | None = None
    reason: str | None = None

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
    stopwatch: Stopwatch,
    pace: Pace,
) -> list[Result]:
    """Time `impls` against each other on one workload; one result each, in their order.

    An implementation that refuses the workload, fails, or computes something else gets no time but a reason.
    """
    task = problem(workload, copies=rotation_copies(workload, device.l2_bytes), where=where)
    units: dict[str, Unit] = {}
    reasons: dict[str, str] = {}
    for impl in impls:
        made = _attempt(partial(_unit, impl, workload, task, stopwatch))
        if isinstance(made, Unit):
            units[impl.name] = made
        else:
            reasons[impl.name] = str(made)
    runners = [impl for impl in impls if impl.name in units]
    windows: dict[str, list[Window]] = {impl.name: [] for impl in runners}
    for order in orders(len(runners), pace.rounds):
        for impl in (runners[turn] for turn in order if runners[turn].name not in reasons):
            seen = _attempt(partial(_visit, impl, units[impl.name], stopwatch, pace))
            if isinstance(seen, Window):
                windows[impl.name].append(seen)
            else:
                reasons[impl.name] = str(seen)
    return [
        Result(impl=impl, reason=reasons[impl.name])
        if impl.name in reasons
        else Result(impl=impl, windows=tuple(windows[impl.name]))
        for impl in impls
    ]


def _visit(impl: Impl, unit: Unit, stopwatch: Stopwatch, pace: Pace) -> Window:
    return measure(unit, stopwatch, warm_ms=impl.share * pace.warm_ms, window_ms=impl.share * pace.window_ms)


def _unit(impl: Impl, workload: Workload, task: Problem, stopwatch: Stopwatch) -> Unit | str:
    """What a window of `impl` repeats, once its results have been checked; or the reason why there is none."""
    reason = impl.unsupported(workload)
    if reason is not None:
        return reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains at length why a backend was left out
        call = impl.prepare(workload, task.inputs)
        wrong = _why_wrong(call, task.expected)
        if wrong is not None:
            return wrong
        return make_unit(call.run, task.inputs.copies, stopwatch, call.context)


def _why_wrong(call: Call, expected: Sequence[torch.Tensor]) -> str | None:
    """Compare each result with what its last heads must be; a call may return fewer of them than are known."""
    with call.context():
        found = call.run(0)
    for result, right in zip(results_of(found), expected, strict=False):
        if not bool(torch.isfinite(result).all()):
            return "its output is not finite everywhere"
        part = result[:1, -right.shape[1] :].double()
        distance = float((part - right).norm() / right.norm().clamp_min(1e-30))
        if not distance <= SAME_FUNCTION:
            return f"it computes something else (relative error {distance:.3g})"
    return None


def _attempt(work: Callable[[], Unit | Window | str]) -> Unit | Window | str:
    """An implementation that fails costs its own row only."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever another project raises is the reason of a missing row
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {first}" if first else type(error).__name__
