"""Compiling ahead on the CPU: a pool of killable processes that fill Triton's disk cache while a GPU measures.

Each process compiles one candidate at a time with a timeout, because LLVM and ptxas can abort or hang; when one does,
it is killed with all its children and a new one takes its place. A candidate is compiled once for all workloads of a
specialization: its result is remembered, and the worker that measures finds the binary in Triton's cache.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from flashgen.core.compiled import Compiled, Taken
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError, TuningError
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization
from flashgen.measure.worker import Announce, Worker

COMPILE_TIMEOUT_S = 60.0
"""Real candidates compile in 1 to 6 s; a search loses nothing with those that need more than half a minute."""

COMPILE_SERVICE = "flashgen.tuning.compile_pool:CompileService"

Key = tuple[Specialization, Config]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """One candidate to compile."""

    spec: Specialization
    config: Config
    device: Device


class Compiler(Protocol):
    """What a tuning run needs of a compile pool."""

    def submit(self, spec: Specialization, config: Config) -> None:
        """Compile this candidate some time soon; a second call changes nothing."""
        ...

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        """Wait for a candidate's result (submitting it if needed)."""
        ...


class CompilePool:
    """`jobs` processes that compile for `device`; use it as a context manager, or close it.

    Args:
        device: what to compile for; it need not be present.
        jobs: processes, at least 1.
        timeout_s: seconds for one candidate.
        service: the class that compiles (`module:Class`), as for `flashgen.measure.worker.Worker`.

    Raises:
        TuningError: `jobs` is below 1.
    """

    def __init__(
        self,
        device: Device,
        *,
        jobs: int,
        timeout_s: float = COMPILE_TIMEOUT_S,
        service: str = COMPILE_SERVICE,
    ) -> None:
        if jobs < 1:
            raise TuningError(f"a compile pool has at least 1 process, got {jobs}")
        self._device = device
        self._timeout_s = timeout_s
        self._service = service
        self._results: dict[Key, Future[Compiled | Failure]] = {}
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="compile")
        self._local = threading.local()
        self._workers: list[Worker] = []

    def submit(self, spec: Specialization, config: Config) -> None:
        """Compile this candidate some time soon; a second call changes nothing."""
        if (spec, config) not in self._results:
            job = CompileJob(spec=spec, config=config, device=self._device)
            self._results[spec, config] = self._threads.submit(self._compile, job)

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        """Wait for a candidate's result (submitting it if needed).

        Raises:
            MeasureError: no compile process can be started at all.
        """
        self.submit(spec, config)
        return self._results[spec, config].result()

    def close(self) -> None:
        """Kill every process; what was not compiled yet is forgotten."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        running = [future for future in self._results.values() if not future.done()]
        while any(not future.done() for future in running):
            self._kill()  # again and again: a worker that was just starting comes up a second time
            time.sleep(0.02)
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _compile(self, job: CompileJob) -> Compiled | Failure:
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = Worker(self._service)
            self._workers.append(worker)
        outcome: Compiled | Failure = worker.call("compile", job, timeout_s=self._timeout_s)
        return outcome

    def _kill(self) -> None:
        for worker in tuple(self._workers):
            pid = worker.pid
            if pid is not None:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue


class CompileService:
    """What runs inside a process of the pool."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce

    def compile(self, job: CompileJob) -> Compiled | Failure:
        """Compile one candidate, for its resources and for Triton's cache."""
        from flashgen.codegen.build import compile_kernel

        self._announce("build", None)
        try:
            kernel = compile_kernel(job.spec, job.config, job.device)
        except FlashgenError as error:
            return Failure(stage="build", reason=str(error))
        parts = {
            part.kernel.entry: Taken(
                registers=part.registers,
                spills=part.spills,
                shared_bytes=part.shared_bytes,
                occupancy=part.occupancy(job.device),
            )
            for part in kernel.parts
        }
        return Compiled.of(parts, compile_ms=kernel.compile_ms, source_digest=kernel.source.digest)


def rejected(compiled: Compiled | Failure, *, spill_limit_bytes: int) -> Failure | None:
    """Why a compiled candidate is not worth measuring, or None."""
    if isinstance(compiled, Failure):
        return compiled
    for name, part in compiled.parts or (("", compiled),):
        if part.occupancy < 1:
            reason = (
                f"{name or 'it'} does not fit: {part.registers} registers, {part.shared_bytes} bytes of shared memory"
            )
            return Failure(stage="resources", reason=reason)
    if compiled.spills > spill_limit_bytes:
        return Failure(stage="resources", reason=f"it spills {compiled.spills} bytes, more than {spill_limit_bytes}")
    return None


def usable_cpus() -> int:
    """CPUs that this process may use; one is left for the coordinator where there are several."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, count - 1)
