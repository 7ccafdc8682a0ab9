"""Building: rendered text to a compiled kernel for any target.

Nothing here needs a GPU: Triton compiles for a target that it is told. Its disk cache makes a second compile of
the same kernel cheap, in this process or another.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.codegen import inspect
from flashgen.codegen.families import family
from flashgen.codegen.family import KernelSpec
from flashgen.codegen.generated import FOLDER, load_module
from flashgen.codegen.helper import HelperKernel, render_helper
from flashgen.codegen.render import KernelSource, render
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import BuildError
from flashgen.core.settings import cache_folder, triton_cache
from flashgen.core.workload import Specialization

SHORT_INTERVAL_S = 1e-4
"""Between switches of threads while one of them hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart:
    """One compiled kernel of a config and what it takes of an SM.

    `registers` are per thread, `spills` are bytes of local memory per thread (0 is clean), `shared_bytes` are per
    block, `num_warps` those of all roles together. `handle` is Triton's own compiled kernel; nothing of it is loaded to
    a GPU before a launch.
    """

    kernel: KernelSpec
    registers: int
    spills: int
    shared_bytes: int
    num_warps: int
    compile_ms: float
    handle: Any

    def occupancy(self, device: Device) -> int:
        """Blocks that run side by side on one SM of `device`; 0 if not even one fits."""
        threads = self.num_warps * device.warp_size
        if self.shared_bytes > device.smem_per_block:
            return 0
        # registers are handed out to warps in units of 256 (CUDA occupancy calculator; sm80 and newer)
        per_warp = -(-max(self.registers, 1) * device.warp_size // 256) * 256
        by_registers = device.regs_per_sm // (per_warp * self.num_warps)
        by_shared = device.smem_per_sm // (self.shared_bytes + inspect.RESERVED_SMEM) if self.shared_bytes else 32
        return min(by_registers, max(by_shared, 1), device.max_threads_per_sm // threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """The compiled kernels of a config, in the order of their launches; `device` is what they were compiled for.

    The other attributes are those of `main`, the one that takes most shared memory, but for `spills` (the most of any)
    and `compile_ms` (of all together).
    """

    source: KernelSource
    device: Device
    parts: tuple[CompiledPart, ...]

    @property
    def main(self) -> CompiledPart:
        """The part that takes most shared memory: of a forward pass the only one."""
        return max(self.parts, key=lambda part: part.shared_bytes)

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self.main.registers

    @property
    def spills(self) -> int:
        """Bytes of local memory of a thread, the most of any part."""
        return max(part.spills for part in self.parts)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.main.shared_bytes

    @property
    def num_warps(self) -> int:
        """Warps of a block, those of all roles."""
        return self.main.num_warps

    @property
    def compile_ms(self) -> float:
        """What compiling all parts took."""
        return sum(part.compile_ms for part in self.parts)

    @property
    def handle(self) -> Any:
        """Triton's compiled kernel."""
        return self.main.handle

    def occupancy(self, device: Device) -> int:
        """Blocks that run side by side on one SM of `device`; 0 if not even one fits."""
        return self.main.occupancy(device)


def compile_kernel(spec: Specialization, config: Config, device: Device) -> CompiledKernel:
    """Render `config` for `spec` and compile its kernels for `device`, present or not.

    Raises:
        ConfigError: the config did not pass `families.validate`.
        BuildError: Triton or ptxas refused it; the message has the first line of their reason.
    """
    kernels = family(config.family).kernels(spec, config)
    with _hashed_ahead():
        source = render(spec, config)
    return _compile(source, kernels, device, f"{config} for {spec.key}")


def compile_helper(helper: HelperKernel, device: Device) -> CompiledKernel:
    """Render a helper kernel and compile it for `device`, present or not.

    Raises:
        BuildError: Triton or ptxas refused it; the message has the first line of their reason.
    """
    return _compile(render_helper(helper), (helper.kernel,), device, f"{helper.id} for {helper.key}")


@contextlib.contextmanager
def _hashed_ahead() -> Iterator[None]:
    """Triton's hash of itself, which its cache asks for once a process, beside what is done in here.

    It reads and hashes half a gigabyte by the megabyte, and holds Python's lock between these alone: while another
    thread computes it would wait for `sys.getswitchinterval()` at each.
    """
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    if key is None or key.cache_info().currsize:
        yield
        return

    def hashed() -> None:
        with contextlib.suppress(Exception):  # whoever asks for it next is told
            key()

    thread, interval = threading.Thread(target=hashed, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SHORT_INTERVAL_S))
    try:
        thread.start()
        yield
    finally:
        thread.join()
        sys.setswitchinterval(interval)


def _compile(source: KernelSource, kernels: tuple[KernelSpec, ...], device: Device, name: str) -> CompiledKernel:
    import triton

    module = load_module(source)
    _prepare_caches()
    try:
        parts = [_compile_part(getattr(module, kernel.entry), kernel, device) for kernel in kernels]
    except Exception as error:  # Triton raises its own, LLVM's and ptxas' errors, without a common base
        if isinstance(error, BuildError):
            raise
        raise BuildError(
            f"Triton {triton.__version__} cannot compile {name} on {device.arch}: {reason_of(error)}"
        ) from error
    return CompiledKernel(source=source, device=device, parts=tuple(parts))


def _compile_part(function: Any, kernel: KernelSpec, device: Device) -> CompiledPart:
    import triton

    source, target, flags = request(function, kernel, device)
    started = time.perf_counter()
    handle = triton.compile(source, target=target, options=flags)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    used = inspect.resources(handle, device)
    return CompiledPart(
        kernel=kernel,
        registers=used.registers,
        spills=used.spills,
        shared_bytes=handle.metadata.shared,
        num_warps=handle.metadata.num_warps,  # of all roles, where a kernel specialises its warps
        compile_ms=elapsed_ms,
        handle=handle,
    )


def request(function: Any, kernel: KernelSpec, device: Device) -> tuple[Any, Any, dict[str, object]]:
    """What Triton is asked to compile: the function with its signature, for which target, with which options."""
    from triton.backends.compiler import GPUTarget

    options, parameters = kernel.options, kernel.parameters
    signature = {parameter.name: parameter.type for parameter in parameters}
    aligned = {(i,): [["tt.divisibility", 16]] for i, parameter in enumerate(parameters) if parameter.aligned16}
    arch: int | str = device.capability if device.is_nvidia else device.arch
    target = GPUTarget("cuda" if device.is_nvidia else "hip", arch, device.warp_size)
    flags: dict[str, object] = {"num_warps": options.num_warps, "num_stages": options.num_stages}
    # the default of this flag changes in Triton 3.10; fused multiply-adds are what was tuned and verified
    flags["enable_fp_fusion"] = True
    if options.maxnreg:
        flags["maxnreg"] = options.maxnreg
    return _ast(kernel.language)(function, signature, {}, aligned), target, flags


def reason_of(error: BaseException) -> str:
    """The reason of a compiler's error in one line: of nested ones the innermost, with the source that it is about."""
    from triton.compiler.errors import CompilationError

    while isinstance(error.__cause__, CompilationError):
        error = error.__cause__
    if isinstance(error, CompilationError) and error.error_message and error.src and hasattr(error.node, "lineno"):
        source = error.src.split("\n")[error.node.lineno - 1].strip()
        return f"{error.error_message} (at `{source}`)"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _ast(language: str) -> Any:
    """Triton's class for the source of a kernel in one of its two languages."""
    if language == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


@functools.cache
def _prepare_caches() -> None:
    """Triton fails where its cache cannot be written; flashgen's own falls back, so that is lent to it.

    What killed processes left in either is deleted.
    """
    import triton

    from flashgen.codegen.leftovers import sweep

    folder = triton_cache()
    if folder is not None:
        triton.knobs.cache.dir = str(folder)
    with contextlib.suppress(OSError):
        sweep(cache_folder(FOLDER), Path(triton.knobs.cache.dir))
