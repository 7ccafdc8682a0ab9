"""What a config of the portable backward families needs of an SM at least; what could run needs no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.codegen.common_mods import has_blocks
from flashgen.codegen.common_portable import (
    MIN_WARPGROUP_ROWS,
    OTHER_REGS,
    TENSOR_MEMORY_COLUMNS,
    TENSOR_MEMORY_ROWS,
)
from flashgen.codegen.head_parts import LEAST_BLOCK, is_split, padded
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.score_mods import MASK_BLOCK
from flashgen.core.workload import DTYPE_BYTES, Specialization

SPLIT_ID, FUSED_ID = "portable_backward_split", "portable_backward_fused"

PREPARE_ELEMENTS = 8192
"""Of one tensor in a program that works on rows: 64 of each of its 128 threads, loaded 16 bytes at a time."""

SCORES_BYTES = 1024
"""Of a block of fp32 scores, whose layout changes, too."""

DBIAS_TILE_BYTES = 16 * 1024
"""Of one input in a program of the gradient of a bias; two of them lie beside each other in 64 KB."""


def is_fused(config: Config) -> bool:
    """Whether dQ is added by the kernel of dK and dV."""
    return config.family == FUSED_ID


def prepare_rows(spec: Specialization) -> int:
    """Query rows of a program of the first and the last kernel."""
    width = max(padded(spec.head_dim, False), padded(spec.head_dim_v, False))
    return max(16, min(64, PREPARE_ELEMENTS // width))


def dbias_blocks(spec: Specialization) -> tuple[int, int]:
    """Queries and keys of a block of the kernel for the gradient of a bias."""
    width = max(padded(spec.head_dim, False), padded(spec.head_dim_v, False))
    largest = 32 if spec.dtype == "fp32" else 64  # without tensor cores a tile takes more registers
    rows = max(LEAST_BLOCK, min(largest, DBIAS_TILE_BYTES // (width * DTYPE_BYTES[spec.dtype])))
    return rows, max(LEAST_BLOCK, rows // 2)  # the sum is one more tile in registers


def row_block(spec: Specialization, config: Config) -> int:
    """Query rows of scratch memory are padded to a multiple of it: the largest block of any kernel."""
    blocks = [config.integer("block_m"), prepare_rows(spec), dbias_blocks(spec)[0]]
    blocks += [MASK_BLOCK] if has_blocks(spec) else []  # steps are those of whole blocks of a block mask
    return max(blocks if is_fused(config) else [*blocks, config.integer("dq_block_m")])


def dq_columns(spec: Specialization, config: Config) -> int:
    """Columns of dQ in fp32: those of its tiles."""
    return padded(spec.head_dim, is_split(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A kernel that owns rows of one side of the scores and walks those of the other.

    `acc` are the fp32 columns that it adds up for each of its rows, `added` those that it adds to memory for each row
    of a step; `columns` are those of the two tensors that each side brings, of `element_bytes` each, and `widest` those
    of the wider one.
    """

    own: int
    walk: int
    acc: int
    added: int
    columns: int
    widest: int
    element_bytes: int
    warps: int
    stages: int

    @property
    def step_bytes(self) -> int:
        """What one step loads."""
        return self.walk * self.columns * self.element_bytes

    @property
    def own_bytes(self) -> int:
        """What it loads once."""
        return self.own * self.columns * self.element_bytes


def loops(spec: Specialization, config: Config) -> Iterator[Loop]:
    """The kernels of a config that are worth counting: that of dK and dV, then that of dQ where there is one."""
    split = is_split(config)
    d, dv = padded(spec.head_dim, split), padded(spec.head_dim_v, split)

    def loop(own: str, walk: str, prefix: str, acc: int, added: int) -> Loop:
        return Loop(
            own=config.integer(own),
            walk=config.integer(walk),
            acc=acc,
            added=added,
            columns=d + dv,
            widest=max(d, dv),
            element_bytes=DTYPE_BYTES[spec.dtype],
            warps=config.integer(f"{prefix}num_warps"),
            stages=config.integer(f"{prefix}num_stages"),
        )

    yield loop("block_n", "block_m", "", d + dv, d if is_fused(config) else 0)
    if not is_fused(config):
        yield loop("dq_block_m", "dq_block_n", "dq_", d, 0)


