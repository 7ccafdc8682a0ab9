"""Kernels of a config under the gate's odd shapes."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import invalid
from flashgen.core.config import Config
from flashgen.core.workload import Specialization
from flashgen.launch.geometry import Geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import make_plan
from flashgen.measure.directions import VerificationCase
from flashgen.measure.odd_shapes import OddShape, check_odd, odd_problems


def assert_passes_the_gate(
    key: str, config: Config, problems: Sequence[tuple[OddShape, VerificationCase]] = (), *, repeats: int = 0
) -> None:
    """Compile a config and run it on these problems, or on all odd shapes of the specialization."""
    spec, device = Specialization.parse(key), current_device()
    assert invalid(config, spec, device) is None
    compiled = compile_kernel(spec, config, device)
    verdict = check_odd(
        lambda q, k, v, out, features: make_plan(compiled, spec, config, Geometry.of(q, k, v, out, features), 0),
        problems or odd_problems(spec, "cuda"),
        repeats=repeats,
    )
    assert verdict is None, str(verdict)
