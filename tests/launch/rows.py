"""Kernels with any parameters of the launch vocabulary: a family's row and what Triton would have compiled of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.family import CompileOptions, KernelSpec, Parameter
from flashgen.codegen.render import KernelSource
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.workload import Specialization
from flashgen.launch import driver_plan
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import Layout, block_of
from flashgen.launch.plan import Launch, TritonPlan
from tests.launch.fake_driver import FakeDriver

CONFIG = Config.of("imagined", {})
ALWAYS = (Parameter(name="LSE", type="*fp32"), Parameter(name="lse_rows", type="i32"))


def metadata_of(given: tuple[Parameter, ...]) -> SimpleNamespace:
    """Triton's metadata: boxes of 64 rows for the first descriptor, 65 for the second and so on, to tell them apart."""
    descriptors = [p for p in given if p.type.startswith("tensordesc")]
    boxes = [[*block_of(p)[:-2], 64 + number, 64][-len(block_of(p)) :] for number, p in enumerate(descriptors)]
    return SimpleNamespace(
        num_warps=12, shared=1000, tensordesc_meta=[{"block_size": box, "swizzle": 3} for box in boxes]
    )


def part_of(entry: str, given: tuple[Parameter, ...], handle: object, *, programs: int = 7) -> CompiledPart:
    """A kernel of these parameters, as if it had been compiled to `handle`."""
    options = CompileOptions(num_warps=4, num_stages=1)
    kernel = KernelSpec(entry=entry, parameters=given, options=options, programs=lambda device, sizes: programs)
    return CompiledPart(
        kernel=kernel, registers=32, spills=0, shared_bytes=1000, num_warps=12, compile_ms=0.0, handle=handle
    )


def compiled_of(*parts: CompiledPart) -> CompiledKernel:
    """Kernels of one config, compiled for an H200."""
    return CompiledKernel(source=KernelSource(entry="imagined", text=""), device=find_device("h200"), parts=parts)


def parameters(*named: str) -> tuple[Parameter, ...]:
    """`"window_left: i32"` and so on, and what every kernel has."""
    pairs = (text.split(": ", 1) for text in named)
    return (*(Parameter(name=name, type=kind) for name, kind in pairs), *ALWAYS)


class Imagined:
    """A kernel of the given parameters, launched through the driver or through Triton."""

    def __init__(self, given: tuple[Parameter, ...], key: str) -> None:
        self.parameters = given
        self.spec = Specialization.parse(key)
        self.seen: list[dict[str, Any]] = []
        self.metadata = metadata_of(given)
        self.compiled = compiled_of(part_of("imagined", given, self))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        names = [parameter.name for parameter in self.parameters]
        return lambda *arguments: self.seen.append(dict(zip(names, arguments, strict=True)))

    def through_the_driver(self, cuda: FakeDriver, geometry: Geometry) -> Launch:
        cuda.parameters = self.parameters
        return driver_plan.DriverPlan(
            self.compiled,
            self.spec,
            CONFIG,
            geometry,
            function=0x6000,
            layout=Layout.of(self.parameters, trailing=2),
            device_index=0,
        ).launch

    def through_triton(self, geometry: Geometry) -> Launch:
        return TritonPlan(self.compiled, self.spec, CONFIG, geometry, 0)
