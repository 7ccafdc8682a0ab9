"""The decode family's schedules: how often sequences are split, and which knobs belong together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.decode_splits import SplitCounts, split_counts
from flashgen.codegen.families import decode_config, invalid
from flashgen.codegen.family import Sizes
from flashgen.codegen.portable_decode.defaults import ONLY_GRID, ONLY_SHARES
from flashgen.codegen.portable_decode.resources import register_limit
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization

H200 = find_device("h200")
SPEC = Specialization(direction="decode", dtype="bf16", head_dim=128, head_dim_v=128)


def config(schedule: str = "grid", **knobs: int | bool) -> Config:
    found = decode_config(SPEC, Sizes(batch=1, nheads=8, nheads_k=8, seqlen_q=1, seqlen_k=8192), H200)
    usual = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "per_sm": 1, "min_tiles": 1}
    return found.replace(**{"schedule": schedule, **usual, **ONLY_SHARES, **ONLY_GRID, **knobs})


def counts(pairs: int, seqlen_k: int, split_size: int = 0, **knobs: int) -> tuple[int, int, int]:
    found: SplitCounts = split_counts(config(**knobs), H200, pairs=pairs, seqlen_k=seqlen_k, split_size=split_size)
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
    assert counts(8, 131072, 1024) == (1, 17, 128)
    assert counts(512, 131072, 1024, chunk=1024) == (1, 1, 128)
    assert counts(512, 1024, 1024) == (1, 1, 1)


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


def test_programs_of_an_sm_have_registers_side_by_side() -> None:
    assert register_limit(config("shares", per_sm=2, num_warps=8)) == 128
    assert register_limit(config("shares", per_sm=3, num_warps=4)) == 168
    assert register_limit(config("shares", per_sm=2, num_warps=4)) == 0  # 255 is what there is
    assert register_limit(config("shares", per_sm=2, num_warps=4, maxnreg=168)) == 168


def test_the_rule_for_many_sequences_over_small_pages_fits_twice() -> None:
    spec = replace(SPEC, page_size=16)
    sizes = Sizes(batch=64, nheads=32, nheads_k=8, seqlen_q=1, seqlen_k=4096)
    found = decode_config(spec, sizes, H200)
    compiled = compile_kernel(spec, found, H200)
    assert compiled.occupancy(H200) >= found.integer("per_sm")
    assert compiled.spills == 0
