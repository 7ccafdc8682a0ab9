"""The order of tiles where some have more work than others: the knob `heads_per_group` of the Hopper families.

Tiles come in groups of heads, in each those with the most work first. What the tiles of a group read again stays in the
L2 cache; but where a launch has few tiles for each SM, the heaviest ones of the last group begin when all others are
nearly done. In one group of all heads they begin first.
"""

from __future__ import annotations

from flashgen.core.config import Config

ALL_HEADS = 1024
"""Heads of a group that are all of them: a launch with more has tiles for many waves, whatever their order."""


def heads_per_group(config: Config) -> int:
    """What a cost model is told: 0 is all."""
    heads = config.integer("heads_per_group")
    return 0 if heads >= ALL_HEADS else heads
