"""Files that others wrote: what they are and how large is known before anything is read."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from flashgen.core.errors import FlashgenError
from flashgen.core.quoting import shown

MAX_NAME = 1000
"""Characters of a path in a message."""

LOCK_WAIT_S = 10.0
"""For a lock that others hold for milliseconds; who holds it longer must not stop a program."""

_LOCK_STEP_S = 0.005


def read_text(path: object, *, what: str, most_bytes: int, error: type[FlashgenError]) -> str:
    """The text of an ordinary file: a fifo would wait for ever, and a device may have no end.

    Args:
        path: the file.
        what: it is, for messages: "a workload file".
        most_bytes: it may have.
        error: the class of what is raised.

    Raises:
        FlashgenError: of the class `error`, where there is no such file, or it has no UTF-8 text or too much of it.
    """
    if not isinstance(path, (str, Path)):
        raise error(f"{what} is named by a path, got {shown(path)}")
    name = str(path)[:MAX_NAME]
    try:
        data = _read(path, most_bytes)
        if len(data) > most_bytes:
            raise error(f"{what} has at most {most_bytes} bytes, got more in {name}")
        return data.decode("utf-8")
    except (OSError, ValueError) as reason:  # of a path with a NUL, or of bytes that are no text
        if isinstance(reason, FlashgenError):
            raise
        raise error(f"{what} must be readable text, got {name}: {str(reason)[:MAX_NAME]}") from reason


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process in the block, by a lock on a file that stays; on Windows nothing is locked.

    What somebody planted in the file's place is neither followed nor waited for.

    Raises:
        OSError: the file is a link or none of the ordinary kind, cannot be made, or others keep the lock.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
    except ImportError:  # processes should have a file each there
        yield
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"a lock is an ordinary file, got {str(path)[:MAX_NAME]}")
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    name = str(path)[:MAX_NAME]
                    raise TimeoutError(f"a lock is held for moments, got one for {LOCK_WAIT_S:g} s: {name}") from None
            time.sleep(_LOCK_STEP_S)
        try:
            yield
        finally:
            flock(descriptor, LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
    finally:
        os.close(descriptor)


def _read(path: str | Path, most_bytes: int) -> bytes:
    """All bytes of a file, or one more than `most_bytes` of a larger one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a fifo does not wait
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is a folder, a device or a pipe and no ordinary file")
        return file.read(most_bytes + 1)
