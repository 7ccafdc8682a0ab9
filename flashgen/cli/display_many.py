"""How a run on many GPUs looks: lines that name the station, or one JSON object a line for machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from flashgen.cli import output
from flashgen.cli.display import QUIET_S, duration, ended_line, started_line
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


def make_display(*, as_json: bool) -> OnStationEvent:
    """The display that suits the output."""
    return print_json_line if as_json else StationLines()


def print_json_line(station: str, event: Event) -> None:
    """Print an event as an object with its `station`."""
    sys.stdout.write(to_json(event, station=station) + "\n")
    sys.stdout.flush()


class StationLines:
    """Lines that make sense in a log: starts, ends, losses, and how far the run is where nothing else is said."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._spoke = clock()
        self._total = self._ended = self._tried = 0
        self._busy: set[str] = set()

    def __call__(self, station: str, event: Event) -> None:
        """Print what is new."""
        self._count(station, event)
        line = self._line(event)
        if line is None and self._clock() - self._spoke >= QUIET_S:
            line = self._progress()
        if line is not None:
            output.say(f"{station}: {line}" if station else line)
            self._spoke = self._clock()

    def _count(self, station: str, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._total += len(event.workloads)
        elif isinstance(event, WorkloadStarted):
            self._busy.add(station)
        elif isinstance(event, (TrialFinished, CandidateRanked)):
            self._tried += 1
        elif isinstance(event, WorkloadFinished):
            self._ended += 1
            self._busy.discard(station)

    def _line(self, event: Event) -> str | None:
        if isinstance(event, RunStarted):
            return started_line(event)
        if isinstance(event, Warned):
            return f"warning: {event.message}"
        if isinstance(event, WorkloadStarted):
            resumed = f", {event.resumed_trials} trials from before" if event.resumed_trials else ""
            return f"{event.workload.key}: {event.candidates} candidates{resumed}"
        if isinstance(event, WorkloadFinished):
            return ended_line(event, f"[{self._ended}/{self._total}]")
        return None

    def _progress(self) -> str:
        spent = duration(self._clock() - self._started)
        return f"{self._ended} of {self._total} workloads ended, {self._tried} candidates tried in {spent}"
