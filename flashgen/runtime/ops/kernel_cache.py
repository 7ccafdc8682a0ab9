"""From a config to its compiled kernel: of this process, of an earlier one, or built now; and warm-up, which builds."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import BuildError, LaunchError
from flashgen.core.quoting import printable
from flashgen.core.settings import settings
from flashgen.core.workload import DECODE, Specialization
from flashgen.runtime.ops import log

if TYPE_CHECKING:
    from flashgen.codegen.build import CompiledKernel
    from flashgen.runtime.lookup.ladder import Served

T = TypeVar("T")

KERNELS: dict[tuple[Specialization, Config, str], CompiledKernel] = {}
"""What this process has compiled or read, by what is compiled in, config and the identity of the GPU."""

_STATE = threading.local()


def built(
    spec: Specialization, served: Served, device: Device, index: int, bind: Callable[[CompiledKernel, Config, int], T]
) -> T:
    """What `bind` makes of the kernel that the ladder answered, or of the default one where that fails here.

    A record may come from another Triton, under which its config still fitted.

    Args:
        spec: what is compiled in.
        served: the ladder's answer.
        device: the GPU.
        index: torch's index of it.
        bind: makes what the memo holds from a compiled kernel, its config and the index.

    Raises:
        BuildError: a compile is needed and the settings forbid it, or it failed.
        LaunchError: the driver refuses the kernel, or a CUDA graph is being captured.
    """
    from flashgen.codegen.families import default_config
    from flashgen.launch.plan import check_capture

    try:
        return bind(compiled(spec, served.config, device, index), served.config, index)
    except (BuildError, LaunchError) as error:
        check_capture(index, f"building the kernel for {spec.key}")
        default = default_config(spec, device)
        if served.record is None or settings().no_compile or default == served.config:
            raise
        # if this fails, too, it is not for the record
        run = bind(compiled(spec, default, device, index), default, index)
        message = (
            f"the record {served.record.workload.key} of {served.layer} cannot serve here and the default config does; "
            f"tune again with this Triton: {error}"
        )
        warnings.warn(printable(message, lines=True), stacklevel=2)
        return run


def compiled(spec: Specialization, config: Config, device: Device, index: int) -> CompiledKernel:
    """The compiled kernel of a config: from this process, from an earlier one or built now.

    Raises:
        BuildError: FLASHGEN_NO_COMPILE forbids it outside `warmup`, or the compile failed.
        LaunchError: a CUDA graph is being captured.
    """
    key = (spec, config, device.identity)
    found = KERNELS.get(key)
    if found is None:
        from flashgen.codegen import build
        from flashgen.launch import binaries
        from flashgen.launch.plan import check_capture

        check_capture(index, f"building the kernel for {spec.key}")
        found = binaries.read(spec, config, device)
        if found is not None:
            KERNELS[key] = found
            return found
        if settings().no_compile and not getattr(_STATE, "warming", False):
            raise BuildError(
                f"FLASHGEN_NO_COMPILE forbids compiling outside warmup, and {config} for {spec.key} is not compiled; "
                "add its shapes to the flashgen.warmup call"
            )
        started = time.perf_counter()
        found = KERNELS[key] = build.compile_kernel(spec, config, device)
        log.compiled_in(time.perf_counter() - started, config, spec)
        binaries.write(found, spec, config)
    return found


def warm(calls: Iterable[tuple[Specialization, Config]], device: Device, index: int) -> int:
    """Compile and load the kernels of these configs; returns how many there are."""
    from flashgen.launch.decode_passes import endless
    from flashgen.launch.plan import load

    _STATE.warming = True
    try:
        pairs = set(calls)
        for spec, config in pairs:
            load(compiled(spec, config, device, index), index)
        if any(spec.direction == DECODE for spec, _ in pairs):
            endless(index)
        return len(pairs)
    finally:
        _STATE.warming = False
