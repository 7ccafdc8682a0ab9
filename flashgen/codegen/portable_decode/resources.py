"""What a config of the portable decode family takes of an SM, and the shapes of its tiles."""

from __future__ import annotations

from flashgen.codegen.common_portable import MAX_REGS_PER_THREAD, MIN_WARPGROUP_ROWS, OTHER_REGS
from flashgen.codegen.common_wgmma import THREADS_PER_WARPGROUP
from flashgen.codegen.head_parts import tile_side
from flashgen.codegen.inspect import RESERVED_SMEM
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

NVIDIA_WARP, NVIDIA_REGISTERS, REGISTER_STEP = 32, 65536, 8
"""Threads of a warp, registers of an SM, and in what numbers threads get them; other vendors know no limit."""

WARPGROUP_WARPS = THREADS_PER_WARPGROUP // NVIDIA_WARP

OTHER_SMEM = 8192
"""Bytes of shared memory beside the stages, for p between the products and for sums over warps: 6144 were found. One
warpgroup needs none: a row of its products lies in one warp."""


def uses_wgmma(config: Config) -> bool:
    """Whether warpgroups multiply, on sm90: elsewhere what is said of their memory is above the need."""
    is_large = config.integer("block_m") >= MIN_WARPGROUP_ROWS and config.integer("num_warps") % WARPGROUP_WARPS == 0
    return is_large and not config["warp_keys"]


def smem_needed(spec: Specialization, config: Config) -> int:
    """The shared memory of a program in bytes: a buffer of K and V for each stage but the one that is computed."""
    row = tile_side(spec.head_dim) + tile_side(spec.head_dim_v)
    buffers, queries, other = max(config.integer("num_stages") - 1, 1), 0, 0 if config["warp_keys"] else OTHER_SMEM
    if uses_wgmma(config):
        # what is multiplied while the next step is copied has a buffer more, and queries lie there, too
        buffers, queries = config.integer("num_stages"), config.integer("block_m") * tile_side(spec.head_dim)
        other = 0 if config["num_warps"] == WARPGROUP_WARPS else OTHER_SMEM
    elements = buffers * config.integer("block_n") * row + queries
    return elements * DTYPE_BYTES[spec.dtype] + other


def _tile_words(spec: Specialization, config: Config) -> int:
    """Registers of a thread for queries, scores and outputs, where warps share nothing or divide all of it."""
    rows, warps = config.integer("block_m"), config.integer("num_warps")
    columns = tile_side(spec.head_dim_v) + tile_side(spec.head_dim) // 2
    if config["warp_keys"]:
        return rows * (config.integer("block_n") // warps + columns)
    return rows * (config.integer("block_n") + columns) // warps


def register_limit(config: Config) -> int:
    """Registers that a thread may have, so that the programs of an SM lie there side by side; 0 is no limit.

    Left alone, ptxas takes what makes one program fastest, and shares that are equal run one after the other.
    """
    threads = config.integer("per_sm") * config.integer("num_warps") * NVIDIA_WARP
    fits = NVIDIA_REGISTERS // threads // REGISTER_STEP * REGISTER_STEP
    return config.integer("maxnreg") or (fits if fits < MAX_REGS_PER_THREAD else 0)


def why_too_large(spec: Specialization, config: Config, device: Device) -> str | None:
    """The resource that the programs of a config cannot have side by side on an SM of `device`, or None."""
    per_sm, threads = config.integer("per_sm"), config.integer("num_warps") * device.warp_size
    shared = smem_needed(spec, config)
    if shared > device.smem_per_block:
        return f"it needs {shared} bytes of shared memory and a block has {device.smem_per_block}"
    if per_sm * (shared + RESERVED_SMEM) > device.smem_per_sm:
        return f"{per_sm} programs of {shared} bytes of shared memory do not fit into the {device.smem_per_sm} of an SM"
    if per_sm * threads > device.max_threads_per_sm:
        return f"{per_sm} programs of {threads} threads are more than the {device.max_threads_per_sm} of an SM"
    words = _tile_words(spec, config) // device.warp_size
    available = min(MAX_REGS_PER_THREAD, device.regs_per_sm // (per_sm * threads))
    available = min(available, config.integer("maxnreg") or available)
    if words + OTHER_REGS > available:
        return f"a thread needs about {words + OTHER_REGS} registers and has {available}"
    return None
