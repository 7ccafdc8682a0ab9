"""`DriverPlan`: the kernels of a config launched through the CUDA driver, with all parameters prepared.

What differs from launch to launch (pointers, scale, query offset, features) is the same in all kernels, so it lies in
one place that the parameter lists of all of them point to: a launch writes it once, however many kernels there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashgen.codegen.family import Parameter
from flashgen.launch import driver
from flashgen.launch.binding import Binding
from flashgen.launch.counters import Counters
from flashgen.launch.feature_arguments import has_arguments
from flashgen.launch.feature_writers import WriteFeatures, features_writer
from flashgen.launch.parameter_buffer import C_TYPES, ParameterBuffer
from flashgen.launch.parameters import SLOT_BYTES, Layout
from flashgen.launch.vocabulary import COUNTER

PointTo = Callable[[int], None]
"""Makes what is of a tensor point to its memory, or raises `LaunchError` and changes nothing."""

PointToCounter = Callable[[int], torch.Tensor]
"""Points a kernel to its counter on a stream and returns it, to be kept until the launch."""


Call = tuple[int, int, int, None]
"""Arguments of cuLaunchKernelEx: address of a configuration, handle of a kernel, address of an array of addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMaps:
    """One descriptor, made once for all parameters that are equal to it.

    Attributes:
        subject: a tensor's id, or a piece of scratch memory.
        maps: its CUtensorMaps.
        places: the arrays of addresses that name it, and where.
    """

    subject: str
    maps: driver.TensorMaps
    places: list[tuple[Any, int]] = field(default_factory=list)


