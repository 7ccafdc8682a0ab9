"""The GPUs of this process as values of `core.device`: what torch reports of each, and the catalogue's figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashgen.core.device import CATALOGUE, SOLD_POWER_W, Device, memory_class_gb, unusual_power_w
from flashgen.core.errors import DeviceError


def current_device(index: int = 0) -> Device:
    """GPU `index` of torch as a `Device`; bandwidth and peak are the catalogue's where the identity is known, else 0.

    Raises:
        DeviceError: torch sees no such GPU.
    """
    if not torch.cuda.is_available():
        raise DeviceError("a GPU that torch can use is needed, and torch.cuda.is_available() is False")
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceError(f"a GPU index is below {torch.cuda.device_count()} here, got {index}")
    properties, is_hip = torch.cuda.get_device_properties(index), torch.version.hip is not None
    sold_w = 0 if is_hip else SOLD_POWER_W.get(properties.name) or _asked_power_w(index)
    return device_of(properties, is_hip=is_hip, sold_w=sold_w)


def _asked_power_w(index: int) -> int:
    from flashgen.launch import nvml  # which takes some ms to start, and a card that is named needs it not

    return nvml.sold_power_w(index)


def device_of(properties: Any, *, is_hip: bool, sold_w: int = 0) -> Device:
    """A `Device` from torch's device properties (only reported numbers, no catalogue figure overrides them).

    `sold_w` is the power limit in watts that the card is sold with, 0 if that is not known.
    """
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
    device = dataclasses.replace(device, power_w=unusual_power_w(device, sold_w))
    for known in CATALOGUE:
        if known.identity == device.usual_identity:
            return dataclasses.replace(device, bandwidth_gbs=known.bandwidth_gbs, peak_tflops=known.peak_tflops)
    return device
