"""What a measurement has to know of the GPU beside its properties: its clock, and who else uses it.

Without NVML (`flashgen.launch.nvml`) there is no clock and no warning of other processes, and everything else works.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from flashgen.launch.nvml import ask, driver_version, handle, limits, state, versions

__all__ = (
    "driver_version",
    "gpus_of_driver",
    "limits",
    "other_processes",
    "sm_clock_mhz",
    "state",
    "versions",
)


def gpus_of_driver() -> list[str]:
    """The names of the GPUs that the NVIDIA driver has, whether torch can use them or not; empty if it does not answer.

    The driver counts them all: CUDA_VISIBLE_DEVICES hides none here.
    """

    def names(nvml: Any) -> list[str]:
        every = (nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(n)) for n in range(nvml.nvmlDeviceGetCount()))
        return [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in every]

    found: list[str] = ask(names, [])
    return found


def sm_clock_mhz(index: int = 0) -> float | None:
    """The SM clock at this moment, None where it cannot be read."""
    clock = ask(lambda nvml: nvml.nvmlDeviceGetClockInfo(handle(index), nvml.NVML_CLOCK_SM), None)
    return None if clock is None else float(clock)


def other_processes(index: int = 0) -> list[str]:
    """One line for each other process that computes on the GPU, e.g. `process 1234 (2.1 GB)`.

    In a container the driver's process numbers are the host's, and this process cannot find itself among them: then
    one of the listed ones is left out for it.
    """
    running: list[Any] = ask(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(handle(index)), [])
    others = [process for process in running if process.pid != os.getpid()]
    if others and len(others) == len(running) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        others = sorted(others, key=lambda process: process.usedGpuMemory or 0)[1:]
    return [f"process {process.pid} ({(process.usedGpuMemory or 0) / 1e9:.1f} GB)" for process in others]
