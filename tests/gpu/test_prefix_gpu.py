"""`attention_decode(prefix=...)` on a GPU: right against attention over all keys, in graphs, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.runtime.decode.call import DecodeCall
from flashgen.runtime.decode.prefix import Prefix
from tests.decoding import Case, arguments, assert_right, make, only
from tests.prefixes import joined, make_prefix

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
WIDE: dict[str, Any] = {"nheads": 32, "nheads_k": 8, "head_dim": 128, "dtype": BF16}
OWN = (1, 500, 17, 0, 1000, 64, 63, 65)
CAUSAL = {"causal": True}

CASES = {
    "one for all": (Case(lens=OWN, page=64, options=CAUSAL, **WIDE), (3000,), (), 64),
    "contiguous": (Case(lens=OWN, **WIDE), (3000,), (), None),
    "pages of 16, two groups": (Case(lens=OWN, page=16, layout="hnd", **WIDE), (700, 5000), (), 16),
    "groups of all sizes": (Case(lens=OWN, page=16, **WIDE), (700, 0, 65), (0, 1, 6), 64),
    "many rows": (Case(lens=OWN * 12, page=16, **WIDE), (2000,), (), 16),
    "queries of 4": (Case(lens=OWN, page=16, seqlen_q=4, options=CAUSAL, **WIDE), (1500, 2), (), 16),
    "window and sinks": (
        Case(
            lens=(3, 64, 100, 200),
            sinks=True,
            nheads=64,
            nheads_k=8,
            head_dim=64,
            dtype=BF16,
            options={"window": (99, 0)},
        ),
        (2000,),
        (),
        16,
    ),
    "softcap and slopes": (Case(lens=OWN, alibi=True, options={"softcap": 30.0}, **WIDE), (300,), (), 32),
    "unequal heads": (
        Case(lens=(40, 11), nheads=7, nheads_k=1, head_dim=96, head_dim_v=80, dtype=torch.float16),
        (400,),
        (),
        None,
    ),
    "wide heads": (Case(lens=(40, 11), nheads=8, nheads_k=4, head_dim=256, dtype=BF16), (400,), (), 16),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


def run(call: DecodeCall, prefix: Prefix, **changes: Any) -> Any:
    tensors, named = arguments(replace(call, **changes))
    return flashgen.attention_decode(*tensors, **named, prefix=prefix)


@pytest.mark.parametrize("split", [None, 256], ids=["shares", "fixed"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention_over_shared_and_own_keys(name: str, split: int | None) -> None:
    case, lens, starts, page = CASES[name]
    call, prefix = make(case, "cuda"), make_prefix(case, lens, starts, page, "cuda")
    out, lse = run(call, prefix, fixed_split_size=split, return_lse=True)
    assert_right(joined(call, prefix), out, lse)
    assert torch.equal(out, run(call, prefix, fixed_split_size=split))


def test_a_captured_graph_serves_all_lengths_of_both() -> None:
    case = Case(lens=(700, 1024, 3, 90), page=16, **WIDE)
    call, prefix = make(case, "cuda"), make_prefix(case, (2000, 300), page=64, device="cuda")
    run(call, prefix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(call, prefix, return_lse=True)
    for own, shared in (((0, 0, 0, 0), (0, 0)), ((1, 17, 2, 64), (1, 300)), ((700, 3, 3, 90), (1999, 64))):
        call.seqlens.copy_(torch.tensor(own, dtype=torch.int32))
        prefix.seqlens.copy_(torch.tensor(shared, dtype=torch.int32))
        graph.replay()
        assert_right(joined(call, prefix), out, lse)
        assert torch.equal(out, run(call, prefix))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_call_waits_for_nothing() -> None:
    case = Case(lens=(700, 1024, 3, 90), page=16, options={"window": (900, 0)}, **WIDE)
    call, prefix = make(case, "cuda"), make_prefix(case, (2000, 300), page=64, device="cuda")
    run(call, prefix)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run(call, prefix)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [{}, {"window": (1500, 0)}], ids=["all keys", "window"])
def test_with_fixed_splits_bits_follow_from_a_sequences_keys_alone(window: dict[str, Any]) -> None:
    case = Case(lens=(700, 1024, 3, 90, 200), page=16, options={"fixed_split_size": 256, **window}, **WIDE)
    call, prefix = make(case, "cuda"), make_prefix(case, (2000,), page=64, device="cuda")
    out = run(call, prefix)
    for rows in ([1], [4, 0], [2, 1, 0, 3] * 20):
        assert torch.equal(out[rows], run(only(call, rows), prefix))
