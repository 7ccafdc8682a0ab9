"""The pass over shared keys, interpreted, and what it gives once it is merged with the one over own keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.core.config import KnobValue
from flashgen.runtime.decode.call import DecodeCall
from flashgen.runtime.decode.prefix import Prefix
from flashgen.runtime.decode.shared_keys import passes, shared_call
from flashgen.runtime.ops.merging import merge
from tests.decoding import Case, assert_right, make, only
from tests.interpreter.decode import GRID, WARPS, interpreted, launched, results, small_config
from tests.prefixes import joined, make_prefix
from tests.tiers import every


def with_prefix(call: DecodeCall, prefix: Prefix, **knobs: KnobValue) -> tuple[torch.Tensor, torch.Tensor]:
    """As `run_with_prefix` does it, with interpreted kernels."""
    own = interpreted(call)
    shared = prefix.shared_keys(call.k_cache, call.v_cache)
    out, lse = results(call)
    for one in passes(call, shared, out):
        sequences = one.run.sequences
        beside = {"OwnLens": call.seqlens[sequences]}
        first_keys = one.first_keys(shared.seqlens, call.seqlens)
        beside |= {} if first_keys is None else {"Leftpad": first_keys}
        slopes = call.features.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            beside["AlibiSlopes"] = slopes[sequences]
        groups = replace(shared_call(call, shared, one.run), q=call.q[sequences])
        launched(groups, one.checked, small_config(one.checked, **knobs), out[sequences], lse[sequences], **beside)
    return merge((out, own[0]), (lse, own[1]), "bshd")


CAUSAL = {"causal": True}
CASES = {
    "one for all": (Case(lens=(0, 1, 17, 40), options=CAUSAL), (50,), ()),
    "pages, one query": (Case(lens=(5, 16, 0), page=16), (33,), ()),
    "groups of all sizes": (Case(lens=(3, 0, 9, 1), nheads=3, nheads_k=1), (20, 40), (0, 1)),
    "some queries": (Case(lens=(3, 0, 9, 1), seqlen_q=3, options=CAUSAL), (2, 30), ()),
    "window, sinks": (Case(lens=(3, 9, 21, 6), sinks=True, options={"window": (10, 0)}), (40, 20), ()),
    "window of both sides": (Case(lens=(1, 9), seqlen_q=4, options={"window": (6, 1)}), (30,), ()),
    "window of own keys alone": (Case(lens=(20, 30), options={"window": (10, 0)}), (40,), ()),
    "softcap, slopes": (Case(lens=(20, 3), alibi=True, seqlen_q=2, options={"softcap": 3.0, **CAUSAL}), (19,), ()),
    "rows of several tiles": (Case(lens=(2, 0, 5), seqlen_q=4, nheads=8, nheads_k=1, options=CAUSAL), (35,), ()),
}


@pytest.mark.parametrize("name", every(2, CASES))
def test_it_is_attention_over_shared_and_own_keys(name: str) -> None:
    case, lens, starts = CASES[name]
    call, prefix = make(case), make_prefix(case, lens, starts, case.page)
    assert_right(joined(call, prefix), *with_prefix(call, prefix))


@pytest.mark.parametrize("knobs", [GRID, WARPS], ids=["grid", "warps"])
def test_other_schedules_are_right(knobs: dict[str, KnobValue]) -> None:
    case, lens, starts = CASES["some queries"]
    call, prefix = make(case), make_prefix(case, lens, starts)
    assert_right(joined(call, prefix), *with_prefix(call, prefix, **knobs))


@pytest.mark.parametrize(
    ("page", "knobs"),
    every(3, [(None, {}), (16, GRID), (64, {**GRID, **WARPS, "partials": 8}), (64, {})]),
    ids=["shares", "grid, small pages", "warps, large pages", "shares, large pages"],
)
def test_with_fixed_splits_a_group_does_not_matter(page: int | None, knobs: dict[str, KnobValue]) -> None:
    """In a window, either, where others of a group see shared keys in front of those that one sees."""
    case = Case(
        lens=(90, 60, 0, 300, 401), nheads=2, nheads_k=1, page=16, options={"window": (400, 0), "fixed_split_size": 128}
    )
    call, prefix = make(case), make_prefix(case, (700,), page=page)
    out, lse = with_prefix(call, prefix, **knobs)
    assert_right(joined(call, prefix), out, lse)
    for rows in ([0], [3], [1, 0], [4]):
        alone, alone_lse = with_prefix(only(call, rows), prefix, **knobs)
        assert torch.equal(out[rows], alone)
        assert torch.equal(lse[rows], alone_lse)
