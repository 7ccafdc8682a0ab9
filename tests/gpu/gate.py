"""Kernels of a config under the gate's odd shapes."""

from __future__ import annotations

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import invalid
from flashgen.core.config import Config
from flashgen.core.workload import Specialization
from flashgen.launch.geometry import Geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import make_plan
from flashgen.measure.odd_shapes import check_odd, odd_problems


def assert_passes_the_gate(key: str, config: Config) -> None:
    spec, device = Specialization.parse(key), current_device()
    assert invalid(config, spec, device) is None
    compiled = compile_kernel(spec, config, device)
    verdict = check_odd(
        lambda q, k, v, out, features: make_plan(compiled, spec, config, Geometry.of(q, k, v, out, features), 0),
        odd_problems(spec, "cuda"),
    )
    assert verdict is None, str(verdict)
