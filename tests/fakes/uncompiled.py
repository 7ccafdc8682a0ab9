"""Kernels with the parameters of the real ones, which nobody has compiled: for tests of what a launch gives to them.

That real ones have these parameters is seen in tests/launch/test_real_kernels.py, for every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from flashgen.codegen import build
from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.families import family
from flashgen.codegen.family import KernelSpec
from flashgen.codegen.render import KernelSource
from flashgen.core.device import Device
from flashgen.launch import binaries
from flashgen.launch.parameters import block_of, slot_sizes

Make = Callable[[Iterable[KernelSpec], Device, str], CompiledKernel]


class Handle:
    """Stands for Triton's compiled kernel, called `name`; its hash is that of no other kernel."""

    def __init__(self, kernel: KernelSpec, name: str, title: str) -> None:
        self.hash = f"{kernel.entry} of {title}"
        self.asm = {"cubin": b""}
        boxes = [block_of(one) for one in kernel.parameters if one.type.startswith("tensordesc")]
        self.metadata = SimpleNamespace(
            name=name,
            num_warps=kernel.options.num_warps,
            shared=1000,
            tensordesc_meta=[{"block_size": list(box), "swizzle": 3} for box in boxes],
        )
        sizes = [size for parameter in kernel.parameters for size in slot_sizes(parameter)]
        self.parameter_bytes = (*sizes, 8, 8)


def part_of(kernel: KernelSpec, name: str, title: str) -> CompiledPart:
    """A kernel of few registers; `title` says of what call and config."""
    return CompiledPart(
        kernel=kernel,
        registers=32,
        spills=0,
        shared_bytes=1000,
        num_warps=kernel.options.num_warps,
        compile_ms=0.0,
        handle=Handle(kernel, name, title),
    )


def made_of(kernels: Iterable[KernelSpec], device: Device, title: str) -> CompiledKernel:
    """What compiling them would give."""
    parts = tuple(part_of(kernel, kernel.entry, title) for kernel in kernels)
    return CompiledKernel(source=KernelSource(entry="imagined", text=""), device=device, parts=parts)


def compile_nothing(patch: pytest.MonkeyPatch, make: Make = made_of) -> None:
    """Have every kernel made in this way, and none kept for other processes."""
    patch.setattr(
        build,
        "compile_kernel",
        lambda spec, config, device: make(family(config.family).kernels(spec, config), device, f"{spec.key} {config}"),
    )
    patch.setattr(
        build, "compile_helper", lambda helper, device: make((helper.kernel,), device, f"{helper.id} {helper.key}")
    )
    for name in ("read", "write", "read_helper", "write_helper"):
        patch.setattr(binaries, name, lambda *asked: None)
