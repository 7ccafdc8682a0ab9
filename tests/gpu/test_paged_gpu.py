"""Packed sequences over pages on a GPU: features against float64, large caches, graphs, memory, mixed batches."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.runtime.ops import kernel_cache
from tests.covering import covering_array
from tests.gpu.paged_cases import KEYS, QUERIES, case_of, run
from tests.packing import Case, Packed, assert_right
from tests.paging import LAYOUTS, Paged, paged

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
WIDE: dict[str, Any] = {"nheads": 8, "nheads_k": 2, "head_dim": 128, "dtype": BF16}

FACTORS: dict[str, tuple[Any, ...]] = {
    "page": (1, 10, 16, 64, 128, 256),
    "dims": ((128, 128), (64, 64), (96, 96), (256, 256)),
    "dtype": (BF16, torch.float16, torch.float32),
    "heads": ((8, 1), (6, 2), (4, 4)),
    "position": ("none", "causal", "window", "causal window"),
    "softcap": (False, True),
    "alibi": ("", "shared", "own"),
    "sinks": (False, True),
    "mod": (False, True),
    "used": (False, True),
    "layout": LAYOUTS,
    "by_ends": (False, True),
    "num_decodes": (0, 2),
}
CASES = covering_array(FACTORS)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features_is_right(number: int) -> None:
    row = CASES[number]
    call = paged(case_of(row), row["page"], row["layout"], device="cuda", by_ends=row["by_ends"])
    assert_right(call.packed, *run(call, num_decodes=row["num_decodes"], return_lse=True))


@pytest.mark.parametrize("page", [16, 128])
def test_bits_do_not_follow_from_pages_and_strides(page: int) -> None:
    case = Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE)
    first = run(paged(case, page, device="cuda"), return_lse=True)
    for order, layout in enumerate(LAYOUTS):
        again = run(paged(case, page, layout, device="cuda", order=order), return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), layout


@pytest.mark.parametrize("page", [16, 128])
def test_pages_behind_2_to_the_31_elements(page: int) -> None:
    case = Case(queries=(40, 17), keys=(200, 130), options={"causal": True}, **WIDE)
    call = paged(case, page, device="cuda")
    step = call.k.stride(0)
    far = 2**31 // step + 5
    k, v = (torch.empty(far + len(call.k), *call.k.shape[1:], dtype=BF16, device="cuda") for _ in range(2))
    k[far:], v[far:] = call.k, call.v
    table = call.named["block_table"]
    moved = torch.where((table >= 0) & (table < len(call.k)), table + far, table)
    assert_right(call.packed, *run(replace(call, k=k, v=v), block_table=moved, return_lse=True))


def clean(call: Paged) -> Paged:
    """The call without NaN and stale entries: any lengths and pages may be drawn for it."""
    call.k.nan_to_num_(), call.v.nan_to_num_()
    call.named["block_table"].clamp_(0, len(call.k) - 1)
    return replace(call, q=call.q.nan_to_num())


def drawn(call: Paged, num_decodes: int, draw: random.Random) -> None:
    """Other lengths of queries and keys, and another table, in the memory of the tensors that there are."""
    table, rows, batch = call.named["block_table"], len(call.q), len(QUERIES)
    ends = sorted(draw.randint(num_decodes, rows) for _ in range(batch - num_decodes))
    call.named["cu_seqlens_q"].copy_(torch.tensor([*range(num_decodes + 1), *ends], dtype=torch.int32))
    keys = [draw.choice((draw.randint(0, 16 * table.shape[1]), draw.randint(0, 40))) for _ in range(batch)]
    call.named["seqused_k"].copy_(torch.tensor(keys, dtype=torch.int32))
    pages = [draw.randrange(len(call.k)) for _ in range(table.numel())]
    table.copy_(torch.tensor(pages, dtype=torch.int32).view(table.shape))


def side_by_side(call: Paged) -> Packed:
    """The call that its tensors describe now, with keys that lie one sequence behind the other: for the oracle."""
    table, page = call.named["block_table"].cpu(), call.k.shape[1]
    queries = call.named["cu_seqlens_q"].diff().tolist()
    keys = call.named["seqused_k"].tolist()
    case = replace(call.packed.case, queries=tuple(queries), keys=tuple(keys), spare=len(call.q) - sum(queries))
    places = [torch.arange(length) for length in keys]
    pages = torch.cat([row[place // page] for row, place in zip(table, places, strict=True)]).long().to(call.k.device)
    slots = torch.cat([place % page for place in places]).to(call.k.device)
    return Packed(case=case, q=call.q, k=call.k[pages, slots], v=call.v[pages, slots], named=case.options)


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_graph_serves_all_lengths_and_tables(num_decodes: int) -> None:
    case = Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE)
    call = clean(paged(case, 16, device="cuda"))
    most = call.named["block_table"].shape[1] * 16
    bounds = {"max_seqlen_q": len(call.q), "max_seqlen_k": most}
    changes = {"num_decodes": num_decodes, "return_lse": True, **bounds}
    run(call, **changes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call, **changes)
    draw = random.Random(num_decodes)
    for _ in range(50):
        drawn(call, num_decodes, draw)
        for one in captured:
            one.fill_(math.nan)
        graph.replay()
        assert_right(side_by_side(call), *captured)
        found = [one.clone() for one in captured]
        assert all(torch.equal(one, other) for one, other in zip(found, run(call, **changes), strict=True))


def test_graphs_of_mixed_batches_may_run_side_by_side() -> None:
    """Each has memory of its own for its steps of decoding."""
    case = Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE)
    calls, draw = [clean(paged(case, 16, device="cuda", order=order)) for order in range(2)], random.Random(5)
    for call in calls:
        drawn(call, 2, draw)
    changes = {"num_decodes": 2, "return_lse": True, "max_seqlen_q": sum(QUERIES), "max_seqlen_k": 1216}
    expected = [run(call, **changes) for call in calls]
    streams, graphs, outs = [torch.cuda.Stream() for _ in calls], [], []
    torch.cuda.synchronize()
    for call, stream in zip(calls, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append([run(call, **changes) for _ in range(8)])
        graphs.append(graph)
    for _ in range(20):
        for one in (each for found in outs for pair in found for each in pair):
            one.fill_(math.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(outs, expected, strict=True):
            assert all(torch.equal(one, other) for pair in found for one, other in zip(pair, right, strict=True))


@pytest.mark.parametrize("by_ends", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_nothing_is_waited_for_and_little_allocated(num_decodes: int, return_lse: bool, by_ends: bool) -> None:
    """As tests/runtime/test_paged.py counts it; all that is not the output or the LSE is back when the call ends."""
    case = Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE)
    call = paged(case, 16, device="cuda", by_ends=by_ends)
    changes = {"num_decodes": num_decodes, "return_lse": return_lse}
    kept = run(call, **changes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(call, **changes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    temporaries = return_lse + by_ends if num_decodes else 0
    allocated = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    assert allocated == 1 + return_lse + temporaries
    assert after["allocation.all.freed"] - before["allocation.all.freed"] == temporaries
    pairs = zip(kept, again, strict=True) if return_lse else [(kept, again)]
    assert all(torch.equal(one, other) for one, other in pairs)


def test_other_batches_compile_nothing() -> None:
    """After one with few rows, which the default serves, and one with many, which the nearest record does."""
    case = Case(queries=(3,), keys=(1000,), options={"causal": True}, **WIDE)
    kernels = 0
    for turn, count in enumerate((2, 130, 5, 40, 9)):
        lengths = tuple(1 + 13 * n % 500 for n in range(count))
        call = paged(replace(case, queries=(1, *lengths), keys=(600, *lengths)), 16, device="cuda")
        assert_right(call.packed, *run(call, num_decodes=1, max_seqlen_k=1024, return_lse=True))
        kernels = len(kernel_cache.KERNELS) if turn < 2 else kernels
        assert len(kernel_cache.KERNELS) == kernels


def test_it_compiles_into_one_graph() -> None:
    call = paged(Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE), 16, device="cuda")
    for num_decodes in (0, 2):
        compiled = torch.compile(run, fullgraph=True)
        assert torch.equal(compiled(call, num_decodes=num_decodes), run(call, num_decodes=num_decodes))
