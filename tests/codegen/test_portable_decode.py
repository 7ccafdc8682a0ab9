"""The decode family's schedules: how often sequences are split, and which knobs belong together."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.decode_splits import MOST_PROGRAMS, SplitCounts, split_counts
from flashgen.codegen.families import invalid, usual
from flashgen.codegen.family import Sizes
from flashgen.codegen.portable_decode.defaults import ONLY_GRID, ONLY_SHARES, fitted, poor_at_sizes, seed_configs
from flashgen.codegen.portable_decode.family import PORTABLE_DECODE
from flashgen.codegen.portable_decode.resources import register_limit, smem_needed
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from tests.tiers import EXHAUSTIVE, first

H200 = find_device("h200")
SPEC = Specialization(direction="decode", dtype="bf16", head_dim=128, head_dim_v=128)


def config(schedule: str = "grid", **knobs: int | bool) -> Config:
    found = PORTABLE_DECODE.default(SPEC, H200)
    usual = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "per_sm": 1, "min_tiles": 1}
    return found.replace(**{"schedule": schedule, **usual, **ONLY_SHARES, **ONLY_GRID, **knobs})


def counts(pairs: int, seqlen_k: int, split_size: int = 0, *, is_batch: bool = False, **knobs: int) -> tuple[int, ...]:
    found: SplitCounts = split_counts(
        config(**knobs), H200, pairs=pairs, seqlen_k=seqlen_k, split_size=split_size, is_batch=is_batch
    )
    return found.least, found.most, found.slots


def test_pairs_are_split_until_every_sm_has_a_program() -> None:
    assert counts(8, 8192) == (16, 16, 16)  # 132 SMs
    assert counts(8, 8192, per_sm=2) == (33, 33, 33)
    assert counts(8, 640, per_sm=2) == (10, 10, 10)  # as many as there are tiles
    assert counts(8, 640, per_sm=2, min_tiles=4) == (3, 3, 3)
    assert counts(128, 8192) == (1, 1, 1)
    assert counts(512, 1) == (1, 1, 1)


def test_a_long_sequence_has_a_program_for_each_chunk() -> None:
    assert counts(512, 65536, chunk=4096) == (1, 16, 16)
    assert counts(8, 8192, chunk=4096) == (16, 16, 16)
    assert counts(512, 100, chunk=1024, min_tiles=8) == (1, 1, 1)


def test_fixed_splits_have_a_slot_each_and_as_many_programs_as_sms_ask_for() -> None:
    assert counts(8, 8192, 1024) == (1, 8, 8)
    assert counts(8, 131072, 1024) == (1, 16, 128)
    assert counts(128, 8192, 1024, per_sm=2) == (1, 2, 8)  # 3 for each would have every third program wait for others
    assert counts(512, 131072, 1024, chunk=1024) == (1, 1, 128)
    assert counts(512, 1024, 1024) == (1, 1, 1)


def test_one_long_sequence_of_a_batch_keeps_no_program_for_more_than_a_few_fixed_splits() -> None:
    assert counts(512, 65536, 1024, is_batch=True, per_sm=2) == (1, 16, 64)  # one program would take 64 in turn
    assert counts(512, 4096, 1024, is_batch=True) == (1, 1, 4)
    assert counts(128, 8192, 1024, is_batch=True, per_sm=2) == (1, 2, 8)
    least, most, slots = counts(8192, 2**27, 1024, is_batch=True, per_sm=2)
    assert (least, slots) == (1, 2**17)
    assert most == MOST_PROGRAMS * 264 // 8192  # an axis of a launch has 65535 programs at most


@pytest.mark.parametrize(
    "changed",
    [
        config(slack=4),
        config(slack_percent=8),
        config(overhead=4),
        config("shares", chunk=2048),
        config(warp_keys=True, num_warps=8),
    ],
    ids=["slack", "slack_percent", "overhead", "chunk", "warp_keys"],
)
def test_what_a_schedule_has_no_use_for_is_refused(changed: Config) -> None:
    """Two configs that are one kernel would be measured twice."""
    assert invalid(config(), SPEC, H200) is None
    assert invalid(config("shares"), SPEC, H200) is None
    assert invalid(changed, SPEC, H200) is not None


def test_a_program_of_the_merge_takes_as_many_rows_as_its_registers_and_its_tile_have() -> None:
    rows = config("shares", merge_rows=8, partials=8, reduce_warps=4)
    assert invalid(rows, SPEC, H200) is None
    assert "holds 128 numbers of partial results, not 256" in str(invalid(rows.replace(partials=32), SPEC, H200))
    assert "tiles have 8 query rows" in str(invalid(rows.replace(block_m=8, merge_rows=16), SPEC, H200))
    sizes = Sizes(batch=4, nheads=32, nheads_k=8, seqlen_q=3, seqlen_k=8192)
    one, several = (PORTABLE_DECODE.kernels(SPEC, each)[1] for each in (rows.replace(merge_rows=1), rows))
    assert one.programs is not None
    assert several.programs is not None
    assert (one.programs(H200, sizes), several.programs(H200, sizes)) == (132 * 12, 132 * 2)


@pytest.mark.parametrize(("page_size", "knobs"), [(None, {"ids_ahead": True}), (64, {"ids_per": "page"})])
def test_page_ids_that_there_are_not_are_refused(page_size: int | None, knobs: dict[str, KnobValue]) -> None:
    spec = replace(SPEC, page_size=page_size)
    assert invalid(config("shares"), spec, H200) is None
    assert invalid(config("shares").replace(**knobs), spec, H200) is not None


def test_programs_of_an_sm_have_registers_side_by_side() -> None:
    assert register_limit(config("shares", per_sm=2, num_warps=8)) == 128
    assert register_limit(config("shares", per_sm=3, num_warps=4)) == 168
    assert register_limit(config("shares", per_sm=2, num_warps=4)) == 0  # 255 is what there is
    assert register_limit(config("shares", per_sm=2, num_warps=4, maxnreg=168)) == 168


@EXHAUSTIVE
def test_as_many_programs_of_the_rule_for_small_pages_fit_as_it_wants() -> None:
    spec = replace(SPEC, page_size=16)
    sizes = Sizes(batch=64, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=4096)
    found = usual(PORTABLE_DECODE.default(spec, H200), spec, sizes, H200)
    compiled = compile_kernel(spec, found, H200)
    assert compiled.occupancy(H200) >= found.integer("per_sm")
    assert compiled.spills == 0


@EXHAUSTIVE
@pytest.mark.parametrize("page", first(1, [16, None]))
def test_most_steps_compare_no_key(page: int | None) -> None:
    """Scores of a step are compared with what is seen in a branch that the middle of a sequence passes by."""
    found = compile_kernel(replace(SPEC, page_size=page), config("shares").replace(per_sm=2), H200)
    loop = next(loop for loop in found.main.handle.asm["ttgir"].split("scf.for")[1:] if "async_wait" in loop)
    step, branch = loop.split("scf.if", 1)
    comparison = r"arith\.cmpi s[gl]e, [^\n]*: tensor<\d+x\d+xi32"
    assert re.search(comparison, branch)
    assert not re.search(comparison, step)


@EXHAUSTIVE
@pytest.mark.parametrize("padded", first(1, [True, False]))
def test_programs_of_a_warpgroup_fit_as_they_are_counted(padded: bool) -> None:
    spec = replace(SPEC, page_size=64)
    found = config("shares").replace(block_m=64, block_n=64, num_warps=4, num_stages=3, per_sm=2, padded_rows=padded)
    assert invalid(found, spec, H200) is None
    compiled = compile_kernel(spec, found, H200)
    assert compiled.shared_bytes <= smem_needed(spec, found) <= compiled.shared_bytes + 1024
    assert compiled.occupancy(H200) == 2


def test_padded_rows_serve_any_number_of_them_and_are_for_warpgroups() -> None:
    padded = config("shares").replace(padded_rows=True, block_m=64, num_warps=4)
    sizes = Sizes(batch=4, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=4096)
    assert fitted(SPEC, padded, sizes, H200)["block_m"] == 64
    assert poor_at_sizes(padded, sizes) is None
    assert "has 128" in str(poor_at_sizes(padded, sizes._replace(seqlen_q=32)))
    for wrong in ({"block_m": 16}, {"num_warps": 2}, {"warp_keys": True}):
        assert "warpgroups" in str(invalid(padded.replace(**wrong), SPEC, H200))
    assert "sm90 only" in str(invalid(padded.replace(pdl=False), SPEC, find_device("sm80")))


def test_where_bits_follow_from_a_sequence_alone_there_is_one_order_of_sums() -> None:
    found = [
        usual(
            PORTABLE_DECODE.default(replace(SPEC, page_size=page), H200),
            replace(SPEC, page_size=page),
            Sizes(batch=b, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=0),
            H200,
        )
        for page in (None, 1, 16, 64, 256)
        for b in (1, 16, 64, 1024)
    ]
    for name in ("block_m", "block_n", "num_warps", "warp_keys", "late_sums", "partials", "ids_per"):
        assert len({each[name] for each in found}) == 1, name
    assert all(each["aligned_steps"] for each in found)
    assert "begin with a page" in str(invalid(found[-1].replace(ids_per="page"), replace(SPEC, page_size=16), H200))


def test_what_a_search_tries_first_fits_and_knows_the_pages() -> None:
    for page, per in ((None, "row"), (16, "page"), (64, "row")):
        spec = replace(SPEC, page_size=page)
        seeds = seed_configs(spec, H200)
        assert all(invalid(each, spec, H200) is None for each in seeds)
        first = next(each for each in seeds if each["block_n"] == 64 and not each["padded_rows"])
        assert (first["ids_per"], first["ids_ahead"]) == (per, page is not None)


def mainloop(page_size: int | None, **knobs: KnobValue) -> tuple[set[str], list[str]]:
    """Copies that may be under way when a step waits for its own, and of what shape the addresses of page ids are."""
    spec = replace(SPEC, page_size=page_size)
    found = config("shares").replace(per_sm=2, **knobs)
    assert invalid(found, spec, H200) is None
    text = compile_kernel(spec, found, H200).main.handle.asm["ttgir"]
    loop = next(loop for loop in text.split("scf.for")[1:] if "async_wait" in loop)
    ids = re.findall(r"ld\.global\.nc.*?: (?:tensor<(\d+)x)?i64", loop)
    return set(re.findall(r"async_wait %[^\n]*num = (\d+)", loop)), ids


@pytest.mark.parametrize(
    ("page_size", "knobs", "ids"),
    first(
        1,
        [
            (16, {"ids_per": "page", "ids_ahead": True}, ["4"]),
            (16, {}, ["64"]),
            (64, {"ids_ahead": True}, [""]),
            (None, {}, []),
        ],
    ),
)
def test_page_ids_of_the_next_step_leave_the_pipeline_its_depth(
    page_size: int | None, knobs: dict[str, KnobValue], ids: list[str]
) -> None:
    """A Triton that makes a stage of them would keep less of K and V under way."""
    # keys of a step are waited for before its values
    assert mainloop(page_size, **knobs) == ({"3", "2"}, ids)
