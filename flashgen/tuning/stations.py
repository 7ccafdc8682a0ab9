"""`Station`: a GPU somewhere that a coordinator tunes on, and `Handout`: which workload each of them takes next."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flashgen.core.device import Device
from flashgen.core.errors import MeasureError
from flashgen.core.record import Versions
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.protocol import Executor
from flashgen.tuning.compile_pool import Compiler
from flashgen.tuning.tune import grouped

MOST_LOSSES = 3
"""A workload at which so many machines were lost is given up: it may be what takes them down."""


class StationLostError(MeasureError):
    """The machine of a station does not answer any more; what it was asked is unanswered, and no candidate's fault."""


class Station(Protocol):
    """One GPU with an executor, and a compile pool on its machine; any of their calls may end in StationLostError."""

    @property
    def name(self) -> str:
        """What a person calls it, e.g. `node-3:0`."""
        ...

    @property
    def hostname(self) -> str:
        """Its machine, as the history of records has it."""
        ...

    @property
    def device(self) -> Device:
        """What it measures on, or compiles for."""
        ...

    @property
    def versions(self) -> Versions:
        """Its software, as records have it."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of it."""
        ...

    @property
    def jobs(self) -> int:
        """Its compile processes."""
        ...

    @property
    def executor(self) -> Executor | None:
        """Measures; None where nothing is measured."""
        ...

    @property
    def compiler(self) -> Compiler:
        """Compiles ahead."""
        ...

    def restart(self) -> None:
        """Make it usable again after a loss, in bounded time.

        Raises:
            StationLostError: it stays lost.
        """
        ...

    def stop(self) -> None:
        """End all that runs there, from any thread; calls in progress raise StationLostError."""
        ...


@dataclass(kw_only=True, eq=False)
class Task:
    """A workload to tune, how often a station was lost at it, and what they had spent of its budget."""

    workload: Workload
    losses: int = 0
    spent_s: float = 0.0


@dataclass(kw_only=True)
class Handout:
    """Gives the workloads of one kind of device to stations that ask from threads of their own.

    A station stays with a specialization as long as it has workloads: they share what its node compiled, and winners.
    Then it takes one that nobody has begun or is promised, then helps where most is left. Whoever asks while the last
    ones are still tuned by others waits, because these may be lost and come back.
    """

    workloads: Sequence[Workload]
    _open: dict[Specialization, list[Task]] = field(init=False)
    _begun: set[Specialization] = field(init=False, default_factory=set)
    _promised: dict[str, Specialization] = field(init=False, default_factory=dict)
    _running: int = field(init=False, default=0)
    _is_stopped: bool = field(init=False, default=False)
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._open = {}
        for workload in grouped(self.workloads):
            self._open.setdefault(workload.specialization, []).append(Task(workload=workload))

    def take(self, station: str, last: Specialization | None) -> Task | None:
        """The next task of a station whose last one was of specialization `last`; None if all is done, or stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._open or not self._running)
            if self._is_stopped or not self._open:
                return None
            spec = self._choice(station, last)
            self._promised.pop(station, None)
            task = self._open[spec].pop(0)
            if not self._open[spec]:
                del self._open[spec]
            self._begun.add(spec)
            self._running += 1
            return task

    def following(self, station: str, last: Specialization) -> Iterator[Workload]:
        """What the station will likely be given next; looked up, and promised to it, at the first `next`.

        It may have its node compile for it beforehand, so another station begins another specialization.
        """
        with self._changed:
            if not self._open:
                return
            spec = self._promised[station] = self._choice(station, last)
            workload = self._open[spec][0].workload
        yield workload

    def done(self) -> None:
        """A task that was taken has come to its end."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def give_back(self, task: Task) -> None:
        """A task whose station was lost: it is the next one of its specialization."""
        with self._changed:
            self._running -= 1
            self._open.setdefault(task.workload.specialization, []).insert(0, task)
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody gets another task."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether every task has come to its end."""
        with self._changed:
            return not self._open and not self._running

    @property
    def left(self) -> int:
        """Tasks that nobody has taken."""
        with self._changed:
            return sum(map(len, self._open.values()))

    def _choice(self, station: str, last: Specialization | None) -> Specialization:
        for own in (last, self._promised.get(station)):
            if own is not None and own in self._open:
                return own
        taken = {*self._begun, *self._promised.values()}
        fresh = next((spec for spec in self._open if spec not in taken), None)
        return fresh or max(self._open, key=lambda spec: len(self._open[spec]))
