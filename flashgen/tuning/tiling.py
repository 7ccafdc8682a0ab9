"""`Tiling`: what the analytic model knows of a forward config, read from the knobs of the families that it covers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashgen.codegen.head_parts import is_split, padded
from flashgen.codegen.hopper_forward import resources as hopper_resources
from flashgen.codegen.hopper_forward import template_context as hopper_text
from flashgen.codegen.portable_forward import defaults as portable_defaults
from flashgen.codegen.portable_forward.resources import registers_needed, smem_needed
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import TuningError
from flashgen.core.workload import Specialization
from flashgen.tuning.compile_pool import Compiled

MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One program: its tile, its warps, and how its loads and steps overlap.

    Attributes:
        block_m: query rows of a program.
        packed_heads: heads that share keys, whose rows these are.
        block_n: keys of a step.
        warps: warps that compute.
        stages: depth of the pipeline of loads.
        query_columns: columns of a tile of Q or K, padding included.
        value_columns: columns of a tile of V or O, padding included.
        pointer_loads: whether addresses are computed for every 16 bytes.
        heads_per_group: heads whose programs run side by side; 0 means all.
        heavy_first: whether the programs with the most keys start first.
        steps_in_flight: steps that one warp works on at once: 2 where the next one's products hide a softmax.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    query_columns: int
    value_columns: int
    pointer_loads: bool
    heads_per_group: int
    heavy_first: bool
    steps_in_flight: int = 1
    packed_heads: int = 1


def is_modelled(config: Config) -> bool:
    """Whether the analytic model knows the tiling of the family of `config`."""
    return config.family in FAMILIES


def tiling(spec: Specialization, config: Config) -> Tiling:
    """The tiling of a config.

    Raises:
        TuningError: the family is not modelled.
    """
    if not is_modelled(config):
        raise TuningError(f"a tiling is of {', '.join(FAMILIES)}, got {config.family}")
    return FAMILIES[config.family](spec, config)


def least_resources(spec: Specialization, config: Config, device: Device) -> Compiled:
    """The least that a kernel takes of a multiprocessor, before it is compiled.

    Raises:
        TuningError: the family is not modelled.
    """
    tile = tiling(spec, config)
    if config.family == hopper_text.FAMILY_ID:
        own_o = hopper_resources.own_o(spec, config, device)
        return Compiled(
            registers=hopper_resources.maxnreg(config, device),
            spills=0,
            shared_bytes=hopper_resources.smem_bytes(spec, config, own_o=own_o),
            occupancy=config.integer("blocks_per_sm"),
        )
    registers = min(registers_needed(spec, config, device), config.integer("maxnreg") or MAX_REGISTERS)
    shared, threads = smem_needed(spec, config, device), tile.warps * device.warp_size
    fits = (
        device.regs_per_sm // (max(registers, 32) * threads),
        device.smem_per_sm // (shared + 1024),
        device.max_threads_per_sm // threads,
    )
    return Compiled(registers=registers, spills=0, shared_bytes=shared, occupancy=max(min(fits), 1))


def _portable(spec: Specialization, config: Config) -> Tiling:
    return Tiling(
        block_m=config.integer("block_m"),
        block_n=config.integer("block_n"),
        warps=config.integer("num_warps"),
        stages=config.integer("num_stages"),
        query_columns=padded(spec.head_dim, is_split(config)),
        value_columns=padded(spec.head_dim_v, is_split(config)),
        pointer_loads=config["loads"] == "pointer",
        heads_per_group=config.integer("heads_per_group"),
        heavy_first=bool(config["heavy_first"]),
    )


def _hopper(spec: Specialization, config: Config) -> Tiling:
    return Tiling(
        block_m=hopper_resources.block_m(config),
        block_n=config.integer("block_n"),
        warps=4 * config.integer("warpgroups"),
        stages=config.integer("v_stages"),
        query_columns=hopper_resources.columns(spec.head_dim, config),
        value_columns=hopper_resources.columns(spec.head_dim_v, config),
        pointer_loads=False,
        heads_per_group=config.integer("heads_per_group"),
        heavy_first=spec.causal,
        steps_in_flight=2,
        packed_heads=hopper_resources.packed_heads(config),
    )


FAMILIES: dict[str, Callable[[Specialization, Config], Tiling]] = {
    portable_defaults.FAMILY_ID: _portable,
    hopper_text.FAMILY_ID: _hopper,
}
