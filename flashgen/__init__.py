"""flashgen: code-generating autotuning for attention.

`attention` runs the fastest exact attention kernel known for the GPU and the shapes of the call; `flashgen tune` finds
better ones.
"""

from typing import TYPE_CHECKING

from flashgen._version import __version__
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import (
    BuildError,
    ConfigError,
    DatabaseError,
    DeviceError,
    FlashgenError,
    LaunchError,
    MeasureError,
    SettingError,
    TuningError,
    UnsupportedError,
    WorkloadError,
)
from flashgen.core.workload import Workload

if TYPE_CHECKING:
    from flashgen.runtime.api import attention, explain, reload, warmup

__all__ = [
    "BuildError",
    "Config",
    "ConfigError",
    "DatabaseError",
    "Device",
    "DeviceError",
    "FlashgenError",
    "LaunchError",
    "MeasureError",
    "SettingError",
    "TuningError",
    "UnsupportedError",
    "Workload",
    "WorkloadError",
    "__version__",
    "attention",
    "explain",
    "reload",
    "warmup",
]


def __getattr__(name: str) -> object:
    """The calls that need torch, imported when they are first used: the command line and the values do without."""
    if name not in ("attention", "explain", "reload", "warmup"):
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    from flashgen.runtime import api

    globals().update(attention=api.attention, explain=api.explain, reload=api.reload, warmup=api.warmup)
    return globals()[name]
