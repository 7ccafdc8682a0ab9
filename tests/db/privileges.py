"""What a process may do that is not root, where the tests run as root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NOBODY = 65534


@contextlib.contextmanager
def no_privileges() -> Iterator[None]:
    """Others' files and folders have their modes for this process, too, until the end of the block."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
