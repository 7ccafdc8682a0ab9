"""Every two values of every two factors meet in a rendered kernel on a CPU, judged by the gate; hidden keys are NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.render import render_standalone
from flashgen.core.device import find_device
from flashgen.core.features.values import Features
from flashgen.core.record import Failure
from flashgen.measure.odd_shapes import odd_problem
from flashgen.measure.verify import LaunchFunction, Offset
from tests.covering import ForwardCase, forward_cases
from tests.tiers import first

CASES = forward_cases(
    dtype=("fp16", "fp32"),  # numpy has no bf16, and tf32 is fp32 there
    dims=((16, 16), (24, 40), (80, 80), (160, 160)),
    layout=("bhsd", "bshd"),
    heads=((2, 2), (2, 1), (4, 2)),
    lengths=((1, 70), (37, 70), (70, 37)),
)


@pytest.mark.parametrize(
    ("number", "case"), first(14, list(enumerate(CASES))), ids=lambda value: getattr(value, "title", "")
)
def test_every_two_values_meet(number: int, case: ForwardCase) -> None:
    verdict = odd_problem(case.spec, case.shape, "cpu").run(rendered(case, ("descriptor", "pointer")[number % 2]))
    assert not isinstance(verdict, Failure), str(verdict)


def rendered(case: ForwardCase, loads: str) -> Any:
    spec = case.spec
    small = {"block_m": 32, "block_n": 32, "num_warps": 2, "num_stages": 2, "loads": loads, "products": "ieee"}
    source = render_standalone(spec, PORTABLE_FORWARD.default(spec, find_device("h200")).replace(**small))
    attention = getattr(load_module(source), f"{source.entry}_call")

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        q_offset: Offset,
        features: Features,
    ) -> None:
        tensors = {name: getattr(features, name) for name in ("alibi_slopes", "sinks", "bias", "mask")}
        arguments: dict[str, Any] = {name: value for name, value in tensors.items() if value is not None}
        arguments |= {"window": features.window} if spec.window else {}
        arguments |= {"softcap": features.softcap} if spec.softcap else {}
        arguments |= {"q_offset": q_offset} if spec.causal or spec.window or spec.alibi else {}
        found, sums = attention(q, k, v, softmax_scale=softmax_scale, **arguments)
        out.copy_(found)
        lse.copy_(sums)

    def factory(*_: torch.Tensor | Features) -> LaunchFunction:
        return kernel

    return factory
