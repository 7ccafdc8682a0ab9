"""Shared memory and named barriers of the Hopper backward families: what does not fit is not compiled."""

from __future__ import annotations

from flashgen.codegen.hopper_resources import BARRIER_BYTES, FIRST_NAMED_BARRIER, ROWS, block
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

MAXNREG = 168
"""Registers of a thread at the launch: 64k over three warpgroups, of which the third has the producer."""

CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
"""Registers of a thread once the roles share them. A producer with 40 made ptxas run all products one by one."""

WIDEST = 128
"""Columns of a head up to which a warpgroup holds both dk and dv of its 64 keys in registers."""

FP32_BYTES = 4


def is_wide(spec: Specialization) -> bool:
    """Whether one warpgroup sums dk and the other dv, of the same 64 keys."""
    return max(block(spec.head_dim), block(spec.head_dim_v)) > WIDEST


def block_n(spec: Specialization) -> int:
    """Keys of a program: 64 for each of two warpgroups, or for both. 256 were slower."""
    return ROWS if is_wide(spec) else 2 * ROWS


def dq_columns(spec: Specialization, config: Config) -> int:
    """Columns of dq of a warpgroup: all of them for its half of 128 queries, or half of them for all of 64."""
    columns = block(spec.head_dim)
    return columns if config["block_m"] == 2 * ROWS else columns // 2


def main_bytes(spec: Specialization, config: Config) -> int:
    """Shared memory of the kernel that owns keys."""
    width, width_v = block(spec.head_dim), block(spec.head_dim_v)
    block_m, q_stages, do_stages = (config.integer(name) for name in ("block_m", "q_stages", "do_stages"))
    elements = block_n(spec) * (width + width_v) + block_m * (q_stages * width + do_stages * width_v)
    rows = block_m * (q_stages + do_stages)
    path = dict(config.knobs).get("dq_path")
    if path is not None or is_wide(spec):
        elements += 2 * block_n(spec) * block_m  # ds or p, of this step and the last
    staged = 2 * ROWS * dq_columns(spec, config) if path in ("inline", "writer") else 0
    return elements * DTYPE_BYTES[spec.dtype] + (rows + staged) * FP32_BYTES + BARRIER_BYTES


def dq_bytes(spec: Specialization, config: Config, v_stages: int) -> int:
    """Shared memory of the split family's kernel that owns queries, with so many slots for V."""
    width, width_v, block_n = block(spec.head_dim), block(spec.head_dim_v), config.integer("dq_block_n")
    elements = 2 * ROWS * (width + width_v) + block_n * (config.integer("dq_stages") * width + v_stages * width_v)
    return elements * DTYPE_BYTES[spec.dtype] + BARRIER_BYTES


def dq_v_stages(spec: Specialization, config: Config, device: Device) -> int:
    """As many slots for V as for K, or one where those do not fit: V is not needed as long in a step."""
    stages = config.integer("dq_stages")
    return stages if dq_bytes(spec, config, stages) <= device.smem_per_block else 1


def named_barriers(spec: Specialization, config: Config) -> dict[str, int]:
    """The first number of each group of named barriers; none where barriers are in shared memory."""
    if config["barriers"] != "named":
        return {}
    path = dict(config.knobs).get("dq_path")
    sizes = {"Q_EMPTY": config.integer("q_stages"), "DO_EMPTY": config.integer("do_stages")}
    sizes |= {"MEETING": 1} if path or is_wide(spec) else {}
    sizes |= {"P_FULL": 2, "P_EMPTY": 2} if is_wide(spec) else {}
    sizes |= {"DQ_FULL": 2, "DQ_EMPTY": 2} if path == "writer" else {}
    found, number = {}, FIRST_NAMED_BARRIER
    for name, size in sizes.items():
        found[name] = number
        number += size
    if not path:
        found |= {"DQ_K_EMPTY": FIRST_NAMED_BARRIER, "DQ_V_EMPTY": FIRST_NAMED_BARRIER + config.integer("dq_stages")}
    return found
