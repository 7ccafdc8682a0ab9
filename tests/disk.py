"""A disk that is full."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

ROOM_BYTES = 16
"""What is left for each file: a file is begun, and cannot be finished."""


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process gets longer than `ROOM_BYTES`; writing more is an OSError, which Python makes of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
