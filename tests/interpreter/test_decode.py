"""The kernels of decoding, interpreted: right against the oracle, with poison wherever nothing may be read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.core.config import KnobValue
from flashgen.launch.decode_numbers import side_by_side
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall
from tests.decoding import Case, assert_right, decode_config, make, only
from tests.interpreter.decode import DEVICE, GRID, WARPS, interpreted, launched, results, small_config
from tests.tiers import every, first

MERGE: dict[str, KnobValue] = {"merge_rows": 2, "partials": 8}

LENS = (0, 1, 15, 16, 17, 90, 3)
CASES = {
    "contiguous": Case(lens=LENS),
    "one long": Case(lens=(2, 150, 0), nheads=3, nheads_k=1),
    "pages of 16": Case(lens=LENS, page=16, layout="hnd"),
    "pages of 32": Case(lens=(0, 1, 31, 32, 33, 70), page=32, layout="halves", seqlen_q=2, options={"causal": True}),
    "pages of 1": Case(lens=(0, 1, 20), page=1, nheads=5, nheads_k=1),
    "pages of 24": Case(lens=(23, 24, 25, 60), page=24, layout="interleaved", nheads=2, nheads_k=2),
    "more queries than keys": Case(lens=(0, 2, 5, 40), seqlen_q=5, nheads=6, nheads_k=2, options={"causal": True}),
    "all queries see all": Case(lens=(3, 40), seqlen_q=3, options={"softmax_scale": 0.3}),
    "many rows": Case(lens=(5, 33), seqlen_q=3, nheads=16, nheads_k=2, options={"causal": True}),
    "window and sinks": Case(lens=(3, 64, 90, 0), sinks=True, page=16, options={"window": (20, 0)}),
    "window over small pages": Case(lens=(70, 33), page=5, nheads=2, nheads_k=1, options={"window": (20, 0)}),
    "window of both sides": Case(lens=(40, 7), seqlen_q=4, options={"window": (9, 1)}),
    "softcap and slopes": Case(lens=(50, 0, 18), alibi=True, options={"softcap": 3.0}),
    "left padding": Case(lens=(50, 20, 9), leftpad=(3, 19, 9), seqlen_q=2, options={"causal": True}),
    "rows of the cache": Case(lens=(50, 2), batch_idx=(3, 0), sinks=True),
    "unequal heads in fp16": Case(lens=(40, 11), head_dim=24, head_dim_v=40, dtype=torch.float16, nheads=7, nheads_k=1),
}


@pytest.mark.parametrize("name", every(2, CASES))
def test_it_is_right_and_reads_nothing_that_is_hidden(name: str) -> None:
    call = make(CASES[name])
    assert_right(call, *interpreted(call))


KNOBS: dict[str, dict[str, KnobValue]] = {
    "contiguous": {**GRID, "per_sm": 6, **MERGE},
    "many rows": {"merge_rows": 8, "reduce_warps": 4, "partials": 8},
    "one long": {**GRID, "per_sm": 6, "min_tiles": 4, **MERGE},
    "pages of 16": {**GRID, **WARPS},
    "pages of 32": {**GRID, "per_sm": 6},
    "more queries than keys": {**GRID, **WARPS, "block_m": 8},
    "window and sinks": {**GRID, "per_sm": 4, **WARPS},
    "softcap and slopes": {**WARPS, "slack_percent": 8, **MERGE},
    "window of both sides": MERGE,
    "left padding": {**GRID, "per_sm": 6},
    "unequal heads in fp16": {**GRID, **WARPS, "block_m": 8},
}


@pytest.mark.parametrize("name", every(2, KNOBS))
def test_other_schedules_and_keys_of_warps_are_right(name: str) -> None:
    call = make(CASES[name])
    assert_right(call, *interpreted(call, **KNOBS[name]))


ALIKE = {
    "cut alike": Case(lens=(97, 97), nheads=2, nheads_k=1),
    "cut alike, some with fewer parts": Case(lens=(160, 1, 150, 0), nheads=2, nheads_k=1, page=16),
    "one with all parts": Case(lens=(230,), nheads=3, nheads_k=3, sinks=True),
    "one without keys": Case(lens=(0,), nheads=2, nheads_k=1),
    "whole, several for each program": Case(lens=(33, 32, 31, 33, 20), nheads=6, nheads_k=3),
    "whole in a window": Case(lens=(90, 64, 70), page=16, options={"window": (20, 0)}),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("per_sm", first(1, [4, 1]))
def test_sequences_of_about_one_length_are_cut_alike(name: str, per_sm: int) -> None:
    call = make(ALIKE[name])
    assert_right(call, *interpreted(call, per_sm=per_sm, slack=4))


def parts_of(*lens: int) -> list[tuple[int, int]]:
    """What each of nine programs has of one head: ends of sequences that began in others, and beginnings."""
    call = make(Case(lens=lens, nheads=1, nheads_k=1, head_dim=16))
    out, lse = results(call)
    checked = CheckedDecode.of(call, out)
    part_lse = torch.full((2 * 9,), math.nan)  # of one row
    launched(call, checked, small_config(checked, per_sm=3), out, lse, PartLse=part_lse)
    return [(int(end), int(beginning)) for end, beginning in ~part_lse.view(9, 2).isnan()]


def test_sequences_of_one_length_have_one_piece_a_program() -> None:
    """By equal shares of 38 tiles, the fifth program had the end of one sequence and the beginning of the next."""
    first, other, idle = (0, 1), (1, 0), (0, 0)
    assert parts_of(304, 304) == [first, other, other, other, first, other, other, other, idle]
    # unequal ones have equal shares, of 3 or 4 tiles
    assert parts_of(304, 160)[5] == (1, 1)


PAGES: dict[str, dict[str, KnobValue]] = {
    "pages of 16": {"ids_per": "page", "ids_ahead": True, "block_n": 64},
    "pages of 32": {"ids_ahead": True},
    "pages of 1": {"ids_ahead": True, **GRID},
    "window and sinks": {"ids_per": "page", **GRID, **WARPS},
    "window over small pages": {"ids_ahead": True, **WARPS},
}


@pytest.mark.parametrize("name", PAGES)
def test_page_ids_of_a_page_and_those_of_the_next_step_are_right(name: str) -> None:
    call = make(CASES[name])
    assert_right(call, *interpreted(call, **PAGES[name]))


def test_windows_that_begin_within_a_page_are_right_where_steps_begin_with_pages() -> None:
    """At each place of a page, the first and the last one too."""
    case = Case(lens=(32, 47, 48, 49, 63), page=16, nheads=2, nheads_k=1, head_dim=16)
    call = make(replace(case, options={"window": (30, 0)}))
    for ahead in (False, True):
        assert_right(call, *interpreted(call, ids_per="page", ids_ahead=ahead, block_n=32))


def test_a_long_sequence_among_short_ones_has_more_programs() -> None:
    call = make(Case(lens=(1100, 5, 0), nheads=1, nheads_k=1, head_dim=16))
    assert_right(call, *interpreted(call, **GRID, chunk=1024, block_n=128))


@pytest.mark.parametrize("knobs", every(2, [{}, {**GRID, **WARPS}]), ids=["shares", "grid, keys of warps"])
def test_row_sums_behind_the_last_step_are_right(knobs: dict[str, KnobValue]) -> None:
    for name in ("more queries than keys", "window and sinks", "one long"):
        call = make(CASES[name])
        assert_right(call, *interpreted(call, late_sums=True, **knobs))


def test_rows_of_several_tiles_are_right() -> None:
    call = make(CASES["many rows"])
    assert_right(call, *interpreted(call, block_m=16))


def test_fixed_splits_are_right() -> None:
    cases: list[tuple[int | None, dict[str, Any], dict[str, KnobValue]]] = [
        (None, {"causal": True}, {}),
        (16, {"window": (180, 0)}, GRID),
        (24, {"softcap": 5.0}, {}),
    ]
    for pages, options, knobs in cases:
        given = {**options, "fixed_split_size": 128}
        call = make(
            Case(
                lens=(260, 0, 129, 7),
                seqlen_q=2,
                nheads=2,
                nheads_k=1,
                page=pages,
                sinks=True,
                head_dim=16,
                options=given,
            )
        )
        assert_right(call, *interpreted(call, **knobs))


@pytest.mark.parametrize("split", first(1, [None, 128]), ids=["shares", "fixed splits"])
def test_a_part_of_the_heads_side_by_side_is_right(split: int | None) -> None:
    """Six programs, of which four heads make three groups of two: a sequence has two pairs for each."""
    call = make(Case(lens=(190, 0, 128, 133), nheads=4, nheads_k=4, head_dim=16, options={"fixed_split_size": split}))
    assert side_by_side(4, 6) == (3, 2)
    for knobs in ({"per_sm": 2}, {"per_sm": 2, "slack": 16}, {"per_sm": 2, "overhead": 8}):
        assert_right(call, *interpreted(call, block_n=32, **knobs))


def test_whole_pairs_and_shares_of_several_tiles_are_right() -> None:
    call = make(Case(lens=(60, 64, 61), page=16))
    for knobs in ({"slack": 16}, {"min_tiles": 4}, {"per_sm": 1, "overhead": 8}, {"partials": 8, "per_sm": 6}):
        assert_right(call, *interpreted(call, **knobs))


@pytest.mark.parametrize("knobs", first(1, [{**GRID, **WARPS}, {}, GRID]), ids=["keys of warps", "shares", "grid"])
def test_the_bits_of_a_sequence_follow_from_itself_alone(knobs: dict[str, KnobValue]) -> None:
    """With fixed splits: in any batch, order, grid and pages. Without them they do not, or this shows nothing."""
    lens, fixed = (40, 300, 129, 7), {"fixed_split_size": 128}
    case = Case(lens=lens, page=16, nheads=16, nheads_k=1, head_dim=16, options=fixed)
    whole = make(case)
    out, lse = interpreted(whole, **knobs)
    others = [
        (interpreted(make(case, order=5), per_sm=2, **knobs), slice(None)),
        (interpreted(only(whole, [1]), per_sm=1, **knobs), [1]),
        (interpreted(only(whole, [2, 1, 0]), **knobs), [2, 1, 0]),
    ]
    for (same, same_lse), rows in others:
        assert torch.equal(out[rows], same)
        assert torch.equal(lse[rows], same_lse)
    shares = replace(whole, fixed_split_size=None)
    assert not torch.equal(interpreted(shares, **knobs)[1][1:2], interpreted(only(shares, [1]), per_sm=2, **knobs)[1])


def by_the_rule(call: DecodeCall, **knobs: KnobValue) -> tuple[torch.Tensor, torch.Tensor]:
    """As `interpreted`, by the config that serves such calls; what only a compiler understands is left out."""
    checked = CheckedDecode.of(call, results(call)[0])
    config = decode_config(checked.spec, checked.shape.sizes, DEVICE)
    given = {**dict(config.knobs), "page_ids": "load", "pdl": False, **knobs}
    return interpreted(call, **given)


WINDOWED = Case(
    lens=(300, 151, 152, 7, 0, 215), nheads=2, nheads_k=1, options={"window": (150, 0), "fixed_split_size": 128}
)


@pytest.mark.parametrize("seqlen_q", first(1, [3, 1]))
@pytest.mark.parametrize("knobs", first(1, [{"schedule": "shares", "overhead": 4}, {}]), ids=["shares", "grid"])
def test_windows_over_pages_of_any_size_have_the_same_bits(knobs: dict[str, KnobValue], seqlen_q: int) -> None:
    """A window begins within a step; steps of pages that hold whole ones can begin nowhere but at their multiples."""
    case = replace(WINDOWED, seqlen_q=seqlen_q)
    call = make(case)
    out, lse = by_the_rule(call, **knobs)
    assert_right(call, out, lse)
    for page in (1, 24, 128) if seqlen_q == 1 else (16, 64):
        over_pages = make(replace(case, page=page))
        same, same_lse = by_the_rule(over_pages, **knobs)
        assert torch.equal(out, same), page
        assert torch.equal(lse, same_lse), page


@pytest.mark.parametrize("window", [None, (150, 0)], ids=["all keys", "window"])
def test_keys_behind_left_padding_have_the_bits_of_keys_without_it(window: tuple[int, int] | None) -> None:
    """Padding follows from the longest sequence of a batch."""
    pads = (3, 64, 100, 0, 77, 5)
    options = {"fixed_split_size": 128, **({"window": window} if window else {})}
    call = make(replace(WINDOWED, options=options))
    out, lse = by_the_rule(call)
    room = call.k_cache.shape[1] + max(pads)
    caches = {}
    for name in ("k_cache", "v_cache"):
        cache = getattr(call, name)
        caches[name] = cache.new_full((len(pads), room, *cache.shape[2:]), math.nan)
        for b, pad in enumerate(pads):
            caches[name][b, pad : pad + cache.shape[1]] = cache[b]
    leftpad = torch.tensor(pads, dtype=torch.int32)
    for knobs in ({}, {"schedule": "shares", "overhead": 4}):
        padded = by_the_rule(replace(call, **caches, seqlens=call.seqlens + leftpad, leftpad=leftpad), **knobs)
        assert torch.equal(out, padded[0])
        assert torch.equal(lse, padded[1])


def test_left_padding_behind_a_length_or_the_cache_leaves_no_keys() -> None:
    call = make(replace(WINDOWED, lens=(200, 200, 200), options={"fixed_split_size": 128}))
    call = replace(call, leftpad=torch.tensor([200, 2**31 - 1, -5], dtype=torch.int32))
    out, lse = by_the_rule(call)
    assert not out[:2].any()
    assert (lse[:2] == -math.inf).all()
    assert torch.equal(out[2:], by_the_rule(replace(call, leftpad=None))[0][2:])


def test_layouts_of_the_caches_give_the_same_bits() -> None:
    found = [interpreted(make(Case(lens=(33, 60), page=16, layout=one))) for one in ("nhd", "hnd", "halves")]
    assert all(torch.equal(found[0][0], out) and torch.equal(found[0][1], lse) for out, lse in found[1:])
