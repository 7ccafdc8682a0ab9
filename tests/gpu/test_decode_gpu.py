"""`flashgen.attention_decode` on a GPU: the attacks of the interpreter at real sizes, graphs, streams, memory, bits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.codegen.common_decode import ONLY_SHARES
from flashgen.codegen.families import family, invalid, usual
from flashgen.core.config import Config, KnobValue
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.launch.gpu import current_device
from flashgen.runtime.decode import runs
from flashgen.runtime.decode.call import CheckedDecode
from tests.decoding import Case, assert_right, make, only, run
from tests.gpu.decode_cases import BF16, CASES, WIDE

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_QUIET", "1")
    flashgen.reload()
    yield
    flashgen.reload()


@pytest.mark.parametrize("split", [None, 256], ids=["shares", "fixed"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_and_reads_nothing_that_is_hidden(name: str, split: int | None) -> None:
    call = make(CASES[name], "cuda")
    out, lse = run(call, fixed_split_size=split, return_lse=True)
    assert_right(call, out, lse)
    again, lse_again = run(call, fixed_split_size=split, return_lse=True)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def portable(checked: CheckedDecode) -> Config:
    """What serves by the rule of the family for all GPUs, even where there is another one."""
    device, sizes = current_device(0), checked.shape.sizes
    return usual(family("portable_decode").default(checked.spec, device), checked.spec, sizes, device)


SMALL: dict[str, KnobValue] = {
    "block_n": 64,
    "num_warps": 4,
    "num_stages": 3,
    "per_sm": 1,
    "schedule": "shares",
    "warp_keys": False,
    "late_sums": False,
}
MERGE: dict[str, KnobValue] = {"merge_rows": 4, "reduce_warps": 4, "partials": 8}
OTHERS: dict[str, dict[str, KnobValue]] = {
    "grid": {"schedule": "grid", **ONLY_SHARES},
    "grid, early": {"schedule": "grid", **ONLY_SHARES, "early": True},
    "grid, chunks": {"schedule": "grid", **ONLY_SHARES, "chunk": 1024, "early": True, "pdl": False},
    "grid, keys of warps": {"schedule": "grid", **ONLY_SHARES, "warp_keys": True, "early": True},
    "shares, late sums": {"late_sums": True},
    "grid, late sums, keys of warps": {"schedule": "grid", **ONLY_SHARES, "warp_keys": True, "late_sums": True},
    "shares, keys of warps": {"warp_keys": True, "early": True, "slack_percent": 8},
    "grid, eight rows": {"schedule": "grid", **ONLY_SHARES, "block_m": 8},
    "grid, eight rows, keys of warps": {"schedule": "grid", **ONLY_SHARES, "block_m": 8, "warp_keys": True},
    "grid, many rows": {"schedule": "grid", **ONLY_SHARES, "block_m": 64},
    "grid, rows merged together": {"schedule": "grid", **ONLY_SHARES, "block_m": 16, **MERGE},
    "shares, rows merged together": {"block_m": 16, **MERGE},
}


@pytest.mark.parametrize("knobs", OTHERS)
@pytest.mark.parametrize("name", ["contiguous", "pages of 16", "queries of 4", "window and sinks"])
def test_configs_that_no_rule_takes_are_right(name: str, knobs: str) -> None:
    split = 256 if name == "queries of 4" else None
    call = replace(make(CASES[name], "cuda"), fixed_split_size=split, return_lse=True)
    checked, device = CheckedDecode.of(call, torch.empty_like(call.q)), current_device(0)
    config = portable(checked).replace(**{**SMALL, **OTHERS[knobs]})
    assert invalid(config, checked.spec, device) is None
    out, lse = runs.run(call, config)
    assert lse is not None
    assert_right(call, out, lse)
    again, _ = runs.run(call, config)
    assert torch.equal(out, again)


AHEAD: dict[str, dict[str, KnobValue]] = {
    "ahead": {"ids_ahead": True},
    "of pages": {"ids_per": "page"},
    "of pages, ahead": {"ids_per": "page", "ids_ahead": True, "num_stages": 4},
    "of pages, ahead, keys of warps": {"ids_per": "page", "ids_ahead": True, "warp_keys": True},
}


@pytest.mark.parametrize("knobs", AHEAD)
@pytest.mark.parametrize("name", ["pages of 16", "ends of pages of 16", "window and sinks"])
def test_page_ids_of_a_page_and_those_of_the_next_step_are_right(name: str, knobs: str) -> None:
    call = replace(make(CASES[name], "cuda"), return_lse=True)
    checked, device = CheckedDecode.of(call, torch.empty_like(call.q)), current_device(0)
    config = portable(checked).replace(**{**SMALL, **AHEAD[knobs]})
    assert invalid(config, checked.spec, device) is None
    assert_right(call, *runs.run(call, config))


@pytest.mark.parametrize("batch", [1, 17, 1024, 1025])
def test_many_sequences(batch: int) -> None:
    """The first and the last ones against the oracle; all of them against calls of a few with the same bits."""
    lens = tuple(random.Random(batch).choice((0, 1, 2, 63, 64, 65, 130)) for _ in range(batch))
    options = {"fixed_split_size": 128}
    call = make(Case(lens=lens, page=16, nheads=4, nheads_k=2, head_dim=64, dtype=BF16, options=options), "cuda")
    out, lse = run(call, return_lse=True)
    ends = sorted({*range(min(9, batch)), *range(max(batch - 8, 0), batch)})
    assert_right(only(call, ends), out[ends], lse[ends])
    parts = [run(only(call, list(range(batch))[start : start + 100])) for start in range(0, batch, 100)]
    assert torch.equal(out, torch.cat(parts))
    shares, shares_lse = run(call, fixed_split_size=None, return_lse=True)
    assert_right(only(call, ends), shares[ends], shares_lse[ends])
    torch.testing.assert_close(shares, out, atol=2e-2, rtol=2e-2)


def test_layouts_of_the_caches_give_the_same_bits() -> None:
    case = Case(lens=(33, 600, 3000), page=64, **WIDE)
    found = [run(make(replace(case, layout=one), "cuda")) for one in ("nhd", "hnd", "halves", "interleaved")]
    assert all(torch.equal(found[0], out) for out in found[1:])


def test_the_bits_of_a_sequence_follow_from_itself_alone() -> None:
    lens, fixed = (400, 3000, 1290, 7, 5000), {"fixed_split_size": 512}
    case = Case(lens=lens, page=16, options=fixed, **WIDE)
    whole = make(case, "cuda")
    out, lse = run(whole, return_lse=True)
    for order in (3, 4):
        assert torch.equal(out, run(make(case, "cuda", order=order)))
    for page in (None, 64, 256):
        other = make(replace(case, page=page), "cuda")
        assert torch.equal(out, run(other)), page
    for rows in ([1], [4, 1, 0], [1, 4] * 20):
        same, same_lse = run(only(whole, rows), return_lse=True)
        assert torch.equal(out[rows], same)
        assert torch.equal(lse[rows], same_lse)
    shares = replace(whole, fixed_split_size=None)
    assert not torch.equal(run(shares)[[1]], run(only(shares, [1])))


@pytest.mark.parametrize("heads", ["groups of 4", "wide heads"])
def test_windows_over_pages_of_any_size_have_the_same_bits(heads: str) -> None:
    """Heads of 256 are served by a config of the other schedule."""
    sizes = WIDE if heads == "groups of 4" else {"nheads": 8, "nheads_k": 4, "head_dim": 256, "dtype": BF16}
    options = {"fixed_split_size": 128, "window": (150, 0)}
    case = Case(lens=(400, 3000, 1290, 7, 151, 0), options=options, **sizes)
    call = make(case, "cuda")
    out, lse = run(call, return_lse=True)
    assert_right(call, out, lse)
    for page in (1, 16, 64, 128):
        same, same_lse = run(make(replace(case, page=page), "cuda"), return_lse=True)
        assert torch.equal(out, same), page
        assert torch.equal(lse, same_lse), page


@pytest.mark.parametrize("page", [16, 128], ids=["a page for each row", "steps in one page"])
def test_pages_of_more_than_two_billion_elements(page: int) -> None:
    heads, dim = 8, 128
    pages = 2**31 // (page * heads * dim) + 64
    k, v = (torch.full((pages, page, heads, dim), math.nan, dtype=BF16, device="cuda") for _ in range(2))
    small = make(Case(lens=(300, 1000), page=page, **WIDE), "cuda")
    count = small.k_cache.shape[0]
    k[-count:], v[-count:] = small.k_cache, small.v_cache
    assert small.block_table is not None
    table = torch.where(small.block_table < count, small.block_table + (pages - count), small.block_table)
    assert torch.equal(run(small), run(small, k_cache=k, v_cache=v, block_table=table))


def test_contiguous_caches_of_more_than_two_billion_elements() -> None:
    heads, dim = 8, 128
    rows = 2**31 // (4096 * heads * dim) + 2
    k, v = (torch.full((rows, 4096, heads, dim), math.nan, dtype=BF16, device="cuda") for _ in range(2))
    case = make(Case(lens=(300, 4000), room=4096, **WIDE), "cuda")
    k[-2:], v[-2:] = case.k_cache, case.v_cache
    ids = torch.tensor([rows - 2, rows - 1], dtype=torch.int32, device="cuda")
    assert torch.equal(run(case), run(case, k_cache=k, v_cache=v, batch_idx=ids))


def test_lengths_behind_the_cache_count_as_all_of_it() -> None:
    call = make(Case(lens=(512, 512), **WIDE), "cuda")
    lens = torch.tensor([2**31 - 1, -5], dtype=torch.int32, device="cuda")
    out, lse = run(call, seqlens=lens, return_lse=True)
    assert torch.equal(out[0], run(call)[0])
    assert not out[1].any()
    assert (lse[1] == -math.inf).all()


def test_contents_are_checked_where_the_setting_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CHECKS", "1")
    flashgen.reload()
    call = make(Case(lens=(512, 90), page=64, **WIDE), "cuda")
    run(call)
    with pytest.raises(WorkloadError, match="seqlens"):
        run(call, seqlens=torch.tensor([512, 1000], dtype=torch.int32, device="cuda"))
    assert call.block_table is not None
    with pytest.raises(WorkloadError, match="page ids"):
        run(call, block_table=call.block_table.clone().fill_(-1))


def test_a_gradient_is_refused_and_unaligned_tensors_are_served() -> None:
    call = make(Case(lens=(512, 90), **WIDE), "cuda")
    with pytest.raises(UnsupportedError, match="no backward pass"):
        run(call, q=call.q.clone().requires_grad_())
    odd = torch.empty(call.q.numel() + 1, dtype=BF16, device="cuda")[1:].view(call.q.shape).copy_(call.q)
    assert_right(call, *run(call, q=odd, return_lse=True))
