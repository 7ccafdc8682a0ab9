"""How many programs of the portable forward family share the keys of a block of queries, and where that serves."""

from __future__ import annotations

import functools

from flashgen.codegen.common_portable import programs_side_by_side
from flashgen.codegen.family import Sizes
from flashgen.codegen.key_splits import best_splits, split_keys, why_not_shared, with_shares
from flashgen.codegen.portable_forward.resources import smem_needed
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

BLOCK_US, FP32_BLOCK_US = 1.9, 3.0
"""Microseconds of a block of keys on an H100, by default configs: larger heads have smaller blocks."""


def key_splits(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int:
    """The programs that share the keys of a block of queries in a launch."""
    return _best(spec, config, sizes, device) if split_keys(config) else 1


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config with shared keys where these take less time at some sizes, and without where they do not."""
    return with_shares(config, why_not_shared(spec) is None and _best(spec, config, sizes, device) > 1)


def beside(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """The config that `fitted` may serve in the place of one."""
    return (config.replace(split_keys=not split_keys(config)),) if why_not_shared(spec) is None else ()


def _best(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int:
    block_m, block_n = config.integer("block_m"), config.integer("block_n")
    block_us = FP32_BLOCK_US if spec.dtype == "fp32" else BLOCK_US
    per_sm = _side_by_side(spec, config, device)
    return best_splits(spec, sizes, device, rows=block_m, block_n=block_n, block_us=block_us, per_sm=per_sm)


@functools.lru_cache(maxsize=256)  # a new length asks for it
def _side_by_side(spec: Specialization, config: Config, device: Device) -> int:
    return programs_side_by_side(config, smem_needed(spec, config, device), device)
