"""Stations of this process that need neither a GPU nor a cluster, and can be lost at a chosen moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Versions
from flashgen.core.workload import Specialization
from flashgen.measure.protocol import EvaluateJob, Executor, Outcome, RaceJob, RaceResult
from flashgen.tuning.compile_pool import Compiler
from flashgen.tuning.stations import StationLostError
from tests.tuning.fakes import H200, FakeExecutor


@dataclass(kw_only=True)
class FakeStation(FakeExecutor):
    """A fake executor and compiler; the evaluations whose numbers are in `lost_at` find it lost, from 0 on.

    It comes back `restarts` times, or takes half a minute over it (`is_slow`) unless it is stopped.
    """

    name: str = "node:0"
    hostname: str = "node"
    device: Device = H200
    versions: Versions = field(default_factory=Versions)
    warnings: tuple[str, ...] = ()
    jobs: int = 2
    measures: bool = True
    lost_at: Callable[[int, EvaluateJob], bool] = lambda number, job: False
    lost_in_race: Callable[[int], bool] = lambda number: False
    restarts: int = 0
    is_slow: bool = False
    asked: int = 0
    is_stopped: bool = False

    @property
    def executor(self) -> Executor | None:
        return self if self.measures else None

    @property
    def compiler(self) -> Compiler:
        return self

    def evaluate(self, job: EvaluateJob) -> Outcome:
        number, self.asked = self.asked, self.asked + 1
        if self.is_stopped or self.lost_at(number, job):
            raise StationLostError("planted")
        return super().evaluate(job)

    def race(self, job: RaceJob) -> RaceResult:
        if self.is_stopped or self.lost_in_race(len(self.races)):
            raise StationLostError("planted in a race")
        return super().race(job)

    def submit(self, spec: Specialization, config: Config) -> None:
        return

    def result(self, spec: Specialization, config: Config) -> Compiled:
        return Compiled(registers=128, spills=0, shared_bytes=65536, occupancy=1, source_digest="d")

    def restart(self) -> None:
        until = time.monotonic() + 30
        while self.is_slow and not self.is_stopped and time.monotonic() < until:
            time.sleep(0.01)
        if self.restarts < 1 or self.is_stopped:
            raise StationLostError("planted for good")
        self.restarts -= 1

    def stop(self) -> None:
        self.is_stopped = True
