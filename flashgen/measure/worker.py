"""`Worker`: a service in a process that can be killed.

The process is a fresh interpreter (never a fork: a CUDA context does not survive one) in a session of its own, so that
a Ctrl-C in the terminal does not reach it and everything it starts dies with it. Whatever happens in it, a call
returns: an answer, or a `Failure` that says what happened. After a death or a timeout the next call starts a new one.

A service is a class named as `module:Class`. It is made in the process from an `announce` function and the arguments
given here; `announce(stage, subject)` says what comes next, so that a sudden death can be blamed on it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from flashgen.core.errors import MeasureError
from flashgen.core.record import STAGES, Failure
from flashgen.core.settings import child_environment

Announce = Callable[[str, int | None], None]

STARTS = 2
"""A worker that does not come up gets one more chance: a card may be busy for a moment."""

REAP_S = 30.0
EXIT_S = 5.0
PARENT_CHECK_S = 0.5
LOG_TAIL_BYTES = 4096


class WorkerLostError(Exception):
    """Raised by a service whose process is of no more use; it answers with the failure and ends itself."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True)
class _Ready:
    pass


@dataclass(frozen=True, slots=True)
class _Announcement:
    stage: str
    subject: int | None


@dataclass(frozen=True, slots=True)
class _Answer:
    value: object


@dataclass(frozen=True, slots=True)
class _Lost:
    failure: Failure


