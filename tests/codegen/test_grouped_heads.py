"""Heads side by side in tiles of dense calls that fill tiles of one head, against what each took on an H200.

`packed_heads_nvidia_h200.csv` has races of all tiles of a class with one head and with several, on lengths most of
which leave a part of the last tile of one head empty. `packed_heads_unseen_nvidia_h200.csv` has shapes that constants
were not fitted to.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.packed_heads import fit, grouped_configs, losses, shape_of, times_of
from benchmarks.search_files import read
from flashgen.codegen.families import balanced, beside, default_config, fitted, invalid
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_packing import SEQUENCE_HEADS, packing_of_group
from flashgen.codegen.hopper_forward import tile_choice
from flashgen.codegen.hopper_forward.defaults import with_heads
from flashgen.codegen.hopper_forward.tiles import GROUPED_CONSTANTS, GROUPED_TILES, TILES
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.protocol import specialization
from flashgen.tuning.candidates import Candidates

H200 = find_device("h200")
RACES, UNSEEN = (
    times_of(read(Path(__file__).parent / f"packed_heads_{name}.csv")) for name in ("nvidia_h200", "unseen_nvidia_h200")
)
SHORT, LONG = Sizes(32, 32, 8, 300, 300), Sizes(4, 32, 8, 2048, 2048)

LOSSES = {
    (128, True): (1.013, 1.06),
    (128, False): (1.014, 1.13),
    (64, True): (1.006, 1.03),
    (64, False): (1.018, 1.13),
}
"""Mean and most of what serves over the best of each race, by any tile that a record has."""

ALONE = {(128, True): 1.07, (128, False): 1.06, (64, True): 1.03, (64, False): 1.08}
"""What the best tile with one head takes over the best at least, in the mean."""


@pytest.mark.parametrize("key", GROUPED_TILES)
def test_the_constants_are_what_the_times_make(key: tuple[int, bool]) -> None:
    for known, tile in zip(GROUPED_TILES[key], TILES[key], strict=True):
        made = fit(tile, RACES[key], H200.num_sms, causal=key[1], has_constants=key in GROUPED_CONSTANTS)
        assert (known.overhead, known.lone, known.tail, known.before) == (
            made.overhead,
            made.lone,
            made.tail,
            made.before,
        )
        assert known.step == pytest.approx(made.step, abs=5e-4)
        assert known.grouped == pytest.approx(made.grouped, abs=6e-4)


@pytest.mark.parametrize("key", GROUPED_TILES)
def test_what_serves_is_nearly_the_best_tile_with_one_head_or_several(key: tuple[int, bool]) -> None:
    races = RACES[key]
    assert len(races) >= 10
    mean, most = LOSSES[key]
    found = losses(races, H200)
    assert len(found) == len(TILES[key])
    for own, lost in found.items():
        assert len(lost) == len(races), own
        assert statistics.geometric_mean(lost) <= mean, own
        assert max(lost) <= most, own
    alone = [min(ms for shape, ms in of.items() if shape[2] == 1) / min(of.values()) for of in races.values()]
    assert statistics.geometric_mean(alone) >= ALONE[key]


@pytest.mark.parametrize("key", GROUPED_TILES)
def test_what_serves_is_near_the_best_of_shapes_that_nothing_was_fitted_to(key: tuple[int, bool]) -> None:
    assert not UNSEEN[key].keys() & RACES[key].keys()
    for own, lost in losses(UNSEEN[key], H200).items():
        assert len(lost) == 3, own
        assert statistics.geometric_mean(lost) <= 1.038, own
        assert max(lost) <= 1.12, own


@pytest.mark.parametrize("key", GROUPED_TILES)
def test_what_serves_is_valid_and_beside_every_config_that_it_takes_the_place_of(key: tuple[int, bool]) -> None:
    several = set()
    for workload in RACES[key]:
        spec, sizes = specialization(workload), Sizes.of(workload)
        for config in grouped_configs(workload, H200).values():
            assert invalid(config, spec, H200) is None
            served = balanced(config, spec, sizes, H200)
            assert invalid(served, spec, H200) is None
            assert served == config or served in beside(config, spec, H200)
            assert balanced(served, spec, sizes, H200) == served, "and stays"
            several.add(served["packed_heads"])
    assert several >= {1, 4, 8}


@pytest.mark.parametrize(("nheads", "nheads_k", "heads"), [(32, 8, 4), (64, 8, 8), (16, 8, 2), (71, 1, 8), (12, 2, 2)])
def test_as_many_heads_are_side_by_side_as_leave_few_rows_empty(nheads: int, nheads_k: int, heads: int) -> None:
    assert packing_of_group(SHORT._replace(nheads=nheads, nheads_k=nheads_k)) == heads
    spec = Specialization.parse("fwd-bf16-d128")
    sizes = Sizes(4096 // nheads, nheads, nheads_k, 400, 400)
    assert balanced(default_config(spec, H200), spec, sizes, H200)["packed_heads"] == heads


@pytest.mark.parametrize(("nheads", "nheads_k"), [(32, 32), (28, 4), (24, 8), (40, 8)])
def test_of_groups_that_would_leave_many_rows_empty_each_head_has_its_tile(nheads: int, nheads_k: int) -> None:
    for key in ("d128", "d128-causal", "d64"):
        spec = Specialization.parse(f"fwd-bf16-{key}")
        sizes = SHORT._replace(nheads=nheads, nheads_k=nheads_k)
        assert balanced(default_config(spec, H200), spec, sizes, H200)["packed_heads"] == 1


@pytest.mark.parametrize("key", ["d96-causal", "d256", "d128-causal-softcap", "d128-causal-window", "d128-alibi"])
def test_what_was_not_timed_has_one_head_a_tile(key: str) -> None:
    spec = Specialization.parse(f"fwd-bf16-{key}")
    default = default_config(spec, H200)
    assert balanced(default, spec, SHORT, H200)["packed_heads"] == 1
    assert fitted(default, spec, SHORT, H200) == default
    assert all(config["packed_heads"] == 1 for config in beside(default, spec, H200))


def test_few_queries_are_left_to_their_own_rule() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal")
    default = default_config(spec, H200)
    for rows in (1, 16, 64):
        assert tile_choice.grouped(spec, default, SHORT._replace(seqlen_q=rows), H200) is None
    assert tile_choice.grouped(spec, default, SHORT._replace(seqlen_q=65), H200) is not None


def test_a_config_with_heads_side_by_side_has_one_at_lengths_that_fill_its_tiles() -> None:
    spec = Specialization.parse("fwd-bf16-d128-causal")
    default = default_config(spec, H200)
    packed = balanced(default, spec, SHORT, H200)
    assert packed["packed_heads"] == 4
    found = balanced(packed, spec, LONG, H200)
    assert found["packed_heads"] == 1
    assert invalid(found, spec, H200) is None
    assert fitted(packed, spec, LONG, H200)["packed_heads"] == 1


@pytest.mark.parametrize("key", ["d128-causal", "d128", "d64-causal"])
@pytest.mark.parametrize("sizes", [SHORT, LONG, LONG._replace(batch=2, nheads=128, seqlen_q=13963, seqlen_k=13963)])
def test_a_config_whose_ctas_share_keys_does_so_where_few_tiles_ask_for_it_alone(key: str, sizes: Sizes) -> None:
    spec = Specialization.parse(f"fwd-bf16-{key}")
    for tile in TILES[spec.head_dim, spec.causal]:
        alone = tile_choice.with_tile(spec, default_config(spec, H200), tile, H200)
        assert balanced(alone.replace(split_keys=True), spec, sizes, H200) == balanced(alone, spec, sizes, H200)


def test_a_config_that_keeps_its_tile_and_its_heads_keeps_its_groups() -> None:
    spec, sizes = Specialization.parse("fwd-bf16-d128-causal"), SHORT._replace(batch=64)
    tile = balanced(default_config(spec, H200), spec, sizes, H200)
    assert tile["packed_heads"] == 4
    for heads in (2, 8, 32):
        assert balanced(tile.replace(heads_per_group=heads), spec, sizes, H200)["heads_per_group"] == heads


@pytest.mark.parametrize("key", GROUPED_TILES)
@pytest.mark.parametrize("heads", SEQUENCE_HEADS[1:])
def test_what_serves_few_queries_is_beside_a_config_with_heads_side_by_side(key: tuple[int, bool], heads: int) -> None:
    spec = Specialization.parse(f"fwd-bf16-d{key[0]}" + ("-causal" if key[1] else ""))
    config = with_heads(spec, default_config(spec, H200), heads, H200)
    assert config["packed_heads"] == heads
    known = {config, *beside(config, spec, H200)}
    for rows in (1, 10, 23, 32, 54, 64):
        for keys in (rows, 16566):
            for nheads in (5, 8, 16, 62):
                assert balanced(config, spec, Sizes(2, nheads, 1, rows, keys), H200) in known


@pytest.mark.parametrize("key", [each for each in GROUPED_TILES if each[1]])
def test_calls_with_an_offset_on_the_gpu_have_the_tiles_that_are_chosen(key: tuple[int, bool]) -> None:
    plain = Specialization.parse(f"fwd-bf16-d{key[0]}-causal")
    spec = replace(plain, offset_tensor=True)
    for sizes in (SHORT, LONG, Sizes(26, 48, 8, 581, 581), Sizes(4, 284, 4, 366, 366)):
        tiles = [shape_of(balanced(default_config(each, H200), each, sizes, H200)) for each in (plain, spec)]
        assert tiles[0] == tiles[1]


def test_a_search_has_tiles_with_one_head_and_with_several() -> None:
    found = {config["packed_heads"] for config in _hopper("b32-h32-hk8-s300-d128-causal")}
    assert found == {1, 4}
    assert {config["packed_heads"] for config in _hopper("b4-h32-hk8-s2048-d128-causal")} == {1}
    assert {config["packed_heads"] for config in _hopper("b32-h32-s300-d128-causal")} == {1}


def _hopper(text: str) -> list[object]:
    spaces = Candidates.of(Workload.parse(text), H200).spaces
    return [config for space in spaces if space.family == "hopper_forward" for config in space.configs]
