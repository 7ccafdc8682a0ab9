"""Shared memory and named barriers of the Hopper backward families: what does not fit is not compiled."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.common_groups import leaves_sums
from flashgen.codegen.common_wgmma import (
    BARRIER_BYTES,
    FIRST_NAMED_BARRIER,
    LEAST_COLUMNS,
    ROWS,
    block,
    one_part,
    widest_block,
)
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import HeadPart, can_split, head_parts, is_split, why_not_split
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

FUSED_ID = "hopper_backward_fused"
SPLIT_ID = "hopper_backward_split"

MAXNREG = 168
"""Registers of a thread at the launch: 64k over three warpgroups, of which the third has the producer and writers."""

CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
"""Registers of a thread once the roles share them. A producer with 40 made ptxas run all products one by one."""

DO_STAGES = 2
"""Slots for blocks of dO. A third slot for Q was slower by up to 15%, so one for dO was not tried."""

KEYS = 2 * ROWS
"""Keys of a tile with all columns of a head in registers."""

WIDEST = 128
"""Columns of a head up to which a warpgroup holds both dk and dv of its 64 keys in registers."""

FP32_BYTES = 4

PART_BLOCKS = 8
"""Query blocks whose dq a tile converts: 256 KB of sums."""

TOLERATED_SPILLS = 192
"""Bytes of local memory of a thread. Persistent programs spill 30 to 130, nearly all between tiles: sizes, descriptors
and the like, which the compiler keeps in registers for all of a program."""

FUSED_DEFAULT_SPILLS, SPLIT_DEFAULT_SPILLS = 48, 24
"""Of defaults of plain shapes, the most under Triton 3.6 and 3.9."""


def is_wide(spec: Specialization) -> bool:
    """Whether one warpgroup sums dk and the other dv, of the same 64 keys."""
    return widest_block(spec) > WIDEST


def parts(head_dim: int, config: Config) -> tuple[HeadPart, ...]:
    """The parts of a head that a product has at a time: one, or two that are columns of one tile in shared memory."""
    if is_split(config) and has_parts(head_dim):
        found = head_parts(head_dim, split=True)
        return tuple(replace(part, block=max(part.block, LEAST_COLUMNS)) for part in found)
    return one_part(head_dim)


def has_parts(head_dim: int) -> bool:
    """Whether a head is padded to 256 columns in one part, and to 192 in two."""
    return head_dim > WIDEST and can_split(head_dim)


def why_not_parts(spec: Specialization) -> str | None:
    """Why neither the heads of Q and K nor those of V have products of two parts, or None."""
    if has_parts(spec.head_dim) or has_parts(spec.head_dim_v):
        return None
    return why_not_split(spec) or f"parts of heads of up to {WIDEST} columns are no whole lines of the swizzle"


def block_n(spec: Specialization) -> int:
    """Keys of a tile: 64 for each of two warpgroups, or for both. 256 were slower."""
    return ROWS if is_wide(spec) else KEYS


def is_fused(config: Config) -> bool:
    """Whether dq is summed in the pass that sums dk and dv."""
    return config.family == FUSED_ID


def converts(config: Config) -> bool:
    """Whether tiles convert sums of dq."""
    return is_fused(config) and config["dq_conversion"] == "tiles"


def writes_dq(config: Config) -> bool:
    """Whether one tile has all keys of a head, and dq of its steps is all there is."""
    return is_fused(config) and config["dq_conversion"] == "none"


def most_keys(config: Config) -> int | None:
    """The keys of a launch whose tiles write dq; None is any number."""
    return KEYS if writes_dq(config) else None


def why_not_written(config: Config, sizes: Sizes) -> str | None:
    """Why dq that tiles write would be that of some of the keys, or None."""
    if not writes_dq(config) or sizes.seqlen_k <= KEYS:
        return None
    return f"tiles that write dq have all keys, at most {KEYS}, got seqlen_k {sizes.seqlen_k}"


def adds_dq(config: Config) -> bool:
    """Whether tiles add dq to sums in memory."""
    return is_fused(config) and not writes_dq(config)


def is_staggered(config: Config) -> bool:
    """Whether one warpgroup is half a step ahead; a config that is older than the knob means that none is."""
    return config.get("stagger_warpgroups", False) is True


def prefetches_scores(config: Config) -> bool:
    """Whether s is computed a step ahead; a config that is older than the knob means that it is not."""
    return config.get("qk_prefetch", False) is True


def key_gradients(config: Config) -> tuple[str, str]:
    """The parameters for dk and dv of a tile: descriptors of both, or fp32 sums that the last kernel adds."""
    return ("DkParts", "DvParts") if leaves_sums(config) else ("dk_desc", "dv_desc")


def dq_columns(spec: Specialization, config: Config) -> int:
    """Columns of dq of a warpgroup: all of them for its half of 128 queries, or half of them for all of 64."""
    columns = block(spec.head_dim)
    return columns if config["block_m"] == 2 * ROWS else columns // 2


def main_bytes(spec: Specialization, config: Config) -> int:
    """Shared memory of the kernel whose tiles are keys."""
    width, width_v = block(spec.head_dim), block(spec.head_dim_v)
    block_m, q_stages = config.integer("block_m"), config.integer("q_stages")
    elements = block_n(spec) * (width + width_v) + block_m * (q_stages * width + DO_STAGES * width_v)
    if is_fused(config) or is_wide(spec):
        elements += 2 * block_n(spec) * block_m  # ds or p, of this step and the last
    staged = 2 * ROWS * dq_columns(spec, config) if is_fused(config) else 0
    by_row = block_m * (q_stages + DO_STAGES)
    return elements * DTYPE_BYTES[spec.dtype] + (by_row + staged) * FP32_BYTES + BARRIER_BYTES


def dq_bytes(spec: Specialization, config: Config, v_stages: int) -> int:
    """Shared memory of the split family's kernel whose tiles are queries, with so many slots for V."""
    width, width_v, keys = block(spec.head_dim), block(spec.head_dim_v), config.integer("dq_block_n")
    elements = 2 * ROWS * (width + width_v) + keys * (config.integer("dq_stages") * width + v_stages * width_v)
    return elements * DTYPE_BYTES[spec.dtype] + BARRIER_BYTES


def dq_v_stages(spec: Specialization, config: Config, device: Device) -> int:
    """As many slots for V as for K, or one where those do not fit: V is not needed as long in a step."""
    stages = config.integer("dq_stages")
    return stages if dq_bytes(spec, config, stages) <= device.smem_per_block else 1


def named_barriers(spec: Specialization, config: Config) -> dict[str, int]:
    """Named barriers of the kernel whose tiles are keys: how many there are in each group."""
    sizes = {"Q_EMPTY": config.integer("q_stages"), "DO_EMPTY": DO_STAGES}
    if is_fused(config):
        return sizes | {"MEETING": 1, "DQ_FULL": 2, "DQ_EMPTY": 2}
    return sizes | ({"MEETING": 1, "P_FULL": 2, "P_EMPTY": 2} if is_wide(spec) else {})


def dq_named_barriers(config: Config) -> dict[str, int]:
    """The same of the split family's kernel whose tiles are queries."""
    return {} if is_fused(config) else dict.fromkeys(("DQ_K_EMPTY", "DQ_V_EMPTY"), config.integer("dq_stages"))


def numbered(sizes: dict[str, int]) -> dict[str, int]:
    """The first number of each group of named barriers."""
    found, number = {}, FIRST_NAMED_BARRIER
    for name, size in sizes.items():
        found[name] = number
        number += size
    return found