class Worker:
    """One service behind a process boundary; use it from one thread, close it or use it as a context manager."""

    def __init__(self, service: str, *arguments: object, start_timeout_s: float = 180.0) -> None:
        """Nothing is started before the first call.

        Args:
            service: `module:Class` of the service.
            arguments: for its constructor, after `announce`; they are pickled.
            start_timeout_s: how long the process may take until its service is made.
        """
        self._service = service
        self._arguments = arguments
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._log: IO[bytes] | None = None
        self._last = _Announcement("launch", None)

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        return self._process.pid if self._process else None

    @property
    def subject(self) -> int | None:
        """What the service announced last as the subject of its work (an index of the caller's)."""
        return self._last.subject

    def call(self, method: str, payload: object = None, *, timeout_s: float) -> Any:
        """Call `method(payload)` of the service.

        Returns:
            Its answer, or a `Failure`: the process died, was killed after `timeout_s` seconds, or the method raised.

        Raises:
            MeasureError: no process with this service can be started.
        """
        if self._process is not None and _has_ended(self._process.pid):
            self._end()  # it died between two calls, for which the next candidate is not to blame
        if self._process is None:
            self._start()
        self._last = _Announcement("launch", None)
        try:
            return self._exchange(method, payload, timeout_s)
        except BaseException:  # Ctrl-C: the late answer must not meet the next question
            self._end()
            raise

    def close(self) -> None:
        """End the process and all that it started; the next call would start a new one."""
        self._end()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _exchange(self, method: str, payload: object, timeout_s: float) -> Any:
        assert self._pipe is not None
        try:
            self._pipe.send((method, payload))
            reply = self._receive(timeout_s)
        except (EOFError, OSError):
            return self._bury()
        if reply is None:
            self._end()
            return Failure(
                stage="timeout",
                reason=f"no answer within {timeout_s:g} s in stage {self._last.stage}; the worker was killed",
            )
        if isinstance(reply, _Lost):
            self._end()
            return reply.failure
        assert isinstance(reply, _Answer)
        return reply.value

    def _receive(self, timeout_s: float) -> object | None:
        """The next message that is no announcement; None if it does not come in time."""
        assert self._pipe is not None
        deadline = time.monotonic() + timeout_s
        while self._pipe.poll(max(0.0, deadline - time.monotonic())):
            message = self._pipe.recv()
            if not isinstance(message, _Announcement):
                return message  # type: ignore[no-any-return]
            self._last = message
        return None

    def _start(self) -> None:
        reason = ""
        for _ in range(STARTS):
            self._spawn()
            assert self._pipe is not None
            try:
                self._pipe.send((self._service, self._arguments))
                reply = self._receive(self._start_timeout_s)
            except (EOFError, OSError):
                reason = self._bury().reason
                continue
            if isinstance(reply, _Ready):
                return
            self._end()
            reason = str(reply.failure) if isinstance(reply, _Lost) else f"not ready after {self._start_timeout_s:g} s"
        raise MeasureError(f"a worker process must come up to measure; {self._service} did not: {reason}")

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-c", "from flashgen.measure import worker; worker.main()"]
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs.fileno(),),
            env=child_environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path), PYTHONSAFEPATH="1"),
            start_new_session=True,
        )
        theirs.close()
        self._pipe = ours

    def _bury(self) -> Failure:
        """The process died by itself: say how."""
        assert self._process is not None
        _await_exit(self._process.pid)
        log, process, stage = self._log, self._process, self._last.stage
        self._log = None
        self._end()
        said = _tail(log)
        code = process.returncode
        if code == -signal.SIGKILL:
            how, stage = "was killed from outside, as the system does when memory runs out", "memory"
        elif code is not None and code < 0:
            how = f"died of {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        return Failure(stage=stage, reason=f"the worker {how}{f': {said}' if said else ''}")

    def _end(self) -> None:
        """Kill the process group and forget it; harmless if there is none."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # a process inside the driver may take a while to die; a new worker does not need to wait for ever
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAP_S)
        for each in (self._pipe, self._log):
            if each is not None:
                each.close()
        self._pipe = self._log = None


def main() -> None:
    """The process itself: make the service, then answer until the other side is gone."""
    pipe = Connection(int(sys.argv[1]))
    threading.Thread(target=_outlive_nobody, args=(int(sys.argv[2]),), daemon=True).start()
    stage = "launch"

    def announce(name: str, subject: int | None = None) -> None:
        nonlocal stage
        stage = name
        pipe.send(_Announcement(name, subject))

    try:
        name, arguments = pipe.recv()
        try:
            module, _, attribute = name.partition(":")
            service = getattr(importlib.import_module(module), attribute)(announce, *arguments)
        except Exception as error:  # noqa: BLE001 - whatever a service cannot start with is told to the caller
            pipe.send(_Lost(Failure(stage="launch", reason=_told(error))))
            return
        pipe.send(_Ready())
        while True:
            method, payload = pipe.recv()
            stage = "launch"
            _answer(pipe, lambda: getattr(service, method)(payload), lambda: stage)  # noqa: B023 - called at once
    except (EOFError, ConnectionError):
        return


def _answer(pipe: Connection, question: Callable[[], object], stage: Callable[[], str]) -> None:
    try:
        pipe.send(_Answer(question()))
    except WorkerLostError as error:
        pipe.send(_Lost(error.failure))
        os._exit(1)  # no destructor may touch a broken context
    except (EOFError, ConnectionError):
        raise
    except MemoryError as error:
        pipe.send(_Answer(Failure(stage="memory", reason=_told(error))))
    except Exception as error:  # noqa: BLE001 - one candidate's trouble is data, whatever it is
        known = stage() if stage() in STAGES else "launch"
        pipe.send(_Answer(Failure(stage=known, reason=_told(error))))


def _outlive_nobody(parent: int) -> None:
    """Kill this process and all that it started when its parent is gone, even in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not reaped, so that its group id stays ours until the group is killed."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _await_exit(pid: int) -> None:
    deadline = time.monotonic() + EXIT_S
    while time.monotonic() < deadline and not _has_ended(pid):
        time.sleep(0.01)


def _told(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: IO[bytes] | None) -> str:
    """The last line that the process wrote, which is often the reason of its death."""
    if log is None:
        return ""
    with log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - LOG_TAIL_BYTES))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
