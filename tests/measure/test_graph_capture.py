"""What a capture that fails leaves behind, on a torch whose CUDA parts are stood in for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from flashgen.measure import graph_capture

POOL = (0, 7)


@dataclass
class FakeCuda:
    """`broken` is a capture that a forbidden call invalidates: its end raises, and torch's own stream is not left."""

    broken: bool = False
    streams: list[str] = field(default_factory=lambda: ["default"])
    undone: list[str] = field(default_factory=list)
    ended: bool = False

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before = list(self.streams)
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams[:] = before

    @contextlib.contextmanager
    def graph(self, graph: object, *, pool: tuple[int, int], stream: str) -> Iterator[None]:
        assert (pool, self.streams[-1]) == (POOL, stream)
        self.streams.append(stream)
        try:
            yield
        finally:
            if self.broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.ended = True
            self.streams.pop()

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return POOL


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    graph = SimpleNamespace(pool=fake.pool, replay=lambda: "replayed")
    generator = SimpleNamespace(clone_state=lambda: "fresh", graphsafe_set_state=fake.undone.append)
    for name, value in {
        "CUDAGraph": lambda: graph,
        "graph_pool_handle": lambda: POOL,
        "current_device": lambda: 0,
        "stream": fake.stream,
        "graph": fake.graph,
        "synchronize": lambda: None,
        "default_generators": (generator,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda index, pool, name=name: fake.undone.append(name), raising=False)
    monkeypatch.setattr(graph_capture, "_side_stream", lambda index: "side")
    return fake


def test_calls_are_recorded_on_the_side_stream(cuda: FakeCuda) -> None:
    seen: list[str] = []
    with graph_capture.on_side_stream():
        seen.append(cuda.streams[-1])
        replay = graph_capture.capture(lambda: seen.append(cuda.streams[-1]))
    assert seen == ["side", "side"]
    assert cuda.streams == ["default"]
    assert replay() == "replayed"
    assert cuda.undone == []


def test_a_broken_capture_is_undone_and_told_by_its_cause(cuda: FakeCuda) -> None:
    cuda.broken = True

    def reads_back() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graph_capture.capture(reads_back)
    assert cuda.streams == ["default"]
    assert cuda.undone == ["_cuda_endAllocateToPool", "_cuda_releasePool", "fresh"]


def test_a_capture_that_only_its_end_finds_broken_is_undone_too(cuda: FakeCuda) -> None:
    cuda.broken = True
    with pytest.raises(RuntimeError, match="due to a previous error"):
        graph_capture.capture(lambda: None)
    assert cuda.undone[-1] == "fresh"


def test_what_fails_beside_the_gpu_leaves_a_graph_that_frees_its_own_pool(cuda: FakeCuda) -> None:
    def fails() -> None:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        graph_capture.capture(fails)
    assert cuda.streams == ["default"]
    assert cuda.undone == []
