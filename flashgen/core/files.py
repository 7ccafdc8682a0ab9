"""Files that others wrote: what they are and how large is known before anything is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashgen.core.errors import FlashgenError
from flashgen.core.quoting import shown

MAX_NAME = 1000
"""Characters of a path in a message."""


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


def _read(path: str | Path, most_bytes: int) -> bytes:
    """All bytes of a file, or one more than `most_bytes` of a larger one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a fifo does not wait
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is a folder, a device or a pipe and no ordinary file")
        return file.read(most_bytes + 1)
