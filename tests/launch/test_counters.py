"""Counters of persistent kernels: never shared by launches that may run side by side, zero before the first one."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashgen.launch import counters
from flashgen.launch.counters import Counters
from flashgen.launch.geometry import Geometry
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import LSE, POINTERS, Imagined
from tests.launch.conftest import Streams
from tests.launch.kernels import tensors


class Graphs:
    """Blocks that were zeroed, counters that a graph under capture zeroes itself, and which graph that is."""

    def __init__(self, cuda: FakeDriver) -> None:
        self.cuda = cuda
        self.blocks: list[torch.Tensor] = []
        self.in_graph: list[torch.Tensor] = []

    def capture(self, number: int | None) -> None:
        self.cuda.capture = number


@pytest.fixture
def graphs(cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    state, real = Graphs(cuda), torch.zeros

    def zeros(index: int, count: int) -> torch.Tensor:
        assert cuda.capture is None, "a wait for the GPU would break the capture"
        state.blocks.append(real(count, dtype=torch.int32))
        return state.blocks[-1]

    def zeros_in_graph(*size: int, **options: object) -> torch.Tensor:
        assert options == {"dtype": torch.int32, "device": "cuda:0"}
        state.in_graph.append(real(*size, dtype=torch.int32))
        return state.in_graph[-1]

    monkeypatch.setattr(counters, "_FREE", {})
    monkeypatch.setattr(counters, "zeros", zeros)
    monkeypatch.setattr(counters, "BLOCK_COUNTERS", 4)
    monkeypatch.setattr(torch, "zeros", zeros_in_graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capture is not None)
    return state


def test_a_plan_has_one_counter_a_stream(graphs: Graphs) -> None:
    one, two = Counters(0), Counters(0)
    found = [plan.of(stream).data_ptr() for plan in (one, two) for stream in (0, 7)]
    assert len(set(found)) == 4
    assert [plan.of(stream).data_ptr() for plan in (one, two) for stream in (0, 7)] == found
    assert len(graphs.blocks) == 1


def test_counters_lie_in_different_sectors_and_start_at_zero(graphs: Graphs) -> None:
    plan = Counters(0)
    found = [plan.of(stream) for stream in range(9)]
    assert all(one.tolist() == [0] and one.dtype == torch.int32 for one in found)
    ordered = sorted(one.data_ptr() for one in found)
    assert all(later - earlier >= 32 for earlier, later in itertools.pairwise(ordered))
    assert len(graphs.blocks) == 3, "a block that is used up is followed by the next"


def test_every_capture_has_its_own_on_each_stream(graphs: Graphs) -> None:
    """Two graphs captured on one stream may be replayed on two at once, and beside eager calls."""
    plan = Counters(0)
    eager = plan.of(0).data_ptr()
    found = []
    for capture in (1, 2):
        graphs.capture(capture)
        found += [plan.of(0).data_ptr(), plan.of(0).data_ptr()]
    graphs.capture(None)
    assert found[0] == found[1] != found[2] == found[3]
    assert plan.of(0).data_ptr() == eager not in found
    graphs.capture(1)
    assert plan.of(5).data_ptr() not in (*found, eager)
    assert graphs.in_graph == [], "a graph zeroes nothing while there are counters"


def test_a_graph_zeroes_its_own_where_there_is_none_left(graphs: Graphs) -> None:
    plan = Counters(0)
    graphs.capture(1)
    for stream in range(4):
        plan.of(stream)
    assert graphs.in_graph == []
    assert plan.of(9) is not plan.of(9), "each launch after its own zeroing"
    assert len(graphs.in_graph) == 2
    graphs.capture(None)
    assert plan.of(9).data_ptr() not in [one.data_ptr() for one in graphs.in_graph]
    assert len(graphs.blocks) == 2


def test_a_plan_made_under_capture_leaves_the_gpu_alone(graphs: Graphs) -> None:
    graphs.capture(3)
    assert Counters(0).of(0).tolist() == [0]
    assert (len(graphs.blocks), len(graphs.in_graph)) == (0, 1)


def test_a_launch_gets_the_counter_of_its_stream(graphs: Graphs, cuda: FakeDriver, streams: Streams) -> None:
    kernel = Imagined((*POINTERS, *LSE, "Counter: *i32"))
    four = tensors(kernel.spec)
    launch, triton = kernel.through_the_driver(cuda, Geometry.of(*four)), kernel.through_triton(Geometry.of(*four))
    seen = []
    for stream, capture in ((0, None), (8, None), (0, None), (0, 1), (0, 2), (0, None)):
        streams.current = stream
        graphs.capture(capture)
        launch(*four)
        triton(*four)
        seen += [cuda.launches[-1].values["Counter"], kernel.seen[-1].arguments["Counter"].data_ptr()]
    assert seen[:2] == seen[4:6] == seen[-2:]
    assert len(set(seen)) == 8
