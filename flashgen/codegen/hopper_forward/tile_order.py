"""The order of tiles under a causal mask where a launch has few of them.

Tiles come in groups of heads, in each the ones with the most keys first, so that the last ones to end are short, and
keys and values of a group stay in the L2 cache. Where a launch has few tiles for each SM, the long tiles of the last
group begin when the others are nearly done, and all wait for them: then all heads are one group. On an H100 33 shapes
with one to six waves of tiles take 1.19 times as long in groups of four heads, at most 1.44 times; two with seven waves
take 1.04 times as long in one group. With more than 32 heads that is so up to three waves; then 32 are enough.

Where there are many tiles, three kinds of them have the largest groups whose keys and values the L2 cache holds. With
192 rows and 64 keys groups of 8 took 1.036 times as long as these in the mean of 26 shapes on an H200
(docs/experiments/waves.md). Of the other two pairs of trials of searches that differ in nothing else say so: with
256 rows and 64 keys, heads of 64, these took 0.96 of the time of other groups in the mean of 23 pairs, and with 128
rows and keys, up to twenty waves of tiles, 0.97 of 34 pairs (`tests/codegen/test_cached_groups.py`).

Where all CTAs run at once, several on an SM, these get long and short tiles together in one group of all heads
(`_turned` of the template): on an H200 45 tiles of 30 shapes took 0.98 of the time in the mean, 0.86 to 1.02.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flashgen.codegen import head_packing
from flashgen.codegen.common_order import ALL_HEADS, in_groups, in_groups_of
from flashgen.codegen.common_wgmma import widest_block
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import is_split
from flashgen.codegen.hopper_forward import resources
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

FEW_WAVES, ONE_GROUP_WAVES, LARGE_GROUP = 6, 3, 32
"""Tiles for each place of an SM up to which the order decides, and up to which any number of heads is one group."""

HELD_WAVES = 5
"""The same of tiles whose groups follow the L2 cache. With 5.5 to 5.8 waves and long sequences 32 heads took 1.006,
1.017, 1.020 and 1.024 of the time of these groups in races on an H200, and 1.006 in the mean of three pairs on an H100.
"""


class Cached(NamedTuple):
    """Groups of heads of which the largest serves that the L2 cache holds.

    Attributes:
        groups: heads of a group, the most first.
        share: how much of the cache their keys and values may take.
        least: heads of a group where none of these fits; None leaves a config as it was measured.
        waves: up to so many tiles for each place of an SM.
    """

    groups: tuple[int, ...]
    share: float
    least: int | None
    waves: float = math.inf

    @property
    def served(self) -> tuple[int, ...]:
        """What serves at one size or another."""
        return self.groups if self.least is None else (*self.groups, self.least)


CACHED: Mapping[tuple[int, int, int], Cached] = {
    (64, 4, 64): Cached(groups=(32,), share=0.45, least=8),
    (128, 2, 128): Cached(groups=(32,), share=0.15, least=None, waves=20),
    (128, 3, 64): Cached(groups=(16, 8), share=0.6, least=4),
}
"""By columns of the larger tile of a head, warpgroups and keys of a step: tiles whose groups were timed."""

STEEP = 2
"""Keys for each query up to which the first tiles have much fewer keys than the last ones."""


def orders(spec: Specialization, config: Config) -> tuple[Config, ...]:
    """What `ordered` may serve in the place of a config at one size or another."""
    found = in_groups_of(spec, config, LARGE_GROUP), in_groups(spec, config, ALL_HEADS)
    cached = _cached(spec, config)
    return (*found, *(in_groups_of(spec, config, heads) for heads in (cached.served if cached else ())))


def ordered(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config that was measured at other sizes, with its heads in larger groups where these have few tiles.

    And in smaller ones where these have many, and it was measured with few.
    """
    if not spec.causal or sizes.seqlen_k > STEEP * sizes.seqlen_q:
        return config
    rows, packed = resources.tile_rows(config), resources.packed_heads(config)
    tiles, heads = head_packing.tiles(sizes, rows, packed), head_packing.packs(sizes, packed)
    slots = device.num_sms * config.integer("blocks_per_sm")
    if device.num_sms < tiles <= slots:
        return in_groups(spec, config, ALL_HEADS)
    own = config.integer("heads_per_group")
    held = _held(spec, config, sizes, device, waves=tiles / slots) if tiles > HELD_WAVES * slots else None
    if held is not None:
        return in_groups_of(spec, config, held)
    if tiles > FEW_WAVES * slots:
        return in_groups_of(spec, config, LARGE_GROUP) if own > LARGE_GROUP else config
    if tiles <= slots:
        return config
    wanted = ALL_HEADS if heads > LARGE_GROUP and tiles <= ONE_GROUP_WAVES * slots else LARGE_GROUP
    return in_groups(spec, config, wanted) if own < heads else config


def _cached(spec: Specialization, config: Config) -> Cached | None:
    """The groups that a config's tiles were timed in, where these follow the cache."""
    if is_split(config) or resources.packed_heads(config) > 1:
        return None
    return CACHED.get((widest_block(spec), config.integer("warpgroups"), config.integer("block_n")))


def _held(spec: Specialization, config: Config, sizes: Sizes, device: Device, *, waves: float) -> int | None:
    """The heads of the largest group whose keys and values the L2 cache holds, or None where nobody timed that."""
    cached = _cached(spec, config)
    if cached is None or not device.l2_bytes or waves > cached.waves:
        return None
    head_bytes = sizes.seqlen_k * (spec.head_dim + spec.head_dim_v) * DTYPE_BYTES[spec.dtype]
    room, shared = cached.share * device.l2_bytes, sizes.nheads // sizes.nheads_k
    return next((heads for heads in cached.groups if -(-heads // shared) * head_bytes <= room), cached.least)
