"""What the analytic model knows of the Hopper backward families: the levels of their defaults."""

from __future__ import annotations

import functools

from flashgen.codegen.common_groups import heads_per_tile, query_shares
from flashgen.codegen.common_loops import owning_keys, owning_queries, streamed_bytes
from flashgen.codegen.common_order import heads_per_group
from flashgen.codegen.common_wgmma import ROWS
from flashgen.codegen.cost import CostModel, LoopKernel, Tiling
from flashgen.codegen.head_parts import columns_of
from flashgen.codegen.hopper_backward import resources
from flashgen.core.compiled import Taken
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

TMA_TRIPS = 2
"""dQ goes into shared memory and is read again in whole rows by TMA, for which nobody waits."""

CONSUMER_WARPS = 8
"""Two warpgroups of 64 keys or queries each; heads of more columns leave both of them the same 64 keys."""


def _tile(spec: Specialization, config: Config, name: str) -> Tiling:
    queries = name == "dq"
    return Tiling(
        block_m=2 * ROWS if queries else config.integer("block_m"),
        block_n=config.integer("dq_block_n") if queries else resources.block_n(spec),
        warps=CONSUMER_WARPS,
        stages=config.integer("dq_stages" if queries else "q_stages"),
        query_columns=columns_of(resources.parts(spec.head_dim, config)),
        value_columns=columns_of(resources.parts(spec.head_dim_v, config)),
        pointer_loads=False,
        heads_per_group=heads_per_group(config),
        heavy_first=spec.causal,
        walked_heads=0 if queries else heads_per_tile(config),
        query_shares=1 if queries else query_shares(config),
        writes_dq=resources.writes_dq(config),
        steps_in_flight=2,
    )


def _taken(spec: Specialization, config: Config, device: Device) -> Taken:
    """One program takes an SM: nearly all of its shared memory, and all of its registers."""
    return Taken(registers=resources.MAXNREG, spills=0, shared_bytes=device.smem_per_block, occupancy=1)


_KNOBS = ("block_m", "q_stages", "heads_per_group", "heads_per_tile", "query_shares")

SPLIT_COST_MODEL = CostModel(
    kernels=(
        LoopKernel(
            name="dkdv",
            knobs=_KNOBS,
            tile=functools.partial(_tile, name="dkdv"),
            loop=owning_keys,
            taken=_taken,
        ),
        LoopKernel(
            name="dq",
            knobs=("dq_block_n", "dq_stages", "heads_per_group"),
            tile=functools.partial(_tile, name="dq"),
            loop=owning_queries,
            taken=_taken,
        ),
    ),
    streamed_bytes=functools.partial(streamed_bytes, adds_dq=resources.adds_dq),
)

FUSED_COST_MODEL = CostModel(
    kernels=(
        LoopKernel(
            name="main",
            knobs=(*_KNOBS, "dq_conversion"),
            tile=functools.partial(_tile, name="main"),
            loop=functools.partial(owning_keys, added_trips=TMA_TRIPS),
            taken=_taken,
        ),
    ),
    streamed_bytes=functools.partial(streamed_bytes, adds_dq=resources.adds_dq),
)
