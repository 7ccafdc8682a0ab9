"""What drives the GPUs of this process: versions of the software, and what NVML tells of a card.

NVML (the package nvidia-ml-py) may be missing or refuse: then there is no driver version, no clock and no limit, and
everything else works.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashgen._version import __version__
from flashgen.core.record import Limits, Versions


def versions() -> Versions:
    """The software of this process; what is not installed is an empty string."""
    return Versions(
        flashgen=__version__, triton=_installed("triton"), torch=str(torch.__version__), driver=driver_version()
    )


def driver_version() -> str:
    """The NVIDIA driver (`580.95.05`) or the HIP runtime (`hip 6.4...`); empty where it is not known."""
    if torch.version.hip is not None:
        return f"hip {torch.version.hip}"
    return str(ask(lambda nvml: nvml.nvmlSystemGetDriverVersion(), ""))


def limits(index: int = 0) -> Limits:
    """What bounds the speed of the GPU beside its model, as far as NVML says."""
    return Limits.of(state(index))


def state(index: int = 0) -> tuple[tuple[str, float], ...]:
    """What decides how fast the GPU is at this moment: limit of its power, clocks, temperature; as far as NVML says."""
    questions: dict[str, Callable[[Any, Any], float]] = {
        "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_limit_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "sm_clock_max_mhz": lambda nvml, handle: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    found = {name: ask(partial(_figure, question, index), None) for name, question in questions.items()}
    return tuple((name, value) for name, value in found.items() if value is not None)


def _figure(question: Callable[[Any, Any], float], index: int, nvml: Any) -> float:
    return float(question(nvml, handle(index)))


def sold_power_w(index: int = 0) -> int:
    """The power limit in watts that the card is sold with, whatever it is set to; 0 if NVML does not say."""

    def watts(nvml: Any, handle: Any) -> float:
        return float(nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)) / 1e3

    return round(float(ask(partial(_figure, watts, index), 0.0)))


def ask(question: Callable[[Any], Any], otherwise: Any) -> Any:
    """The answer of NVML, or `otherwise`: an old driver, a container or a MIG slice may refuse any question."""
    library = nvml()
    if library is None:
        return otherwise
    try:
        return question(library)
    except library.NVMLError:
        return otherwise


@functools.cache
def nvml() -> Any | None:
    """The library, initialised; None where it is not installed or does not answer."""
    if torch.version.hip is not None:
        return None
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
    except ImportError:
        return None
    except library.NVMLError:
        return None
    return library


@functools.cache
def handle(index: int) -> Any:
    """NVML's handle of torch's GPU `index`, found by UUID because their numbering differs."""
    library = nvml()
    assert library is not None
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
