"""Launches of backward kernels in Gluon, whole, on a modelled machine."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import torch

from flashgen.codegen.common_wgmma import ROWS
from flashgen.codegen.family import KernelFamily, KernelSpec
from flashgen.codegen.render import render
from flashgen.core.config import KnobValue
from flashgen.core.device import find_device
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import feature_arguments
from flashgen.launch.backward import FIELDS, BackwardTensors, backward_geometry
from flashgen.launch.geometry import Geometry, scalars
from flashgen.launch.parameters import block_of, is_descriptor
from flashgen.launch.scratch import ScratchPlan
from tests.codegen.gluon_machine import Descriptor, Machine, Pointer, kernel_of

H200 = find_device("h200")
LOG2E = math.log2(math.e)
Tensors = dict[str, torch.Tensor]


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory from its first element on."""
    first = tensor.storage_offset()
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size() - first,), (1,), first)


def launched(
    row: KernelFamily,
    spec: Specialization,
    changes: dict[str, KnobValue],
    tensors: Tensors,
    features: Features,
    programs: int = 3,
) -> Tensors:
    """Gradients, and `neg_delta`, of tensors in bhsd order; a persistent kernel has so many CTAs."""
    config = row.default(spec, H200).replace(**changes)
    assert row.unsupported(spec, H200) is None
    assert row.invalid(spec, config, H200) is None
    tensors |= {f"d{name}": torch.full_like(tensors[name], math.nan) for name in "qkv"}
    given = {FIELDS[name]: tensors[name] for name in FIELDS}
    geometry = backward_geometry(BackwardTensors(**given, lse=tensors["lse"], dlse=tensors["dlse"]), features)
    scratch = ScratchPlan.of(spec, config, geometry.sizes, first="neg_delta")
    memory = torch.full((scratch.floats,), math.nan)
    pieces = {name: piece.of(memory) for name, piece in scratch.pieces.items()}
    scale = tensors["q"].shape[3] ** -0.5
    counter = torch.zeros(1, dtype=torch.int64)
    known: dict[str, Any] = scalars(geometry) | {"LSE": tensors["lse"], "DLSE": tensors["dlse"], "Counter": counter}
    known |= {"dlse_rows": geometry.sizes.seqlen_q, "softmax_scale": scale, "softmax_scale_log2": scale * LOG2E}
    known |= {piece.pointer: pieces[name] for name, piece in scratch.pieces.items()}
    known |= {name.upper(): tensors[name] for name in FIELDS}
    text = render(spec, config).text
    for kernel in row.kernels(spec, config):
        names = set(kernel.names)
        of_call = feature_arguments.arguments(names, features, scale, known, causal=spec.causal)
        run(kernel, text, _bound(kernel, known | of_call, tensors, pieces, geometry, scratch), geometry, programs)
    assert int(counter) == 0
    rows = geometry.sizes.seqlen_q
    return {name: tensors[f"d{name}"] for name in "qkv"} | {"neg_delta": pieces["neg_delta"][:, :, :rows]}


def run(kernel: KernelSpec, text: str, arguments: list[Any], geometry: Geometry, programs: int) -> None:
    count = kernel.programs(H200, geometry.sizes)
    is_gluon, is_persistent = kernel.language == "gluon", "Counter" in kernel.names
    # tiles that convert dq wait for others: also where the GPU has room for one program at a time
    converts = "TilesDone" in kernel.names and is_gluon
    machine = Machine(min(count, programs) if is_persistent else count, room=1 if converts else None)
    instead: dict[str, Any] = {"_load_chunks": _load_chunks} if converts else {}
    for name, size in (("_queries_ahead", "BLOCK_M"), ("_keys_ahead", "DQ_BLOCK_N")):
        if columns := re.findall(rf"^{size} = gl.constexpr\((\d+)\)", text, re.MULTILINE):
            instead[name] = functools.partial(_distance, int(columns[0]))
    (machine.run if is_gluon else machine.run_each)(kernel_of(text, kernel.entry, machine, **instead), arguments)


def _load_chunks(DqAcc: Pointer, chunk: Any, count: Any) -> torch.Tensor:
    """What the kernel's own function of this name loads, whose layouts the machine has none of: two chunks as rows."""
    found = torch.zeros(2, ROWS, ROWS)
    for number in range(min(2, int(count))):
        first = (int(chunk) + 2 * number) * ROWS * ROWS
        by_register = DqAcc.memory[first : first + ROWS * ROWS].reshape(ROWS // 16, ROWS // 8, 8, 4, 2, 2)
        found[number] = by_register.permute(0, 4, 2, 1, 3, 5).reshape(ROWS, ROWS)
    return found.reshape(2 * ROWS, ROWS)


def _distance(columns: int, ahead: torch.Tensor) -> torch.Tensor:
    """What the kernel's own functions of these names compute by layouts."""
    return (ahead[:, None] + torch.arange(columns)[None, :]).abs()


def _bound(
    kernel: KernelSpec, known: dict[str, Any], tensors: Tensors, pieces: Tensors, geometry: Geometry, plan: ScratchPlan
) -> list[Any]:
    found: list[Any] = []
    for parameter in kernel.parameters:
        name = parameter.name.removesuffix("_desc")
        if is_descriptor(parameter):
            block = block_of(parameter)
            memory = storage(tensors[name]) if name in tensors else pieces[name].view(-1)
            described = geometry.described(name, len(block)) if name in tensors else plan.pieces[name].view(len(block))
            found.append(Descriptor(memory=memory, shape=described[0], strides=described[1], block=block))
        elif isinstance(value := known[name], torch.Tensor):
            flat = storage(value)
            found.append(Pointer(memory=flat if flat.is_floating_point() or name == "Counter" else flat.long()))
        else:
            found.append(torch.tensor(0 if value is None else value))
    return found
