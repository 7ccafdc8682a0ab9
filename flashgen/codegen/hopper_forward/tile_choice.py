"""Tiles that fill the SMs: which of the tiles of a class serves sizes that nobody measured.

Where a launch has few CTAs for each SM, the last wave of them decides: 156 tiles of 128 rows are two waves on 132 SMs,
108 of 192 rows are one. A nearby record says nothing of that, so a config that was measured at other sizes keeps its
tile only where no other one promises to be faster by a margin. The estimate is the time of the waves: steps over the
keys and an overhead for each CTA, CTAs of one SM side by side, and, where queries see fewer keys the earlier they are,
the longest CTA or an equal share of all work with some of a CTA behind it, whichever is more.

What a step takes was fitted to 80 shapes on an H200 (bf16, 8 to 64 heads, 700 to 10240 queries), each tile by itself.
On these, the tile that this chooses took 1.006 of the best one's time in the geometric mean and 1.08 at most, where
the nearest record's took 1.065 and 1.48; docs/experiments/waves.md has shapes that nothing was fitted to. Under a
causal mask heads of 128 columns want tiles of 128 queries nearly always, and others have to promise more there.

Packed sequences have the same tiles, and a wider margin: all that a host knows is how long each may be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward import resources, rules
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

MARGINS = {"bf16": 0.03, "fp16": 0.1}
"""By which another tile has to promise to be faster, by dtype.

