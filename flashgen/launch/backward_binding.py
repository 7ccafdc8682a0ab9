"""`BackwardBinding`: what the parameters of a backward config's kernels stand for, however they are launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.core.workload import Specialization
from flashgen.launch import feature_arguments
from flashgen.launch.backward_geometry import FIELDS, BackwardGeometry, backward_scalars
from flashgen.launch.backward_scratch import ScratchPlan
from flashgen.launch.geometry import clamp_offset, legal_strides
from flashgen.launch.parameter_buffer import View
from flashgen.launch.parameters import block_of, is_descriptor

POINTERS = {**{name.upper(): field for name, field in FIELDS.items()}, "LSE": "lse", "DLSE": "dlse", "DBias": "dbias"}
"""Parameters that point to a tensor of the call, and the tensor's field in `BackwardTensors`."""

CALL_SCALARS = (
    "dlse_rows",
    "softmax_scale",
    "softmax_scale_log2",
    "q_offset",
    *feature_arguments.CALL_NUMBERS,
)
"""Numbers that may differ between the calls of one geometry."""

OWN = "Counter"
"""The one parameter whose value is not the same in all kernels of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBinding:
    """A config's kernels and the values of their parameters, as far as a geometry fixes them.

    Attributes:
        compiled: the kernels.
        spec: what is compiled in.
        geometry: shapes and strides of every call.
        scalars: the numbers that follow from them.
        scratch: the memory that the kernels share.
        names: the parameters of all kernels together.
    """

    compiled: CompiledKernel
    spec: Specialization
    geometry: BackwardGeometry
    scalars: dict[str, int]
    scratch: ScratchPlan
    names: frozenset[str]

    @classmethod
    def of(
        cls, compiled: CompiledKernel, spec: Specialization, config: Config, geometry: BackwardGeometry
    ) -> BackwardBinding:
        """Bind the kernels, all of whose parameters must be in the launch vocabulary.

        Raises:
            LaunchError: one is not, or has two types; or the gradient of the bias has an impossible shape.
        """
        _check_dbias(spec, geometry)
        found = cls(
            compiled=compiled,
            spec=spec,
            geometry=geometry,
            scalars=backward_scalars(geometry),
            scratch=ScratchPlan.of(spec, config, geometry.sizes),
            names=frozenset(name for part in compiled.parts for name in part.kernel.names),
        )
        found._check_parameters()
        return found

    @property
    def programs(self) -> tuple[int, ...]:
        """Blocks of a launch of each kernel."""
        return tuple(part.kernel.programs(self.compiled.device, self.geometry.sizes) for part in self.compiled.parts)

    def subject(self, parameter: Parameter) -> str:
        """What a tensor descriptor is of: a piece of scratch memory, or a tensor's id (two for a head in two parts)."""
        name = parameter.name.removesuffix("_desc")
        return name if name in self.scratch.pieces else name.removesuffix("1")

    def view(self, parameter: Parameter) -> View:
        """Shape and strides that a tensor descriptor is made with."""
        subject = self.subject(parameter)
        if subject in FIELDS:
            shape, strides = self.geometry.tensor(subject)
            return shape, legal_strides(shape, strides)
        return self.scratch.pieces[subject].view(len(block_of(parameter)))

    def offset(self, q_offset: int | torch.Tensor | None) -> int | torch.Tensor:
        """The argument for a query offset: an integer of 32 bits, or the tensor where kernels read one.

        Raises:
            LaunchError: it is the other kind than what is compiled in.
        """
        if self.spec.offset_tensor:
            if not isinstance(q_offset, torch.Tensor):
                raise LaunchError(f"the kernel reads query offsets from an int32 tensor (batch,), got {q_offset}")
            return q_offset
        if q_offset is None:
            return self.scalars["q_offset"]
        if isinstance(q_offset, torch.Tensor):
            raise LaunchError(f"the kernel takes one integer query offset, got a tensor of shape {q_offset.shape}")
        is_far = not feature_arguments.FAR_FEATURES.isdisjoint(self.names)
        return clamp_offset(q_offset, self.geometry.forward, is_far=is_far)

    def _check_parameters(self) -> None:
        types: dict[str, str] = {}
        for part in self.compiled.parts:
            for parameter in part.kernel.parameters:
                if not self._is_known(parameter):
                    raise LaunchError(
                        f"parameters of backward kernels are those of the launch vocabulary and of scratch memory "
                        f"({', '.join(self.scratch.pieces)}), got {parameter.name} ({parameter.type}) of "
                        f"{part.kernel.entry}"
                    )
                kind = "*" if parameter.type.startswith("*") else parameter.type
                if not is_descriptor(parameter) and types.setdefault(parameter.name, kind) != kind:
                    raise LaunchError(
                        f"a parameter has one type in all kernels of a config, got {parameter.name} as "
                        f"{types[parameter.name]} and as {kind} in {part.kernel.entry}"
                    )

    def _is_known(self, parameter: Parameter) -> bool:
        name, pieces = parameter.name, self.scratch.pieces
        if is_descriptor(parameter):
            subject = self.subject(parameter)
            rank = len(block_of(parameter))
            fits = rank == 4 if subject in FIELDS else subject in pieces and rank <= len(pieces[subject].scratch.shape)
            return name.endswith("_desc") and fits
        if parameter.type.startswith("*"):
            own = name in POINTERS or name in ("QOffset", OWN) or feature_arguments.is_tensor(name)
            return own or any(name == piece.pointer for piece in pieces.values())
        return name in self.scalars or name in CALL_SCALARS


def _check_dbias(spec: Specialization, geometry: BackwardGeometry) -> None:
    """The gradient of a full bias has an axis of the scores, or 1 where the bias broadcasts."""
    shape, sizes = geometry.dbias_shape, geometry.sizes
    if not spec.bias_grad or spec.bias != "full":
        return
    scores = (sizes.batch, sizes.nheads, sizes.seqlen_q, sizes.seqlen_k)
    if shape is None or shape[3] != scores[3] or any(a not in (1, b) for a, b in zip(shape, scores, strict=True)):
        raise LaunchError(
            f"the gradient of a full bias has four dimensions, those of the scores {scores} or 1 in the first three, "
            f"got {shape}"
        )
