"""What runs in the hosts of a Ray cluster without GPUs; imports little, as each of their processes imports it."""

from __future__ import annotations

import os
import time

from flashgen.core.compiled import Compiled
from flashgen.core.device import find_device
from flashgen.core.record import Measurement, Versions
from flashgen.core.settings import child_environment
from flashgen.measure.protocol import EvaluateJob, HostInfo, RaceJob, RaceResult
from flashgen.measure.worker import Announce
from flashgen.tuning.compile_pool import CompileJob

GPUS = 2
SMALL, LARGE = find_device("h100"), find_device("h200")


class Gpus:
    """The cluster's GPUs are of two kinds; the host's process is named as another user of each."""

    def __init__(self, announce: Announce, index: int) -> None:
        last = child_environment()["CUDA_VISIBLE_DEVICES"] == str(GPUS - 1)
        self._device = SMALL if last else LARGE

    def describe(self, _: object) -> HostInfo:
        return HostInfo(
            device=self._device, versions=Versions(driver="580"), other_processes=(f"process {os.getppid()}",)
        )

    def evaluate(self, job: EvaluateJob) -> Measurement:
        time.sleep(0.01)
        return Measurement(times_ms=(job.workload.flops / 1e12 + job.config.integer("block_m") / 1e3,))

    def race(self, job: RaceJob) -> RaceResult:
        times = [job.workload.flops / 1e12 + config.integer("block_m") / 1e3 for config in job.configs]
        return RaceResult(outcomes=tuple(Measurement(times_ms=(time,) * job.rounds) for time in times))


class Broken:
    """A GPU that does not work."""

    def __init__(self, announce: Announce, index: int) -> None:
        raise OSError("planted")


class Compiler:
    """Everything compiles at once."""

    def __init__(self, announce: Announce) -> None:
        return

    def compile(self, job: CompileJob) -> Compiled:
        return Compiled(registers=128, spills=0, shared_bytes=65536, occupancy=1, source_digest="d")
