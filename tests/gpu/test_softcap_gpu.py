"""The hardware's tanh of a softcap: outputs that pass the gate without an LSE, and what serves calls with one."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.codegen.build import compile_kernel
from flashgen.codegen.families import exact_sibling, family, invalid
from flashgen.core.config import Config
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
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm90"
    ),
]

FAMILIES = ("hopper_forward", "portable_forward")
KEYS = ("fwd-bf16-d128-causal-softcap", "fwd-bf16-d256-causal-softcap-window", "fwd-bf16-d64-softcap-alibi-sink")


def hardware(name: str, spec: Specialization) -> Config:
    config = family(name).default(spec, current_device()).replace(tanh="hardware")
    assert invalid(config, spec, current_device()) is None
    return config


def factory(name: str, spec: Specialization) -> KernelFactory:
    config = hardware(name, spec)
    compiled = compile_kernel(spec, config, current_device())
    return lambda q, k, v, out, features: make_plan(compiled, spec, config, Geometry.of(q, k, v, out, features), 0)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("key", KEYS)
def test_odd_shapes_pass_the_gate_without_an_lse(key: str, name: str) -> None:
    spec = Specialization.parse(key)
    verdict = check_odd(factory(name, spec), odd_problems(spec, "cuda"), out_alone=True)
    assert verdict is None, str(verdict)


@pytest.mark.parametrize("data", DATA_KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_hard_data_pass_the_gate_without_an_lse(name: str, dtype: str, data: str) -> None:
    workload = Workload.parse(f"{dtype}-b1-h4-hk2-s4096-d256-causal-softcap")
    case = forward_problem(workload, 1, 7, "cuda", data)
    verdict = case.run(factory(name, workload.specialization), out_alone=True)
    assert not isinstance(verdict, Failure), str(verdict)


def test_a_call_with_an_lse_has_an_exact_one() -> None:
    q, k, v = (torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16) * 3 for _ in range(3))
    spec = Specialization.parse("fwd-bf16-d128-causal-softcap")
    config = hardware("hopper_forward", spec)
    call = {"causal": True, "softcap": 50.0}
    alone = flashgen.explain(q, k, v, config=config, **call)
    with_lse = flashgen.explain(q, k, v, config=config, return_lse=True, **call)
    assert (alone.served.config, with_lse.served.config) == (config, exact_sibling(config, spec))
    out, lse = flashgen.attention(q, k, v, return_lse=True, **call)
    scores = (50 * ((q.double() @ k.double().mT) * 128**-0.5 / 50).tanh()).masked_fill_(
        torch.ones(1024, 1024, dtype=torch.bool, device="cuda").triu_(1), float("-inf")
    )
    assert float((lse.double() - scores.logsumexp(-1)).abs().max()) < 2e-4
    assert float((out.double() - flashgen.attention(q, k, v, **call).double()).abs().max()) < 0.3
