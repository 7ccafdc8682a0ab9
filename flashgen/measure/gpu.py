"""What a measurement has to know of the GPU beside its properties: what drives it, its clock, and who else uses it.

NVML (the package nvidia-ml-py) may be missing or refuse: without it there is no clock, no driver version and no warning
of other processes, and everything else works.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashgen._version import __version__
from flashgen.core.record import Versions


def versions() -> Versions:
    """The software of this process; what is not installed is an empty string."""
    return Versions(
        flashgen=__version__, triton=_installed("triton"), torch=str(torch.__version__), driver=driver_version()
    )


def driver_version() -> str:
    """The NVIDIA driver (`580.95.05`) or the HIP runtime (`hip 6.4...`); empty where it is not known."""
    if torch.version.hip is not None:
        return f"hip {torch.version.hip}"
    return str(_ask(lambda nvml: nvml.nvmlSystemGetDriverVersion(), ""))


def gpus_of_driver() -> list[str]:
    """The names of the GPUs that the NVIDIA driver has, whether torch can use them or not; empty if it does not answer.

    The driver counts them all: CUDA_VISIBLE_DEVICES hides none here.
    """

    def names(nvml: Any) -> list[str]:
        every = (nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(n)) for n in range(nvml.nvmlDeviceGetCount()))
        return [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in every]

    found: list[str] = _ask(names, [])
    return found


def sm_clock_mhz(index: int = 0) -> float | None:
    """The SM clock at this moment, None where it cannot be read."""
    clock = _ask(lambda nvml: nvml.nvmlDeviceGetClockInfo(_handle(index), nvml.NVML_CLOCK_SM), None)
    return None if clock is None else float(clock)


def state(index: int = 0) -> tuple[tuple[str, float], ...]:
    """What decides how fast the GPU is at this moment: limit of its power, clocks, temperature; as far as NVML says."""
    questions: dict[str, Callable[[Any, Any], float]] = {
        "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_limit_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "sm_clock_max_mhz": lambda nvml, handle: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    found = {name: _ask(partial(_figure, question, index), None) for name, question in questions.items()}
    return tuple((name, value) for name, value in found.items() if value is not None)


def _figure(question: Callable[[Any, Any], float], index: int, nvml: Any) -> float:
    return float(question(nvml, _handle(index)))


def other_processes(index: int = 0) -> list[str]:
    """One line for each other process that computes on the GPU, e.g. `process 1234 (2.1 GB)`.

    In a container the driver's process numbers are the host's, and this process cannot find itself among them: then
    one of the listed ones is left out for it.
    """
    running: list[Any] = _ask(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(_handle(index)), [])
    others = [process for process in running if process.pid != os.getpid()]
    if others and len(others) == len(running) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        others = sorted(others, key=lambda process: process.usedGpuMemory or 0)[1:]
    return [f"process {process.pid} ({(process.usedGpuMemory or 0) / 1e9:.1f} GB)" for process in others]


def _ask(question: Callable[[Any], Any], otherwise: Any) -> Any:
    """The answer of NVML, or `otherwise`: an old driver, a container or a MIG slice may refuse any question."""
    nvml = _nvml()
    if nvml is None:
        return otherwise
    try:
        return question(nvml)
    except nvml.NVMLError:
        return otherwise


@functools.cache
def _nvml() -> Any | None:
    if torch.version.hip is not None:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except nvml.NVMLError:
        return None
    return nvml


@functools.cache
def _handle(index: int) -> Any:
    """NVML's handle of torch's GPU `index`, found by UUID because their numbering differs."""
    nvml = _nvml()
    assert nvml is not None
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
