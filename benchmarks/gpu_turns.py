"""One GPU shared by benchmarks that run side by side: whoever measures is alone on the machine, all others are stopped.

Most of what a race takes beside its windows is one core's work, such as tracing and compiling for other
implementations. Benchmarks that take turns do that side by side, and a window sees no more of them than their memory.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "FLASHGEN_BENCHMARK_TURNS"
"""Environment variable: the folder of `GpuTurns` of the process's GPU. Without it a process has the GPU to itself."""

QUEUED_S = 0.03
"""What a process that is stopped has queued on the GPU is worked off by then, but for a long pass of a reference: that
ends in the load before a race."""


class GpuTurns:
    """The process groups that share a GPU, as files of a folder, and a lock that whoever measures holds.

    Args:
        folder: one for each GPU; is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def join(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Start the leader of a process group between two turns; it is stopped in those of others from then on."""
        with self._lock():
            process = start()
            (self.folder / str(process.pid)).touch()
        return process

    def leave(self, group: int) -> None:
        """Forget a process group that has ended, and let the others run, whom it left stopped if it was killed."""
        with self._lock():
            (self.folder / str(group)).unlink(missing_ok=True)
            self._send(signal.SIGCONT)

    @contextlib.contextmanager
    def alone(self, group: int | None = None) -> Iterator[None]:
        """Wait until nobody else measures, then stop all groups but `group`, if it is one of them, until the end."""
        with self._lock():
            try:
                self._send(signal.SIGSTOP, spared=group)
                time.sleep(QUEUED_S)
                yield
            finally:
                self._send(signal.SIGCONT)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _send(self, what: signal.Signals, spared: int | None = None) -> None:
        for group in (int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()):
            if group != spared:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, what)


def has_others() -> bool:
    """Whether other processes of a run hold memory of this GPU."""
    return bool(os.environ.get(VARIABLE))


@contextlib.contextmanager
def my_turn() -> Iterator[None]:
    """Surrounds whatever a benchmark measures; nothing is compiled inside, since all others wait.

    At its end a process that has taken turns prints how long they were.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        yield
        return
    if not _SPENT:
        atexit.register(_say_what_was_spent)
    asked = time.monotonic()
    with GpuTurns(Path(folder)).alone(os.getpgrp()):
        began = time.monotonic()
        try:
            yield
        finally:
            _SPENT.append((began - asked, time.monotonic() - began))


_SPENT: list[tuple[float, float]] = []
"""Seconds of each turn of this process: waited for, and taken."""


def _say_what_was_spent() -> None:
    waited, taken = (sum(each) for each in zip(*_SPENT, strict=True))
    print(f"{len(_SPENT)} turns: {taken:.0f} s, waited for {waited:.0f} s", flush=True)
