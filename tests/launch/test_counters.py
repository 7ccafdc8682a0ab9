"""Counters of persistent kernels: never shared by launches that may run side by side, zero before the first one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashgen.core.errors import LaunchError
from flashgen.launch import counters, driver
from flashgen.launch.backward import backward_geometry
from flashgen.launch.counters import Counters
from flashgen.launch.driver_launch import launcher
from flashgen.launch.driver_plan import DriverPlan
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import Layout
from flashgen.launch.plan import load_part
from tests.fakes.driver import FakeDriver
from tests.fakes.imagined import LSE, POINTERS, Imagined, backward_tensors
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


KERNELS = {
    "forward": (("fwd-bf16-d64"), ((*POINTERS, *LSE, "Counter: *i32"),)),
    "split forward": (("fwd-bf16-d64"), ((*POINTERS, "Counter: *i32"), (*LSE, "Counter: *i32"))),
    "backward": (("bwd-bf16-d64"), (("NegDelta: *fp32", "Counter: *i32"), ("Counter: *i32", "Q: *bf16"))),
}
ORDER = ((0, None), (0, None), (8, None), (0, None), (0, 1), (0, 1), (0, 2), (0, None), (8, 2), (8, None), (0, None))
"""Streams and captures such that each is followed by the others and by itself."""


def assert_nothing_is_shared(seen: Mapping[tuple[int, int | None], Iterable[int]]) -> None:
    everything = [address for found in seen.values() for address in found]
    assert len(everything) == len(set(everything)), "between streams or captures"


@pytest.mark.parametrize("name", KERNELS)
def test_a_launch_gets_the_counters_of_its_stream_and_capture(
    name: str, graphs: Graphs, cuda: FakeDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "BLOCK_COUNTERS", 64)
    key, named = KERNELS[name]
    kernel = Imagined(*named, key=key)
    given = tensors(kernel.spec) if name != "backward" else (backward_tensors(),)
    geometry = Geometry.of(*given) if name != "backward" else backward_geometry(*given)
    launch, triton = kernel.through_the_driver(cuda, geometry), kernel.through_triton(geometry)
    seen: dict[tuple[int, int | None], set[int]] = {}
    for stream, capture in ORDER:
        streams.current = stream
        graphs.capture(capture)
        launch(*given)
        triton(*given)
        count = len(named)
        found = [one.values["Counter"] for one in cuda.launches[-count:]]
        found += [one.arguments["Counter"].data_ptr() for one in kernel.seen[-count:]]
        assert len(set(found)) == 2 * count, "each kernel of each plan has its own"
        assert seen.setdefault((stream, capture), set(found)) == set(found)
    assert_nothing_is_shared(seen)


@pytest.mark.parametrize("name", ["forward", "split forward"])
def test_a_later_geometry_has_the_counters_of_the_stream_that_it_is_launched_on(
    name: str, graphs: Graphs, cuda: FakeDriver, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with those of the first stream, and writes its own where that is another one, or captured."""
    monkeypatch.setattr(counters, "BLOCK_COUNTERS", 64)
    key, named = KERNELS[name]
    kernel = Imagined(*named, key=key)
    calls = [tensors(kernel.spec, (2, 6, 3, rows, 333)) for rows in range(200, 200 + len(ORDER))]
    functions = [number + 1 for number in range(len(named))]
    cuda.kernels |= dict(zip(functions, kernel.given, strict=True))
    layouts = [Layout(parameters=each, trailing=2) for each in kernel.given]
    binding = kernel.binding(Geometry.of(*calls[0]))
    plan = DriverPlan(binding, functions=functions, layouts=layouts, device_index=0)
    launch_at = launcher(plan)
    seen: dict[tuple[int, int | None], list[int]] = {}
    for four, (stream, capture) in zip(calls, ORDER, strict=True):
        sized = plan.sized(Geometry.of(*four))
        assert sized is not None
        streams.current = stream
        graphs.capture(capture)
        launch_at(sized)(*four)
        done = cuda.launches[-len(named) :]
        assert {one.stream for one in done} == {stream}
        found = [one.values["Counter"] for one in done]
        assert seen.setdefault((stream, capture), found) == found
    assert_nothing_is_shared(seen)


def test_after_a_counter_was_refused_all_of_them_are_written_again(
    graphs: Graphs, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, named = KERNELS["split forward"]
    kernel = Imagined(*named, key=key)
    four = tensors(kernel.spec)
    launch = kernel.through_the_driver(cuda, Geometry.of(*four))
    launch(*four)
    first = [one.values["Counter"] for one in cuda.launches]
    graphs.capture(1)
    real, turns = driver.capture_id, itertools.count()

    def once(stream: int) -> int:
        if next(turns):
            raise LaunchError("no capture has this stream")
        return real(stream)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "capture_id", once)
        with pytest.raises(LaunchError, match="no capture"):
            launch(*four)
    graphs.capture(None)
    launch(*four)
    assert [one.values["Counter"] for one in cuda.launches[2:]] == first


@pytest.mark.parametrize(("name", "blocks"), [("forward", 1), (None, 0)])
def test_a_kernel_that_is_loaded_has_its_counters_ready(name: str | None, blocks: int, graphs: Graphs) -> None:
    """So that the first launch behind a warm-up does not wait for the GPU."""
    key, named = KERNELS[name] if name else ("fwd-bf16-d64", ((*POINTERS, *LSE),))
    (part,) = Imagined(*named, key=key).compiled.parts
    handle = SimpleNamespace(asm={"cubin": b""}, hash="imagined", metadata=SimpleNamespace(name="kernel", shared=1000))
    load_part(replace(part, handle=handle), 0)
    assert len(graphs.blocks) == blocks
    Counters(0)
    assert len(graphs.blocks) == 1
