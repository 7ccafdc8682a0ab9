"""`tune_on_stations`: one run on many GPUs, of one kind or of several; one process decides and writes.

Every station has a thread here that searches for one workload after the other, exactly as a run on one GPU does; only
what compiles, verifies and times is elsewhere. Everything is stored here as it comes, so a station that is lost costs
the candidate in flight: its workload goes to whoever is free next, who finds the trials in the database and what is
left of the budget. That a machine went away is never stored as a failure of a kernel.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.core.device import Device
from flashgen.core.errors import MeasureError
from flashgen.core.record import Limits
from flashgen.core.workload import Workload
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import AnyStore, Context, Neighbours, Options, lookahead
from flashgen.tuning.events import Event, RunFinished, RunStarted, TrialFinished, Warned, WorkloadFinished
from flashgen.tuning.from_calls import LEAST_S
from flashgen.tuning.learned_cost import LearnedCost
from flashgen.tuning.stations import MOST_LOSSES, Handout, Station, StationLostError, Task
from flashgen.tuning.tune import both_neighbours, ended, grouped, new_run, plain, tune_one

LEAST_SHARE = 0.1
"""A workload that comes back has at least this share of its budget, for the finals."""

TICK_S = 0.2
STOP_S = 10.0

OnStationEvent = Callable[[str, Event], None]
"""Is told the name of a station, empty for the run as a whole, and what happened there."""


def tune_on_stations(
    workloads: Sequence[Workload],
    *,
    stations: Sequence[Station],
    stores: Mapping[str, AnyStore],
    budget: Budget,
    options: Options | None = None,
    neighbours: Neighbours | None = None,
    learned: LearnedCost | None = None,
    on_event: OnStationEvent = lambda station, event: None,
    clock: Callable[[], float] = time.monotonic,
    limit_s: float | None = None,
) -> tuple[RunFinished, ...]:
    """Tune every workload once for each kind of device among the stations, all stations at the same time.

    Args:
        workloads: what to tune.
        stations: where; they are stopped at the end, whatever happens.
        stores: the database of each device identity, to resume from and write to.
        budget: for each workload.
        options: how to search; each station's number of compile processes decides how far it compiles ahead.
        neighbours: known records by `Specialization.workload_class`; the stores' if not given.
        learned: what is known of other searches, to propose candidates by; None leaves that to the sampler.
        on_event: is told everything as it happens, in the calling thread.
        clock: seconds that only grow.
        limit_s: seconds for all workloads: the last ones have what is left, no search begins once less than
            `from_calls.LEAST_S` are, and the same call goes on with those.

    Returns:
        One for each kind of device, in the order of the stations; all are `interrupted` by a KeyboardInterrupt.

    Raises:
        MeasureError: all stations of a kind were lost while it had workloads left; what was found is stored.
        DatabaseError: results cannot be stored.
    """
    kinds: dict[str, list[Station]] = {}
    for station in stations:
        kinds.setdefault(station.device.identity, []).append(station)
    fleets = [
        _Fleet(stations=same, store=stores[identity], workloads=grouped(workloads), started=clock())
        for identity, same in kinds.items()
    ]
    return _Run(fleets, budget, options or Options(), neighbours, learned, on_event, clock, limit_s).run()


@dataclass(kw_only=True)
class _Fleet:
    """The stations of one kind of device, and what they have to do."""

    stations: list[Station]
    store: AnyStore
    workloads: tuple[Workload, ...]
    started: float
    outcomes: list[WorkloadFinished] = field(default_factory=list)
    handout: Handout = field(init=False)

    def __post_init__(self) -> None:
        self.handout = Handout(workloads=self.workloads)

    @property
    def device(self) -> Device:
        return self.stations[0].device

    def finished(self, now: float, *, interrupted: bool) -> RunFinished:
        outcomes = sorted(self.outcomes, key=lambda outcome: self.workloads.index(outcome.workload))
        return RunFinished(
            device=self.device,
            outcomes=tuple(outcomes),
            interrupted=interrupted,
            seconds=now - self.started,
        )


class _Run:
    def __init__(
        self,
        fleets: Sequence[_Fleet],
        budget: Budget,
        options: Options,
        neighbours: Neighbours | None,
        learned: LearnedCost | None,
        on_event: OnStationEvent,
        clock: Callable[[], float],
        limit_s: float | None,
    ) -> None:
        self._ends = math.inf if limit_s is None else clock() + limit_s
        self._fleets = fleets
        self._budget = budget
        self._options = options
        self._neighbours = neighbours
        self._learned = learned
        self._on_event = on_event
        self._clock = clock
        self._id = new_run()
        self._inbox: queue.SimpleQueue[tuple[_Fleet, str, Event] | BaseException] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, args=(fleet, station), name=station.name, daemon=True)
            for fleet in fleets
            for station in fleet.stations
        ]

    def run(self) -> tuple[RunFinished, ...]:
        interrupted = False
        try:
            for fleet in self._fleets:
                self._started(fleet)
            for thread in self._threads:
                thread.start()
            while self._is_running() or not self._inbox.empty():
                self._tell(TICK_S)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._stop()
        while not self._inbox.empty():
            self._tell(0.0)
        finished = tuple(fleet.finished(self._clock(), interrupted=interrupted) for fleet in self._fleets)
        for each in finished:
            self._on_event("", each)
        if not interrupted and self._left_s() >= LEAST_S:
            self._check_nothing_is_left()
        return finished

    def _is_running(self) -> bool:
        """Whether anybody works; one that is being started again is not waited for when all is done."""
        is_done = all(fleet.handout.is_done for fleet in self._fleets)
        return not is_done and any(thread.is_alive() for thread in self._threads)

    def _started(self, fleet: _Fleet) -> None:
        measured = fleet.stations[0].executor is not None
        self._on_event("", RunStarted(device=fleet.device, workloads=fleet.workloads, measured=measured))
        for station in fleet.stations:
            for message in station.warnings:
                self._on_event(station.name, Warned(message=message))

    def _tell(self, timeout_s: float) -> None:
        try:
            found = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(found, BaseException):
            raise found
        fleet, name, event = found
        if isinstance(event, WorkloadFinished):
            fleet.outcomes.append(event)
        self._on_event(name, event)

    def _stop(self) -> None:
        """End all stations, and with them the threads, which find them lost."""
        self._is_stopped.set()
        for fleet in self._fleets:
            fleet.handout.stop()
            for station in fleet.stations:
                station.stop()
        deadline = time.monotonic() + STOP_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _check_nothing_is_left(self) -> None:
        for fleet in self._fleets:
            if fleet.handout.left:
                raise MeasureError(
                    f"a run needs a machine that answers, and none is left of {len(fleet.stations)} with "
                    f"{fleet.device.name}: {fleet.handout.left} of {len(fleet.workloads)} workloads are not tuned; the "
                    "same command goes on"
                )

    def _serve(self, fleet: _Fleet, station: Station) -> None:
        """The thread of a station."""
        last = None
        try:
            while self._left_s() >= LEAST_S and (task := fleet.handout.take(station.name, last)) is not None:
                last = task.workload.specialization
                if not self._tune(fleet, station, task):
                    return
        except BaseException as error:  # noqa: BLE001 - what ends the run is raised in the thread of its caller
            self._inbox.put(error)

    def _left_s(self) -> float:
        """Seconds of the limit for all workloads."""
        return self._ends - self._clock()

    def _tune(self, fleet: _Fleet, station: Station, task: Task) -> bool:
        """Tune one workload; whether the station can take another."""
        first: list[float] = []  # when the first candidate had been tried: from then on a budget in seconds counts

        def emit(event: Event) -> None:
            if isinstance(event, TrialFinished) and not first:
                first.append(self._clock())
            self._inbox.put((fleet, station.name, event))

        following = fleet.handout.following(station.name, task.workload.specialization)
        try:
            outcome = tune_one(self._context(fleet, station, task, emit), station.executor, task.workload, following)
        except StationLostError as error:
            if self._is_stopped.is_set():
                return False
            task.losses += 1
            task.spent_s += self._clock() - first[0] if first else 0.0
            emit(Warned(message=f"{station.name} was lost while it tuned {task.workload.key}: {error}"))
            self._pass_on(fleet, task, emit)
            return self._restarted(station, emit)
        emit(outcome)
        fleet.handout.done()
        return True

    def _pass_on(self, fleet: _Fleet, task: Task, emit: Callable[[Event], None]) -> None:
        if task.losses < MOST_LOSSES:
            fleet.handout.give_back(task)
            return
        emit(ended(task.workload, "failed", f"{task.losses} machines were lost at it; nothing is stored of that"))
        fleet.handout.done()

    def _restarted(self, station: Station, emit: Callable[[Event], None]) -> bool:
        try:
            station.restart()
        except StationLostError as error:
            if not self._is_stopped.is_set():
                emit(Warned(message=f"{station.name} is given up, and the others take its work: {error}"))
            return False
        return not self._is_stopped.is_set()

    def _context(self, fleet: _Fleet, station: Station, task: Task, emit: Callable[[Event], None]) -> Context:
        return Context(
            device=fleet.device,
            versions=plain(station.versions),
            store=fleet.store,
            compiler=station.compiler,
            budget=_rest(self._budget, task.spent_s, self._left_s()),
            options=dataclasses.replace(self._options, lookahead=lookahead(station.jobs)),
            neighbours=both_neighbours(fleet.store, self._neighbours),
            emit=emit,
            clock=self._clock,
            run=self._id,
            host=station.hostname,
            limits=Limits() if station.executor is None else Limits.of(station.executor.describe().state),
            learned=self._learned,
        )


def _rest(budget: Budget, spent_s: float, left_s: float) -> Budget:
    """What is left after `spent_s` seconds, in a run that has `left_s`; one in trials counts those that are stored."""
    if budget.seconds is None:
        return budget
    return Budget(seconds=max(min(budget.seconds - spent_s, left_s), LEAST_SHARE * budget.seconds))
