"""How many query heads of a group a tile of the Hopper backward families walks over at some sizes."""

from __future__ import annotations

from flashgen.codegen.common_groups import BY_RULE, KeyTiles, heads_per_tile, why_pointless
from flashgen.codegen.family import Sizes
from flashgen.codegen.hopper_backward import resources
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """The same without sums in memory where a tile has all heads of a group anyway."""
    return config if why_pointless(config, sizes) is None else config.replace(heads_per_tile=0)


def balanced(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config with as many heads a tile as these sizes take, where that is better than its own."""
    config = fitted(spec, config, sizes, device)
    tiles = KeyTiles(
        block_m=config.integer("block_m"),
        block_n=resources.block_n(spec),
        slots=device.num_sms,
        causal=spec.causal,
        coarse=spec.causal and not spec.window and not resources.is_wide(spec),
    )
    return _with(config, tiles.best(sizes, heads_per_tile(config)))


def beside(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """The configs that `balanced` may serve in the place of one."""
    return tuple(_with(config, heads) for heads in BY_RULE if heads != heads_per_tile(config))


def _with(config: Config, heads: int) -> Config:
    if heads == heads_per_tile(config):
        return config
    return config.replace(heads_per_tile=heads, **({"dq_conversion": "kernel"} if resources.converts(config) else {}))
