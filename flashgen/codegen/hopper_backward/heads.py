"""How many query heads of a group a tile walks over.

A tile is a block of keys of one key head. With all query heads of the group in it, dk and dv are summed in registers;
but 28 query heads over 4 key heads and 4096 keys are 128 tiles then, of which a causal mask leaves the first one twice
the mean. Tiles with fewer heads of a group fill the SMs, and leave sums that another kernel adds: a tile writes and
that kernel reads fp32 rows of dk and dv, in the time of `PART_STEPS` steps.
"""

from __future__ import annotations

from flashgen.codegen.common_sequences import key_blocks
from flashgen.codegen.common_wgmma import ROWS
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_backward import resources
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

HEADS_PER_TILE = (0, 1, 2, 4)
"""Values of the knob; 0 is all heads of a group."""

BY_RULE = (0, 1, 2)
"""Those that serve without a record of the sizes: 4 heads were at most 5% faster than 2."""

PART_STEPS = 3.0
"""Steps of 64 queries that take as long as the sums of a tile, in memory and back."""

COARSE = 0.3
"""What SMs idle at the end under a causal mask, in tiles of the mean SM: the last ones end at different times."""

WORTH = 0.98
"""Another number of heads serves where the time that is expected falls below this share."""


def why_pointless(config: Config, sizes: Sizes) -> str | None:
    """The reason why sums go through memory for nothing at these sizes, or None."""
    heads, group = resources.heads_per_tile(config), sizes.nheads // sizes.nheads_k
    if heads and group <= heads:
        return f"its tiles walk over {heads} query heads of a group, which has {group}: no other tile has sums to add"
    return None


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """The same without sums in memory where a tile has all heads of a group anyway."""
    return config if why_pointless(config, sizes) is None else config.replace(heads_per_tile=0)


def balanced(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config with as many heads a tile as these sizes take, where that is much better than its own."""
    config = fitted(spec, config, sizes, device)
    group = sizes.nheads // sizes.nheads_k
    own = resources.heads_per_tile(config)
    others = {heads: _steps(spec, config, sizes, device, heads or group) for heads in BY_RULE if heads < group}
    best = min(others, key=lambda heads: (others[heads], heads))
    return _with(config, best) if others[best] < WORTH * _steps(spec, config, sizes, device, own or group) else config


def beside(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """The configs that `balanced` may serve in the place of one."""
    return tuple(_with(config, heads) for heads in BY_RULE if heads != resources.heads_per_tile(config))


def _with(config: Config, heads: int) -> Config:
    changes = {"dq_conversion": "kernel"} if heads and resources.converts(config) else {}
    return config.replace(heads_per_tile=heads, **changes)


def _steps(spec: Specialization, config: Config, sizes: Sizes, device: Device, heads: int) -> float:
    """Steps until the last tile ends, in each of which a tile meets a block of queries of one head.

    Tiles are of equal work, or begin with the heaviest: then the longest one, or the mean of all SMs, says when the
    last one ends. On none of 20 shapes on an H100 was another value more than 5% faster than the one with the least
    (docs/decisions/heads-per-tile.md).
    """
    block_m, block_n = config.integer("block_m"), resources.block_n(spec)
    parts = -(-(sizes.nheads // sizes.nheads_k) // heads)
    blocks = key_blocks(sizes, block_n) if sizes.sequences else -(-sizes.seqlen_k // block_n)
    tiles = sizes.batch * sizes.nheads_k * parts * blocks
    rounds = -(-tiles // device.num_sms)
    queries, keys = (sizes.max_seqlen_q, sizes.max_seqlen_k) if sizes.sequences else (sizes.seqlen_q, sizes.seqlen_k)
    longest = -(-queries // block_m)
    # of packed sequences a host knows how long they are on average
    mean = min(longest, sizes.seqlen_q / max(sizes.sequences, 1) / block_m + 1) if sizes.sequences else longest
    if spec.causal:
        mean *= 1 - min(queries, keys) / max(keys, 1) / 2
    if spec.causal or spec.varlen:
        is_coarse = spec.causal and not spec.window and not resources.is_wide(spec)
        idle = COARSE * device.num_sms / tiles if is_coarse else 0.0
        share = sizes.batch * sizes.nheads * blocks * mean / device.num_sms
        walked = max(heads * longest, share * (1 + idle))
    else:
        walked = rounds * heads * longest
    return walked + (PART_STEPS * ROWS / block_m * rounds if parts > 1 else 0.0)
