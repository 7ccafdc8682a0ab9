"""Times of calls, by the events of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def times(calls: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each, in rotation; medians of nine windows of 50 ms or so."""
    found: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(9):
        for call, windows in zip(calls, found, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            start.record()
            for _ in range(20):
                call()
            end.record()
            end.synchronize()
            windows.append(start.elapsed_time(end) / 20)
    return [median(windows) for windows in found]
