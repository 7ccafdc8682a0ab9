"""The gate of backward passes, on the kernels as they are rendered: right ones pass it, with room to spare."""

from __future__ import annotations

import inspect

import pytest
import torch

from flashgen.codegen.family import KernelFamily
from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.codegen.render import render
from flashgen.core.device import find_device
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.plan import BackwardLaunch
from flashgen.measure.backward_inputs import written
from flashgen.measure.backward_verification_case import backward_odd_problem
from flashgen.measure.odd_shapes import odd_shapes
from flashgen.measure.verify import Errors
from tests.tiers import EXHAUSTIVE, every

LARGEST = 30_000
"""Query-key pairs of a head; the interpreter needs seconds for more."""

TILES = {"block_m": 128, "block_n": 128}
SPLIT_TILES = {**TILES, "dq_block_m": 128, "dq_block_n": 128}
"""Few of them: what the interpreter does for an operation takes the same time for large ones."""

FEATURES = ("window", "softcap", "alibi_slopes", "bias", "mask")


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("row", "key", "first"),
    every(
        2,
        [
            (PORTABLE_BACKWARD_SPLIT, "bwd-fp16-d32-softcap-alibi-bias-mask-window-dbias", 0),
            (PORTABLE_BACKWARD_FUSED, "bwd-fp32-d32-causal-keybias-keymask-dbias", 1),
        ],
    ),
    ids=["split", "fused"],
)
def test_rendered_kernels_pass_the_odd_shapes(row: KernelFamily, key: str, first: int) -> None:
    spec = Specialization.parse(key)
    tiles = SPLIT_TILES if row is PORTABLE_BACKWARD_SPLIT else TILES
    source = render(spec, row.default(spec, find_device("h200")).replace(**tiles))
    gradients = getattr(load_module(source), f"{source.entry}_call")
    compiled_in = inspect.signature(gradients).parameters

    def kernels(
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> torch.Tensor:
        t = tensors
        features = {name: getattr(features, name) for name in FEATURES if name in compiled_in}
        dq, dk, dv, neg_delta, *dbias = gradients(
            t.q, t.k, t.v, t.out, t.lse, t.dout, dlse=t.dlse, softmax_scale=softmax_scale, q_offset=q_offset, **features
        )
        for target, found in zip(written(t).values(), (dq, dk, dv, *dbias), strict=True):
            target.copy_(found)
        return neg_delta

    def factory(*_: BackwardTensors | Features) -> BackwardLaunch:
        return kernels

    small = [shape for shape in odd_shapes(spec) if shape.seqlen_q * shape.seqlen_k <= LARGEST]
    assert len(small) >= 5
    for number, shape in list(enumerate(small))[first::2]:  # each family half of them
        problem = backward_odd_problem(spec, shape, "cpu", sink=number > 2, dlse=number // 2 % 2 == 1)
        verdict = problem.run(factory)
        assert isinstance(verdict, Errors), (shape.title, verdict)