def why_too_wide(spec: Specialization, device: Device, *, fused: bool) -> str | None:
    """The reason why not even blocks of 16 fit into the shared memory of an NVIDIA device, or None.

    That is Q, K, V and dO; where products of tensor cores change their layouts once more, also the wider of K and V,
    and what becomes dQ.
    """
    d, dv = padded(spec.head_dim, False), padded(spec.head_dim_v, False)
    columns = 2 * (d + dv) + (0 if spec.dtype == "fp32" else max(d, dv) + d * fused)
    needed = LEAST_BLOCK * columns * DTYPE_BYTES[spec.dtype] + SCORES_BYTES
    if device.is_nvidia and needed > device.smem_per_block:
        return f"blocks of {LEAST_BLOCK} need {needed} bytes of shared memory and a block has {device.smem_per_block}"
    return None


def why_too_large(loop: Loop, device: Device) -> str | None:
    """The resource that a kernel cannot have on `device`, or None."""
    threads = loop.warps * device.warp_size
    needed = registers_needed(loop, device)
    available = min(_most_registers(device), device.regs_per_sm // threads)
    if needed > available:
        return f"a thread needs about {needed} registers and has {available}"
    columns = tensor_columns(loop)
    if device.has_tensor_memory and columns > TENSOR_MEMORY_COLUMNS:
        return f"it needs {columns} columns of tensor memory and there are {TENSOR_MEMORY_COLUMNS}"
    shared = smem_needed(loop, device)
    if shared > device.smem_per_block:
        return f"it needs at least {shared} bytes of shared memory and a block has {device.smem_per_block}"
    return None


def registers_needed(loop: Loop, device: Device) -> int:
    """A lower bound of the registers of a thread: p and dp, and the sums where tensor memory does not hold them."""
    words = loop.own * 2 * loop.walk
    if not (device.has_tensor_memory and loop.own >= MIN_WARPGROUP_ROWS):
        words += loop.own * loop.acc
    return words // (loop.warps * device.warp_size) + OTHER_REGS


def tensor_columns(loop: Loop) -> int:
    """Columns of tensor memory on sm100: the sums, s and dp, p or ds as an operand, and what is added to memory."""
    if loop.own < MIN_WARPGROUP_ROWS:
        return 0
    columns = loop.own * (loop.acc + 2 * loop.walk + loop.walk // 2) // TENSOR_MEMORY_ROWS
    return columns + (loop.added if loop.walk >= MIN_WARPGROUP_ROWS else 0)


def smem_needed(loop: Loop, device: Device) -> int:
    """A lower bound of shared memory in bytes: what a program loads once, and the stages of what it walks.

    A loop for wgmma has a buffer for each stage, another one less. On AMD its own rows are in registers.
    """
    if not device.is_nvidia:
        return loop.step_bytes * max(loop.stages - 1, 1) // (2 if loop.stages == 1 else 1)
    if not _is_warpgroup(loop, device):
        return loop.own_bytes + max(loop.stages - 1, 1) * loop.step_bytes
    operand = loop.own * loop.walk * loop.element_bytes if loop.added else 0
    return loop.own_bytes + loop.stages * loop.step_bytes + operand


def _is_warpgroup(loop: Loop, device: Device) -> bool:
    """Whether the tensor cores read what a program owns from shared memory; it transposes no operand of 32 bits."""
    transposes = bool(loop.added) and loop.element_bytes == 4
    return device.has_warpgroup_mma and loop.own >= MIN_WARPGROUP_ROWS and not transposes


def _most_registers(device: Device) -> int:
    """Of one thread: CDNA has vector and accumulation registers."""
    return device.architecture.regs_per_thread
