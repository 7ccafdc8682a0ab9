"""The order of tiles where some have more work than others: the knob `heads_per_group` of the Hopper families.

Tiles come in groups of heads, in each those with the most work first. What the tiles of a group read again stays in the
L2 cache; but where a launch has few tiles for each SM, the heaviest ones of the last group begin when all others are
nearly done. In one group of all heads they begin first. In a forward pass whose CTAs all run at once, several on an SM,
these get long and short tiles together in that group (`_turned` of the template).
"""

from __future__ import annotations

import functools

from flashgen.codegen.common_mods import has_blocks
from flashgen.core.config import Config
from flashgen.core.workload import Specialization

ALL_HEADS = 1024
"""Heads of a group that are all of them: a launch with more has tiles for many waves, whatever their order."""


def heads_per_group(config: Config) -> int:
    """What a cost model is told: 0 is all."""
    heads = config.integer("heads_per_group")
    return 0 if heads >= ALL_HEADS else heads


def follows_lengths(spec: Specialization) -> bool:
    """Whether tiles have less work the earlier their queries are, at any sizes, and nothing else tells them apart."""
    return spec.causal and not (spec.window or spec.varlen or has_blocks(spec))


def in_groups(spec: Specialization, config: Config, heads: int) -> Config:
    """A config with groups of so many heads or more; as it is where tiles have no such order, or sizes nobody knows."""
    return config if config.integer("heads_per_group") >= heads else in_groups_of(spec, config, heads)


@functools.lru_cache(maxsize=256)
def in_groups_of(spec: Specialization, config: Config, heads: int) -> Config:
    """The same of just so many."""
    return config.replace(heads_per_group=heads) if follows_lengths(spec) else config
