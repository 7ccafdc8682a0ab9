"""How many programs of the portable forward family share the keys of a block of queries, and where that serves."""

from __future__ import annotations

from flashgen.codegen.family import Scratch, Sizes
from flashgen.codegen.key_splits import best_splits, scratch_of_shares, split_keys, why_not_shared, with_shares
from flashgen.codegen.portable_forward.resources import smem_needed
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

MANY_WARPS = 8
"""Programs with so many take the registers of an SM, as their sums do."""

BLOCK_US, FP32_BLOCK_US = 1.9, 3.0
"""Microseconds of a block of keys on an H100, by default configs: larger heads have smaller blocks."""


def scratch(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    """What the shares of a block leave for the kernel that merges them."""
    return scratch_of_shares(sizes, sizes.key_splits, spec.head_dim_v) if split_keys(config) else ()


def key_splits(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int:
    """The programs that share the keys of a block of queries in a launch."""
    return _best(spec, config, sizes, device) if split_keys(config) else 1


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config with shared keys where these take less time at some sizes, and without where they do not."""
    shared = why_not_shared(spec) is None and _best(spec, config, sizes, device) > 1
    return config if shared == split_keys(config) else with_shares(config, shared)


def beside(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """The config that `fitted` may serve in the place of one."""
    return (config.replace(split_keys=not split_keys(config)),) if why_not_shared(spec) is None else ()


def _best(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int:
    by_registers = max(1, MANY_WARPS // config.integer("num_warps"))
    by_memory = device.smem_per_sm // max(smem_needed(spec, config, device), 1)
    per_sm = max(1, min(by_registers, by_memory))
    block_m, block_n = config.integer("block_m"), config.integer("block_n")
    block_us = FP32_BLOCK_US if spec.dtype == "fp32" else BLOCK_US
    return best_splits(spec, sizes, device, rows=block_m, block_n=block_n, block_us=block_us, per_sm=per_sm)
