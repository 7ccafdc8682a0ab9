"""Packed sequences over a paged cache, interpreted: right against the oracle, and nothing read that nobody sees."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flashgen.codegen.families import family
from flashgen.codegen.family import KernelSpec
from flashgen.codegen.generated import load_module
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.launch import feature_arguments
from flashgen.launch.feature_arguments import LOG2E
from flashgen.launch.geometry import scalars
from flashgen.launch.parameters import block_of
from flashgen.launch.scratch import ScratchPlan
from tests.packing import Case, assert_right
from tests.paging import LAYOUTS, Paged, checked, paged
from tests.tiers import every, first, only

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of rows that do not count

DEVICE = find_device("sm90")
SMALL = {"block_m": 16, "block_n": 16, "num_warps": 4, "loads": "pointer", "heads_per_group": 8, "page_ids": "load"}


def interpreted(call: Paged, splits: int = 1, **knobs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the portable kernel, in memory that holds NaN before; programs that share keys are `splits`."""
    problem, row = checked(call), family("portable_forward")
    knobs = {**SMALL, "heavy_first": problem.spec.causal, **knobs}
    config = row.default(problem.spec, DEVICE).replace(**knobs)
    assert row.unsupported(problem.spec, DEVICE) is None
    kernels = row.kernels(problem.spec, config)
    out = torch.full((*call.q.shape[:2], call.v.shape[3]), math.nan, dtype=call.q.dtype)
    lse = torch.full((call.q.shape[1], len(call.q)), math.nan)
    scale = call.named.get("softmax_scale") or call.q.shape[2] ** -0.5
    known: dict[str, Any] = scalars(problem.geometry) | {"Q": call.q, "K": call.k, "V": call.v, "O": out, "LSE": lse}
    sizes = problem.geometry.sizes._replace(key_splits=splits)
    scratch = ScratchPlan.of(problem.spec, config, sizes)
    memory = torch.full((scratch.floats,), math.nan)
    known |= {"lse_rows": len(call.q), "softmax_scale_log2": scale * LOG2E, "key_splits": splits}
    known |= {piece.pointer: piece.of(memory) for piece in scratch.pieces.values()}
    assert problem.features is not None
    module = load_module(render(problem.spec, config))
    for kernel in kernels:
        names = frozenset(kernel.names)
        known |= _described(kernel, call)
        known |= feature_arguments.arguments(names, problem.features, scale, known, causal=problem.spec.causal)
        run = getattr(module, kernel.entry)
        run[(kernel.programs(DEVICE, sizes),)](*[known[name] for name in kernel.names])
    return out, lse


def _described(kernel: KernelSpec, call: Paged) -> dict[str, TensorDescriptor]:
    views = {"q": call.q.unsqueeze(0), "k": call.k, "v": call.v}
    found = {}
    for parameter in kernel.parameters:
        if parameter.name.endswith("_desc"):
            seen = views[parameter.name[0]].transpose(1, 2)
            block = list(block_of(parameter))
            found[parameter.name] = TensorDescriptor(seen, list(seen.shape), list(seen.stride()), block)
    return found


