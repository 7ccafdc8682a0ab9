"""Tiles of one warpgroup where a head has few queries.

A tile of 128 or 192 rows with 8 queries in it computes all of its rows, in warpgroups that take turns for nothing. With
tiles of 64 rows no warpgroup waits for another, and an SM has two CTAs. On an H100 calls with 7 to 64 queries of a head
are 1.1 to 1.6 times as fast by them, where all CTAs run at once.
"""

from __future__ import annotations

import functools

from flashgen.codegen import head_packing
from flashgen.codegen.common_scores import is_plain_forward
from flashgen.codegen.common_wgmma import ROWS
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_forward import resources, rules
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

_ONE_WARPGROUP: dict[str, KnobValue] = {
    "warpgroups": 1,
    "blocks_per_sm": 2,
    "v_stages": 2,
    "q_stages": 1,
    "ping_pong": False,
    "hidden_blocks": "computed",
}
_STEPS = (128, 64)
"""Keys of a step, the better first where they fit."""

MOST_STEPS = 16
"""Steps up to which such a tile was timed. Over long keys it is how much of them an SM has under way that counts."""

MOST_COLUMNS = 128
"""Of heads of which such tiles were timed."""


def narrowed(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config that was measured at other sizes, with tiles of one warpgroup where these have few queries."""
    if sizes.seqlen_q > ROWS:
        return config
    packed = resources.packed_heads(config)
    while packed * sizes.seqlen_q > ROWS:
        packed //= 2
    found = in_one_warpgroup(spec, config, packed, device)
    is_short = sizes.seqlen_k <= MOST_STEPS * found.integer("block_n")
    slots = device.num_sms * found.integer("blocks_per_sm")
    return found if is_short and head_packing.packs(sizes, packed) <= slots else config


@functools.lru_cache(maxsize=256)
def in_one_warpgroup(spec: Specialization, config: Config, packed: int, device: Device) -> Config:
    """A config with such tiles, of so many heads; as it is where there are none, or none were timed."""
    if not is_plain_forward(spec) or spec.varlen or spec.head_dim > MOST_COLUMNS:
        return config
    for block_n in _STEPS:
        found = config.replace(**_ONE_WARPGROUP, block_n=block_n, packed_heads=packed)
        if rules.invalid(spec, found, device) is None:
            return found
    return config


def others(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """What `narrowed` may serve in the place of a config at one size or another."""
    packed = resources.packed_heads(config)
    heads = (number for number in head_packing.PACKED_HEADS if number <= packed)
    found = (in_one_warpgroup(spec, config, number, device) for number in heads)
    return tuple(other for other in dict.fromkeys(found) if other != config)
