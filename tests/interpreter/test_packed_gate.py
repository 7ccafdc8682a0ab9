"""The gate of packed sequences, on the kernels as they are rendered: right ones pass it, with room to spare."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.codegen.families import family
from flashgen.codegen.generated import load_module
from flashgen.codegen.render import render
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import feature_arguments
from flashgen.launch.backward import FIELDS, BackwardTensors, backward_geometry
from flashgen.launch.feature_arguments import LOG2E
from flashgen.launch.geometry import Geometry, scalars
from flashgen.launch.scratch import ScratchPlan
from flashgen.measure.packed_case import packed_case
from flashgen.measure.packed_odd import (
    ODD_SEED,
    odd_packed_backward_problem,
    odd_packed_workload,
    odd_packs,
    page_packs,
)
from flashgen.measure.verify import Errors
from tests.tiers import EXHAUSTIVE, every

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of rows that do not count

DEVICE = find_device("sm90")
SMALL = {"block_m": 16, "block_n": 16, "num_warps": 4, "loads": "pointer", "heads_per_group": 1}
LARGEST = 230
"""Rows of all sequences; the interpreter needs seconds for more."""


def launch(
    spec: Specialization, config: Config, geometry: Geometry, features: Features, scale: float, known: dict[str, Any]
) -> None:
    module = load_module(render(spec, config))
    known |= scalars(geometry) | {"softmax_scale_log2": scale * LOG2E, "softmax_scale": scale}
    for kernel in family(config.family).kernels(spec, config):
        given = known | feature_arguments.arguments(set(kernel.names), features, scale, known, causal=spec.causal)
        programs = kernel.programs(DEVICE, geometry.sizes)
        getattr(module, kernel.entry)[(programs,)](*[given[name] for name in kernel.names])


@EXHAUSTIVE
@pytest.mark.parametrize("key", every(2, ["fwd-fp16-d16-varlen-window-sink", "fwd-fp16-d16-varlen-window-page24"]))
def test_a_rendered_forward_kernel_passes_the_odd_packs(key: str) -> None:
    spec = replace(Specialization.parse(key), aligned16=False)
    config = family("portable_forward").default(spec, DEVICE).replace(**SMALL, page_ids="load")

    def factory(q: Any, k: Any, v: Any, out: Any, features: Features) -> Any:
        geometry = Geometry.of(q, k, v, out, features)

        def run(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, offset: Any, features: Features) -> None:
            known = {"Q": q, "K": k, "V": v, "O": out, "LSE": lse, "lse_rows": q.shape[2]}
            launch(spec, config, geometry, features, scale, known)

        return run

    packs = [pack for pack in odd_packs(spec) if sum(pack.form.queries) <= LARGEST]
    packs = [pack for pack in page_packs(24) if spec.page_size] or packs
    assert len(packs) >= 2 + (spec.page_size is None)
    for pack in packs:
        case = packed_case(odd_packed_workload(spec, pack), pack.form, copies=1, seed=ODD_SEED, device="cpu")
        verdict = case.run(factory)
        assert isinstance(verdict, Errors), (pack.title, verdict)


@pytest.mark.parametrize("name", every(2, ["portable_backward_split", "portable_backward_fused"]))
def test_rendered_backward_kernels_pass_the_odd_packs(name: str) -> None:
    spec = replace(Specialization.parse("bwd-fp16-d16-varlen-causal"), aligned16=False)
    small = SMALL | ({} if "fused" in name else {"dq_block_m": 16, "dq_block_n": 16, "dq_num_warps": 4})
    config = family(name).default(spec, DEVICE).replace(**small)

    def factory(tensors: BackwardTensors, features: Features) -> Any:
        geometry = backward_geometry(tensors, features)
        scratch = ScratchPlan.of(spec, config, geometry.sizes)

        def run(t: BackwardTensors, scale: float, offset: Any, features: Features) -> torch.Tensor:
            memory = torch.full((scratch.floats,), math.nan)
            known = {field.upper(): getattr(t, FIELDS[field]) for field in FIELDS}
            known |= {piece.pointer: piece.of(memory) for piece in scratch.pieces.values()}
            known |= {"LSE": t.lse, "DLSE": t.lse if t.dlse is None else t.dlse}
            known |= {"dlse_rows": 0 if t.dlse is None else t.q.shape[2]}
            launch(spec, config, geometry, features, scale, known)
            return scratch.pieces["neg_delta"].of(memory)[:, :, : t.q.shape[2]]

        return run

    packs = [(number, pack) for number, pack in enumerate(odd_packs(spec)) if sum(pack.form.queries) <= LARGEST]
    for number, pack in packs["split" in name :: 2]:  # the second one has a gradient of the LSE where no key is seen
        case = odd_packed_backward_problem(spec, pack, "cpu", number)
        verdict = case.run(factory)
        assert isinstance(verdict, Errors), (pack.title, verdict)
