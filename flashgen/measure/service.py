"""`GpuService`: what runs inside the worker process of one GPU. It builds, verifies and times.

Problems of a candidate become a `Failure`. If the context of the process did not survive them, the process says so and
ends, and the next call finds a new one.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from flashgen.core.config import Config
from flashgen.core.record import SPLIT, Baseline, Failure, Measurement
from flashgen.launch.gpu import current_device
from flashgen.launch.sdpa import BACKENDS
from flashgen.measure import gpu
from flashgen.measure.bench import Bench, Candidate, State
from flashgen.measure.directions import VerificationCase
from flashgen.measure.faults import failure_of, gpu_is_lost
from flashgen.measure.protocol import EvaluateJob, HostInfo, Outcome, RaceJob, RaceResult
from flashgen.measure.scores import compared
from flashgen.measure.sequential import ANCHOR_ROUNDS, Referee
from flashgen.measure.source import version_of_source
from flashgen.measure.timing import (
    CudaStopwatch,
    Stopwatch,
    Unit,
    Window,
    interleave,
    make_unit,
    measure,
    median_clock,
)
from flashgen.measure.toolchain import GpuToolchain, Toolchain
from flashgen.measure.worker import Announce, WorkerLostError

T = TypeVar("T")

Units = tuple[Unit, ...]

MOST_PROBES, HOST_GAP_MS = 3, 20.0
"""Windows of a candidate that looks slow, and by how much a host that was kept from its work may make one longer.

