"""How many query heads of a group a program of the portable backward families walks over at some sizes."""

from __future__ import annotations

from flashgen.codegen.common_groups import BY_RULE, KeyTiles, heads_per_tile, why_pointless
from flashgen.codegen.common_portable import programs_side_by_side
from flashgen.codegen.family import Sizes
from flashgen.codegen.portable_backward.resources import loops, smem_needed
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config with as many heads a program as these sizes take, where that is better than its own."""
    own = heads_per_tile(config) if why_pointless(config, sizes) is None else 0
    smem = smem_needed(next(loops(spec, config)), device)
    tiles = KeyTiles(
        block_m=config.integer("block_m"),
        block_n=config.integer("block_n"),
        slots=device.num_sms * programs_side_by_side(config, smem, device),
        causal=spec.causal,
        coarse=spec.causal and not spec.window,
    )
    best = tiles.best(sizes, own)
    return config if best == heads_per_tile(config) else config.replace(heads_per_tile=best)


def beside(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """The configs that `fitted` may serve in the place of one."""
    return tuple(config.replace(heads_per_tile=heads) for heads in BY_RULE if heads != heads_per_tile(config))
