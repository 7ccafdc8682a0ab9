"""`Tile`, one kind of tile of a class, with what its CTAs are expected to take; and those of each class (`TILES`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.family import Sizes
from flashgen.core.config import KnobValue


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


_IN_ONE: Mapping[bool, tuple[dict[str, Any], ...]] = {
    False: (
        {
            "warpgroups": 1,
            "block_n": 64,
            "blocks_per_sm": 3,
            "knobs": _knobs({}, ping_pong=False, softmax_reference="running"),
        },
        {"warpgroups": 2, "block_n": 128, "knobs": _knobs({}, softmax_reference="running")},
        {"warpgroups": 3, "block_n": 128, "knobs": _knobs(_FREE)},
        {"warpgroups": 4, "block_n": 64, "knobs": _knobs(_FREE, k_release="with_v")},
    ),
    True: (
        {
            "warpgroups": 1,
            "block_n": 64,
            "blocks_per_sm": 4,
            "knobs": _knobs(_FREE, ping_pong=False, qk_prefetch="none", heads_per_group=32, v_stages=2),
        },
        {
            "warpgroups": 1,
            "block_n": 128,
            "blocks_per_sm": 2,
            "knobs": _knobs(
                _FREE,
                ping_pong=False,
                max_chains=4,
                conditional_rescale=False,
                softmax_reference="running",
                heads_per_group=32,
                v_stages=2,
            ),
        },
        {"warpgroups": 3, "block_n": 128, "knobs": _knobs({**_FREE, **_SKIPPING}, q_stages=2)},
        {"warpgroups": 4, "block_n": 64, "knobs": _knobs({**_FREE, **_SKIPPING}, q_stages=2)},
    ),
}
"""Tiles of heads of up to 64 columns, by whether a mask is causal."""

_IN_PARTS: Mapping[bool, tuple[dict[str, Any], ...]] = {
    False: (
        {
            "warpgroups": 1,
            "block_n": 64,
            "blocks_per_sm": 3,
            "knobs": _knobs(_PARTS, ping_pong=False, softmax_reference="running"),
        },
        {"warpgroups": 2, "block_n": 128, "knobs": _knobs(_PARTS)},
        {"warpgroups": 3, "block_n": 64, "knobs": _knobs(_PARTS), "margin": 0.05},
        {"warpgroups": 3, "block_n": 128, "knobs": _knobs({**_FREE, **_PARTS}, qk_prefetch="half")},
    ),
    True: (
        {
            "warpgroups": 1,
            "block_n": 64,
            "blocks_per_sm": 3,
            "knobs": _knobs({**_FREE, **_PARTS}, ping_pong=False, heads_per_group=32),
        },
        {"warpgroups": 2, "block_n": 128, "knobs": _knobs(_PARTS, heads_per_group=8)},
        {"warpgroups": 3, "block_n": 64, "knobs": _knobs({**_SKIPPING, **_PARTS}), "margin": 0.1},
        {"warpgroups": 3, "block_n": 128, "knobs": _knobs({**_FREE, **_SKIPPING, **_PARTS}, qk_prefetch="half")},
    ),
}
"""Tiles of heads that lie in two parts, by whether a mask is causal."""


def _tiles(shapes: Sequence[dict[str, Any]], *constants: tuple[float, float, float, float]) -> tuple[Tile, ...]:
    """Tiles with step, overhead, lone and tail of each."""
    return tuple(
        Tile(**shape, step=step, overhead=overhead, lone=lone, tail=tail)
        for shape, (step, overhead, lone, tail) in zip(shapes, constants, strict=True)
    )


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
    (64, False): _tiles(_IN_ONE[False], (0.888, 2, 0.5, 0), (1.059, 2, 1, 0), (1.381, 2, 1, 0), (0.845, 4, 1, 0)),
    (64, True): _tiles(
        _IN_ONE[True], (0.891, 4, 0.5, 0.25), (0.969, 2, 0.8, 0.5), (1.397, 3, 1, 0.25), (0.802, 6, 1, 0.5)
    ),
    (56, False): _tiles(_IN_ONE[False], (1.109, 2, 0.5, 0), (1.106, 2, 1, 0), (1.483, 2, 1, 0), (0.917, 4, 1, 0)),
    (56, True): _tiles(
        _IN_ONE[True], (1.165, 3, 0.4, 0.5), (1.222, 2, 0.6, 0.25), (1.39, 3, 1, 0.25), (0.901, 5, 1, 0.5)
    ),
    (96, False): _tiles(_IN_PARTS[False], (1.196, 2, 0.5, 0), (1.259, 2, 1, 0), (0.920, 4, 1, 0), (1.802, 2, 1, 0)),
    (96, True): _tiles(
        _IN_PARTS[True], (1.011, 4, 0.5, 0.25), (1.139, 3, 1, 0.25), (0.932, 4, 1, 0.25), (1.789, 3, 1, 0.25)
    ),
    (80, False): _tiles(_IN_PARTS[False], (1.082, 2, 0.6, 0), (1.161, 2, 1, 0), (0.854, 4, 1, 0), (1.497, 3, 1, 0)),
    (80, True): _tiles(
        _IN_PARTS[True], (0.920, 4, 0.5, 0.25), (1.069, 3, 1, 0.25), (0.858, 4, 1, 0.25), (1.830, 2, 1, 0.25)
    ),
}
"""By head dimension and whether it is causal: the tiles with which searches won, each with the rest of its config."""