On a busy host eight trials of kernels of 7 to 25 us were dropped for one window of 0.09 to 0.12 ms a call.
"""

SHORT_ROUNDS = 3
"""Parts of the short window, each beside a shorter window of the reference kernel."""

REFERENCE_SHARE = 0.5
"""Length of the reference kernel's short windows, as a share of the candidate's."""

REFERENCE = "reference"
"""The name of a reference kernel that is no baseline of this race."""

KEEP_SHARE = 0.25
"""Share of the device memory that inputs and right answers of earlier workloads may keep."""


class GpuService:
    """Evaluates candidates on one GPU; `measure.protocol` says what the answers mean."""

    def __init__(self, announce: Announce, index: int = 0, toolchain: Toolchain | None = None) -> None:
        """Take GPU `index` of torch.

        Args:
            announce: tells the other side of the pipe what comes next.
            index: the GPU.
            toolchain: builds kernels; None compiles configs of the kernel families.

        Raises:
            DeviceError: there is no such GPU.
        """
        self._index = index
        self._device = current_device(index)
        where = torch.device("cuda", index)
        torch.cuda.set_device(where)
        torch.zeros(1, device=where)  # make the context now: a broken card must show before the first candidate
        stopwatch = CudaStopwatch(lambda: gpu.sm_clock_mhz(index))
        toolchain = toolchain or GpuToolchain(self._device, index)
        keep_bytes = KEEP_SHARE * torch.cuda.get_device_properties(index).total_memory
        self._judge = Judge(Bench(self._device, where, toolchain, stopwatch, keep_bytes), stopwatch, announce)

    def describe(self, _: object = None) -> HostInfo:
        """The device and software of this process, and who else uses the GPU."""
        others = tuple(gpu.other_processes(self._index))
        return HostInfo(
            device=self._device,
            versions=dataclasses.replace(gpu.versions(), flashgen=version_of_source()),
            other_processes=others,
            hostname=socket.gethostname(),
            state=gpu.state(self._index),
        )

    def evaluate(self, job: EvaluateJob) -> Outcome:
        """See `protocol.Executor.evaluate`."""
        return self._judge.evaluate(job)

    def race(self, job: RaceJob) -> RaceResult | Failure:
        """See `Judge.race`."""
        return self._judge.race(job)


class Judge:
    """The order of work on candidates; free of the GPU, which the bench and the stopwatch stand for."""

    def __init__(self, bench: Bench, stopwatch: Stopwatch, announce: Announce) -> None:
        self._bench = bench
        self._stopwatch = stopwatch
        self._tell = announce
        self._stage = "launch"

    def evaluate(self, job: EvaluateJob) -> Outcome:
        """Verify one config, probe it, and time it beside the reference kernel in short windows.

        Raises:
            WorkerLostError: this process can measure no more.
        """
        return self._attempt(lambda: self._evaluate(job))

    def race(self, job: RaceJob) -> RaceResult | Failure:
        """Verify configs, time them against each other, and verify each once more afterwards.

        Returns:
            The result, or a `Failure` of the race as a whole: the config that was announced last is to blame (an index
            behind the last config is one of torch's backends), and the others deserve another race.

        Raises:
            WorkerLostError: this process can measure no more; blame goes as above.
        """
        return self._attempt(lambda: self._race(job))

    def _evaluate(self, job: EvaluateJob) -> Outcome:
        self._announce("launch", None)
        state = self._bench.state(job.workload)
        ready = self._ready(state, job.config, 0)
        if isinstance(ready, Failure):
            return ready
        candidate, units = ready
        unit = units[0]
        probe = self._probe(unit, job.drop_above_ms)
        if job.drop_above_ms is not None and probe.ms > job.drop_above_ms:
            return _measurement(candidate, [[probe]])
        reference = self._bench.reference(state)
        part_ms = 1e3 * job.window_s / SHORT_ROUNDS
        mine: list[list[Window]] = [[] for _ in units]
        theirs: list[Window] = []
        for number in range(SHORT_ROUNDS):
            turns = [(each, part_ms, windows) for each, windows in zip(units, mine, strict=True)]
            if reference is not None:
                turns.append((reference, REFERENCE_SHARE * part_ms, theirs))
            for who, window_ms, windows in turns if number % 2 else reversed(turns):
                windows.append(measure(who, self._stopwatch, warm_ms=1e3 * job.warm_s, window_ms=window_ms))
        return _measurement(candidate, mine, reference_ms=_median(theirs) if theirs else None)

    def _probe(self, unit: Unit, drop_above_ms: float | None) -> Window:
        """One short window; of a candidate that would be dropped for what a host may have lost, the fastest of some."""
        probe = measure(unit, self._stopwatch, warm_ms=0.0, window_ms=unit.ms)
        for _ in range(MOST_PROBES - 1):
            if drop_above_ms is None or not 0 < probe.ms - drop_above_ms <= HOST_GAP_MS / unit.calls:
                break
            again = measure(unit, self._stopwatch, warm_ms=0.0, window_ms=unit.ms)
            probe = min(probe, again, key=lambda each: each.ms)
        return probe

    def _race(self, job: RaceJob) -> RaceResult | Failure:
        self._announce("launch", None)
        state = self._bench.state(job.workload)
        outcomes: dict[int, Outcome] = {}
        hard = self._bench.hard_case(state) if job.hard else None
        racers: dict[int, tuple[Candidate, Units]] = {}
        for index, config in enumerate(job.configs):
            ready = self._attempt(partial(self._ready, state, config, index, hard))
            if isinstance(ready, Failure):
                outcomes[index] = ready
            else:
                racers[index] = ready
        others = self._others(state, job, next(iter(racers), None))
        turns = [(index, unit) for index, (_, units) in racers.items() for unit in units]
        windows = interleave(
            [unit for _, unit in turns],
            self._stopwatch,
            rounds=job.rounds,
            warm_ms=1e3 * job.warm_s,
            window_ms=1e3 * job.window_s,
            settle_ms=1e3 * job.settle_s,
            before=lambda turn: self._announce("launch", turns[turn][0]),
            going_on=self._referee(job, racers, turns),
        )
        medians = self._beside(others, job)
        reference_ms = next((medians[impl] for impl in others if impl != SPLIT), None)
        for index, (candidate, _) in racers.items():
            mine = _of(index, turns, windows)
            wrong = self._attempt(partial(self._check_again, candidate, index))
            outcomes[index] = wrong or _measurement(candidate, mine, reference_ms=reference_ms)
        found = tuple(Baseline(impl=impl, median_ms=ms) for impl, ms in medians.items() if impl != REFERENCE)
        return RaceResult(outcomes=tuple(outcomes[index] for index in range(len(job.configs))), baselines=found)

    def _referee(
        self, job: RaceJob, racers: Mapping[int, tuple[Candidate, Units]], turns: Sequence[tuple[int, Unit]]
    ) -> Referee | None:
        """Who ends the race, if it has a rule."""
        rule, places = job.rule, {index: place for place, index in enumerate(racers)}
        if rule is None or not racers:
            return None
        for index in sorted(set(range(len(job.configs))) - racers.keys(), reverse=True):
            rule = rule.without(index)

        def times(windows: Sequence[Sequence[Window]]) -> list[tuple[float, ...]]:
            found = {
                place: _measurement(racers[index][0], _of(index, turns, windows)) for index, place in places.items()
            }
            return [each.times_ms for each in compared(found).values()]

        return Referee(rule, [places[subject] for subject, _ in turns], times, time.monotonic)

    def _beside(self, others: Mapping[str, Unit], job: RaceJob) -> dict[str, float]:
        """Times of the reference kernel and torch's backends, behind the race and the fastest first.

        Most of them draw less power than what races. Among its turns they would give whoever comes next a higher clock,
        and whoever comes half a second later a lower one.
        """
        medians = {}
        for impl, unit in sorted(others.items(), key=lambda each: each[1].call_ms):
            (windows,) = interleave(
                [unit],
                self._stopwatch,
                rounds=min(job.rounds, ANCHOR_ROUNDS),
                warm_ms=1e3 * job.warm_s,
                window_ms=1e3 * job.window_s,
                before=lambda _: self._announce("launch", len(job.configs)),
            )
            medians[impl] = _median(windows)
        return medians

    def _ready(
        self, state: State, config: Config, subject: int, hard: VerificationCase | None = None
    ) -> tuple[Candidate, Units] | Failure:
        """A config that passed the gate, and what its windows repeat: of each of its runs, in their order."""
        candidate = self._bench.candidate(state, config, lambda stage: self._announce(stage, subject), hard)
        if isinstance(candidate, Failure):
            return candidate
        self._announce("launch", subject)
        cases = [(candidate.run, state.problem), (candidate.hard_run, hard)]
        cases += [(run, state.profiles[name]) for name, run in candidate.profile_runs.items()]
        units = (make_unit(run, case.copies, self._stopwatch) for run, case in cases if run and case)
        return candidate, tuple(units)

    def _others(self, state: State, job: RaceJob, first: int | None) -> dict[str, Unit]:
        """The reference kernel first, and the other baselines, if they are asked for and can run.

        One of a mixed batch is two launches, its chunks by the `first` config that races.
        """
        self._announce("launch", len(job.configs))
        reference = self._bench.reference(state) if job.reference else None
        units = {impl: self._bench.sdpa(state, impl) for impl in BACKENDS} if job.baselines else {}
        found = {impl: unit for impl, unit in units.items() if unit is not None}
        found = found or ({} if reference is None else {REFERENCE: reference})
        split = self._bench.split(state, job.configs[first]) if job.baselines and first is not None else None
        return found if split is None else {**found, SPLIT: split}

    def _check_again(self, candidate: Candidate, subject: int) -> Failure | None:
        """A kernel with a race condition may be right once; after thousands of calls it is asked again."""
        self._announce("verify", subject)
        verdict = candidate.check()
        if isinstance(verdict, Failure):
            return Failure(stage=verdict.stage, reason=f"right before the timing and wrong after it: {verdict.reason}")
        return None

    def _attempt(self, work: Callable[[], T]) -> T | Failure:
        """Do the work; an exception is a failure of the stage announced last, or the end of this process."""
        try:
            return work()
        except WorkerLostError:
            raise
        except Exception as error:  # noqa: BLE001 - one candidate's trouble is data, whatever it is
            failure = failure_of(error, self._stage)
        if gpu_is_lost():
            raise WorkerLostError(failure)
        if failure.stage == "memory":
            self._bench.release()
        return failure

    def _announce(self, stage: str, subject: int | None) -> None:
        self._stage = stage
        self._tell(stage, subject)


def _of(index: int, turns: Sequence[tuple[int, Unit]], windows: Sequence[Sequence[Window]]) -> list[Sequence[Window]]:
    """The windows of a config's runs, in their order."""
    return [each for (subject, _), each in zip(turns, windows, strict=True) if subject == index]


def _median(windows: Sequence[Window]) -> float:
    return statistics.median(window.ms for window in windows)


def _measurement(
    candidate: Candidate, windows: Sequence[Sequence[Window]], *, reference_ms: float | None = None
) -> Measurement:
    """Of the windows of a candidate's runs in their order; those behind the last list were not measured."""
    normal, *others = windows
    hard = others.pop(0) if candidate.hard_run is not None and others else ()
    return Measurement(
        times_ms=_times_ms(normal),
        max_error=candidate.errors.max_error,
        mean_error=candidate.errors.mean_error,
        reference_ms=reference_ms,
        sm_clock_mhz=median_clock(normal),
        hard_times_ms=_times_ms(hard),
        profile_times_ms=tuple(
            (name, _times_ms(each)) for name, each in zip(candidate.profile_runs, others, strict=False)
        ),
    )


def _times_ms(windows: Sequence[Window]) -> tuple[float, ...]:
    return tuple(window.ms for window in windows)
