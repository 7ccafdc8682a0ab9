"""Tiles that fill the SMs: which of the tiles of a class serves sizes that nobody measured.

Where a launch has few CTAs for each SM, the last wave of them decides: 156 tiles of 128 rows are two waves on 132 SMs,
108 of 192 rows are one. A nearby record says nothing of that, so a config that was measured at other sizes keeps its
tile only where no other one promises to be faster by a margin. The estimate is the time of the waves: steps over the
keys and an overhead for each CTA, CTAs of one SM side by side, and, where queries see fewer keys the earlier they are,
the longest CTA or an equal share of all work with some of a CTA behind it, whichever is more.

What a step takes was fitted to races on an H200 (bf16, 4 to 128 heads, 128 to 16384 queries), each tile by itself.
docs/experiments/waves.md has what the tiles that this chooses cost, also on shapes that nothing was fitted to. In long
launches, which meet the power limit of a card, times count as races of such load have them (`tiles.SUSTAINED`).

Packed sequences have the same tiles, and a wider margin: a host knows how many there are, their rows together and how
long each may be. The estimate is that of lengths in a ramp: that a tile fits one length says nothing of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from flashgen.codegen import head_packing
from flashgen.codegen.common_scores import is_plain_forward
from flashgen.codegen.common_wgmma import ROWS
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward import resources, rules
from flashgen.codegen.hopper_forward.tiles import (
    GROUPED_CONSTANTS,
    GROUPED_SUSTAINED,
    GROUPED_SUSTAINED_KEYS,
    GROUPED_TILES,
    SUSTAINED,
    SUSTAINED_US,
    TILES,
    Lengths,
    Tile,
)
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.lengths import RAMP, packed_lengths
from flashgen.core.workload import Specialization

MARGIN = 0.03
"""By which another tile has to promise to be faster.

Constants are of bf16. In float16, whose softmax differs, what they choose for 37 records with each left out costs 1.000
of the record's own tile by the times of searches, where a margin of 0.1 without factors cost 1.002 and 1.07 at most.
"""

NARROWER_MARGIN = 0.1
"""The same of heads that have the tiles of a wider class, as 104 those of 128: these were not timed either."""

EVEN_ROWS, UNEVEN_ROWS = 16, 1.4
"""Columns of 32 bytes, and what others cost tiles of one warpgroup, which load keys most often.

Their steps took 1.2 to 1.7 times as long with heads of 40, 56 and 72 as with 64 and 80.
"""

PACKED_MARGIN = 0.05
"""The same of packed sequences, of whose lengths a bound and the mean are all that is known."""

PACKED_SHAPES = 2
"""Ramps of lengths that a tile of packed sequences is chosen by."""

QUANTILES = 8
"""Lengths that stand for those of all packed sequences."""

SUSTAINED_MARGIN = 0.01
"""By which another tile has to promise to be faster where launches are long, in which tiles were timed so."""

FILLING_ROWS = 256
"""Queries for each SM with which a launch keeps all of them busy: one that does not meets no power limit."""

SHARED_WARPGROUPS = 2
"""Of the tile whose keys CTAs share, alone on its SM."""


def balanced(spec: Specialization, config: Config, sizes: Sizes, device: Device, packed_heads: int = 1) -> Config:
    """A config that was measured at other sizes, with another tile where that fills the SMs better at these.

    Of packed sequences the one of these that does so with so many heads side by side.
    """
    tiles = _tiles(spec)
    own = _own(tiles, config)
    if own is None or (spec.varlen and not sizes.sequences):
        return config
    sms, causal = device.num_sms, spec.causal
    if spec.varlen:
        times = [_packed_time(tile, sizes, sms, causal=causal, packed_heads=packed_heads) for tile in tiles]
    else:
        times = [tile.time(sizes, sms, causal=causal) for tile in tiles]
    own_factors, factors = _factors(spec)
    if packed_heads > 1:
        # of which the record says nothing, so that no tile has a margin
        asked = [time * factor for time, factor in zip(times, own_factors, strict=True)]
        return with_tile(spec, config, tiles[asked.index(min(asked))], device)
    asked = [time * factor for time, factor in zip(times, factors, strict=True)]
    asked[own] = times[own] * own_factors[own]
    sustained = SUSTAINED.get((spec.head_dim, causal), ())
    launches = PACKED_SHAPES if spec.varlen else 1  # of which times are a product
    if sustained and _meets_the_limit(min(times) ** (1 / launches), sizes, sms):
        if spec.varlen:  # whose tiles were not timed so: they have to promise as much as in short launches
            asked = [time * factor**launches for time, factor in zip(asked, sustained, strict=True)]
        else:
            asked = [time * factor for time, factor in zip(times, sustained, strict=True)]
            asked[own] *= 1 - SUSTAINED_MARGIN
    best = asked.index(min(asked))
    return config if best == own else with_tile(spec, config, tiles[best], device)


def grouped(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> tuple[Tile | None, int] | None:
    """The tile that fills the SMs best where heads share keys, None a config's own, and heads side by side in it.

    Of a config that was measured at other sizes both stay where nothing else promises to be faster by a margin. None
    where nobody timed that, as for few queries.
    """
    tiles, heads = _grouped_tiles(spec, sizes), _numbers(sizes)
    own = _place(tiles, config)
    if own is None or not heads:
        return None
    sms, causal = device.num_sms, spec.causal
    times = {
        (number, n): tile.time(sizes, sms, causal=causal, packed_heads=n) / (1 - tile.margin)
        for n in heads
        for number, tile in enumerate(tiles)
    }
    margin, here = MARGIN, (own, resources.packed_heads(config))
    sustained = _grouped_sustained(spec, sizes)
    if sustained and _meets_the_limit(min(times.values()), sizes, sms):
        times = {(number, n): time * sustained[number] for (number, n), time in times.items()}
        margin = SUSTAINED_MARGIN
    if here in times:
        times[here] *= 1 - margin
    number, n = min(times, key=lambda one: times[one])
    return None if number == own else tiles[number], n


def is_grouped(spec: Specialization, config: Config) -> bool:
    """Whether heads may be side by side in the place of a config of long queries."""
    return _place(_grouped_tiles(spec), config) is not None


def grouped_heads(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int | None:
    """With how many heads side by side a config's own tile promises to be the fastest; None likewise."""
    tiles, heads = _grouped_tiles(spec, sizes), _numbers(sizes)
    own = _place(tiles, config)
    if own is None or not heads:
        return None
    one, *several = (tiles[own].time(sizes, device.num_sms, causal=spec.causal, packed_heads=n) for n in heads)
    return heads[-1] if several and several[0] < one * (1 - MARGIN) else 1


