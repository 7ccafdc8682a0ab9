"""`Tile`, one kind of tile of a class, with what its CTAs are expected to take; and those of each class (`TILES`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashgen.codegen import head_packing
from flashgen.codegen.family import Sizes
from flashgen.core.config import KnobValue

Lengths = tuple[tuple[int, int], ...]
"""The rows and the keys of some sequences."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tile:
    """One kind of tile of a class.

    Attributes:
        warpgroups: of 64 query rows each.
        block_n: keys of a step.
        blocks_per_sm: CTAs side by side.
        knobs: what else its config has.
        step: what a step takes, in us on an H200.
        overhead: what a CTA takes beside its steps, in steps.
        lone: the share of its time that a CTA takes which has an SM to itself.
        tail: under a causal mask, how much of a mean CTA comes behind an equal share of all work.
        before: under a causal mask, by how much longer it takes if nearly all keys come before the first query.
        margin: by which it has to promise to be faster, where that is more than `MARGIN`; the record's own tile, too.
            Packed sequences do not ask for it.
        packed: what a step of packed sequences takes over that of a dense call.
        with_heads: the same where several heads are side by side.
        grouped: what a step of a dense call takes where several heads are, over that with one.
    """

    warpgroups: int
    block_n: int
    blocks_per_sm: int = 1
    knobs: tuple[tuple[str, KnobValue], ...]
    step: float
    overhead: float
    lone: float = 1.0
    tail: float = 0.0
    before: float = 0.0
    margin: float = 0.0
    packed: float = 1.0
    with_heads: float = 1.0
    grouped: float = 1.0

    def time(self, sizes: Sizes, sm_count: int, *, causal: bool, packed_heads: int = 1) -> float:
        """What the CTAs of these sizes are expected to take, with so many heads of a group side by side."""
        if packed_heads == 1:  # written out: every new length asks
            tiles, step = -(-sizes.seqlen_q // (64 * self.warpgroups)) * sizes.batch * sizes.nheads, self.step
        else:
            tiles, step = head_packing.tiles(sizes, 64 * self.warpgroups, packed_heads), self.step * self.grouped
        slots = sm_count * self.blocks_per_sm
        longest = -(-sizes.seqlen_k // self.block_n) + self.overhead
        if causal:
            step *= self._slower(sizes.seqlen_q, sizes.seqlen_k)
            if tiles <= slots:
                return step * longest * self._pace(tiles / sm_count)
            mean = self._mean(sizes.seqlen_q, sizes.seqlen_k, packed_heads)
            return step * max(self.lone * longest, mean * (tiles / slots + self.tail))
        waves, rest = divmod(tiles, slots)
        return step * longest * (waves + (self._pace(-(-rest // sm_count)) if rest else 0.0))

    def packed_time(
        self, lengths: Lengths, heads: float, sm_count: int, *, causal: bool, packed_heads: int = 1
    ) -> float:
        """What the CTAs of packed sequences are expected to take: an equal share of all work, or the longest CTA.

        Args:
            lengths: the rows and the keys of each of some sequences.
            heads: how often each of these is there: its heads, times the sequences like it.
            sm_count: SMs of the GPU.
            causal: whether a row sees the keys up to its own alone.
            packed_heads: of these heads, how many are side by side in a tile.
        """
        steps, longest = _steps(self, lengths, causal, packed_heads)
        slots = sm_count * self.blocks_per_sm
        step = self.step * (self.with_heads if packed_heads > 1 else self.packed)
        return step * max(self.lone * longest, steps * heads / packed_heads / slots)

    def _mean(self, seqlen_q: int, seqlen_k: int, packed_heads: int = 1) -> float:
        """The steps of a mean CTA under a causal mask, with its overhead."""
        rows = 64 * self.warpgroups // packed_heads
        seen = max(seqlen_k - seqlen_q, 0) + min((-(-seqlen_q // rows) + 1) * rows, 2 * seqlen_q) / 2
        return min(seen, seqlen_k) / self.block_n + 0.5 + self.overhead

    def _slower(self, seqlen_q: int, seqlen_k: int) -> float:
        """By which factor a step takes longer under a causal mask, for the keys that the first query sees."""
        return 1 + self.before * max(seqlen_k - seqlen_q, 0) / max(seqlen_k, 1)

    def _pace(self, beside: float) -> float:
        """The share of its time that a CTA takes which has an SM for itself and so many beside it."""
        return self.lone + (1 - self.lone) * max(beside - 1, 0.0) / max(self.blocks_per_sm - 1, 1)


@functools.lru_cache(maxsize=512)
def _steps(tile: Tile, lengths: Lengths, causal: bool, packed_heads: int) -> tuple[float, float]:
    """The steps and overheads of all CTAs of some sequences, and of the longest CTA."""
    rows = 64 * tile.warpgroups // packed_heads
    every = longest = 0.0
    for seqlen_q, seqlen_k in lengths:
        slower = tile._slower(seqlen_q, seqlen_k) if causal else 1.0
        last = slower * (-(-seqlen_k // tile.block_n) + tile.overhead)
        every += -(-seqlen_q // rows) * (slower * tile._mean(seqlen_q, seqlen_k, packed_heads) if causal else last)
        longest = max(longest, last)
    return every, longest


class _Shape(NamedTuple):
    """What a tile is, without what its CTAs take."""

    warpgroups: int
    block_n: int
    blocks_per_sm: int
    knobs: tuple[tuple[str, KnobValue], ...]
    margin: float = 0.0


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
_SHARED_SMS: dict[str, KnobValue] = {"exp_order": "free", "ping_pong": False, "qk_prefetch": "none", "v_stages": 2}
"""Of two CTAs of 128 rows: half the loads of keys of CTAs of 64, and a last tile shorter than that of 256 rows."""


def _knobs(changes: Mapping[str, KnobValue], **others: KnobValue) -> tuple[tuple[str, KnobValue], ...]:
    return tuple({**_USUAL, **changes, **others}.items())


_UP_TO_64: Mapping[bool, tuple[_Shape, ...]] = {
    False: (
        _Shape(1, 64, 3, _knobs({}, ping_pong=False, softmax_reference="running")),
        _Shape(2, 128, 1, _knobs({}, softmax_reference="running")),
        _Shape(3, 128, 1, _knobs(_FREE)),
        _Shape(4, 64, 1, _knobs(_FREE, k_release="with_v")),
        _Shape(2, 64, 2, _knobs(_SHARED_SMS)),
    ),
    True: (
        _Shape(1, 64, 4, _knobs(_FREE, ping_pong=False, qk_prefetch="none", heads_per_group=32, v_stages=2)),
        _Shape(
            1,
            128,
            2,
            _knobs(
                _FREE,
                ping_pong=False,
                max_chains=4,
                conditional_rescale=False,
                softmax_reference="running",
                heads_per_group=32,
                v_stages=2,
            ),
        ),
        _Shape(3, 128, 1, _knobs({**_FREE, **_SKIPPING}, q_stages=2)),
        _Shape(4, 64, 1, _knobs({**_FREE, **_SKIPPING}, q_stages=2)),
    ),
}
"""Tiles of heads of up to 64 columns, by whether a mask is causal."""

_IN_PARTS: Mapping[bool, tuple[_Shape, ...]] = {
    False: (
        _Shape(1, 64, 3, _knobs(_PARTS, ping_pong=False, softmax_reference="running")),
        _Shape(2, 128, 1, _knobs(_PARTS)),
        _Shape(3, 64, 1, _knobs(_PARTS), margin=0.05),
        _Shape(3, 128, 1, _knobs({**_FREE, **_PARTS}, qk_prefetch="half")),
        _Shape(2, 64, 2, _knobs({**_SHARED_SMS, **_PARTS}), margin=0.05),
    ),
    True: (
        _Shape(1, 64, 3, _knobs({**_FREE, **_PARTS}, ping_pong=False, heads_per_group=32)),
        _Shape(2, 128, 1, _knobs(_PARTS, heads_per_group=8)),
        _Shape(3, 64, 1, _knobs({**_SKIPPING, **_PARTS}), margin=0.1),
        _Shape(3, 128, 1, _knobs({**_FREE, **_SKIPPING, **_PARTS}, qk_prefetch="half")),
    ),
}
"""The same of heads that lie in two parts, of up to 96 columns."""

_UP_TO_128: Mapping[bool, tuple[_Shape, ...]] = {
    False: (
        _Shape(1, 64, 2, _knobs({}, ping_pong=False, softmax_reference="running", v_stages=2)),
        _Shape(2, 128, 1, _knobs({}, v_stages=2)),
        _Shape(3, 64, 1, _knobs({}), margin=0.05),
    ),
    True: (
        _Shape(1, 64, 2, _knobs(_FREE, ping_pong=False, heads_per_group=32, v_stages=2), margin=0.08),
        _Shape(2, 128, 1, _knobs({}, heads_per_group=8, v_stages=2)),
        _Shape(3, 64, 1, _knobs(_SKIPPING), margin=0.1),
    ),
}
"""The same of heads of up to 128 columns."""

SHARED_COLUMNS = 80
"""Of heads up to which two CTAs of two warpgroups find registers on an SM."""

Constants = tuple[tuple[float, float, float, float, float], ...]
"""Step, overhead, lone, tail and before of each tile of a class."""

CONSTANTS: Mapping[tuple[int, bool], Constants] = {
    (40, False): (
        (1.545, 1, 0.4, 0, 0),
        (1.106, 2, 1, 0, 0),
        (1.284, 3, 1, 0, 0),
        (0.826, 5, 1, 0, 0),
        (1.077, 3, 0.6, 0, 0),
    ),
    (40, True): ((1.320, 3, 0.4, 1, 0), (1.658, 2, 0.4, 0, 0.2), (1.387, 3, 1, 0, 0), (0.763, 7, 1, 0.5, 0.1)),
    (56, False): (
        (1.106, 2, 0.5, 0, 0),
        (1.122, 2, 1, 0, 0),
        (1.508, 2, 1, 0, 0),
        (0.876, 5, 1, 0, 0),
        (0.976, 4, 0.6, 0, 0),
    ),
    (56, True): (
        (1.155, 3, 0.4, 0.5, 0.3),
        (1.215, 2, 0.6, 0.25, 0.3),
        (1.389, 3, 1, 0.25, 0),
        (0.898, 5, 1, 0.5, 0.1),
    ),
    (64, False): (
        (0.910, 2, 0.5, 0, 0),
        (1.073, 2, 1, 0, 0),
        (1.295, 3, 1, 0, 0),
        (0.892, 4, 1, 0, 0),
        (0.962, 3, 0.7, 0, 0),
    ),
    (64, True): (
        (0.881, 4, 0.5, 0.25, 0.4),
        (0.966, 2, 0.8, 0.5, 0.2),
        (1.394, 3, 1, 0.25, 0),
        (0.829, 6, 1, 0.25, 0.2),
    ),
    (72, False): (
        (1.532, 2, 0.4, 0, 0),
        (1.249, 2, 1, 0, 0),
        (0.922, 4, 1, 0, 0),
        (1.551, 3, 1, 0, 0),
        (1.163, 4, 0.6, 0, 0),
    ),
    (72, True): ((1.343, 3, 0.4, 0.25, 0.2), (1.124, 3, 1, 0, 0.1), (0.848, 4, 1, 0.25, 0), (1.658, 3, 1, 0.25, 0)),
    (80, False): (
        (1.072, 2, 0.6, 0, 0),
        (1.167, 2, 1, 0, 0),
        (0.855, 4, 1, 0, 0),
        (1.683, 2, 1, 0, 0),
        (1.195, 3, 0.6, 0, 0),
    ),
    (80, True): (
        (0.913, 4, 0.5, 0.25, 0.3),
        (1.061, 3, 1, 0.25, 0.3),
        (0.855, 4, 1, 0.25, 0.2),
        (1.609, 3, 1, 0.25, 0.2),
    ),
    (96, False): ((1.195, 2, 0.5, 0, 0), (1.262, 2, 1, 0, 0), (0.919, 4, 1, 0, 0), (1.803, 2, 1, 0, 0)),
    (96, True): (
        (1.003, 4, 0.5, 0.25, 0.2),
        (1.132, 3, 1, 0.25, 0.2),
        (0.929, 4, 1, 0.25, 0.1),
        (1.781, 3, 1, 0.25, 0.1),
    ),
    (112, False): ((1.054, 2, 0.6, 0, 0), (1.476, 2, 1, 0, 0), (1.082, 3, 1, 0, 0)),
    (128, False): ((0.922, 3, 0.6, 0, 0), (1.405, 2, 1, 0, 0), (0.991, 4, 1, 0, 0)),
    (128, True): ((0.944, 4, 0.6, 0, 0.3), (1.304, 2, 1, 0.5, 0.2), (0.955, 4, 1, 0.5, 0.1)),
}
"""What `benchmarks.tiles --fit` makes of times."""

GROUPED_CONSTANTS: Mapping[tuple[int, bool], Constants] = {
    (128, True): ((0.993, 1, 0.8, 0.25, 0), (1.536, 1, 1, 0, 0), (0.948, 3, 1, 0.25, 0)),
}
"""The same of a class whose tiles take another time where heads share keys: what `benchmarks.packed_heads --fit` makes.

With several waves of short CTAs an SM has always one to begin with, whose keys the L2 cache holds: tiles of one
warpgroup take 0.6 of what `CONSTANTS` say with 100 queries, and 0.9 of it with 3000.
"""

GROUPED: Mapping[tuple[int, bool], tuple[float, ...]] = {
    (64, False): (1.016, 1.013, 1.024, 1.054, 1.047),
    (64, True): (1.087, 1.072, 1.211, 1.330),
    (128, False): (1.026, 1.013, 1.056),
    (128, True): (1.075, 1.157, 1.268),
}
"""What a step of each tile takes with several heads side by side, over that with one: likewise.

Under a causal mask a tile has fewer positions than a step has keys, so that one block is masked of fewer; and those
that leave out what is hidden from a warpgroup (`hidden_blocks`) cannot do so.
"""

SUSTAINED_US = 100.0
"""What a launch is expected to take from which on load that goes on is what counts, with factors of its own.

They were fitted to launches of 200 us and more. Of seven shapes of 100 to 200 us that were raced under such load three
gain 4.5 to 6.8% by them, and the others keep their tile.

Windows of 30 ms, which the constants were fitted to, are over before a card answers to its power limit. Load that goes
on has an H200 at 1425 to 1605 MHz in place of 1980, and tiles that draw less, as those of more rows, which load keys
less often, are ahead there (docs/experiments/waves.md).
"""

SUSTAINED: Mapping[tuple[int, bool], tuple[float, ...]] = {
    (64, False): (1.025, 1.039, 1.058, 1.011, 1.048),
    (64, True): (1.168, 1.159, 0.995, 1.038),
    (96, True): (1.138, 1.125, 1.034, 1.019),
    (128, False): (1.025, 1.024, 1.067),
    (128, True): (0.975, 1.086, 1.061),
}
"""Times of the tiles of a class in long windows over what constants say: what `benchmarks.sustained_tiles` fits."""


GROUPED_SUSTAINED: Mapping[tuple[int, bool], tuple[float, ...]] = {(128, True): (0.974, 0.994, 1.115)}
"""The same of tiles with `GROUPED_CONSTANTS`, where queries see `GROUPED_SUSTAINED_KEYS` or more."""

GROUPED_SUSTAINED_KEYS = 2048
"""The fewest that they were fitted to: with 1050 keys and 0.33 ms constants are within 5% without them."""

PACKED: Mapping[tuple[int, bool], tuple[tuple[float, float], ...]] = {
    (128, True): ((1.0, 0.75), (1.06, 1.0), (1.0, 1.0)),
}
"""Of classes in which packed sequences differ, `packed` and `with_heads` of each tile.

Of eight searches of causal batches of 32/8 heads on an H200 three warpgroups won or were equal in all; what served took
1.016 of the best tile's time in the mean of all searches of packed sequences, of tiles of one head, and 1.005 with it.
Where heads are side by side one warpgroup was the best tile for five of eight raced batches of 32 to 1024 tokens in the
mean, and the constants alone chose it for none: 1.05 of the best in the mean, and 1.006 with it.
"""


def _of(head_dim: int, causal: bool, constants: Constants) -> tuple[Tile, ...]:
    """The tiles of a class, with these constants."""
    shapes = (_UP_TO_64 if head_dim <= 64 else _IN_PARTS if head_dim <= 96 else _UP_TO_128)[causal]
    if head_dim > SHARED_COLUMNS:
        shapes = tuple(shape for shape in shapes if shape.warpgroups * shape.blocks_per_sm < 4)
    of_packed = PACKED.get((head_dim, causal), ((1.0, 1.0),) * len(constants))
    of_grouped = GROUPED.get((head_dim, causal), (1.0,) * len(constants))
    return tuple(
        Tile(
            **shape._asdict(),
            step=step,
            overhead=overhead,
            lone=lone,
            tail=tail,
            before=before,
            packed=packed,
            with_heads=with_heads,
            grouped=grouped,
        )
        for shape, (step, overhead, lone, tail, before), (packed, with_heads), grouped in zip(
            shapes, constants, of_packed, of_grouped, strict=True
        )
    )


TILES: Mapping[tuple[int, bool], tuple[Tile, ...]] = {each: _of(*each, own) for each, own in CONSTANTS.items()}
"""By head dimension and whether it is causal: the tiles with which searches won, each with the rest of its config."""

GROUPED_TILES: Mapping[tuple[int, bool], tuple[Tile, ...]] = {
    each: tuple(replace(tile, margin=0.0) for tile in _of(*each, GROUPED_CONSTANTS.get(each, CONSTANTS[each])))
    for each in GROUPED
}
"""The same of dense calls whose heads share keys, with one or several of them side by side."""
