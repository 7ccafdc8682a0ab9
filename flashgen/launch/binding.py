"""`Binding`: what the parameters of a config's kernels stand for, however they are launched."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.core.workload import Specialization
from flashgen.launch import feature_arguments
from flashgen.launch.backward import NEG_DELTA, check_backward
from flashgen.launch.geometry import Geometry, clamp_offset, scalars
from flashgen.launch.parameters import block_of, is_descriptor
from flashgen.launch.scratch import ScratchPlan
from flashgen.launch.vocabulary import (
    CALL_SCALARS,
    COUNTER,
    DIRECTIONS,
    KEY_SPLITS,
    OFFSET_TENSOR,
    STRIDED,
    Direction,
)

_WRITTEN = {name: frozenset((*CALL_SCALARS, *direction.rows)) for name, direction in DIRECTIONS.items()}
"""By direction: the numbers that every launch may write another value of."""

View = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides in elements of a tensor, such that a tensor descriptor takes them."""

SCORES = ("bias", "mask")
"""Tensors of the features that a kernel may have descriptors of, beside a pointer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A config's kernels and the values of their parameters, as far as a geometry fixes them.

    Attributes:
        compiled: the kernels, in the order of their launches.
        spec: what is compiled in.
        config: how.
        direction: the tensors of a call.
        geometry: shapes and strides of every call.
        scalars: the numbers that follow from them; those that are `written` are defaults.
        written: the numbers that every launch may write another value of.
        scratch: the memory that the kernels share.
        names: the parameters of all kernels together.
    """

    compiled: CompiledKernel
    spec: Specialization
    config: Config
    direction: Direction
    geometry: Geometry
    scalars: dict[str, int]
    written: frozenset[str]
    scratch: ScratchPlan
    names: frozenset[str]

    @classmethod
    def of(cls, compiled: CompiledKernel, spec: Specialization, config: Config, geometry: Geometry) -> Binding:
        """Bind the kernels, all of whose parameters must be in the launch vocabulary.

        Raises:
            LaunchError: one is not, or has two types; or a backward pass lacks what each of them has.
        """
        scratch = ScratchPlan.at(spec, config, geometry.sizes, compiled.device, first=NEG_DELTA)
        found = cls(
            compiled=compiled,
            spec=spec,
            config=config,
            direction=DIRECTIONS[spec.direction],
            geometry=geometry,
            scalars={**scalars(geometry), KEY_SPLITS: scratch.sizes.key_splits},
            written=_WRITTEN[spec.direction],
            scratch=scratch,
            names=frozenset(name for part in compiled.parts for name in part.kernel.names),
        )
        if spec.direction == "backward":
            check_backward(spec, config.family, geometry, scratch)
        found._check_parameters()
        return found

    @property
    def programs(self) -> tuple[int, ...]:
        """Blocks of a launch of each kernel."""
        device, sizes = self.compiled.device, self.scratch.sizes
        return tuple(part.kernel.programs(device, sizes) for part in self.compiled.parts)

    @property
    def default_scale(self) -> float:
        """The softmax scale of a call that names none."""
        return float(self.geometry.q_shape[3] ** -0.5)

    def is_fixed(self, parameter: Parameter) -> bool:
        """Whether a parameter has one value for all launches of the plan."""
        return parameter.name in self.scalars and parameter.name not in self.written

    def subject(self, parameter: Parameter) -> str:
        """What a tensor descriptor is of: a piece of scratch memory, or a tensor's id (two for a head in two parts)."""
        name, part = _described(parameter.name)
        return name if name in self.scratch.pieces else part

    def view(self, parameter: Parameter) -> View:
        """Shape and strides that a tensor descriptor is made with.

        Raises:
            LaunchError: it is of a bias or a mask, and the call has none.
        """
        return view_of(self.subject(parameter), len(block_of(parameter)), self.geometry, self.scratch)

    @property
    def is_far(self) -> bool:
        """Whether scores depend on query offsets beyond the lengths."""
        return not feature_arguments.FAR_FEATURES.isdisjoint(self.names)

    def offset(self, q_offset: int | torch.Tensor | None) -> int | torch.Tensor:
        """The argument for a query offset: an integer of 32 bits, or the tensor where kernels read one.

        Raises:
            LaunchError: it is the other kind than what is compiled in.
        """
        self.check_offset(q_offset)
        if q_offset is None:
            return self.scalars["q_offset"]
        if isinstance(q_offset, torch.Tensor):
            return q_offset
        return clamp_offset(q_offset, self.geometry, is_far=self.is_far)

    def check_offset(self, q_offset: int | torch.Tensor | None) -> None:
        """Refuse a query offset of the other kind than what is compiled in.

        Raises:
            LaunchError: it is.
        """
        if isinstance(q_offset, torch.Tensor):
            if not self.spec.offset_tensor:
                raise LaunchError(f"the kernel takes one integer query offset, got a tensor of shape {q_offset.shape}")
        elif self.spec.offset_tensor:
            raise LaunchError(f"the kernel reads query offsets from an int32 tensor (batch,), got {q_offset}")

    def _check_parameters(self) -> None:
        types: dict[str, str] = {}
        for part in self.compiled.parts:
            entry = part.kernel.entry
            for parameter in part.kernel.parameters:
                if not self._is_known(parameter, part.kernel.names):
                    raise LaunchError(
                        f"a launch writes the parameters of its vocabulary ({self._vocabulary()}), got "
                        f"{parameter.name} ({parameter.type}) of {entry}"
                    )
                kind = "*" if parameter.type.startswith("*") else parameter.type
                if not is_descriptor(parameter) and types.setdefault(parameter.name, kind) != kind:
                    raise LaunchError(
                        f"a parameter has one type in all kernels of a config, got {parameter.name} as "
                        f"{types[parameter.name]} and as {kind} in {entry}"
                    )

    def _is_known(self, parameter: Parameter, beside: list[str]) -> bool:
        name = parameter.name
        if is_descriptor(parameter):
            return name.endswith("_desc") and self._is_described(parameter, beside)
        if not parameter.type.startswith("*"):
            return name in self.scalars or name in self.written
        return name in self._pointers() or feature_arguments.is_tensor(name)

    def _is_described(self, parameter: Parameter, beside: list[str]) -> bool:
        subject, rank, pieces = self.subject(parameter), len(block_of(parameter)), self.scratch.pieces
        if subject in pieces:
            return rank <= len(pieces[subject].scratch.shape)
        if subject in SCORES:
            return rank == 4 and subject.capitalize() in beside
        return subject in STRIDED and subject in self.geometry.tensors and rank in (4, 5)

    def _pointers(self) -> list[str]:
        """Parameters that point to a tensor of the call or to scratch memory."""
        offset = [OFFSET_TENSOR] if self.spec.offset_tensor else []
        pieces = (piece.pointer for piece in self.scratch.pieces.values())
        return [*(tensor.pointer for tensor in self.direction.tensors), *offset, COUNTER, *pieces]

    def _vocabulary(self) -> str:
        """Everything that a parameter may be, in one line."""
        described = [name for name in self.geometry.tensors if name in STRIDED or name in SCORES]
        pointers = [*self._pointers(), *feature_arguments.TENSORS, "Aux<n>"]
        descriptors = [f"{name}_desc" for name in (*described, *self.scratch.pieces)]
        return ", ".join([*pointers, *descriptors, *sorted(self.scalars.keys() | self.written)])


def view_of(subject: str, rank: int, geometry: Geometry, scratch: ScratchPlan) -> View:
    """Shape and strides that a tensor descriptor of so many axes is made with.

    Raises:
        LaunchError: it is of a bias or a mask, and the call has none.
    """
    piece = scratch.pieces.get(subject)
    return geometry.described(subject, rank) if piece is None else piece.view(rank)


@functools.cache
def _described(name: str) -> tuple[str, str]:
    """What the name of a descriptor says that it is of: of a piece of scratch memory, or of a tensor."""
    name = name.removesuffix("_desc")
    return name, name.removesuffix("1")