def for_shares(spec: Specialization, config: Config, device: Device) -> Config:
    """A config whose CTAs share keys, with the tile of two warpgroups if its class has a table.

    On an H200 that took 0.88 to 1.0 of the time of the tile that fills the SMs best alone, on five shapes.
    """
    tiles = _tiles(spec)
    own = _own(tiles, config)
    shared = next((tile for tile in tiles if tile.warpgroups == SHARED_WARPGROUPS), None)
    if own is None or shared is None or tiles[own] is shared:
        return config
    return with_tile(spec, config, shared, device)


def others(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """What `balanced` may serve in the place of a config at one size or another."""
    tiles = _tiles(spec)
    own = _own(tiles, config)
    if own is None:
        return ()
    # of packed sequences with heads side by side its own tile, too, has what goes with it
    able = (tile for number, tile in enumerate(tiles) if number != own or rules.may_pack_sequences(spec))
    found = (with_tile(spec, config, tile, device) for tile in able)
    return tuple(other for other in found if other != config)


def _packed_time(tile: Tile, sizes: Sizes, sms: int, *, causal: bool, packed_heads: int) -> float:
    """The product of what two ramps of lengths take: up to the bound of their class, and up to three quarters of it.

    One alone would favour a tile that happens to fit its lengths.
    """
    some, longest, found = min(sizes.sequences, QUANTILES), max(1, sizes.max_seqlen_q), 1.0
    for bound in (longest, max(1, 3 * longest // 4)):
        lengths = _ramp(some, bound, sizes.seqlen_q // sizes.sequences, sizes.max_seqlen_k / longest)
        if len(set(lengths)) == 1 and packed_heads == 1:
            alike = sizes._replace(batch=sizes.sequences, seqlen_q=lengths[0][0], seqlen_k=lengths[0][1])
            found *= tile.time(alike, sms, causal=causal)
        else:
            heads = sizes.nheads * sizes.sequences / some
            found *= tile.packed_time(lengths, heads, sms, causal=causal, packed_heads=packed_heads)
    return found


@functools.lru_cache(maxsize=256)
def _ramp(sequences: int, longest: int, mean: int, ratio: float) -> Lengths:
    """Rows and keys of sequences of so many rows in the mean, where they have `ratio` times as many keys."""
    rows = packed_lengths(RAMP, sequences, longest, min(mean, longest) * sequences)
    return tuple((n, max(1, int(n * ratio))) for n in rows if n) or ((1, 1),)


@functools.lru_cache(maxsize=256)
def _tiles(spec: Specialization) -> tuple[Tile, ...]:
    """Those of a specialization without any feature that changes its work: of its class, or of the next wider one.

    None of one without a table.
    """
    if not is_plain_forward(spec):
        return ()
    widths = sorted(width for width, causal in TILES if causal is spec.causal and spec.head_dim <= width)
    return TILES[widths[0], spec.causal] if widths else ()


@functools.lru_cache(maxsize=256)
def _factors(spec: Specialization) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What the time of each tile counts times, as the record's own and as another one: what it has to promise."""
    tiles, has_own = _tiles(spec), (spec.head_dim, spec.causal) in TILES
    least = max(PACKED_MARGIN if spec.varlen else MARGIN, 0.0 if has_own else NARROWER_MARGIN)
    loads = UNEVEN_ROWS if spec.head_dim % EVEN_ROWS and not has_own else 1.0
    shapes = PACKED_SHAPES if spec.varlen else 1

    def asked(tile: Tile, margin: float) -> float:
        return ((loads if tile.warpgroups == 1 else 1.0) / (1 - margin)) ** shapes

    margins = [0.0 if spec.varlen else tile.margin for tile in tiles]
    return (
        tuple(map(asked, tiles, margins)),
        tuple(asked(tile, max(margin, least)) for tile, margin in zip(tiles, margins, strict=True)),
    )


def _meets_the_limit(time_us: float, sizes: Sizes, sms: int) -> bool:
    """Whether a launch that is expected to take so long is one in which times of load that goes on count."""
    return time_us >= SUSTAINED_US and sizes.batch * sizes.nheads * sizes.seqlen_q >= FILLING_ROWS * sms


def _grouped_tiles(spec: Specialization, sizes: Sizes | None = None) -> tuple[Tile, ...]:
    """Those of dense calls whose heads share keys; none where heads side by side were not timed.

    Where most keys come before all queries they are those of all calls: constants of groups have one race of such.
    """
    key = spec.head_dim, spec.causal
    if spec.varlen or not is_plain_forward(spec):
        return ()
    if sizes is not None and _is_behind(key, sizes):
        return TILES[key]
    return GROUPED_TILES.get(key, ())


def _is_behind(key: tuple[int, bool], sizes: Sizes) -> bool:
    """Whether queries lie behind as many other keys or more, in a class with constants of calls where they do not."""
    return key in GROUPED_CONSTANTS and sizes.seqlen_k >= 2 * sizes.seqlen_q


def _grouped_sustained(spec: Specialization, sizes: Sizes) -> tuple[float, ...]:
    """Factors of load that goes on, in which tiles of one class were timed with many keys alone."""
    key = spec.head_dim, spec.causal
    if key not in GROUPED_SUSTAINED or _is_behind(key, sizes):
        return SUSTAINED.get(key, ())
    return GROUPED_SUSTAINED[key] if sizes.seqlen_k >= GROUPED_SUSTAINED_KEYS else ()


def _numbers(sizes: Sizes) -> tuple[int, ...]:
    """One head, and as many side by side as suit a group; none without one, or where there are few queries."""
    if sizes.nheads == sizes.nheads_k or sizes.seqlen_q <= ROWS:
        return ()
    heads = head_packing.packing_of_group(sizes)
    return (1,) if heads == 1 else (1, heads)


def _own(tiles: Sequence[Tile], config: Config) -> int | None:
    """The place of a config's tile among these, if it is there and has no heads side by side."""
    return None if resources.packed_heads(config) > 1 else _place(tiles, config)


def _place(tiles: Sequence[Tile], config: Config) -> int | None:
    """The same whatever heads are side by side."""
    if not tiles:
        return None
    shape = config.integer("warpgroups"), config.integer("block_n")
    return next((number for number, tile in enumerate(tiles) if (tile.warpgroups, tile.block_n) == shape), None)


@functools.lru_cache(maxsize=256)
def with_tile(spec: Specialization, config: Config, tile: Tile, device: Device) -> Config:
    """A config with another tile and what goes with it; as it is where that is not valid."""
    knobs = dict(tile.knobs)
    if spec.causal and (spec.varlen or spec.offset_tensor):
        # each sequence has a diagonal of its own, and an offset on the GPU any: no one block holds it
        knobs["masked_blocks"] = "branch"
    shape = {"warpgroups": tile.warpgroups, "block_n": tile.block_n, "blocks_per_sm": tile.blocks_per_sm}
    found = config.replace(**{**knobs, **shape})
    return found if rules.invalid(spec, found, device) is None else config
