"""Shared memory and registers of the Hopper decode family, as arithmetic: what does not fit is not compiled."""

from __future__ import annotations

from flashgen.codegen.common_portable import MAX_REGS_PER_THREAD
from flashgen.codegen.common_wgmma import BARRIER_BYTES, MAX_REGISTERS, REGISTER_STEP, ROWS, SM90
from flashgen.codegen.inspect import RESERVED_SMEM
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

PRODUCER_WARPS, CONSUMER_WARPS = 4, 4
"""With one or two warps that copy, addresses took as long as the memory does."""

FEW_ROWS = (8, 16, 32)
"""Query rows of programs that compute the transposes of scores and output, as columns, of which wgmma has 8 or more."""

PRODUCER_REGISTERS = {1: 128, 2: 80, 3: 80}
"""Of a thread that copies, by the programs of an SM: addresses of 8 to 32 rows."""

OTHER_REGS = 40
"""Registers of a consumer thread beside scores, weights and output: statistics, the range of each row, phases."""


def q_stages(spec: Specialization, config: Config) -> int:
    """Slots for queries, each of a piece: as many as the ring has, for pieces of one tile, or as there is room for."""
    room = min(SM90.smem_per_block, SM90.smem_per_sm // config.integer("per_sm") - RESERVED_SMEM)
    slots = range(config.integer("num_stages"), 1, -1)
    return next((slot for slot in slots if _smem_bytes(spec, config, slot) <= room), 1)


def smem_needed(spec: Specialization, config: Config) -> int:
    """The shared memory of a program in bytes: the ring of K and V, and the queries."""
    return _smem_bytes(spec, config, q_stages(spec, config))


def _smem_bytes(spec: Specialization, config: Config, tiles_of_queries: int) -> int:
    block_m, block_n = config.integer("block_m"), config.integer("block_n")
    elements = (2 * config.integer("num_stages") * block_n + tiles_of_queries * block_m) * spec.head_dim
    # the transpose of the weights is an operand that lies in shared memory
    elements += block_m * block_n if block_m != ROWS else 0
    return elements * DTYPE_BYTES[spec.dtype] + BARRIER_BYTES


def register_limit(config: Config) -> int:
    """Registers of a thread before the roles divide them, so that the programs of an SM lie side by side; 0 is any."""
    return {1: 0, 2: 128, 3: 80}[config.integer("per_sm")]


def consumer_registers(config: Config, device: Device) -> int:
    """Those of a thread that multiplies: what the threads that copy leave."""
    warps = PRODUCER_WARPS + CONSUMER_WARPS
    threads = config.integer("per_sm") * warps * device.warp_size
    a_thread = min(device.regs_per_sm // threads // REGISTER_STEP * REGISTER_STEP, MAX_REGS_PER_THREAD)
    left = a_thread * warps - PRODUCER_REGISTERS[config.integer("per_sm")] * PRODUCER_WARPS
    return min(left // CONSUMER_WARPS // REGISTER_STEP * REGISTER_STEP, MAX_REGISTERS)


def why_too_large(spec: Specialization, config: Config, device: Device) -> str | None:
    """The resource that the programs of a config cannot have side by side on an SM of `device`, or None."""
    per_sm, shared = config.integer("per_sm"), smem_needed(spec, config)
    if shared > device.smem_per_block:
        return f"it needs {shared} bytes of shared memory and a block has {device.smem_per_block}"
    if per_sm * (shared + RESERVED_SMEM) > device.smem_per_sm:
        return f"{per_sm} programs of {shared} bytes of shared memory do not fit into the {device.smem_per_sm} of an SM"
    block_m, block_n = config.integer("block_m"), config.integer("block_n")
    if block_m != ROWS and block_n < ROWS:
        return f"keys are rows of a product, of which a warpgroup has {ROWS}, and a step has {block_n}"
    # a thread's part of a tile: scores and output in fp32, weights in two bytes, and with few rows the sums of keys
    sums = block_n if block_m != ROWS else 0
    needed = (spec.head_dim + block_n + block_n // 2 + sums) * block_m // (
        CONSUMER_WARPS * device.warp_size
    ) + OTHER_REGS
    available = consumer_registers(config, device)
    if needed > available:
        return f"a consumer thread needs about {needed} registers and gets {available}"
    return None
