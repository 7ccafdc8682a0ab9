"""flashgen: code-generating autotuning for attention.

`attention` runs the fastest exact attention kernel known for the GPU and the shapes of the call; `flashgen tune` finds better ones.
"""

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
