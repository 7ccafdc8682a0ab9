"""The tile of a config that was measured at other sizes, against what each tile took on an H200.

`tiles_nvidia_h200.csv` has the times of races of all tiles of a class, on shapes most of which have few CTAs for an SM,
and, of causal classes and of heads of 96 and more, what searches of 60 shapes had of each tile at best.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.left_out import SEARCHES
from benchmarks.search_files import read
from benchmarks.tiles import losses, shape_of, times_of
from flashgen.codegen.families import balanced, beside, default_config, family, invalid
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward import tile_choice
from flashgen.codegen.hopper_forward.tiles import SUSTAINED, TILES, Tile
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.record import Measurement
from flashgen.core.workload import Specialization, Workload
from flashgen.db.log_files import SUFFIX, read_log
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.packed_ladder import PackedSizes
from tests.tiers import every
from tests.tile_times import tile_times

A100, H200 = find_device("a100"), find_device("h200")

MEAN = {40: 1.026, 56: 1.024, 64: 1.012, 72: 1.007, 80: 1.016, 96: 1.013, 112: 1.004, 128: 1.01}
WORST = {40: 1.11, 56: 1.17, 64: 1.12, 72: 1.09, 80: 1.17, 96: 1.17, 112: 1.04, 128: 1.16}
"""Time over that of the best tile, by head dimension; with any one tile for all it is 1.10 and 1.48."""

SUSTAINED_LOSSES = {(64, False): (1.009, 1.073)}
"""Of 22 shapes, where others have up to 20: one of 114 us, whose CTAs of 64 rows fill the last wave, loses that."""

SUSTAINED_TIMES = Path(__file__).parent / "sustained_tiles_nvidia_h200.csv"


def measured(head_dim: int, causal: bool) -> dict[Workload, dict[tuple[int, int], float]]:
    return tile_times()[head_dim, causal]


def spec_of(head_dim: int, causal: bool, dtype: str = "bf16") -> Specialization:
    return Specialization.parse(f"fwd-{dtype}-d{head_dim}" + ("-causal" if causal else ""))


def config_of(spec: Specialization, tile: Tile) -> Config:
    config = default_config(spec, H200).replace(**dict(tile.knobs))
    return config.replace(warpgroups=tile.warpgroups, block_n=tile.block_n, blocks_per_sm=tile.blocks_per_sm)


@pytest.mark.parametrize(("head_dim", "causal"), TILES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_tile_is_a_valid_config(head_dim: int, causal: bool, dtype: str) -> None:
    spec = spec_of(head_dim, causal, dtype)
    for tile in TILES[head_dim, causal]:
        assert invalid(config_of(spec, tile), spec, H200) is None, tile


@pytest.mark.parametrize(("head_dim", "causal"), TILES)
def test_the_tile_that_serves_is_nearly_the_best_one_wherever_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool
) -> None:
    """In windows as short as these, of which factors of load that goes on say nothing."""
    monkeypatch.setattr(tile_choice, "SUSTAINED", {})
    tiles = TILES[head_dim, causal]
    # a search had not all of them
    times = {workload: of for workload, of in measured(head_dim, causal).items() if len(of) == len(tiles)}
    assert len(times) >= 13
    found = losses(times, H200)
    assert len(found) == len(tiles)
    for own, lost in found.items():
        assert len(lost) == len(times)
        assert statistics.geometric_mean(lost) <= MEAN[head_dim], own
        assert max(lost) <= WORST[head_dim], own


@pytest.mark.parametrize(("head_dim", "causal"), SUSTAINED)
def test_long_launches_have_the_tile_that_is_fastest_under_load_that_goes_on(head_dim: int, causal: bool) -> None:
    times = times_of(read(SUSTAINED_TIMES))[head_dim, causal]
    for own, lost in losses(times, H200).items():
        assert len(lost) == len(times) >= 3
        mean, worst = SUSTAINED_LOSSES.get((head_dim, causal), (1.004, 1.021))
        assert statistics.geometric_mean(lost) <= mean, own
        assert max(lost) <= worst, own


@pytest.mark.parametrize(
    ("key", "tile"),
    [
        ("b2-h24-s3072-d128-causal", (3, 64)),  # 0.191 ms, 0.203 by 128 x 128
        ("b3-h16-sq700-sk5000-d128-causal", (3, 64)),  # 0.165, 0.174
        ("b1-h64-hk8-s3072-d64-causal", (4, 64)),  # 0.166, 0.174 by 64 x 64
        ("b1-h28-hk4-s4096-d128-causal", (2, 128)),  # 0.184, 0.196 by 192 x 64
        ("b16-h16-s1024-d128-causal", (2, 128)),  # 0.159, 0.174
        ("b32-h16-s512-d128-causal", (2, 128)),  # 0.111, 0.117
        ("b16-h32-hk8-s512-d128-causal", (2, 128)),  # 0.102, 0.106
        ("fp16-b5-h24-s3000-d128-causal", (3, 64)),  # 0.496, 0.511 by 128 x 128; longer, and in float16
        ("fp16-b2-h16-s8192-d128-causal", (3, 64)),  # 0.858, 0.865
        ("fp16-b4-h16-s4096-d128-causal", (2, 128)),  # 0.467, 0.482 by 192 x 64
    ],
)
def test_launches_just_long_and_in_float16_have_what_won_under_load_that_goes_on(
    key: str, tile: tuple[int, int]
) -> None:
    workload = Workload.parse(key)
    spec = specialization(workload)
    assert shape_of(balanced(default_config(spec, H200), spec, Sizes.of(workload), H200)) == tile


def test_in_short_windows_the_wrong_tiles_of_long_launches_win() -> None:
    """What the factors are there for: tiles of one warpgroup at clocks that no load keeps up."""
    short, long = measured(64, True), times_of(read(SUSTAINED_TIMES))[64, True]
    lost = [
        of[min(short[workload], key=lambda s: short[workload][s])] / min(of.values()) for workload, of in long.items()
    ]
    assert max(lost) > 1.12


def test_one_wave_of_tall_tiles_is_better_than_two() -> None:
    """12 heads have 156 tiles of 128 queries, or 108 of 192."""
    spec, config = spec_of(128, False), default_config(spec_of(128, False), H200)
    sizes = Sizes(batch=1, nheads=12, nheads_k=12, seqlen_q=1664, seqlen_k=1664)
    assert shape_of(config) == (2, 128)
    assert shape_of(balanced(config, spec, sizes, H200)) == (3, 64)
    assert balanced(config, spec, Sizes(batch=4, nheads=16, nheads_k=16, seqlen_q=4096, seqlen_k=4096), H200) == config


@pytest.mark.parametrize(("batch", "nheads", "queries"), [(3, 8, 266), (4, 16, 285), (1, 16, 320)])
def test_short_sequences_have_small_tiles_under_a_mask(batch: int, nheads: int, queries: int) -> None:
    """Those of 128 queries compute a quarter more than there are, and nothing beside them."""
    spec = spec_of(128, True)
    for tile in TILES[128, True]:
        chosen = balanced(config_of(spec, tile), spec, Sizes(batch, nheads, nheads, queries, queries), H200)
        assert shape_of(chosen)[0] == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "columns"), [(48, 56), (88, 96), (120, 128)])
def test_heads_without_a_table_have_the_tiles_of_the_next_wider_ones(head_dim: int, columns: int, causal: bool) -> None:
    spec, wider = spec_of(head_dim, causal), spec_of(columns, causal)
    able = {shape_of(each) for each in beside(default_config(spec, H200), spec, H200)}
    assert able >= {shape_of(config_of(wider, tile)) for tile in TILES[columns, causal]} - {
        shape_of(default_config(spec, H200))
    }
    sizes = Sizes(batch=1, nheads=12, nheads_k=12, seqlen_q=1664, seqlen_k=1664)
    assert invalid(balanced(default_config(spec, H200), spec, sizes, H200), spec, H200) is None


@pytest.mark.parametrize("key", ["fwd-bf16-d128-window", "fwd-bf16-d192", "fwd-bf16-d128-varlen", "fwd-bf16-d128-bias"])
def test_what_was_not_measured_keeps_its_tile(key: str) -> None:
    spec = Specialization.parse(key)
    config = family("hopper_forward").default(spec, H200)
    sizes = Sizes(batch=1, nheads=12, nheads_k=12, seqlen_q=1664, seqlen_k=1664)
    assert balanced(config, spec, sizes, H200) == config


@pytest.mark.parametrize(("head_dim", "causal"), TILES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_tile_may_serve_packed_sequences(head_dim: int, causal: bool, dtype: str) -> None:
    spec = Specialization.parse(f"fwd-{dtype}-d{head_dim}{'-causal' if causal else ''}-varlen")
    config = family("hopper_forward").default(spec, H200)
    able = {config, *beside(config, spec, H200)}
    assert {shape_of(each) for each in able} == {(tile.warpgroups, tile.block_n) for tile in TILES[head_dim, causal]}
    assert all(invalid(each, spec, H200) is None for each in able)


def packed(rows: int, longest: int, nheads: int = 32) -> Sizes:
    return Sizes(
        batch=1, nheads=nheads, nheads_k=nheads, seqlen_q=rows, seqlen_k=rows,
        sequences=rows // longest, max_seqlen_q=longest, max_seqlen_k=longest,
    )  # fmt: skip


def test_short_packed_sequences_get_small_tiles_and_long_ones_tall_tiles_wherever_a_config_comes_from() -> None:
    for key, longest, tall in (("fwd-bf16-d64-causal-varlen", 512, False), ("fwd-bf16-d64-varlen", 16384, True)):
        spec = Specialization.parse(key)
        usual = family("hopper_forward").default(spec, H200)
        for config in (usual, *beside(usual, spec, H200)):
            assert (shape_of(balanced(config, spec, packed(16384, longest), H200))[0] >= 3) is tall
    # what is known of lengths is a bound and their mean: a tile that is little better on paper serves neither
    assert balanced(usual, spec, packed(16384, 16384, nheads=12), H200) == usual
    assert balanced(usual, spec, Sizes(batch=1, nheads=1, nheads_k=1, seqlen_q=0, seqlen_k=0, sequences=1), H200)


def test_ragged_sequences_get_short_last_tiles_though_their_mean_fits_tall_ones() -> None:
    spec = Specialization.parse("fwd-bf16-d64-varlen")
    ragged, full = packed(16384, 512, nheads=16)._replace(sequences=64), packed(16384, 1024)
    for each in (family("hopper_forward").default(spec, H200), config_of(spec, TILES[64, False][3])):
        assert shape_of(balanced(each, spec, ragged, H200)) == (2, 64)  # as of the search of just that
        assert shape_of(balanced(each, spec, full, H200)) == (4, 64)


def packed_searches() -> list[tuple[Workload, tuple[str, ...], dict[tuple[int, int], float]]]:
    """Of shipped searches of packed sequences: the profiles of lengths that a trial has, and each tile's least time.

    A time is the geometric mean of those on the profiles.
    """
    found = []
    for log in map(read_log, sorted((SEARCHES / H200.folder).glob(f"fwd-*-varlen-*{SUFFIX}"))):
        assert log.search is not None
        times: dict[tuple[int, int], float] = {}
        profiles: tuple[str, ...] = ()
        for trial in log.trials:
            is_alone = trial.config.get("packed_heads", 1) == 1  # others are chosen by races of their own
            if isinstance(trial.outcome, Measurement) and trial.config.family == "hopper_forward" and is_alone:
                each = (("same", trial.outcome.times_ms), *trial.outcome.profile_times_ms)
                profiles = tuple(profile for profile, _ in each)
                mean = statistics.geometric_mean(min(windows) for _, windows in each)
                times[shape_of(trial.config)] = min(mean, times.get(shape_of(trial.config), math.inf))
        if not log.search.workload.lengths:
            found.append((log.search.workload, profiles, times))
    return found


def test_the_estimate_of_packed_sequences_finds_the_best_tile_of_searches() -> None:
    found = packed_searches()
    assert len(found) >= 7
    for workload, profiles, times in found:
        expected = dict.fromkeys(
            ((tile.warpgroups, tile.block_n) for tile in TILES[workload.head_dim, workload.causal]), 1.0
        )
        for profile in profiles:
            each = replace(workload, lengths=profile)
            lengths = tuple(zip(each.each_seqlen_q, each.each_length, strict=True))
            for tile in TILES[workload.head_dim, workload.causal]:
                expected[shape_of(tile)] *= tile.packed_time(lengths, workload.nheads, 132, causal=workload.causal)
        best = min(expected.keys() & times.keys(), key=expected.__getitem__)
        assert times[best] <= 1.031 * min(times.values()), workload.key


def test_what_serves_packed_sequences_without_a_record_is_nearly_the_best_tile_of_searches() -> None:
    lost = []
    for workload, _, times in packed_searches():
        spec, sizes = specialization(workload), PackedSizes.of(workload).largest.packed
        for tile in TILES[workload.head_dim, workload.causal]:
            served = shape_of(balanced(config_of(spec, tile), spec, sizes, H200))
            if served in times:
                lost.append(times[served] / min(times.values()))
    assert len(lost) >= 20
    assert statistics.geometric_mean(lost) <= 1.02
    assert max(lost) <= 1.06


def test_heads_of_uneven_rows_without_a_table_leave_small_tiles() -> None:
    """Of 8 heads of 88 and 96, 1024 queries: their rows are 176 and 192 bytes long."""
    sizes = Sizes(batch=1, nheads=8, nheads_k=8, seqlen_q=1024, seqlen_k=1024)
    for head_dim, rows in ((96, 1), (88, 2)):
        spec = spec_of(head_dim, True)
        small = config_of(spec, TILES[96, True][0])
        assert shape_of(balanced(small, spec, sizes, H200))[0] == rows


def test_keys_before_all_queries_take_longer_in_tiles_that_load_them_often() -> None:
    spec = spec_of(64, True)
    small, usual = (config_of(spec, tile) for tile in TILES[64, True][:3:2])
    for keys, expected in ((4096, 1), (20480, 3)):
        sizes = Sizes(batch=1, nheads=12, nheads_k=12, seqlen_q=4096, seqlen_k=keys)
        assert {shape_of(balanced(each, spec, sizes, H200))[0] for each in (small, usual)} == {expected}


def test_ctas_that_share_keys_have_the_tile_of_two_warpgroups_that_is_alone_on_an_sm() -> None:
    spec, sizes = spec_of(64, False), Sizes(batch=1, nheads=8, nheads_k=8, seqlen_q=303, seqlen_k=3718)
    for tile in TILES[64, False]:
        found = balanced(config_of(spec, tile), spec, sizes, H200)
        assert (found["split_keys"], *shape_of(found), found["blocks_per_sm"]) == (True, 2, 128, 1)


def test_heads_packed_into_a_tile_and_other_families_stay() -> None:
    spec, sizes = spec_of(96, False), Sizes(batch=1, nheads=12, nheads_k=3, seqlen_q=1664, seqlen_k=1664)
    packed = default_config(spec, H200).replace(packed_heads=4)
    assert balanced(packed, spec, sizes, H200) == packed
    portable = default_config(spec, A100)
    assert portable.family == "portable_forward"
    assert balanced(portable, spec, sizes, A100) == portable


OTHERS = {
    (128, False): 13,
    (128, True): 49,
    (64, False): 17,
    (64, True): 54,
    (40, False): 2,
    (40, True): 9,
    (56, False): 2,
    (56, True): 9,
    (72, False): 2,
    (72, True): 15,
    (112, False): 2,
    (96, False): 2,
    (96, True): 15,
    (80, False): 2,
    (80, True): 15,
}
"""Tiles of one warpgroup for few queries, with what else each tile's config has, and orders for few tiles.

Where heads side by side were timed also each tile with two, four and eight of them.
"""


@pytest.mark.parametrize(("head_dim", "causal"), every(2, TILES))
def test_what_may_serve_beside_a_config_is_all_that_sizes_choose(head_dim: int, causal: bool) -> None:
    spec = spec_of(head_dim, causal)
    shapes = [(specialization(w), Sizes.of(w)) for w in measured(head_dim, causal)]
    for tile in TILES[head_dim, causal]:
        config = config_of(spec, tile)
        able = {config, *beside(config, spec, H200)}
        others = len(able) - 2 * len(TILES[head_dim, causal])  # with shared keys and without
        assert 0 < others <= OTHERS[head_dim, causal]
        chosen = {balanced(config, of_shape, sizes, H200) for of_shape, sizes in shapes}
        assert len(chosen) > 1
        assert chosen <= able
