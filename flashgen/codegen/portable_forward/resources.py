"""What a config of the portable forward family needs of an SM at least; what could run needs no more."""

from __future__ import annotations

from flashgen.codegen.common_portable import (
    MAX_REGS_PER_THREAD,
    MIN_WARPGROUP_ROWS,
    OTHER_REGS,
    TENSOR_MEMORY_COLUMNS,
    TENSOR_MEMORY_ROWS,
)
from flashgen.codegen.common_products import IEEE, products
from flashgen.codegen.head_parts import is_split, padded
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

MAX_THREADS = 1024


def why_too_large(spec: Specialization, config: Config, device: Device) -> str | None:
    """The resource that the config cannot have on `device`, or None."""
    threads = config.integer("num_warps") * device.warp_size
    if threads > MAX_THREADS:
        return f"a block has at most {MAX_THREADS} threads, not {threads}"
    needed = registers_needed(spec, config, device)
    available = min(MAX_REGS_PER_THREAD, device.regs_per_sm // threads)
    available = min(available, config.integer("maxnreg") or available)
    if needed > available:
        return f"a thread needs about {needed} registers and has {available}"
    columns = config.integer("block_m") // TENSOR_MEMORY_ROWS * _score_columns(spec, config)
    if device.has_tensor_memory and columns > TENSOR_MEMORY_COLUMNS:
        return f"it needs {columns} columns of tensor memory and there are {TENSOR_MEMORY_COLUMNS}"
    shared = smem_needed(spec, config, device)
    if shared > device.smem_per_block:
        return f"it needs at least {shared} bytes of shared memory and a block has {device.smem_per_block}"
    return None


def registers_needed(spec: Specialization, config: Config, device: Device) -> int:
    """A lower bound of the 32-bit registers of a thread: output accumulator, fp32 scores, and Q where it stays in them.

    Tensor cores before Hopper's (and consumer Blackwell's) multiply from registers, and Q is kept there over the loop.
    """
    threads = config.integer("num_warps") * device.warp_size
    rows = config.integer("block_m")
    words = rows * _score_columns(spec, config)
    if products(config) != IEEE:
        words += rows * padded(spec.head_dim_v, is_split(config))  # a step's sum, which is then added to the output
    if not device.has_warpgroup_mma:
        words += rows * padded(spec.head_dim, is_split(config)) * DTYPE_BYTES[spec.dtype] // 4
    return words // threads + OTHER_REGS


def smem_needed(spec: Specialization, config: Config, device: Device) -> int:
    """A lower bound of the shared memory in bytes: the stages of K and V, and Q where the tensor cores read it from."""
    size, split = DTYPE_BYTES[spec.dtype], is_split(config)
    step = config.integer("block_n") * (padded(spec.head_dim, split) + padded(spec.head_dim_v, split)) * size
    stages = config.integer("num_stages")
    warpgroup = device.has_warpgroup_mma and config.integer("block_m") >= MIN_WARPGROUP_ROWS
    query = config.integer("block_m") * padded(spec.head_dim, split) * size if warpgroup else 0
    if stages == 1 or not device.is_nvidia:
        return query + step // 2  # without a pipeline V takes the place of K
    # a pipeline of copies keeps a buffer for each stage, one of ordinary loads a buffer less
    buffers = stages if warpgroup and config["loads"] == "descriptor" else stages - 1
    return query + buffers * step


def _score_columns(spec: Specialization, config: Config) -> int:
    """fp32 columns of a query row: its scores and its outputs."""
    return config.integer("block_n") + padded(spec.head_dim_v, is_split(config))
