"""`DriverPlan`: the kernels of a config launched through the CUDA driver, open in the sizes of its calls.

What depends on the specialization alone is found once: where every parameter lies, what descriptors are made of, the
handles of the kernels. A new geometry costs what depends on it: sizes, strides, and the driver's descriptors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from flashgen.codegen.family import Sizes
from flashgen.launch import driver
from flashgen.launch.backward import NEG_DELTA, check_backward
from flashgen.launch.binding import Binding
from flashgen.launch.counters import Counters
from flashgen.launch.feature_arguments import has_arguments
from flashgen.launch.feature_writers import WriteFeatures, features_writer
from flashgen.launch.geometry import Q_OFFSET_PLACE, Geometry, scalar_values, scalars
from flashgen.launch.parameters import WORD_BYTES, Layout
from flashgen.launch.plan_layout import STREAM_WORD, PlanLayout
from flashgen.launch.scratch import ScratchPlan
from flashgen.launch.tensor_maps import MapPlace, PlanMemory, PointTo
from flashgen.launch.vocabulary import KEY_SPLITS

Call = tuple[Any, ...]
"""The `driver.launch_arguments` of a kernel."""


class SizedPlan:
    """A `DriverPlan` at one geometry: everything is in its place but what launches write.

    Attributes:
        geometry: shapes and strides of every call.
        scratch: the memory that the kernels share; without pieces that of any geometry.
        q_offset: the query offset by default.
        memory: what the driver reads.
    """

    __slots__ = ("geometry", "memory", "q_offset", "scratch")

    def __init__(self, geometry: Geometry, scratch: ScratchPlan, q_offset: int, memory: PlanMemory) -> None:
        """Hold them."""
        self.geometry, self.scratch, self.q_offset, self.memory = geometry, scratch, q_offset, memory


class DriverPlan:
    """What the launches of a config's kernels have in common at all geometries of a kind.

    Attributes:
        binding: the kernels, and what their parameters stand for; its geometry is the first one.
        device_index: torch's index of the GPU.
        layout: where the parameters lie.
        streams: the words of the stream of each kernel's launch configuration.
        has_features: whether kernels have arguments of features.
    """

    def __init__(
        self, binding: Binding, *, functions: Sequence[int], layouts: Sequence[Layout], device_index: int
    ) -> None:
        """Prepare everything but sizes, in this thread's CUDA context (made that of the GPU if it had none).

        Args:
            binding: the kernels, and what their parameters stand for.
            functions: the driver's handle of each loaded kernel.
            layouts: of each kernel's parameters.
            device_index: torch's index of the GPU.
        """
        self.binding, self.device_index = binding, device_index
        self._context = driver.use_context(device_index)
        self.layout = PlanLayout(binding, layouts)
        self._calls = [
            (WORD_BYTES * kernel.config, driver.pointer_to(function), WORD_BYTES * kernel.addresses)
            for kernel, function in zip(self.layout.kernels, functions, strict=True)
        ]
        self.streams = [kernel.config + STREAM_WORD for kernel in self.layout.kernels]
        self.counters = [
            (kernel.counter, Counters(device_index)) for kernel in self.layout.kernels if kernel.counter is not None
        ]
        self._kind = _kind(binding.geometry, binding.scratch)
        self._is_backward = binding.spec.direction == "backward"
        self._scratch_at = ScratchPlan.maker(binding.spec, binding.config, binding.compiled.device, first=NEG_DELTA)
        # kernels that name no piece of it and no share have none at any size
        self._has_scratch = bool(binding.scratch.pieces) or KEY_SPLITS in binding.names
        entries: dict[str, list[tuple[int, int]]] = {}
        for number, one in enumerate(self.layout.described):
            entries.setdefault(one.subject, []).extend((number, entry) for entry in one.entries)
        self.entries = entries
        self._described_features = {subject.capitalize(): subject for subject in ("bias", "mask") if subject in entries}
        places = {name: self.layout.places[name] for name in self.layout.formats if name in self.layout.places}
        self.has_features = has_arguments(binding.names)
        self._write_features = (
            features_writer(
                places, self.layout.formats, causal=binding.spec.causal, described=tuple(self._described_features)
            )
            if self.has_features
            else None
        )

    def sized(self, geometry: Geometry, sizes: Sizes | None = None) -> SizedPlan | None:
        """The plan at a geometry, or None if it is of another kind than the first one; `sizes` are its own, if known.

        Raises:
            LaunchError: a backward pass cannot have this geometry.
        """
        binding, sizes = self.binding, geometry.sizes if sizes is None else sizes
        scratch = binding.scratch
        if self._has_scratch:
            scratch = self._scratch_at(sizes)
            sizes = scratch.sizes  # and how many CTAs share the keys of a tile
        if _kind(geometry, scratch) != self._kind:
            return None
        if self._is_backward:
            check_backward(binding.spec, binding.config.family, geometry, scratch)
        values = scalar_values(geometry)
        values.append(sizes.key_splits)
        memory = self.layout.filled(geometry, scratch, sizes, values)
        return SizedPlan(geometry, scratch, values[Q_OFFSET_PLACE], memory)

    def calls(self, memory: PlanMemory) -> list[Call]:
        """What the driver is called with for each kernel."""
        start, pointer_to = memory.start, driver.pointer_to
        if len(self._calls) == 1:  # as most have, without a function of its own for the loop
            config, function, addresses = self._calls[0]
            return [(pointer_to(start + config), function, pointer_to(start + addresses), None)]
        return [
            (pointer_to(start + config), function, pointer_to(start + addresses), None)
            for config, function, addresses in self._calls
        ]

    def describer(self, subject: str, pointer: str = "") -> PointTo | None:
        """What makes the descriptors of a tensor or a piece point to its memory; None where it has none.

        And the parameter `pointer`, where a kernel has that as well.
        """
        entries, layout = self.entries.get(subject), self.layout
        if entries is None:
            return None
        word, places = layout.places[pointer] if pointer in layout.formats else None, layout.map_places
        if len(entries) > 1:
            return _all_describer([(places[number], entry) for number, entry in entries], word)
        ((number, entry),) = entries
        return places[number].pointer_writer(entry, word)

    def features_writer(self, sized: SizedPlan) -> WriteFeatures | None:
        """What writes the arguments of features; None where the kernels have none."""
        if self._write_features is None:
            return None
        memory = sized.memory
        made = {name: self.describer(subject) for name, subject in self._described_features.items()}
        describe = {name: partial(describer, memory) for name, describer in made.items() if describer is not None}
        return self._write_features(memory.words, scalars(sized.geometry), describe)

    def point_counters(self, words: Any, stream: int) -> list[torch.Tensor]:
        """Point each kernel with a counter to that of a stream; returns the counters, to be kept until the launch."""
        held = []
        for word, counters in self.counters:
            counter = counters.of(stream)
            words[word] = counter.data_ptr()
            held.append(counter)
        return held

    def begin_on(self, stream: int, words: Any) -> None:
        """Have later geometries begin on a stream, as these words do, if none does so yet: most have but one."""
        if self.layout.stream < 0:
            written = [*self.streams, *(word for word, _ in self.counters)]
            self.layout.begin_on(stream, {word: words[word] for word in written})

    def adopt(self) -> bool:
        """Whether this thread had no CUDA context, and now has the plan's.

        A new thread has none until something makes one current, and torch's allocator does not.
        """
        return driver.adopt_context(self._context)

    def fail(self, number: int, code: int, words: Any) -> None:
        """Raise what the driver says to the launch of a kernel.

        Raises:
            LaunchError: always; the message has the kernel and the driver's name and text for `code`.
        """
        kernel = self.layout.kernels[number]
        config = driver.LaunchConfig.from_buffer(words, WORD_BYTES * kernel.config)
        driver.check(code, f"launch {config.grid_x} blocks of {config.block_x} threads of {kernel.entry}")


def _all_describer(entries: Sequence[tuple[MapPlace, int]], word: int | None) -> PointTo:
    def point_all_to(memory: PlanMemory, pointer: int) -> None:
        words = memory.words
        found = [place.at(memory, pointer) for place, _ in entries]  # all or, where one is refused, none
        for (_, entry), address in zip(entries, found, strict=True):
            words[entry] = address
        if word is not None:
            words[word] = pointer

    return point_all_to


def _kind(geometry: Geometry, scratch: ScratchPlan) -> tuple[object, ...]:
    """What of a geometry decides where parameters lie and what they may be: its tensors, and the pieces by rank."""
    pieces = [(name, len(piece.scratch.shape)) for name, piece in scratch.pieces.items()] if scratch.pieces else []
    return (*geometry.tensors, geometry.dbias_shape is None, *pieces)
