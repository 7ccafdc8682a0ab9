"""What a search starts from, and what the analytic model reads from the knobs of each family."""

from __future__ import annotations

import dataclasses
import random

import pytest

from flashgen.codegen.cost import CostModel, Tiling
from flashgen.codegen.families import FAMILIES, applicable, family, invalid
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.hopper_forward import family as hopper_forward
from flashgen.codegen.space import search_space
from flashgen.core.compiled import Taken
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.errors import TuningError
from flashgen.core.workload import Specialization, Workload
from flashgen.tuning.candidates import Candidates, by_prediction, ranking, seed_configs, tile_of
from flashgen.tuning.predict import cost_model, estimate, predict_all, predict_ms
from flashgen.tuning.seed_lists import by_hand
from tests.tiers import EXHAUSTIVE, first

H200 = find_device("h200")
PLAIN = Workload.parse("b1-h16-s8192-d128")
WIDE = Workload.parse("b1-h16-s8192-d192-dv128-causal")
PORTABLE = family("portable_forward")


def model_of(config: Config) -> CostModel:
    found = cost_model(config)
    assert found is not None
    return found


def tiling(spec: Specialization, config: Config) -> Tiling:
    return model_of(config).kernels[0].tile(spec, config)


def least(spec: Specialization, config: Config) -> Taken:
    return model_of(config).kernels[0].taken(spec, config, H200)


def test_a_portable_config_is_read_as_it_is() -> None:
    spec = PLAIN.specialization
    config = PORTABLE.default(spec, H200).replace(loads="pointer", heads_per_group=8, heavy_first=True)
    tile = tiling(spec, config)
    assert (tile.block_m, tile.block_n) == (config["block_m"], config["block_n"])
    assert (tile.warps, tile.stages) == (config["num_warps"], config["num_stages"])
    assert (tile.pointer_loads, tile.heads_per_group, tile.heavy_first) == (True, 8, True)


def test_heads_in_two_parts_are_padded_less() -> None:
    config = PORTABLE.default(WIDE.specialization, H200)
    whole = tiling(WIDE.specialization, config.replace(split_d=False))
    parts = tiling(WIDE.specialization, config.replace(split_d=True))
    assert (whole.query_columns, whole.value_columns) == (256, 128)
    assert (parts.query_columns, parts.value_columns) == (192, 128)
    resources = [least(WIDE.specialization, config.replace(split_d=split)) for split in (False, True)]
    assert resources[1].shared_bytes < resources[0].shared_bytes


def test_a_hopper_default_is_predicted_from_what_it_takes() -> None:
    spec = PLAIN.specialization
    config = hopper_forward.HOPPER_FORWARD.default(spec, H200)
    tile, taken = tiling(spec, config), estimate(PLAIN, config, H200)
    assert tile.block_m == 64 * config.integer("warpgroups")
    assert taken.occupancy == config["blocks_per_sm"]
    assert 0.3 * H200.peak_tflops < PLAIN.flops / predict_ms(PLAIN, config, H200, taken) / 1e9 < H200.peak_tflops
    assert ranking(config) is None


def test_other_families_are_refused() -> None:
    config = Config.of("another", {})
    assert cost_model(config) is None
    for asked in (estimate, lambda *args: predict_all(args[0], [args[1]], args[2])):
        with pytest.raises(TuningError, match=r"covers .*portable_forward.*, got another"):
            asked(PLAIN, config, H200)


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id)
def test_a_cost_model_speaks_of_knobs_and_kernels_that_its_family_has(row: KernelFamily) -> None:
    if row.cost_model is None:
        return
    knobs = {knob.name for knob in row.knobs}
    workload = dataclasses.replace(PLAIN, direction=row.direction)
    default = row.default(workload.specialization, H200)
    entries = {kernel.entry for kernel in row.kernels(workload.specialization, default)}
    for kernel in row.cost_model.kernels:
        assert kernel.entry(default) in entries
        assert set(kernel.knobs or ()) <= knobs
    ranked = row.cost_model.ranking
    if ranked is not None:
        assert ranked.tile_knobs
        assert {*ranked.tile_knobs, *ranked.stage_knobs} <= knobs


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id)
def test_kernels_take_the_same_time_where_the_knobs_that_they_name_agree(row: KernelFamily) -> None:
    """A kernel is predicted once for all configs that agree in them."""
    workload = dataclasses.replace(PLAIN, direction=row.direction, seqlen_q=1024, seqlen_k=1024, causal=True)
    space = search_space(row, workload.specialization, H200)
    configs = random.Random(0).sample(space, min(100, len(space)))
    if row.cost_model is not None:
        together = predict_all(workload, configs, H200)
        alone = {config: predict_ms(workload, config, H200, estimate(workload, config, H200)) for config in configs}
        assert together == alone


@pytest.mark.parametrize("workload", first(1, [PLAIN, WIDE]), ids=lambda workload: workload.key)
def test_favourites_are_different_tiles_in_the_order_of_the_model(workload: Workload) -> None:
    found = Candidates.of(workload, H200)
    liked = [
        c for c, _ in seed_configs(found, workload, H200, 6) if c.family == PORTABLE.id and c not in found.defaults
    ]
    assert 4 <= len(liked) <= 6
    tiles = [tile_of(config) for config in liked]
    assert len(set(tiles)) == len(tiles)
    times = [predict_ms(workload, c, H200, estimate(workload, c, H200)) for c in liked]
    assert times[0] <= min(times) * 1.01


