"""What the analytic model knows of the Hopper forward family: the level of its default."""

from __future__ import annotations

from flashgen.codegen.common_loops import forward_loop
from flashgen.codegen.common_order import heads_per_group
from flashgen.codegen.cost import CostModel, LoopKernel, Tiling
from flashgen.codegen.hopper_forward import resources
from flashgen.core.compiled import Taken
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def tiling(spec: Specialization, config: Config) -> Tiling:
    """The tile of a config's program, all its warpgroups together."""
    return Tiling(
        block_m=resources.tile_rows(config),
        block_n=config.integer("block_n"),
        warps=4 * config.integer("warpgroups"),
        stages=config.integer("v_stages"),
        query_columns=resources.columns(spec.head_dim, config),
        value_columns=resources.columns(spec.head_dim_v, config),
        pointer_loads=False,
        heads_per_group=heads_per_group(config),
        heavy_first=spec.causal,
        steps_in_flight=2,
        packed_heads=resources.packed_heads(config),
    )


def _taken(spec: Specialization, config: Config, device: Device) -> Taken:
    separate_o_smem = resources.separate_o_smem(spec, config, device)
    return Taken(
        registers=resources.maxnreg(config, device),
        spills=0,
        shared_bytes=resources.smem_bytes(spec, config, separate_o_smem=separate_o_smem),
        occupancy=config.integer("blocks_per_sm"),
    )


COST_MODEL = CostModel(kernels=(LoopKernel(tile=tiling, loop=forward_loop, taken=_taken),))