class DriverPlan:
    """Parameters of a config's kernels in fixed places of memory.

    The first slots of the shared memory are the scratch memory, the call's tensors in the order of their direction, and
    the pieces of scratch memory: a launch of many tensors writes all of them at once.

    Attributes:
        binding: the kernels, and what their parameters stand for.
        device_index: torch's index of the GPU.
        kernels: each kernel's parameters and launch configuration.
        functions: the driver's handle of each kernel.
        memory: what launches write.
        slots: the values in it, by parameter.
        maps: every different descriptor once.
    """

    def __init__(
        self, binding: Binding, *, functions: Sequence[int], layouts: Sequence[Layout], device_index: int
    ) -> None:
        """Prepare everything but the pointers, in this thread's CUDA context (made that of the GPU if it had none).

        Args:
            binding: the kernels, and what their parameters stand for.
            functions: the driver's handle of each loaded kernel.
            layouts: of each kernel's parameters.
            device_index: torch's index of the GPU.
        """
        self.binding = binding
        self.device_index = device_index
        self.functions = functions
        self._context = driver.use_context(device_index)
        self.kernels = [
            ParameterBuffer(part, layout, programs=programs, scalars=binding.scalars, view=binding.view)
            for part, layout, programs in zip(binding.compiled.parts, layouts, binding.programs, strict=True)
        ]
        self._share(layouts)
        self.maps = self._shared_maps()

    def _share(self, layouts: Sequence[Layout]) -> None:
        """Have the parameter lists of all kernels point to one place for everything that launches write."""
        tensors = [tensor.pointer for tensor in self.binding.direction.tensors]
        pieces = [piece.pointer for piece in self.binding.scratch.pieces.values()]
        places = {name: number for number, name in enumerate([*tensors, *pieces], start=1)}
        shared = list(self._shared(layouts))
        for _, _, parameter in shared:
            places.setdefault(parameter.name, 1 + len(places))
        self.memory = ctypes.create_string_buffer(SLOT_BYTES * (1 + len(places)))
        start = ctypes.addressof(self.memory)
        self.slots: dict[str, Any] = {}
        for kernel, layout, parameter in shared:
            offset = SLOT_BYTES * places[parameter.name]
            kernel.addresses[layout.positions[parameter.name]] = start + offset
            kind = C_TYPES.get(parameter.type, ctypes.c_uint64)
            self.slots[parameter.name] = kind.from_buffer(self.memory, offset)

    def _shared(self, layouts: Sequence[Layout]) -> Iterator[tuple[ParameterBuffer, Layout, Parameter]]:
        for kernel, layout in zip(self.kernels, layouts, strict=True):
            for parameter in layout.parameters:
                is_own = parameter.name in layout.described or parameter.name == COUNTER
                if not is_own and not self.binding.is_fixed(parameter):
                    yield kernel, layout, parameter

    def _shared_maps(self) -> list[SharedMaps]:
        found: dict[tuple[object, ...], SharedMaps] = {}
        for kernel in self.kernels:
            for one in kernel.descriptors:
                subject = self.binding.subject(one.parameter)
                key = (subject, one.view, one.box, one.swizzle, one.element)
                entry = found.setdefault(key, SharedMaps(subject=subject, maps=one.maps()))
                entry.places.append((kernel.addresses, one.position))
        return list(found.values())

    @property
    def calls(self) -> list[Call]:
        """What the driver is called with for each kernel."""
        return [
            (ctypes.addressof(kernel.config), function, ctypes.addressof(kernel.addresses), None)
            for kernel, function in zip(self.kernels, self.functions, strict=True)
        ]

    def slot(self, name: str) -> Any:
        """The value of a parameter that launches write; one that nobody reads where no kernel has the parameter."""
        return self.slots.get(name, ctypes.c_uint64(0) if name[0].isupper() else ctypes.c_float(0))

    def setter(self, subject: str, pointer: str) -> PointTo:
        """What makes the descriptors of a tensor or a piece, and the parameter `pointer`, point to its memory."""
        placed = [(maps, *place) for maps in self.maps if maps.subject == subject for place in maps.places]
        describe = _maps_setter([(one.maps, addresses, position) for one, addresses, position in placed])
        slot = self.slots.get(pointer)
        if slot is None:
            return describe or _nothing

        def set_pointer(pointer: int) -> None:
            slot.value = pointer

        if describe is None:
            return set_pointer
        describe_first = describe

        def set_both(pointer: int) -> None:
            describe_first(pointer)
            slot.value = pointer

        return set_both

    def features_writer(self) -> WriteFeatures | None:
        """What writes the arguments of features; None where the kernels have none."""
        if not has_arguments(self.binding.names):
            return None
        subjects = {maps.subject for maps in self.maps} & {"bias", "mask"}
        describe = {name.capitalize(): self.setter(name, "") for name in subjects}
        causal = self.binding.spec.causal
        return features_writer(self.slots, self.binding.scalars, causal=causal, describe=describe)

    def counted(self) -> list[PointToCounter]:
        """For each kernel with a counter, what points it to that of a stream."""

        def pointing(counters: Counters, slot: Any) -> PointToCounter:
            def point(stream: int) -> torch.Tensor:
                counter = counters.of(stream)
                slot.value = counter.data_ptr()
                return counter

            return point

        own = [
            (kernel, parameter)
            for kernel, part in zip(self.kernels, self.binding.compiled.parts, strict=True)
            for parameter in part.kernel.parameters
            if parameter.name == COUNTER
        ]
        return [pointing(Counters(self.device_index), kernel.slot(parameter)) for kernel, parameter in own]

    def adopt(self) -> bool:
        """Whether this thread had no CUDA context, and now has the plan's.

        A new thread has none until something makes one current, and torch's allocator does not.
        """
        return driver.adopt_context(self._context)

    def fail(self, number: int, code: int) -> None:
        """Raise what the driver says to the launch of a kernel.

        Raises:
            LaunchError: always; the message has the kernel and the driver's name and text for `code`.
        """
        entry, config = self.binding.compiled.parts[number].kernel.entry, self.kernels[number].config
        driver.check(code, f"launch {config.grid_x} blocks of {config.block_x} threads of {entry}")


def _nothing(pointer: int) -> None:
    """A tensor that no kernel has."""


def _maps_setter(placed: list[tuple[driver.TensorMaps, Any, int]]) -> PointTo | None:
    if not placed:
        return None
    maps, addresses, position = placed[0]
    known, at = maps.known.get, maps.at

    def point_to(pointer: int) -> None:
        addresses[position] = known(pointer) or at(pointer)

    def point_all_to(pointer: int) -> None:
        found = [each.at(pointer) for each, _, _ in placed]  # all or, where one is refused, none
        for (_, places, place), address in zip(placed, found, strict=True):
            places[place] = address

    return point_to if len(placed) == 1 else point_all_to
