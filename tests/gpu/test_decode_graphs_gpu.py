"""`flashgen.attention_decode` in CUDA graphs and in used memory: no wait, no compile, nothing left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import flashgen
from flashgen.codegen import build
from flashgen.codegen.families import family, usual
from flashgen.core.errors import LaunchError
from flashgen.launch import decode_plan
from flashgen.runtime.decode import runs
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall
from flashgen.runtime.ops import serve
from tests.decoding import Case, assert_right, make, oracle, run

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
WIDE: dict[str, Any] = {"nheads": 32, "nheads_k": 8, "head_dim": 128, "dtype": BF16}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


@pytest.mark.parametrize("fixed", [None, 256])
def test_one_captured_graph_serves_all_lengths(fixed: int | None) -> None:
    page, columns, batch = 16, 128, 9
    call = make(Case(lens=(page * columns,) * batch, page=page, options={"fixed_split_size": fixed}, **WIDE), "cuda")
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(call, return_lse=True)
    draw = random.Random(0)
    for _ in range(50):
        lens = [draw.choice((0, 1, page, draw.randint(1, page * columns))) for _ in range(batch)]
        call.seqlens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        eager, eager_lse = run(call, return_lse=True)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)
    right, _ = oracle(call)
    torch.testing.assert_close(out.double().cpu(), right, atol=2e-2, rtol=2e-2)


def test_graphs_may_run_side_by_side() -> None:
    calls = [make(Case(lens=(n, 3000, 70), page=64, **WIDE), "cuda", seed=n) for n in (4000, 2500)]
    expected = [run(call) for call in calls]
    graphs, outs = [torch.cuda.CUDAGraph() for _ in calls], []
    for graph, call in zip(graphs, calls, strict=True):
        with torch.cuda.graph(graph):
            outs.append([run(call) for _ in range(8)])
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in found)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_call_waits_for_nothing_and_allocates_no_segment() -> None:
    call = make(Case(lens=(4000, 3000, 70), page=64, **WIDE), "cuda")
    run(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    assert after["active_bytes.all.current"] == before["active_bytes.all.current"]


def test_what_lies_in_outputs_and_shared_memory_before_makes_no_difference() -> None:
    call = make(Case(lens=(4000, 0, 1, 70), page=64, **WIDE), "cuda")
    expected = run(call, return_lse=True)
    for memory, _ in decode_plan._SHARED.values():
        memory.fill_(math.nan)
    stale = [torch.full_like(one, math.nan) for one in expected]
    places = {one.data_ptr() for one in stale}
    del stale
    found = run(call, return_lse=True)
    assert {one.data_ptr() for one in found} & places
    for one, right in zip(found, expected, strict=True):
        assert torch.equal(one, right)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_new_sizes_compile_nothing_wait_for_nothing_and_allocate_their_output_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once every class of sizes has been there: 200 random batches, tables and longest lengths."""
    pool = torch.randn(64, 16, 8, 128, dtype=BF16, device="cuda")

    def step(batch: int, columns: int) -> tuple[int, int]:
        """Allocations of a call, and bytes in use behind it that were not before."""
        table = torch.randint(64, (batch, columns), dtype=torch.int32, device="cuda")
        lens = torch.randint(16 * columns + 1, (batch,), dtype=torch.int32, device="cuda")
        q = torch.randn(batch, 1, 32, 128, dtype=BF16, device="cuda")
        before = Counts.now()
        out = flashgen.attention_decode(q, pool, pool, lens, block_table=table)
        after = Counts.now()
        del out
        return after.allocations - before.allocations, Counts.now().active - before.active

    for batch in (*(2**power for power in range(9)), 300):
        for columns in (2**power for power in range(9)):
            step(batch, columns)
    for memory in decode_plan._SHARED.values():
        memory[:] = decode_plan.Pieces(0, decode_plan.LARGEST_SHARED).new(pool)  # it grows with sizes, and stays
    torch.cuda.synchronize()
    compiled: list[object] = []
    monkeypatch.setattr(build, "compile_kernel", lambda *given: compiled.append(given))
    draw = random.Random(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            assert step(draw.randint(1, 300), draw.randint(1, 256)) == (1, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not compiled


class Counts(NamedTuple):
    """Of torch's allocator: allocations so far, and bytes in use."""

    allocations: int
    active: int

    @classmethod
    def now(cls) -> Counts:
        stats = torch.cuda.memory_stats()
        return cls(stats["allocation.all.allocated"], stats["active_bytes.all.current"])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_capture_that_was_given_up_leaves_nothing_behind() -> None:
    """Once because the kernel was not there yet, once in the middle of what was recorded."""
    call = make(Case(lens=(3000, 0, 70), page=32, nheads=8, nheads_k=2, head_dim=80, dtype=BF16), "cuda")
    with pytest.raises(LaunchError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(call)
    expected = run(call)
    with pytest.raises(ZeroDivisionError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        _given_up(call)
    assert torch.equal(run(call), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(call)
    graph.replay()
    assert torch.equal(out, expected)
    assert_right(call, *run(call, return_lse=True))


def _given_up(call: DecodeCall) -> None:
    run(call)
    raise ZeroDivisionError


@pytest.mark.parametrize(("family_id", "most"), [("portable_decode", 3), ("hopper_decode", 2)])
def test_with_fixed_splits_the_number_of_programs_changes_no_bits(family_id: str, most: int) -> None:
    call = make(Case(lens=(400, 3000, 7, 5000), page=64, options={"fixed_split_size": 512}, **WIDE), "cuda")
    found = [_with_programs(call, family_id, per_sm) for per_sm in range(1, most + 1)]
    assert all(torch.equal(found[0], out) for out in found[1:])


def _with_programs(call: DecodeCall, family_id: str, per_sm: int) -> torch.Tensor:
    """The output of the config that the rule chooses, with another number of programs for each SM."""
    device = serve.device_at(0)
    checked = CheckedDecode.of(call, torch.empty_like(call.q))
    config = usual(family(family_id).default(checked.spec, device), checked.spec, checked.shape.sizes, device)
    smaller = config.replace(num_stages=2, block_n=min(config.integer("block_n"), 64), per_sm=per_sm)
    return runs.run(call, smaller)[0]
