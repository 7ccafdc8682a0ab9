"""What the analytic model knows of a backward config: the looping kernels of its family, and the knobs of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from flashgen.codegen.common_portable import MAX_REGS_PER_THREAD
from flashgen.codegen.common_wgmma import ROWS, block
from flashgen.codegen.head_parts import is_split, padded
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization, Workload
from flashgen.tuning.backward_loops import owning_keys, owning_queries
from flashgen.tuning.compile_pool import Compiled, Taken
from flashgen.tuning.loops import Loop
from flashgen.tuning.tiling import Tiling

ATOMIC_TRIPS, COPY_ENGINE_TRIPS = 10, 2
"""dQ goes into shared memory and is read again in whole rows: by the warps, which send it out as atomics at an eighth
of that rate, or by the copy engine, for which nobody waits."""

OTHER_REGS = {"dkdv": 90, "dq": 90, "main": 140}
"""Registers of a thread beside sums and scores, as compiled for sm80 to sm90: operands, addresses, statistics."""

REGISTER_BYTES = 4
HOPPER_WARPS = 8
HOPPER_REGISTERS = 168
HOPPER_WIDEST = 128
"""Two warpgroups of 64 keys or queries each; heads of more columns leave both of them the same 64 keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One looping kernel of a family.

    Attributes:
        name: its entry is this behind the family's id.
        knobs: all that its time depends on, so that configs that agree in them share it.
        tile: its tile; `block_m` are always queries and `block_n` keys, whichever a program owns.
        loop: what it does for a workload.
        taken: about what it takes of a multiprocessor, before it is compiled.
    """

    name: str
    knobs: tuple[str, ...]
    tile: Callable[[Specialization, Config], Tiling]
    loop: Callable[[Workload, Tiling], Loop]
    taken: Callable[[Specialization, Config, Device], Taken]


def is_modelled(config: Config) -> bool:
    """Whether the analytic model covers the family of `config`."""
    return config.family in FAMILIES


def parts(config: Config) -> tuple[Part, ...]:
    """The looping kernels of a modelled config, in the order of their launches."""
    return FAMILIES[config.family]


def adds_dq(config: Config) -> bool:
    """Whether dQ is added in memory by the programs of all blocks of keys."""
    return any(part.name == "main" for part in parts(config))


def expected_resources(spec: Specialization, config: Config, device: Device) -> Compiled:
    """About what the kernels of a config take of a multiprocessor, before they are compiled."""
    return Compiled.of({f"{config.family}_{part.name}": part.taken(spec, config, device) for part in parts(config)})


def _portable_tile(spec: Specialization, config: Config, prefix: str = "") -> Tiling:
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
    )


def _portable_taken(spec: Specialization, config: Config, device: Device, *, part: str) -> Taken:
    """Registers of sums, of S and dP, and of the tile of dQ that is added; shared memory of tiles in the pipeline."""
    tile = _portable_tile(spec, config, "dq_" if part == "dq" else "")
    d, dv, threads = tile.query_columns, tile.value_columns, tile.warps * device.warp_size
    owned, walked = (tile.block_m, tile.block_n) if part == "dq" else (tile.block_n, tile.block_m)
    sums = {"dq": d, "dkdv": d + dv, "main": d + dv}[part] * owned + (walked * d if part == "main" else 0)
    needed = (sums + 2 * owned * walked) // threads + OTHER_REGS[part]
    registers = min(needed, MAX_REGS_PER_THREAD)
    shared = (owned + max(tile.stages - 1, 1) * walked) * (d + dv) * DTYPE_BYTES[spec.dtype]
    fits = (
        device.regs_per_sm // (registers * threads),
        device.smem_per_sm // (shared + 1024),
        device.max_threads_per_sm // threads,
    )
    spills = REGISTER_BYTES * (needed - registers)
    return Taken(registers=registers, spills=spills, shared_bytes=shared, occupancy=max(min(fits), 1))


def _hopper_tile(spec: Specialization, config: Config, part: str) -> Tiling:
    queries, d, dv = part == "dq", block(spec.head_dim), block(spec.head_dim_v)
    keys = 2 * ROWS if max(d, dv) <= HOPPER_WIDEST else ROWS
    return Tiling(
        block_m=2 * ROWS if queries else config.integer("block_m"),
        block_n=config.integer("dq_block_n") if queries else keys,
        warps=HOPPER_WARPS,
        stages=config.integer("dq_stages" if queries else "q_stages"),
        query_columns=d,
        value_columns=dv,
        pointer_loads=False,
        heads_per_group=config.integer("heads_per_group"),
        heavy_first=spec.causal,
        steps_in_flight=2,
    )


def _hopper_taken(spec: Specialization, config: Config, device: Device) -> Taken:
    """One program takes a multiprocessor: nearly all of its shared memory, and all of its registers."""
    return Taken(registers=HOPPER_REGISTERS, spills=0, shared_bytes=device.smem_per_block, occupancy=1)


_TILE = ("block_m", "block_n", "num_warps", "num_stages")
_SHARED = ("loads", "heads_per_group", "split_d")
_HOPPER = ("block_m", "q_stages", "heads_per_group")

_SPLIT = (
    Part(
        name="dkdv",
        knobs=(*_TILE, *_SHARED),
        tile=_portable_tile,
        loop=owning_keys,
        taken=functools.partial(_portable_taken, part="dkdv"),
    ),
    Part(
        name="dq",
        knobs=(*(f"dq_{name}" for name in _TILE), *_SHARED),
        tile=functools.partial(_portable_tile, prefix="dq_"),
        loop=owning_queries,
        taken=functools.partial(_portable_taken, part="dq"),
    ),
)
_FUSED = Part(
    name="main",
    knobs=(*_TILE, *_SHARED),
    tile=_portable_tile,
    loop=functools.partial(owning_keys, added_trips=ATOMIC_TRIPS),
    taken=functools.partial(_portable_taken, part="main"),
)
_HOPPER_SPLIT = (
    Part(
        name="dkdv",
        knobs=_HOPPER,
        tile=functools.partial(_hopper_tile, part="dkdv"),
        loop=owning_keys,
        taken=_hopper_taken,
    ),
    Part(
        name="dq",
        knobs=("dq_block_n", "dq_stages", "heads_per_group"),
        tile=functools.partial(_hopper_tile, part="dq"),
        loop=owning_queries,
        taken=_hopper_taken,
    ),
)
_HOPPER_FUSED = Part(
    name="main",
    knobs=_HOPPER,
    tile=functools.partial(_hopper_tile, part="main"),
    loop=functools.partial(owning_keys, added_trips=COPY_ENGINE_TRIPS),
    taken=_hopper_taken,
)

FAMILIES: dict[str, tuple[Part, ...]] = {
    "portable_backward_split": _SPLIT,
    "portable_backward_fused": (_FUSED,),
    "hopper_backward_split": _HOPPER_SPLIT,
    "hopper_backward_fused": (_HOPPER_FUSED,),
}
