"""Kernels with any parameters of the launch vocabulary: a family's row and what Triton would have compiled of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.workload import Specialization
from flashgen.launch import driver_plan, plan
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import Layout
from flashgen.launch.plan import Launch, TritonPlan
from tests.launch.fake_driver import FakeDriver

CONFIG = Config.of("imagined", {})
ALWAYS = (Parameter(name="LSE", type="*fp32"), Parameter(name="lse_rows", type="i32"))


def parameters(*named: str) -> tuple[Parameter, ...]:
    """`"window_left: i32"` and so on, and what every kernel has."""
    pairs = (text.split(": ", 1) for text in named)
    return (*(Parameter(name=name, type=kind) for name, kind in pairs), *ALWAYS)


class Imagined:
    """A kernel of the given parameters, launched through the driver or through Triton."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, given: tuple[Parameter, ...], key: str) -> None:
        self.parameters = given
        self.spec = Specialization.parse(key)
        self.seen: list[dict[str, Any]] = []
        row = SimpleNamespace(parameters=lambda spec, config: given, programs=lambda *sizes: 7)
        monkeypatch.setattr(driver_plan, "family", lambda name: row)
        monkeypatch.setattr(plan, "family", lambda name: row)
        boxes = [p for p in given if p.type.startswith("tensordesc")]
        metadata = SimpleNamespace(
            num_warps=12,
            shared=1000,
            tensordesc_meta=[{"block_size": [1, 1, 64 + number, 64], "swizzle": 3} for number in range(len(boxes))],
        )
        self.compiled: CompiledKernel = SimpleNamespace(handle=self, device=None)  # type: ignore[assignment]
        self.metadata = metadata

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
