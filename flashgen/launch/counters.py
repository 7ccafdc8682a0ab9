"""Zeroed integers for persistent kernels, which take tiles from them and leave them at zero.

Two launches that may run side by side never share one. Launches of one plan on one stream run one after the other, so
each (plan, stream) has its own. Launches that a CUDA graph captures run wherever the graph is replayed, so each capture
has its own again: two graphs that were captured on one stream may be replayed on two.

They come from a block that was zeroed before any launch, because a graph that had to zero its own would do so at every
replay. A graph does not say when it goes, so what a capture took is never given back: 32 bytes a plan and capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from flashgen.launch import driver

SPACING = 8
"""Integers from one counter to the next: 32 bytes, so that no two share a sector of the L2 cache."""

BLOCK_COUNTERS = 1024

_LOCK = threading.Lock()
_FREE: dict[int, Iterator[torch.Tensor]] = {}


class Counters:
    """The counters of one plan on one GPU."""

    __slots__ = ("_index", "_known")

    def __init__(self, index: int) -> None:
        """Make sure that there are some, as long as none is needed by a graph under capture."""
        self._index = index
        self._known: dict[int | tuple[int, int], torch.Tensor] = {}
        prepare(index)

    def of(self, stream: int) -> torch.Tensor:
        """The counter of the next launch on `stream`, which is the current one: int32 (1,)."""
        key: int | tuple[int, int] = stream
        capture = driver.capture_id(stream) if torch.cuda.is_current_stream_capturing() else None
        if capture is not None:
            key = (stream, capture)
        found = self._known.get(key)
        if found is None:
            found = _taken(self._index, is_captured=capture is not None)
            if found is None:
                # memory of the graph, zeroed by the graph, and free for the nodes after this launch
                return torch.zeros(1, dtype=torch.int32, device=f"cuda:{self._index}")
            self._known[key] = found
        return found


def prepare(index: int) -> None:
    """Zero the first counters of a GPU, if that was not done and no graph is under capture; waits for the GPU."""
    with _LOCK:
        if index not in _FREE and not torch.cuda.is_current_stream_capturing():
            _FREE[index] = _block(index)


def _taken(index: int, *, is_captured: bool) -> torch.Tensor | None:
    """A counter that nobody had; None where there is none left and a graph under capture cannot make a new block."""
    with _LOCK:
        found = next(_FREE.get(index, iter(())), None)
        if found is None and not is_captured:
            _FREE[index] = _block(index)
            found = next(_FREE[index])
        return found


def _block(index: int) -> Iterator[torch.Tensor]:
    block = zeros(index, BLOCK_COUNTERS * SPACING)
    return iter(block.view(BLOCK_COUNTERS, SPACING)[:, :1].unbind())


def zeros(index: int, count: int) -> torch.Tensor:
    """`count` zeroed int32 on a GPU, zero for every stream by the time this returns."""
    with torch.cuda.device(index):
        found = torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
        torch.cuda.current_stream().synchronize()
    return found