def near(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return (q_idx // 7 + b) % 3 != k_idx // 11 % 3


PAGE = 16
DROPOUT = {"dropout_p": 0.3, "rng_state": torch.tensor([5, -9])}
CHUNKS = Case(queries=(5, 1, 0, 20, 17, 3), keys=(40, 1, 7, 33, PAGE, PAGE - 1), options={"causal": True})
CASES: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "chunks": (CHUNKS, PAGE, {}),
    "lengths by ends": (replace(CHUNKS, options={}), PAGE, {"by_ends": True}),
    "more queries than keys": (
        Case(queries=(20, 3, 9), keys=(PAGE + 1, 0, 1), options={"causal": True}, sinks=True),
        PAGE,
        {},
    ),
    "pages of one key": (replace(CHUNKS, nheads=3, nheads_k=1), 1, {"layout": "hnd"}),
    "pages of four keys": (CHUNKS, 4, {}),
    "groups of 7 heads": (replace(CHUNKS, nheads=14, head_dim=16, alibi="own"), PAGE, {}),
    "groups of 16 heads": (Case(queries=(5, 20), keys=(40, 33), nheads=16, nheads_k=1, head_dim=16), 8, {}),
    "pages of no power of two": (replace(CHUNKS, nheads=3, nheads_k=3, head_dim=24, head_dim_v=40), 10, {}),
    "pages of several steps": (Case(queries=(20, 33), keys=(70, 64), nheads=8, nheads_k=1, head_dim=16), 32, {}),
    "window": (Case(queries=(33, 7, 20), keys=(59, 40, 20), options={"causal": True, "window": (9, 0)}), 8, {}),
    "window of both sides": (Case(queries=(20, 7), keys=(50, 20), options={"window": (9, 3)}, sinks=True), 32, {}),
    "used queries": (replace(CHUNKS, used_q=(5, 0, 0, 7, 17, 3), spare=20), 8, {}),
    "softcap, slopes and dropout": (
        Case(queries=(33, 7), keys=(20, 40), alibi="own", options={"softcap": 3.0, **DROPOUT}),
        8,
        {"layout": "halves"},
    ),
    "a function": (Case(queries=(33, 0, 20), keys=(40, 5, 20), mod=near, options={"causal": True}), 8, {}),
}


@pytest.mark.parametrize("name", every(2, CASES))
def test_it_is_right_and_reads_nothing_that_does_not_count(name: str) -> None:
    case, page, named = CASES[name]
    call = paged(case, page, **named)
    assert_right(call.packed, *interpreted(call))


TILES: dict[str, tuple[Case, dict[str, Any]]] = {
    "chunks with dropout": (
        replace(CHUNKS, options={"causal": True, **DROPOUT}),
        {"loads": "descriptor", "heads_per_group": 0},
    ),
    "window": (CASES["window"][0], {"loads": "descriptor", "block_m": 32}),
    "a function": (CASES["a function"][0], {"loads": "descriptor"}),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles_of_a_page_by_tma_are_right(name: str) -> None:
    case, knobs = TILES[name]
    call = paged(case, 32)
    assert_right(call.packed, *interpreted(call, **knobs))


@pytest.mark.parametrize("loads", every(2, ["pointer", "descriptor"]))
@pytest.mark.parametrize("name", ["chunks", "more queries than keys"])
def test_programs_that_share_the_keys_of_a_block_are_right(name: str, loads: str) -> None:
    case, page, named = CASES[name]
    call = paged(case, page, **named)
    assert_right(call.packed, *interpreted(call, 3, split_keys=True, loads=loads))


@pytest.mark.parametrize(("page", "loads"), first(1, [(8, "pointer"), (16, "descriptor")]))
def test_bits_do_not_follow_from_pages_and_strides(page: int, loads: str) -> None:
    case = Case(queries=(5, 20), keys=(40, 33), nheads=2, nheads_k=1, options={"causal": True})
    first = interpreted(paged(case, page), loads=loads)
    for order, layout in enumerate(LAYOUTS):
        again = interpreted(paged(case, page, layout, order=order), loads=loads)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), layout


@pytest.mark.parametrize(("page", "loads"), only([(8, "pointer"), (16, "descriptor")], (16, "descriptor")))
def test_the_bits_of_a_chunk_follow_from_itself_alone(page: int, loads: str) -> None:
    """Alone it is another block of the launch, and its pages are the first row of another table."""
    call, start = paged(CHUNKS, page), 0
    out, lse = interpreted(call, loads=loads)
    for b, count in enumerate(CHUNKS.queries):
        if not count:
            continue
        rows = slice(start, start + count)
        named = {**call.named, "cu_seqlens_q": torch.tensor([0, count], dtype=torch.int32), "max_seqlen_q": count}
        named |= {name: call.named[name][b : b + 1] for name in ("seqused_k", "block_table")}
        named["max_seqlen_k"] = call.lengths[b]
        one, one_lse = interpreted(replace(call, q=call.q[rows].clone(), named=named), loads=loads)
        assert torch.equal(out[rows], one), b
        assert torch.equal(lse[:, rows], one_lse), b
        start += count


def test_sequences_behind_others_write_their_own_rows_alone() -> None:
    """As of a mixed batch, whose first sequences are steps of decoding."""
    call, first = paged(CHUNKS, PAGE), 2
    later = ("cu_seqlens_q", "seqused_k", "block_table")
    rest = replace(call, named={n: t[first:] if n in later else t for n, t in call.named.items()})
    (out, lse), (right, right_lse) = interpreted(rest), interpreted(call)
    rows = sum(CHUNKS.queries[:first])
    assert out[:rows].isnan().all()
    assert lse[:, :rows].isnan().all()
    assert torch.equal(out[rows:], right[rows:])
    assert torch.equal(lse[:, rows:], right_lse[:, rows:])


def test_wild_lengths_stay_in_the_table() -> None:
    call = paged(CHUNKS, PAGE)
    wild = torch.tensor([-5, 2**31 - 1, 100, -(2**31), 64, 1000], dtype=torch.int32)
    call.named["block_table"].clamp_(-1, 2)
    interpreted(replace(call, named={**call.named, "seqused_k": wild}))
    ends = torch.tensor([-5, 2**31 - 1, -(2**31), 100, 64, 1000, 0], dtype=torch.int32)
    interpreted(replace(call, named={**call.named, "seqused_k": None, "cu_seqlens_k": ends}))
