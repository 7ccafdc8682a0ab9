"""Services that do to a worker what kernels do to a GPU process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flashgen.core.record import Failure, Measurement
from flashgen.measure.protocol import EvaluateJob, HostInfo, RaceJob, RaceResult
from flashgen.measure.worker import Announce, WorkerLostError


class Troublemaker:
    """Each method is one way to go wrong; `echo` shows that the next call works."""

    def __init__(self, announce: Announce, tag: str = "") -> None:
        self._announce = announce
        self._tag = tag
        self._calls = 0

    def echo(self, value: object) -> tuple[str, object]:
        return self._tag, value

    def pid(self, _: object) -> int:
        return os.getpid()

    def count(self, _: object) -> int:
        self._calls += 1
        return self._calls

    def sleep(self, seconds: float) -> str:
        self._announce("verify", 3)
        time.sleep(seconds)
        return "awake"

    def raise_error(self, message: str) -> None:
        self._announce("build", None)
        raise ValueError(message)

    def abort(self, _: object) -> None:
        print("terminate called after throwing an instance of something", file=sys.stderr, flush=True)
        os.abort()

    def segfault(self, _: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def kill_itself(self, _: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, code: int) -> None:
        os._exit(code)

    def allocate(self, _: object) -> int:
        return len(bytearray(2**60))

    def lose_the_gpu(self, _: object) -> None:
        raise WorkerLostError(Failure(stage="verify", reason="an illegal memory access was encountered"))

    def unpicklable(self, _: object) -> object:
        return lambda: None

    def hang_with_child(self, pid_file: str) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)


class Broken:
    def __init__(self, announce: Announce) -> None:
        raise OSError("no GPU here")


class BusyOnce:
    """Comes up when it is started again."""

    def __init__(self, announce: Announce, seen: str) -> None:
        if not Path(seen).exists():
            Path(seen).touch()
            raise OSError("the GPU is busy")

    def echo(self, value: object) -> object:
        return value


class Slow:
    def __init__(self, announce: Announce) -> None:
        time.sleep(600)


class FakeGpu:
    """A GPU service whose configs do what their knob `act` says; every race of more than one config is recorded."""

    def __init__(self, announce: Announce, index: int) -> None:
        self._announce = announce

    def describe(self, _: object) -> HostInfo:
        from flashgen.core.device import find_device

        return HostInfo(device=find_device("h200"), other_processes=(f"process {os.getpid()}",))

    def evaluate(self, job: EvaluateJob) -> Measurement | Failure:
        self._announce("build", 0)
        return self._act(str(job.config["act"]))

    def race(self, job: RaceJob) -> RaceResult:
        outcomes = []
        for index, config in enumerate(job.configs):
            self._announce("launch", index)
            outcomes.append(self._act(str(config["act"])))
        if job.baselines:
            self._announce("launch", len(job.configs))
            os.abort()
        return RaceResult(outcomes=tuple(outcomes))

    def _act(self, act: str) -> Measurement | Failure:
        if act == "abort":
            os.abort()
        if act == "hang":
            time.sleep(600)
        if act == "wrong":
            return Failure(stage="verify", reason="wrong")
        return Measurement(times_ms=(float(act),))
