"""`Host`: what runs on the machine of a station, in a process of Ray's: an unchanged executor and a compile pool.

Both must be on one machine, because the executor finds what the pool compiled in Triton's cache on its disk. Kernels
run in the executor's own worker process, so that one which crashes or hangs costs a candidate and not this process.
Ray makes one GPU visible here, which is torch's first.
"""

from __future__ import annotations

import importlib.metadata

from flashgen._version import __version__
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import MeasureError
from flashgen.core.record import Failure, Versions
from flashgen.core.workload import Specialization
from flashgen.measure.executor import LocalExecutor
from flashgen.measure.protocol import EvaluateJob, HostInfo, Outcome, RaceJob, RaceResult
from flashgen.measure.source import version_of_source
from flashgen.tuning.compile_pool import CompilePool, usable_cpus


class Host:
    """The far end of a station; the near end asks one thing at a time, and `ping` and `submit` at any time."""

    def __init__(self, service: str, compile_service: str) -> None:
        """Nothing is started before it is asked for; services are named as for `measure.worker.Worker`."""
        self._compile_service = compile_service
        self._executor = LocalExecutor(0, service=service)
        self._pool: CompilePool | None = None

    def hello(self) -> str:
        """Flashgen's version here: plain text, which any two versions agree about."""
        return __version__

    def ping(self) -> None:
        """Show that this process answers."""

    def describe(self) -> HostInfo:
        """See `measure.protocol.Executor.describe`."""
        return self._executor.describe()

    def software(self) -> Versions:
        """The software that compiles here, told without torch or a GPU."""
        found = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
        return Versions(flashgen=version_of_source(), **found)

    def start_compiling(self, device: Device, jobs: int | None, sharing: int) -> int:
        """Make the pool; without `jobs` it has its part of the CPUs, of which `sharing` pools use this machine."""
        count = jobs or max(1, usable_cpus() // sharing)
        self._pool = CompilePool(device, jobs=count, service=self._compile_service)
        return count

    def submit(self, spec: Specialization, config: Config) -> None:
        """See `tuning.compile_pool.Compiler.submit`."""
        self._compiling().submit(spec, config)

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        """See `tuning.compile_pool.Compiler.result`."""
        return self._compiling().result(spec, config)

    def evaluate(self, job: EvaluateJob) -> Outcome:
        """See `measure.protocol.Executor.evaluate`."""
        return self._executor.evaluate(job)

    def race(self, job: RaceJob) -> RaceResult:
        """See `measure.protocol.Executor.race`."""
        return self._executor.race(job)

    def _compiling(self) -> CompilePool:
        if self._pool is None:
            raise MeasureError("a host compiles once it knows for which device, and nobody has told it")
        return self._pool
