"""The GPUs of this process as values of `core.device`: what torch reports of each, and the catalogue's figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashgen.core.device import CATALOGUE, Device, memory_class_gb
from flashgen.core.errors import DeviceError


def current_device(index: int = 0) -> Device:
    """GPU `index` of torch as a `Device`; bandwidth and peak are the catalogue's where the identity is known, else 0.

    Raises:
        DeviceError: torch sees no such GPU.
    """
    if not torch.cuda.is_available():
        raise DeviceError("measuring needs a GPU that torch can use, and torch.cuda.is_available() is False")
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceError(f"a GPU index is below {torch.cuda.device_count()} here, got {index}")
    return device_of(torch.cuda.get_device_properties(index), is_hip=torch.version.hip is not None)


def device_of(properties: Any, *, is_hip: bool) -> Device:
    """A `Device` from torch's device properties (only reported numbers, no catalogue figure overrides them)."""
    block = properties.shared_memory_per_block
    device = Device(
        name=properties.name,
        arch=properties.gcnArchName.split(":")[0] if is_hip else f"sm{properties.major}{properties.minor}",
        num_sms=properties.multi_processor_count,
        memory_gb=memory_class_gb(properties.total_memory),
        smem_per_block=getattr(properties, "shared_memory_per_block_optin", 0) or block,  # missing on old ROCm
        smem_per_sm=properties.shared_memory_per_multiprocessor,
        regs_per_sm=properties.regs_per_multiprocessor,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        warp_size=properties.warp_size,
        l2_bytes=properties.L2_cache_size,
    )
    for known in CATALOGUE:
        if known.identity == device.identity:
            return dataclasses.replace(device, bandwidth_gbs=known.bandwidth_gbs, peak_tflops=known.peak_tflops)
    return device
