"""What the analytic model knows of the portable forward family."""

from __future__ import annotations

from flashgen.codegen.common_loops import forward_loop
from flashgen.codegen.common_portable import MAX_REGS_PER_THREAD
from flashgen.codegen.common_products import PRODUCTS, precision
from flashgen.codegen.common_softcap import HARDWARE, TANH, tanh
from flashgen.codegen.cost import CostModel, LoopKernel, Ranking, Tiling, blocks_side_by_side
from flashgen.codegen.head_parts import is_split, padded
from flashgen.codegen.portable_forward.resources import registers_needed, smem_needed
from flashgen.core.compiled import Taken
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

LEAST_REGISTERS = 32
"""Of a thread, whatever it computes."""


def tiling(spec: Specialization, config: Config) -> Tiling:
    """The tile of a config's program."""
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
        precision=precision(spec, config),
        hardware_tanh=tanh(config) == HARDWARE,
    )


def _taken(spec: Specialization, config: Config, device: Device) -> Taken:
    """The least that the kernel takes."""
    registers = min(registers_needed(spec, config, device), config.integer("maxnreg") or MAX_REGS_PER_THREAD)
    shared, threads = smem_needed(spec, config, device), config.integer("num_warps") * device.warp_size
    side_by_side = blocks_side_by_side(max(registers, LEAST_REGISTERS), shared, threads, device)
    return Taken(registers=registers, spills=0, shared_bytes=shared, occupancy=side_by_side)


COST_MODEL = CostModel(
    kernels=(LoopKernel(tile=tiling, loop=forward_loop, taken=_taken),),
    ranking=Ranking(
        tile_knobs=("block_m", "block_n", "num_warps", "split_d", PRODUCTS.name, TANH.name), stage_knobs=("num_stages",)
    ),
)
