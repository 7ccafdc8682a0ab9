"""A GPU service without a GPU whose candidates really hang, abort, exhaust memory or crash their process."""

from __future__ import annotations

import os
import signal
import time

from flashgen.core.config import Config
from flashgen.core.record import Failure, Measurement
from flashgen.measure.protocol import EvaluateJob, HostInfo, Outcome, RaceJob, RaceResult
from flashgen.measure.worker import Announce
from tests.tuning.fakes import H200, chance, true_ms


def fault(config: Config) -> str:
    """What this candidate does: half of them are well."""
    return ("hang", "abort", "segfault", "memory", "error", *["well"] * 5)[int(10 * chance("fault", config))]


class Service:
    """Same answers as `FakeExecutor`, but from a process that candidates can take down."""

    def __init__(self, announce: Announce, index: int) -> None:
        self._announce = announce

    def describe(self, _: object) -> HostInfo:
        return HostInfo(device=H200)

    def evaluate(self, job: EvaluateJob) -> Outcome:
        self._announce("launch", 0)
        kind = fault(job.config)
        if kind == "hang":
            time.sleep(600)
        if kind == "abort":
            os.abort()
        if kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "memory":
            raise MemoryError("planted")
        if kind == "error":
            return Failure(stage="verify", reason="planted")
        return Measurement(times_ms=(true_ms(job.workload, job.config),))

    def race(self, job: RaceJob) -> RaceResult:
        times = [true_ms(job.workload, config) for config in job.configs]
        return RaceResult(outcomes=tuple(Measurement(times_ms=(time,) * job.rounds) for time in times))
