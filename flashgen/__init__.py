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
    from flashgen.core.features.values import BlockMask
    from flashgen.integrations.model.integrate import integrate
    from flashgen.runtime.api import attention
    from flashgen.runtime.append import append_kv
    from flashgen.runtime.block_mask import block_mask
    from flashgen.runtime.decode.api import attention_decode
    from flashgen.runtime.decode.prefix import Prefix
    from flashgen.runtime.explain import explain
    from flashgen.runtime.record import record
    from flashgen.runtime.states import merge_states
    from flashgen.runtime.varlen.api import attention_varlen
    from flashgen.runtime.warmup import reload, warmup
    from flashgen.tuning.api import tune

__all__ = [
    "BlockMask",
    "BuildError",
    "Config",
    "ConfigError",
    "DatabaseError",
    "Device",
    "DeviceError",
    "FlashgenError",
    "LaunchError",
    "MeasureError",
    "Prefix",
    "SettingError",
    "TuningError",
    "UnsupportedError",
    "Workload",
    "WorkloadError",
    "__version__",
    "append_kv",
    "attention",
    "attention_decode",
    "attention_varlen",
    "block_mask",
    "explain",
    "integrate",
    "merge_states",
    "record",
    "reload",
    "tune",
    "warmup",
]


_LATE = {
    "BlockMask": "flashgen.core.features.values",
    "Prefix": "flashgen.runtime.decode.prefix",
    "append_kv": "flashgen.runtime.append",
    "attention": "flashgen.runtime.api",
    "attention_decode": "flashgen.runtime.decode.api",
    "attention_varlen": "flashgen.runtime.varlen.api",
    "block_mask": "flashgen.runtime.block_mask",
    "explain": "flashgen.runtime.explain",
    "integrate": "flashgen.integrations.model.integrate",
    "merge_states": "flashgen.runtime.states",
    "record": "flashgen.runtime.record",
    "reload": "flashgen.runtime.warmup",
    "tune": "flashgen.tuning.api",
    "warmup": "flashgen.runtime.warmup",
}


def __getattr__(name: str) -> object:
    """What needs torch, imported when it is first used: the command line and the values do without."""
    if name not in _LATE:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    from importlib import import_module

    from flashgen.core.collection import CollectionPaused

    with CollectionPaused():
        globals()[name] = getattr(import_module(_LATE[name]), name)
    return globals()[name]