@pytest.mark.parametrize("key", ["d64", "d64-causal", "d128", "d128-causal", "d256", "d256-causal"])
def test_what_won_before_comes_before_what_the_model_likes(key: str) -> None:
    workload = Workload.parse(f"b4-h16-s4096-{key}")
    found = Candidates.of(workload, H200)
    won = hopper_forward.HOPPER_FORWARD.seed_configs(workload.specialization, H200)
    others, sources = zip(*seed_configs(found, workload, H200, 6, by_hand), strict=True)
    assert list(dict.fromkeys(sources)) == ["default", "seed", "model"]
    defaults = [row.default(workload.specialization, H200) for row in applicable(workload.specialization, H200)]
    assert list(others[: len(defaults) - 1 + len(won)]) == [*defaults[1:], *won]
    assert 2 <= len(won) <= 11
    space = next(space for space in found.spaces if space.family == "hopper_forward")
    assert set(won) <= set(space.configs)


@pytest.mark.parametrize(
    ("key", "tiles"),
    [
        ("b64-h16-tq16384-sq512-d64-varlen", {(1, 64), (2, 64), (2, 128), (3, 128), (4, 64)}),
        ("b4-h16-s4096-d128", {(1, 64), (2, 128), (3, 64)}),
        ("bwd-b4-h16-s4096-d64", {(64,), (128,)}),
    ],
)
def test_a_search_meets_every_tile_that_serves_a_class(key: str, tiles: set[tuple[int, ...]]) -> None:
    workload = Workload.parse(key)
    found = Candidates.of(workload, H200)
    others = [config for config, _ in seed_configs(found, workload, H200, 0, lambda *_: ())]
    own = [config for config in (found.default, *others) if config.family == found.default.family]
    names = ["block_m"] if workload.direction == "backward" else ["warpgroups", "block_n"]
    assert {tuple(config[name] for name in names) for config in own} == tiles
    assert len(own) == len(tiles), "each once"


def test_short_queries_of_groups_are_searched_with_packed_heads_as_well() -> None:
    long = Workload.parse("b4-h16-hk4-s4096-d128-causal")
    short = long.with_shape(seqlen_q=4)
    spec = long.specialization
    unpacked = next(space for space in Candidates.of(long, H200).spaces if space.family == "hopper_forward")
    assert {config["packed_heads"] for config in unpacked.configs} == {1}
    found = Candidates.of(short, H200)
    space = next(space for space in found.spaces if space.family == "hopper_forward")
    assert set(unpacked.configs) < set(space.configs)
    assert {config["packed_heads"] for config in space.configs} == {1, 4}
    assert found.default["packed_heads"] == 4
    won = hopper_forward.HOPPER_FORWARD.seed_configs(spec, H200)
    liked = [config for config, _ in seed_configs(found, short, H200, 6, by_hand)]
    first = liked[len(found.defaults) - 1 :][: len(won)]  # behind the defaults of other families
    assert {config["packed_heads"] for config in first} == {4}
    assert {found.default, *first} <= set(space.configs)


@pytest.mark.parametrize("device", ["h200", "rtx 3090"])
@pytest.mark.parametrize("key", ["dec-b8-h32-hk2-sq4-sk4096-d128", "dec-b4-h8-hk2-sq5-sk64-d256-softcap"])
def test_what_no_longer_fits_with_more_query_rows_is_not_searched(key: str, device: str) -> None:
    workload, target = Workload.parse(key), find_device(device)
    found = Candidates.of(workload, target)
    for space in found.spaces:
        assert len(space.configs) > 50
        for config in random.Random(0).sample(space.configs, 50):
            assert invalid(config, workload.specialization, target) is None


def test_packed_heads_are_predicted_to_save_tiles() -> None:
    decode = Workload.parse("b32-h64-hk8-sq1-sk8192-d128-causal")
    packed = Candidates.of(decode, H200).default
    alone = packed.replace(packed_heads=1)
    assert packed["packed_heads"] == 8
    times = [predict_ms(decode, c, H200, estimate(decode, c, H200)) for c in (packed, alone)]
    assert 4 * times[0] < times[1]


def test_a_family_without_favourites_has_none() -> None:
    assert PORTABLE.seed_configs(PLAIN.specialization, H200) == ()


def test_splitting_is_among_the_favourites_where_it_saves_padding() -> None:
    liked = [config for config, _ in seed_configs(Candidates.of(WIDE, H200), WIDE, H200, 6)]
    assert any(config["split_d"] for config in liked if config.family == "portable_forward")


@EXHAUSTIVE
def test_every_ranked_config_has_its_turn() -> None:
    configs = search_space(PORTABLE, WIDE.specialization, H200)
    order = by_prediction(configs, PORTABLE.default(WIDE.specialization, H200), WIDE, H200)
    assert len(order) == len(set(order)) == len(configs)
