"""How a run on many GPUs looks: lines that name the station, above a bar on a terminal, or JSON for machines."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from types import TracebackType

from flashgen.cli import output
from flashgen.cli.display import QUIET_S, duration, ended_line, started_line
from flashgen.core.quoting import printable
from flashgen.tuning.events import (
    CandidateRanked,
    Event,
    RunStarted,
    TrialFinished,
    Warned,
    WorkloadFinished,
    WorkloadStarted,
    to_json,
)
from flashgen.tuning.many import OnStationEvent


def make_display(*, as_json: bool) -> contextlib.AbstractContextManager[OnStationEvent]:
    """The display that suits the output, around the run."""
    if as_json:
        return contextlib.nullcontext(print_json_line)
    return StationBar() if sys.stdout.isatty() else contextlib.nullcontext(StationLines())


def print_json_line(station: str, event: Event) -> None:
    """Print an event as an object with its `station`."""
    sys.stdout.write(to_json(event, station=station) + "\n")
    sys.stdout.flush()


class StationLines:
    """Lines that make sense in a log: starts, ends, losses, and how far the run is where nothing else is said."""

    def __init__(self, *, say: Callable[[str], None] = output.say, quiet_s: float = QUIET_S) -> None:
        self._say, self._quiet_s = say, quiet_s
        self._started = self._spoke = time.monotonic()
        self.total = self.ended = self._tried = 0
        self._busy: set[str] = set()

    def __call__(self, station: str, event: Event) -> None:
        """Print what is new."""
        self._count(station, event)
        line = self._line(event)
        if line is None and time.monotonic() - self._spoke >= self._quiet_s:
            line = self._progress()
        if line is not None:
            self._say(f"{station}: {line}" if station else line)
            self._spoke = time.monotonic()

    def _count(self, station: str, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.total += len(event.workloads)
        elif isinstance(event, WorkloadStarted):
            self._busy.add(station)
        elif isinstance(event, (TrialFinished, CandidateRanked)):
            self._tried += 1
        elif isinstance(event, WorkloadFinished):
            self.ended += 1
            self._busy.discard(station)

    def _line(self, event: Event) -> str | None:
        if isinstance(event, RunStarted):
            return started_line(event)
        if isinstance(event, Warned):
            return f"warning: {event.message}"
        if isinstance(event, WorkloadStarted):
            resumed = f", {event.resumed_trials} tried before" if event.resumed_trials else ""
            return f"{event.workload.key}: {event.candidates} candidates{resumed}"
        if isinstance(event, WorkloadFinished):
            return ended_line(event, f"[{self.ended}/{self.total}]")
        return None

    def _progress(self) -> str:
        spent = duration(time.monotonic() - self._started)
        return f"{self.ended} of {self.total} workloads ended, {self._tried} candidates tried in {spent}"


class StationBar:
    """The same lines, and a bar of the workloads of all GPUs at the bottom of the terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, transient=True)
        self._task = self._bar.add_task("workloads", total=None)
        self._lines = StationLines(say=self._above, quiet_s=math.inf)

    def __enter__(self) -> StationBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, station: str, event: Event) -> None:
        """Print what is new above the bar, and move it."""
        self._lines(station, event)
        self._bar.update(self._task, completed=self._lines.ended, total=self._lines.total or None)

    def _above(self, line: str) -> None:
        self._bar.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
