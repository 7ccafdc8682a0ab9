"""The gate before every timing, on the kernels as they are rendered: right ones pass it, with room to spare."""

from __future__ import annotations

import pytest
import torch

from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.measure.odd_shapes import check_odd, odd_problems
from flashgen.measure.verify import LaunchFunction
from tests.tiers import first

LARGEST = 50_000
"""Query-key pairs of a head; the interpreter needs seconds for more."""


TILES = {"block_m": 128, "block_n": 128}
"""Few of them: what the interpreter does for an operation takes the same time for large ones."""


@pytest.mark.parametrize(("dtype", "first"), first(1, [("fp16", 0), ("fp32", 1)]))
def test_a_rendered_kernel_passes_the_odd_shapes(dtype: str, first: int) -> None:
    spec = Workload.parse(f"{dtype}-b1-h1-s1-d64-causal").specialization
    source = render(spec, PORTABLE_FORWARD.default(spec, find_device("h200")).replace(products="ieee", **TILES))
    attention = getattr(load_module(source), f"{source.entry}_call")

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        softmax_scale: float,
        q_offset: int | torch.Tensor,
        features: Features,
    ) -> None:
        result = attention(q, k, v, softmax_scale=softmax_scale, q_offset=q_offset)
        out.copy_(result[0])
        lse.copy_(result[1])

    def factory(*_: torch.Tensor | Features) -> LaunchFunction:
        return kernel

    problems = odd_problems(spec, "cpu")
    small = tuple(each for each in problems if each[0].seqlen_q * each[0].seqlen_k <= LARGEST)
    assert len(small) >= 6
    assert check_odd(factory, small[first::2]) is None  # each dtype half of them
