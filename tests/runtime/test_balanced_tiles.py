"""Which tile serves beside a record: its own at its own sizes, at others one that fills the SMs."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.families import balanced, default_config
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.measure.protocol import specialization
from flashgen.runtime.lookup.by_sizes import SizesLookup
from flashgen.runtime.lookup.explanation import explain
from flashgen.runtime.lookup.packed_ladder import PackedSizes, served_packed
from tests.db.samples import H200
from tests.runtime.ladders import Ladder, measured

FULL = Workload.parse("b4-h16-s4096-d128")
ONE_WAVE = Workload.parse("b1-h12-s1664-d128")
"""Of tiles of 192 queries; tiles of 128 are two."""

DEFAULT = default_config(FULL.specialization, H200)


def tile(config: Config) -> tuple[int, int]:
    return config.integer("warpgroups"), config.integer("block_n")


def warpgroups(config: Config) -> int:
    return config.integer("warpgroups")


def test_sizes_of_one_wave_change_the_tile_of_a_record_and_not_that_of_their_own(ladder: Ladder) -> None:
    ladder.user(measured(FULL, config=DEFAULT))
    found = ladder.resolve(ONE_WAVE)
    assert (found.rung, warpgroups(DEFAULT), warpgroups(found.config)) == (5, 2, 3)
    assert ladder.resolve(FULL).config == DEFAULT
    ladder.user(measured(ONE_WAVE, config=DEFAULT))
    assert ladder.resolve(ONE_WAVE).config == DEFAULT


def test_the_default_is_chosen_alike(ladder: Ladder) -> None:
    found = ladder.resolve(ONE_WAVE)
    assert (found.rung, warpgroups(found.config)) == (8, 3)


def test_explain_says_why_the_record_s_config_does_not_serve(ladder: Ladder) -> None:
    ladder.user(measured(FULL, config=DEFAULT))
    text = str(explain(ONE_WAVE, ONE_WAVE.specialization, H200, ladder.records()))
    assert "another tile, which is expected to take less time at these sizes" in text
    far = replace(FULL, batch=2 * FULL.batch)
    assert "another tile" not in str(explain(far, far.specialization, H200, ladder.records()))


def test_explain_says_how_many_heads_are_side_by_side(ladder: Ladder) -> None:
    short = Workload.parse("b32-h32-hk8-s300-d128")
    spec, long = short.specialization, replace(short, seqlen_q=4096, seqlen_k=4096)
    for own, served, what in (
        ((2, 128, 1), short, "with another tile and 4 heads that share keys side by side in it, which is"),
        ((3, 64, 1), short, "with 4 heads that share keys side by side in a tile, which is"),
        ((2, 128, 4), long, "with one head in a tile, which is"),
    ):
        knobs = dict(zip(("warpgroups", "block_n", "packed_heads"), own, strict=True))
        ladder.user(measured(replace(short, batch=2), config=DEFAULT.replace(**knobs)))
        assert what in str(explain(served, spec, H200, ladder.records())), own


def test_explain_says_which_knob_is_another_one(ladder: Ladder) -> None:
    causal = Workload.parse("b4-h16-s4096-d128-causal")
    few = Workload.parse("b2-h3-s5696-d128-causal")
    backward = Workload.parse("bwd-b4-h16-s4096-d64-causal")
    config = default_config(backward.specialization, H200).replace(stagger_warpgroups=False)
    ladder.user(measured(causal, config=default_config(causal.specialization, H200)), measured(backward, config=config))
    text = str(explain(few, few.specialization, H200, ladder.records()))
    assert "with larger groups of heads, since there are few tiles at these sizes" in text
    other = replace(backward, batch=2)
    text = str(explain(other, other.specialization, H200, ladder.records()))
    assert "with one warpgroup ahead of the other, which is faster at these sizes: the config above" in text
    few_tiles = replace(backward, batch=1)
    text = str(explain(few_tiles, few_tiles.specialization, H200, ladder.records()))
    assert "with larger groups of heads, since there are few tiles at these sizes, with one warpgroup ahead" in text


def test_explain_says_that_tiles_write_dq_and_that_groups_are_smaller(ladder: Ladder) -> None:
    backward = Workload.parse("bwd-b4-h16-s4096-d128")
    long = Workload.parse("b1-h32-hk8-s8192-d128-causal")
    tall = default_config(long.specialization, H200).replace(
        warpgroups=3, block_n=64, masked_blocks="branch", hidden_blocks="skipped", v_stages=3, heads_per_group=32
    )
    ladder.user(measured(backward, config=default_config(backward.specialization, H200)), measured(long, config=tall))
    few = Workload.parse("bwd-b64-h16-s128-d128")
    text = str(explain(few, few.specialization, H200, ladder.records()))
    assert "with tiles that have all keys, of which there are few, and write dq themselves: the config above" in text
    longer = Workload.parse("b1-h32-hk8-s20000-d128-causal")
    found = explain(longer, longer.specialization, H200, ladder.records())
    assert found.served.config == tall.replace(heads_per_group=8)
    assert "with smaller groups of heads, which the L2 cache holds at these sizes: the config above" in str(found)


def test_calls_of_new_lengths_get_what_the_ladder_says(ladder: Ladder) -> None:
    ladder.user(measured(FULL, config=DEFAULT))
    records, spec = ladder.records(), FULL.specialization
    lookup = SizesLookup(records.choices(spec, H200), FULL, spec, H200, records)
    sizes = Sizes.of(ONE_WAVE)
    assert lookup.config(sizes, generated_only=True) == ladder.resolve(ONE_WAVE).config
    assert warpgroups(ladder.resolve(ONE_WAVE).config) == 3


def test_packed_sequences_get_the_tile_of_their_bounds_where_no_record_is_of_their_class(ladder: Ladder) -> None:
    short = Workload.parse("fwd-bf16-b32-h32-tq16384-s512-d64-causal-varlen")
    long = replace(short, batch=1, seqlen_q=16384, seqlen_k=16384)
    spec = short.specialization
    tall = default_config(spec, H200)
    for workload, expected in ((short, 1), (long, 4)):
        found = served_packed(spec, PackedSizes.of(workload), H200, ladder.records())
        assert (found.rung, warpgroups(found.config)) == (8, expected)
    ladder.user(measured(long, config=tall))
    found = served_packed(spec, PackedSizes.of(short), H200, ladder.records())
    assert (found.rung, warpgroups(found.config)) == (5, 1)
    assert "another tile" in str(explain(short, spec, H200, ladder.records()))
    ladder.user(measured(short, config=tall))
    assert served_packed(spec, PackedSizes.of(short), H200, ladder.records()).config == tall


def test_most_shipped_winners_keep_their_tile_by_the_estimate() -> None:
    """Searches compared all tiles at these sizes, so that an estimate that is good agrees with them."""
    with Layers.open() as layers:
        records = [one for one, _ in layers.records(device=H200) if one.config.family == "hopper_forward"]
    kept = [
        tile(balanced(one.config, specialization(one.workload), Sizes.of(one.workload), H200)) == tile(one.config)
        for one in records
        if specialization(one.workload).workload_class in ("fwd-bf16-d64", "fwd-bf16-d64-causal", "fwd-bf16-d128")
    ]
    assert len(kept) >= 40
    assert sum(kept) >= 0.75 * len(kept)


def test_a_record_of_another_family_keeps_its_config(ladder: Ladder) -> None:
    ladder.user(measured(FULL))
    assert ladder.resolve(ONE_WAVE).config.family == "portable_forward"
