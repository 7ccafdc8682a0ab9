"""CUDA graphs of calls: recorded on one side stream, and given up without harm where a call cannot be recorded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. They hold no memory, but torch's allocator of host memory points to them for good."""


@contextlib.contextmanager
def on_side_stream() -> Iterator[None]:
    """Make the stream that graphs are recorded on the current one, behind everything that was queued before.

    The autograd engine runs a backward op on the stream of its forward op. A backward pass can be recorded only if its
    forward pass ran on the stream of the recording, so whoever means to record one prepares it here.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(_side_stream(torch.cuda.current_device())):
        yield
    torch.cuda.synchronize()


def capture(calls: Callable[[], object]) -> Callable[[], object]:
    """Record what `calls` launches into a CUDA graph; the result replays it on the current stream.

    Raises:
        Exception: what `calls` raised, or torch when the capture ended. Torch is as usable as before.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    stream = _side_stream(torch.cuda.current_device())
    causes: list[Exception] = []
    try:
        # torch.cuda.graph does not leave its stream where the end of the capture raises, the outer context does
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                calls()
            except Exception as error:
                causes.append(error)
                raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again
        _give_up(graph, pool)
        raise (causes or [error])[0] from None  # the end of a broken capture says only that it was broken before
    finally:
        causes.clear()  # its traceback leads back to this frame, and would keep the tensors of the calls alive
    return graph.replay


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One for each GPU: libraries keep workspaces for every stream that they have seen."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _give_up(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Undo what torch leaves behind where a call that is forbidden in a capture has invalidated it.

    Its allocator would go on to take memory for a capture, and its random numbers to wait for one: every later
    `normal_()` would raise "Offset increment outside graph capture encountered unexpectedly".
    """
    if _has_ended(graph):
        return
    _ABANDONED.append(graph)
    index = torch.cuda.current_device()
    generator = torch.cuda.default_generators[index]
    steps = (
        lambda: torch._C._cuda_endAllocateToPool(index, pool),
        lambda: torch._C._cuda_releasePool(index, pool),
        lambda: generator.graphsafe_set_state(generator.clone_state()),
    )
    for step in steps:
        with contextlib.suppress(RuntimeError, AttributeError):  # the capture, or this torch, is not so far
            step()


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether the capture came to its end, even of a part of the calls; the graph then frees its pool itself."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True
