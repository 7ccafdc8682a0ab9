"""What the analytic model knows of the portable backward families."""

from __future__ import annotations

import functools

from flashgen.codegen.common_groups import HEADS_PER_TILE, heads_per_tile
from flashgen.codegen.common_loops import owning_keys, owning_queries, streamed_bytes
from flashgen.codegen.common_portable import MAX_REGS_PER_THREAD
from flashgen.codegen.common_products import PRODUCTS, precision
from flashgen.codegen.cost import CostModel, LoopKernel, Ranking, Tiling, blocks_side_by_side
from flashgen.codegen.head_parts import is_split, padded
from flashgen.codegen.portable_backward.resources import is_fused
from flashgen.core.compiled import Taken
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

ATOMIC_TRIPS = 10
"""dQ goes into shared memory and is read again in whole rows by the warps, which send it out as atomics at an eighth of
that rate."""

OTHER_REGS = {"dkdv": 90, "dq": 90, "main": 140}
"""Registers of a thread beside sums and scores, as compiled for sm80 to sm90: operands, addresses, statistics."""

REGISTER_BYTES = 4

_TILE = ("block_m", "block_n", "num_warps", "num_stages")
_DQ_TILE = tuple(f"dq_{name}" for name in _TILE)
_SHARED = ("loads", "heads_per_group", "split_d", PRODUCTS.name)


def _tile(spec: Specialization, config: Config, prefix: str = "") -> Tiling:
    return Tiling(
        block_m=config.integer(f"{prefix}block_m"),
        block_n=config.integer(f"{prefix}block_n"),
        warps=config.integer(f"{prefix}num_warps"),
        stages=config.integer(f"{prefix}num_stages"),
        query_columns=padded(spec.head_dim, is_split(config)),
        value_columns=padded(spec.head_dim_v, is_split(config)),
        pointer_loads=config["loads"] == "pointer",
        heads_per_group=config.integer("heads_per_group"),
        heavy_first=spec.causal,
        walked_heads=0 if prefix else heads_per_tile(config),
        precision=precision(spec, config),
    )


def _taken(spec: Specialization, config: Config, device: Device, *, name: str) -> Taken:
    """Registers of sums, of S and dP, and of the tile of dQ that is added; shared memory of tiles in the pipeline."""
    tile = _tile(spec, config, "dq_" if name == "dq" else "")
    d, dv, threads = tile.query_columns, tile.value_columns, tile.warps * device.warp_size
    owned, walked = (tile.block_m, tile.block_n) if name == "dq" else (tile.block_n, tile.block_m)
    sums = {"dq": d, "dkdv": d + dv, "main": d + dv}[name] * owned + (walked * d if name == "main" else 0)
    needed = (sums + 2 * owned * walked) // threads + OTHER_REGS[name]
    registers = min(needed, MAX_REGS_PER_THREAD)
    shared = (owned + max(tile.stages - 1, 1) * walked) * (d + dv) * DTYPE_BYTES[spec.dtype]
    return Taken(
        registers=registers,
        spills=REGISTER_BYTES * (needed - registers),
        shared_bytes=shared,
        occupancy=blocks_side_by_side(registers, shared, threads, device),
    )


SPLIT_COST_MODEL = CostModel(
    kernels=(
        LoopKernel(
            name="dkdv",
            knobs=(*_TILE, *_SHARED, HEADS_PER_TILE.name),
            tile=_tile,
            loop=owning_keys,
            taken=functools.partial(_taken, name="dkdv"),
        ),
        LoopKernel(
            name="dq",
            knobs=(*_DQ_TILE, *_SHARED),
            tile=functools.partial(_tile, prefix="dq_"),
            loop=owning_queries,
            taken=functools.partial(_taken, name="dq"),
        ),
    ),
    streamed_bytes=functools.partial(streamed_bytes, adds_dq=is_fused),
    ranking=Ranking(
        tile_knobs=(*_TILE[:3], "split_d", PRODUCTS.name, *_DQ_TILE[:3]),
        stage_knobs=(_TILE[3], _DQ_TILE[3]),
    ),
)

FUSED_COST_MODEL = CostModel(
    kernels=(
        LoopKernel(
            name="main",
            knobs=(*_TILE, *_SHARED, HEADS_PER_TILE.name),
            tile=_tile,
            loop=functools.partial(owning_keys, added_trips=ATOMIC_TRIPS),
            taken=functools.partial(_taken, name="main"),
        ),
    ),
    streamed_bytes=functools.partial(streamed_bytes, adds_dq=is_fused),
    ranking=Ranking(tile_knobs=(*_TILE[:3], "split_d", PRODUCTS.name), stage_knobs=(_TILE[3],)),
)
