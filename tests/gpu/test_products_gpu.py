"""fp32 tiles that are multiplied in parts, through the gate of fp32: odd shapes, and hard data of long sequences."""

from __future__ import annotations

import pytest
import torch

from flashgen.codegen.build import compile_kernel
from flashgen.codegen.common_products import PRODUCTS
from flashgen.codegen.families import family, invalid
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.launch.geometry import Geometry
from flashgen.launch.gpu import current_device
from flashgen.launch.plan import make_plan
from flashgen.measure.data_kinds import DATA_KINDS
from flashgen.measure.odd_shapes import check_odd, odd_problems
from flashgen.measure.verification_case import forward_problem
from flashgen.measure.verify import KernelFactory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PARTS = tuple(kind for kind in PRODUCTS.values if kind != "ieee")
TILE = {"block_m": 128, "block_n": 16, "num_warps": 8, "num_stages": 3}


def factory(spec: Specialization, kind: str) -> KernelFactory:
    device = current_device()
    config = family("portable_forward").default(spec, device).replace(**TILE, products=kind)
    if reason := invalid(config, spec, device):
        pytest.skip(reason)
    compiled = compile_kernel(spec, config, device)
    return lambda q, k, v, out, features: make_plan(compiled, spec, config, Geometry.of(q, k, v, out, features), 0)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("key", ["fwd-fp32-d64-causal", "fwd-fp32-d128-softcap", "fwd-fp32-d80-causal-sink-window"])
def test_odd_shapes_pass_the_gate(key: str, kind: str) -> None:
    spec = Specialization.parse(key)
    verdict = check_odd(factory(spec, kind), odd_problems(spec, "cuda"))
    assert verdict is None, str(verdict)


@pytest.mark.parametrize("data", DATA_KINDS)
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("shape", ["fp32-b1-h4-s8192-d64-causal", "fp32-b2-h2-s4096-d128"])
def test_hard_data_pass_the_gate(shape: str, kind: str, data: str) -> None:
    workload = Workload.parse(shape)
    case = forward_problem(workload, 1, 7, "cuda", data)
    verdict = case.run(factory(workload.specialization, kind))
    assert not isinstance(verdict, Failure), str(verdict)
