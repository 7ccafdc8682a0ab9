"""Packed sequences over pages on a GPU: features against float64, large caches, graphs, memory, mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.runtime.ops import kernel_cache
from tests.covering import covering_array
from tests.packing import Case, assert_right
from tests.paging import LAYOUTS, Paged, paged

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
QUERIES = (1, 1, 300, 0, 128, 17, 513, 129)
KEYS = (900, 1, 300, 7, 1200, 0, 530, 127)
WIDE: dict[str, Any] = {"nheads": 8, "nheads_k": 2, "head_dim": 128, "dtype": BF16}


def near(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return q_idx // 100 != k_idx // 70


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


def case_of(row: dict[str, Any]) -> Case:
    """The call of a row of the covering array."""
    options: dict[str, Any] = {"causal": True} if "causal" in row["position"] else {}
    if "window" in row["position"]:
        options["window"] = (600, 0 if "causal" in row["position"] else 30)
    if row["softcap"]:
        options["softcap"] = 20.0
    (nheads, nheads_k), (head_dim, head_dim_v) = row["heads"], row["dims"]
    return Case(
        queries=QUERIES,
        keys=KEYS,
        used_q=tuple(n - n // 3 for n in QUERIES) if row["used"] else (),
        nheads=nheads,
        nheads_k=nheads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=row["dtype"],
        spare=40,
        sinks=row["sinks"],
        alibi=row["alibi"],
        mod=near if row["mod"] else None,
        options=options,
    )


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


def run(call: Paged, **changes: Any) -> Any:
    """The public call."""
    return flashgen.attention_varlen(call.q, call.k, call.v, **{**call.named, **changes})


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


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_graph_serves_all_lengths(num_decodes: int) -> None:
    case = Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE)
    call = paged(case, 16, device="cuda")
    call.k.nan_to_num_(), call.v.nan_to_num_()
    call.named["block_table"].clamp_(0, len(call.k) - 1)
    most = call.named["block_table"].shape[1] * 16
    changes = {"num_decodes": num_decodes, "max_seqlen_k": most, "return_lse": True}
    run(call, **changes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call, **changes)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(20):
        call.named["seqused_k"].random_(0, most + 1, generator=generator)
        graph.replay()
        found = [one.clone() for one in captured]
        assert all(torch.equal(one, other) for one, other in zip(found, run(call, **changes), strict=True))


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_nothing_is_waited_for_or_allocated_but_the_output(num_decodes: int) -> None:
    call = paged(Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE), 16, device="cuda")
    kept = run(call, num_decodes=num_decodes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(call, num_decodes=num_decodes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1
    assert torch.equal(kept, again)


def test_other_batches_compile_nothing() -> None:
    case = Case(queries=(3,), keys=(1000,), options={"causal": True}, **WIDE)
    kernels = None
    for count in (2, 5, 40, 9, 130):
        lengths = tuple(1 + 13 * n % 500 for n in range(count))
        call = paged(replace(case, queries=(1, *lengths), keys=(600, *lengths)), 16, device="cuda")
        assert_right(call.packed, *run(call, num_decodes=1, max_seqlen_k=1024, return_lse=True))
        kernels = kernels or len(kernel_cache.KERNELS)
        assert len(kernel_cache.KERNELS) == kernels


def test_it_compiles_into_one_graph() -> None:
    call = paged(Case(queries=QUERIES, keys=KEYS, options={"causal": True}, **WIDE), 16, device="cuda")
    for num_decodes in (0, 2):
        compiled = torch.compile(run, fullgraph=True)
        assert torch.equal(compiled(call, num_decodes=num_decodes), run(call, num_decodes=num_decodes))
