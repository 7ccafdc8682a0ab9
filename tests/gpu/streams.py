"""A stream beside the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def busy_stream() -> Iterator[None]:
    """Make a stream current that has work to do for a while; the one before waits for it in the end."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        big = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(5):
            big = big @ big
        yield
    torch.cuda.current_stream().wait_stream(side)
