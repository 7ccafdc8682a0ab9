"""Packed sequences by the portable kernels: outputs and gradients, in memory that holds NaN before."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flashgen.codegen.families import family
from flashgen.codegen.family import KernelSpec, Sizes
from flashgen.codegen.generated import load_module
from flashgen.codegen.render import render
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.launch import feature_arguments
from flashgen.launch.backward import FIELDS, BackwardTensors, backward_geometry
from flashgen.launch.feature_arguments import LOG2E
from flashgen.launch.geometry import scalars
from flashgen.launch.parameters import block_of
from flashgen.launch.scratch import ScratchPlan
from flashgen.runtime.ops.calls import CheckedCall
from flashgen.runtime.ops.gradients import sink_gradient
from tests.packing import Packed, checked

DEVICE = find_device("sm90")


def interpreted(packed: Packed, splits: int = 1, **knobs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the portable kernel, in memory that holds NaN before; programs that share keys are `splits`."""
    problem = checked(packed)
    spec = problem.spec
    row = family("portable_forward")
    small = {"block_m": 16, "block_n": 16, "num_warps": 4, "loads": "pointer", "heads_per_group": 8}
    config = row.default(spec, DEVICE).replace(**{**small, "heavy_first": spec.causal, **knobs})
    return launched(packed, problem, config, splits)


def launched(
    packed: Packed, problem: CheckedCall, config: Config, splits: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels of a config write."""
    out = torch.full((*packed.q.shape[:2], packed.v.shape[2]), math.nan, dtype=packed.q.dtype)
    lse = torch.full((packed.q.shape[1], len(packed.q)), math.nan)
    kernels = family(config.family).kernels(problem.spec, config)
    tensors = {"q": packed.q, "k": packed.k, "v": packed.v}
    sizes = problem.geometry.sizes._replace(key_splits=splits)
    scratch = ScratchPlan.of(problem.spec, config, sizes)
    memory = torch.full((scratch.floats,), math.nan)
    known: dict[str, Any] = scalars(problem.geometry) | {"O": out, "LSE": lse, "lse_rows": len(packed.q)}
    known |= {"key_splits": splits} | {piece.pointer: piece.of(memory) for piece in scratch.pieces.values()}
    known |= {name.upper(): tensor for name, tensor in tensors.items()}
    module = load_module(render(problem.spec, config))
    for kernel in kernels:
        _launch(kernel, module, packed, known | _described(kernel, tensors), problem, sizes)
    return out, lse


def differentiated(
    packed: Packed, family_id: str, sums: tuple[torch.Tensor, ...] = (), **knobs: Any
) -> dict[str, torch.Tensor]:
    """Gradients by the portable kernels, in memory that holds NaN before; of rows that do not count, too.

    Those of the first aux tensors are added to `sums`.
    """
    out, lse = interpreted(packed)
    dout = gradient_of(packed, out)
    tensors = {"q": packed.q, "k": packed.k, "v": packed.v, "o": out, "do": dout}
    tensors |= {f"d{name}": torch.full_like(tensors[name], math.nan) for name in "qkv"}
    problem = checked(packed)
    spec = replace(problem.spec, direction="backward", sink=False)
    if sums and spec.mods and problem.features:
        spec = replace(spec, mods=replace(spec.mods, aux_grads=tuple(range(len(sums)))))
        features = replace(problem.features, aux=(*problem.features.aux, *reversed(sums)))
        problem = replace(problem, features=features)
    small = {"block_m": 16, "block_n": 16, "num_warps": 4, "loads": "pointer"}
    small |= {} if "fused" in family_id else {"dq_block_m": 16, "dq_block_n": 16, "dq_num_warps": 4}
    row = family(family_id)
    config = row.default(spec, DEVICE).replace(**{**small, "heads_per_group": 8 if spec.causal else 1, **knobs})
    geometry = backward_geometry(
        BackwardTensors(
            **{FIELDS[name]: tensor.unsqueeze(0).transpose(1, 2) for name, tensor in tensors.items()},
            lse=lse.unsqueeze(0),
        ),
        problem.features,
    )
    scratch = ScratchPlan.of(spec, config, geometry.sizes)
    memory = torch.full((scratch.floats,), math.nan)
    known: dict[str, Any] = scalars(geometry) | {"LSE": lse, "DLSE": lse, "dlse_rows": 0}
    known |= {piece.pointer: piece.of(memory) for piece in scratch.pieces.values()}
    known |= {name.upper(): tensor for name, tensor in tensors.items()}
    module = load_module(render(spec, config))
    for kernel in row.kernels(spec, config):
        _launch(kernel, module, packed, known | _described(kernel, tensors), problem, geometry.sizes)
    found = {name: tensors[f"d{name}"] for name in "qkv"}
    if problem.spec.sink:
        neg_delta = scratch.pieces["neg_delta"].of(memory)[:, :, : len(out)]
        found["sinks"] = sink_gradient(packed.named["sinks"], lse.unsqueeze(0), neg_delta)
    return found


def gradient_of(packed: Packed, out: torch.Tensor) -> torch.Tensor:
    """Of an output, with NaN in rows that do not count."""
    found = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    counts = torch.zeros(len(out), dtype=torch.bool)
    for b, queries, _ in packed.sequences():
        counts[queries] = b not in packed.case.poison
    found[~counts] = math.nan
    return found


def _described(kernel: KernelSpec, tensors: dict[str, torch.Tensor]) -> dict[str, TensorDescriptor]:
    found = {}
    for name, tensor in tensors.items():
        seen = tensor.unsqueeze(0).transpose(1, 2)
        for parameter in kernel.parameters:
            if parameter.name == f"{name}_desc":
                sizes = list(block_of(parameter))
                found[parameter.name] = TensorDescriptor(seen, list(seen.shape), list(seen.stride()), sizes)
    return found


def _launch(
    kernel: KernelSpec, module: Any, packed: Packed, known: dict[str, Any], problem: CheckedCall, sizes: Sizes
) -> None:
    scale = packed.named.get("softmax_scale") or packed.q.shape[2] ** -0.5
    known |= {"softmax_scale_log2": scale * LOG2E, "softmax_scale": scale}
    assert problem.features is not None
    names = set(kernel.names)
    known |= feature_arguments.arguments(names, problem.features, scale, known, causal=problem.spec.causal)
    getattr(module, kernel.entry)[(kernel.programs(DEVICE, sizes),)](*[known[name] for name in kernel.names])