These tiles were not timed in float16, whose softmax differs.
"""

NARROWER_MARGIN = 0.1
"""The same of heads that are padded to the columns of a class, as 104 to 128: these were not timed either."""

SHARED_WARPGROUPS = 2
"""Of the tile whose keys CTAs share."""

PACKED_MARGIN = 0.05
"""The same of packed sequences, of whose lengths a bound is all that is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tile:
    """One kind of tile of a class.

    Attributes:
        warpgroups: of 64 query rows each.
        block_n: keys of a step.
        blocks_per_sm: CTAs side by side.
        knobs: what else its config has.
        step: what a step takes, in a unit of its class.
        overhead: what a CTA takes beside its steps, in steps.
        lone: the share of its time that a CTA takes which has an SM to itself.
        tail: under a causal mask, how much of a mean CTA comes behind an equal share of all work.
        margin: by which it has to promise to be faster, where that is more than `MARGINS`; the record's own tile, too.
    """

    warpgroups: int
    block_n: int
    blocks_per_sm: int = 1
    knobs: tuple[tuple[str, KnobValue], ...]
    step: float
    overhead: float
    lone: float = 1.0
    tail: float = 0.0
    margin: float = 0.0

    def time(self, sizes: Sizes, sm_count: int, *, causal: bool) -> float:
        """What the CTAs of these sizes are expected to take."""
        rows, heads = 64 * self.warpgroups, sizes.batch * sizes.nheads
        tiles, slots = -(-sizes.seqlen_q // rows), sm_count * self.blocks_per_sm
        longest = -(-sizes.seqlen_k // self.block_n) + self.overhead
        if causal:
            if tiles * heads <= slots:
                return self.step * longest * self._pace(tiles * heads / sm_count)
            before = max(sizes.seqlen_k - sizes.seqlen_q, 0)  # keys that the first query sees
            seen = before + min((tiles + 1) * rows, 2 * sizes.seqlen_q) / 2
            mean = min(seen, sizes.seqlen_k) / self.block_n + 0.5 + self.overhead
            return self.step * max(self.lone * longest, mean * (tiles * heads / slots + self.tail))
        waves, rest = divmod(tiles * heads, slots)
        return self.step * longest * (waves + (self._pace(-(-rest // sm_count)) if rest else 0.0))

    def _pace(self, beside: float) -> float:
        """The share of its time that a CTA takes which has an SM for itself and so many beside it."""
        return self.lone + (1 - self.lone) * max(beside - 1, 0.0) / max(self.blocks_per_sm - 1, 1)


def balanced(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config that was measured at other sizes, with another tile where that fills the SMs better at these."""
    tiles = _tiles(spec)
    own = _own(tiles, config)
    if own is None or (spec.varlen and not sizes.sequences):
        return config
    sms, causal = device.num_sms, spec.causal
    if spec.varlen:
        shapes = _packed(sizes)
        times = [math.prod(tile.time(each, sms, causal=causal) for each in shapes) for tile in tiles]
    else:
        times = [tile.time(sizes, sms, causal=causal) for tile in tiles]
    own_factors, factors = _factors(spec)
    asked = [time * factor for time, factor in zip(times, factors, strict=True)]
    asked[own] = times[own] * own_factors[own]
    best = asked.index(min(asked))
    return config if best == own else with_tile(spec, config, tiles[best], device)


def for_shares(spec: Specialization, config: Config, device: Device) -> Config:
    """A config whose CTAs share keys, with the tile of two warpgroups if its class has a table.

    On an H200 that took 0.88 to 1.0 of the time of the tile that fills the SMs best alone, on five shapes.
    """
    tiles = _tiles(spec)
    own = _own(tiles, config)
    number = next((number for number, tile in enumerate(tiles) if tile.warpgroups == SHARED_WARPGROUPS), None)
    return config if own is None or number in (None, own) else with_tile(spec, config, tiles[number], device)


def others(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """What `balanced` may serve in the place of a config at one size or another."""
    tiles = _tiles(spec)
    own = _own(tiles, config)
    if own is None:
        return ()
    found = (with_tile(spec, config, tile, device) for number, tile in enumerate(tiles) if number != own)
    return tuple(other for other in found if other != config)


def _packed(sizes: Sizes) -> tuple[Sizes, ...]:
    """Batches like packed sequences of which a host knows bounds: all as long as they can be, and half as long."""
    return tuple(
        sizes._replace(
            batch=max(1, sizes.seqlen_q // queries),
            seqlen_q=queries,
            seqlen_k=max(1, sizes.max_seqlen_k * queries // max(1, sizes.max_seqlen_q)),
        )
        for queries in (max(1, sizes.max_seqlen_q), max(1, sizes.max_seqlen_q // 2))
    )


@functools.lru_cache(maxsize=256)
def _tiles(spec: Specialization) -> tuple[Tile, ...]:
    """Those of a specialization without any feature that changes its work, by the columns that its heads are padded to.

    None of one without a table.
    """
    if not is_plain(spec) or spec.dtype not in MARGINS:
        return ()
    columns = next((width for width in sorted({width for width, _ in TILES}) if spec.head_dim <= width), None)
    return TILES.get((columns, spec.causal), ()) if columns else ()


@functools.lru_cache(maxsize=256)
def _factors(spec: Specialization) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What the time of each tile counts times, as the record's own and as another one: what it has to promise."""
    least = max(
        PACKED_MARGIN if spec.varlen else MARGINS[spec.dtype],
        NARROWER_MARGIN if (spec.head_dim, spec.causal) not in TILES else 0.0,
    )
    shapes = 2 if spec.varlen else 1
    margins = [tile.margin for tile in _tiles(spec)]
    own, other = ([(1 - each) ** -shapes for each in found] for found in (margins, [max(m, least) for m in margins]))
    return tuple(own), tuple(other)


def is_plain(spec: Specialization) -> bool:
    """Whether a specialization has no feature but a causal mask and packed sequences."""
    plain = f"fwd-{spec.dtype}-d{spec.head_dim}" + ("-causal" if spec.causal else "")
    plain += "-varlen" if spec.varlen else ""
    return spec.workload_class == plain and not spec.mods


def _own(tiles: Sequence[Tile], config: Config) -> int | None:
    """The place of a config's tile among these, if it is there and has no heads side by side."""
    if not tiles or resources.packed_heads(config) > 1:
        return None
    shape = config.integer("warpgroups"), config.integer("block_n")
    return next((number for number, tile in enumerate(tiles) if (tile.warpgroups, tile.block_n) == shape), None)


@functools.lru_cache(maxsize=256)
def with_tile(spec: Specialization, config: Config, tile: Tile, device: Device) -> Config:
    """A config with another tile and what goes with it; as it is where that is not valid."""
    knobs = dict(tile.knobs)
    if spec.varlen and spec.causal:
        knobs["masked_blocks"] = "branch"  # each sequence has a diagonal of its own, which no one block holds
    shape = {"warpgroups": tile.warpgroups, "block_n": tile.block_n, "blocks_per_sm": tile.blocks_per_sm}
    found = config.replace(**{**knobs, **shape})
    return found if rules.invalid(spec, found, device) is None else config


_USUAL: dict[str, KnobValue] = {
    "barriers": "named",
    "conditional_rescale": True,
    "early_settle": False,
    "exp_order": "data",
    "heads_per_group": 1,
    "hidden_blocks": "computed",
    "k_release": "own",
    "masked_blocks": "one",
    "max_chains": 1,
    "ping_pong": True,
    "q_stages": 1,
    "qk_prefetch": "block",
    "softmax_reference": "row_sums",
    "split_d": False,
    "v_stages": 3,
}
_FREE: dict[str, KnobValue] = {"barriers": "mbarrier", "exp_order": "free"}
_SKIPPING: dict[str, KnobValue] = {"hidden_blocks": "skipped", "masked_blocks": "branch", "heads_per_group": 8}
_PARTS: dict[str, KnobValue] = {"split_d": True, "v_stages": 2}


def _knobs(changes: Mapping[str, KnobValue], **others: KnobValue) -> tuple[tuple[str, KnobValue], ...]:
    return tuple({**_USUAL, **changes, **others}.items())


TILES: Mapping[tuple[int, bool], tuple[Tile, ...]] = {
    (128, False): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=2,
            step=0.926,
            overhead=3,
            lone=0.6,
            knobs=_knobs({}, ping_pong=False, softmax_reference="running", v_stages=2),
        ),
        Tile(warpgroups=2, block_n=128, step=1.402, overhead=2, knobs=_knobs({}, v_stages=2)),
        Tile(warpgroups=3, block_n=64, step=0.994, overhead=4, knobs=_knobs({})),
    ),
    (128, True): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=2,
            step=0.941,
            overhead=3,
            lone=0.7,
            tail=0.25,
            knobs=_knobs(_FREE, ping_pong=False, heads_per_group=32, v_stages=2),
        ),
        Tile(
            warpgroups=2, block_n=128, step=1.303, overhead=2, tail=0.5, knobs=_knobs({}, heads_per_group=8, v_stages=2)
        ),
        Tile(warpgroups=3, block_n=64, step=0.956, overhead=4, tail=0.5, margin=0.1, knobs=_knobs(_SKIPPING)),
    ),
    (64, False): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=3,
            step=0.850,
            overhead=2,
            lone=0.6,
            knobs=_knobs({}, ping_pong=False, softmax_reference="running"),
        ),
        Tile(warpgroups=2, block_n=128, step=1.072, overhead=2, knobs=_knobs({}, softmax_reference="running")),
        Tile(warpgroups=3, block_n=128, step=1.322, overhead=2, knobs=_knobs(_FREE)),
        Tile(warpgroups=4, block_n=64, step=0.852, overhead=3, knobs=_knobs(_FREE, k_release="with_v")),
    ),
    (64, True): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=4,
            step=0.895,
            overhead=2,
            tail=0.5,
            lone=0.6,
            knobs=_knobs(_FREE, ping_pong=False, qk_prefetch="none", heads_per_group=32, v_stages=2),
        ),
        Tile(
            warpgroups=1,
            block_n=128,
            blocks_per_sm=2,
            step=1.110,
            overhead=1,
            tail=0.25,
            lone=0.8,
            knobs=_knobs(
                _FREE,
                ping_pong=False,
                max_chains=4,
                conditional_rescale=False,
                softmax_reference="running",
                heads_per_group=32,
                v_stages=2,
            ),
        ),
        Tile(
            warpgroups=3,
            block_n=128,
            step=1.314,
            overhead=3,
            tail=0.5,
            knobs=_knobs({**_FREE, **_SKIPPING}, q_stages=2),
        ),
        Tile(
            warpgroups=4,
            block_n=64,
            step=0.895,
            overhead=2,
            tail=0.75,
            knobs=_knobs({**_FREE, **_SKIPPING}, q_stages=2),
        ),
    ),
    (96, False): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=3,
            step=1.198,
            overhead=2,
            lone=0.5,
            knobs=_knobs(_PARTS, ping_pong=False, softmax_reference="running"),
        ),
        Tile(warpgroups=2, block_n=128, step=1.253, overhead=2, knobs=_knobs(_PARTS)),
        Tile(warpgroups=3, block_n=64, step=0.915, overhead=4, knobs=_knobs(_PARTS)),
        Tile(warpgroups=3, block_n=128, step=1.606, overhead=3, knobs=_knobs({**_FREE, **_PARTS}, qk_prefetch="half")),
    ),
    (96, True): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=3,
            step=1.003,
            overhead=4,
            tail=0.25,
            lone=0.5,
            knobs=_knobs({**_FREE, **_PARTS}, ping_pong=False, heads_per_group=32),
        ),
        Tile(warpgroups=2, block_n=128, step=1.130, overhead=3, tail=0.25, knobs=_knobs(_PARTS, heads_per_group=8)),
        Tile(
            warpgroups=3,
            block_n=64,
            step=0.868,
            overhead=5,
            tail=0.25,
            margin=0.1,
            knobs=_knobs({**_SKIPPING, **_PARTS}),
        ),
        Tile(
            warpgroups=3,
            block_n=128,
            step=1.771,
            overhead=3,
            tail=0.25,
            knobs=_knobs({**_FREE, **_SKIPPING, **_PARTS}, qk_prefetch="half"),
        ),
    ),
    (80, False): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=3,
            step=1.081,
            overhead=2,
            lone=0.6,
            knobs=_knobs(_PARTS, ping_pong=False, softmax_reference="running"),
        ),
        Tile(warpgroups=2, block_n=128, step=1.160, overhead=2, knobs=_knobs(_PARTS)),
        Tile(warpgroups=3, block_n=64, step=0.853, overhead=4, knobs=_knobs(_PARTS)),
        Tile(warpgroups=3, block_n=128, step=1.491, overhead=3, knobs=_knobs({**_FREE, **_PARTS}, qk_prefetch="half")),
    ),
    (80, True): (
        Tile(
            warpgroups=1,
            block_n=64,
            blocks_per_sm=3,
            step=0.920,
            overhead=4,
            tail=0.25,
            lone=0.5,
            knobs=_knobs({**_FREE, **_PARTS}, ping_pong=False, heads_per_group=32),
        ),
        Tile(warpgroups=2, block_n=128, step=1.069, overhead=3, tail=0.25, knobs=_knobs(_PARTS, heads_per_group=8)),
        Tile(
            warpgroups=3,
            block_n=64,
            step=0.858,
            overhead=4,
            tail=0.25,
            margin=0.1,
            knobs=_knobs({**_SKIPPING, **_PARTS}),
        ),
        Tile(
            warpgroups=3,
            block_n=128,
            step=1.830,
            overhead=2,
            tail=0.25,
            knobs=_knobs({**_FREE, **_SKIPPING, **_PARTS}, qk_prefetch="half"),
        ),
    ),
}
"""By head dimension and whether it is causal: the tiles with which searches won, each with the rest of its config."""
