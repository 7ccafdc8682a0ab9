"""What a config of the portable forward family needs of a multiprocessor at least; what could run needs no more."""

from __future__ import annotations

from flashgen.codegen.head_parts import padded, why_not_split
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
MAX_THREADS = 1024
MAX_REGS_PER_THREAD = 255
"""The most registers that one thread can address, on NVIDIA and (in vector registers of a wave) close to it on AMD."""

OTHER_REGS = 24
"""Registers per thread for row statistics, addresses and loop state; below what any compiled variant needed."""

MIN_WARPGROUP_ROWS = 64
"""Rows that the matrix units of sm90 and sm100 multiply at once, from shared memory; smaller tiles use mma.sync."""

TENSOR_MEMORY_ROWS, TENSOR_MEMORY_COLUMNS = 128, 512
"""Where sm100 accumulates: 32-bit words of a multiprocessor."""


def why_not_portable(spec: Specialization, device: Device) -> str | None:
    """What no portable family does, in either direction: the reason, or None."""
    if spec.varlen:
        return "it has no varlen"
    if spec.page_size is not None:
        return "it reads no paged keys"
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"its {name} is {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {size}"
    if spec.dtype == "tf32" and not (device.is_nvidia or device.arch == "gfx942"):
        return f"the matrix unit of {device.arch} multiplies no TF32"
    if device.is_nvidia and device.capability < 80:
        return f"it needs sm80 or newer, not {device.arch}"
    return None


def is_split(config: Config) -> bool:
    """Whether heads lie in two parts; a config that is older than the knob means that they do not."""
    return bool(config.get("split_d", False))


def allowed_values_of_all(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    """What a specialization leaves of the knobs that all portable families have: no other value is ever valid."""
    found: dict[str, tuple[KnobValue, ...]] = {}
    if not spec.aligned16:
        found["loads"] = ("pointer",)
    if why_not_split(spec):
        found["split_d"] = (False,)
    return found


def why_not_loads(spec: Specialization, config: Config, device: Device) -> str | None:
    """Why Triton would refuse the config's kind of loads, or silently turn it into the other, or None."""
    if config["loads"] != "descriptor":
        return None
    if not device.has_tma:
        return f"descriptors are turned into pointers on {device.arch}: the same kernel twice"
    if not spec.aligned16:
        return "descriptors need pointers and strides that are multiples of 16 bytes"
    return None


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
    if device.arch == "sm100" and columns > TENSOR_MEMORY_COLUMNS:
        return f"it needs {columns} columns of tensor memory and there are {TENSOR_MEMORY_COLUMNS}"
    shared = smem_needed(spec, config, device)
    if shared > device.smem_per_block:
        return f"it needs at least {shared} bytes of shared memory and a block has {device.smem_per_block}"
    return None


def registers_needed(spec: Specialization, config: Config, device: Device) -> int:
    """A lower bound of the 32-bit registers of a thread: output accumulator, fp32 scores, and Q where it stays in them.

    Matrix units before Hopper's (and consumer Blackwell's) multiply from registers, and Q is kept there over the loop.
    """
    threads = config.integer("num_warps") * device.warp_size
    rows = config.integer("block_m")
    words = rows * _score_columns(spec, config)
    if device.arch not in ("sm90", "sm100"):
        words += rows * padded(spec.head_dim, is_split(config)) * DTYPE_BYTES[spec.dtype] // 4
    return words // threads + OTHER_REGS


def smem_needed(spec: Specialization, config: Config, device: Device) -> int:
    """A lower bound of the shared memory in bytes: the stages of K and V, and Q where the matrix unit reads it from."""
    size, split = DTYPE_BYTES[spec.dtype], is_split(config)
    step = config.integer("block_n") * (padded(spec.head_dim, split) + padded(spec.head_dim_v, split)) * size
    stages = config.integer("num_stages")
    warpgroup = device.arch in ("sm90", "sm100") and config.integer("block_m") >= MIN_WARPGROUP_ROWS
    query = config.integer("block_m") * padded(spec.head_dim, split) * size if warpgroup else 0
    if stages == 1 or not device.is_nvidia:
        return query + step // 2  # without a pipeline V takes the place of K
    # a pipeline of copies keeps a buffer for each stage, one of ordinary loads a buffer less
    buffers = stages if warpgroup and config["loads"] == "descriptor" else stages - 1
    return query + buffers * step


def _score_columns(spec: Specialization, config: Config) -> int:
    """fp32 columns of a query row: its scores and its outputs."""
    return config.integer("block_n") + padded(spec.head_dim_v, is_split(config))
