"""`PlanLayout`: where a plan keeps what the CUDA driver reads at the launches of its kernels, whatever the sizes.

All of it lies in one piece of memory, in words of 8 bytes, one for each number:

| words | written |
|---|---|
| scratch memory, the tensors of the direction in their order, pieces of scratch memory | by launches |
| other pointers and numbers of a call, and a counter of each kernel | by launches, where they change |
| the launch configuration of each kernel | of its blocks for a geometry, of its stream by launches |
| sizes and strides; those of each tensor that has descriptors | for a geometry |
| the addresses of all parameters of each kernel | likewise |
| the first CUtensorMap of each descriptor | by launches |

What differs between launches is the same in all kernels, so all of them point to one place for it, which a launch
writes once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from flashgen.codegen.build import CompiledPart
from flashgen.codegen.family import Sizes
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.device import Device
from flashgen.core.features.score_tensors import Shape4
from flashgen.core.workload import DTYPE_BYTES
from flashgen.launch import driver
from flashgen.launch.binding import Binding, view_of
from flashgen.launch.feature_arguments import LOG2E
from flashgen.launch.geometry import Geometry, scalar_names
from flashgen.launch.parameters import WORD_BYTES, WORD_FORMATS, Layout, block_of, element_of, is_descriptor
from flashgen.launch.scratch import ScratchPlan
from flashgen.launch.tensor_maps import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, Encoding, MapPlace, PlanMemory
from flashgen.launch.vocabulary import COUNTER, KEY_SPLITS, OFFSET_TENSOR

ELEMENT_BYTES = {**DTYPE_BYTES, "u8": 1}
"""Bytes of one element of what a tensor descriptor may be of: of a mask a byte."""

SCALES = ("softmax_scale", "softmax_scale_log2")
"""In words side by side, whatever the kernels have."""

CONFIG_WORDS = ctypes.sizeof(driver.LaunchConfig) // WORD_BYTES
STREAM_WORD = driver.LaunchConfig.stream.offset // WORD_BYTES
POINTER = "Q"
HIGH = 1 << 32
"""Of two numbers of 32 bits in one word, the factor of the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTensor:
    """One descriptor of all kernels that have an equal one.

    Attributes:
        subject: a tensor's id, or a piece of scratch memory.
        encoding: what the driver is told of it but the sizes.
        sizes: the first of its words: strides for kernels, then shape and strides for the driver, innermost first.
        entries: the words of the addresses that name it.
    """

    subject: str
    encoding: Encoding
    sizes: int
    entries: list[int] = field(default_factory=list)

    @property
    def driver_sizes(self) -> int:
        """The first of the words for the driver."""
        return self.sizes + self.encoding.rank

    @property
    def read(self) -> list[int]:
        """The words of shape and strides for kernels, whose 32 bits of a size are the first ones of the driver's 64."""
        first, rank = self.driver_sizes, self.encoding.rank
        return [*reversed(range(first, first + rank)), *range(self.sizes, first)]


@dataclass(slots=True, kw_only=True)
class KernelPlace:
    """The first words of a kernel's launch configuration and of its addresses, and the word of its counter, if any.

    `programs` gives the blocks of a launch.
    """

    entry: str
    programs: Callable[[Device, Sizes], int]
    config: int
    counter: int | None
    addresses: int = 0


class _Words:
    """Words in the order in which they are placed: the values that they begin with, and how they are packed."""

    def __init__(self) -> None:
        self.values, self.formats = list[Any](), list[str]()

    def add(self, formats: Iterable[str], values: Iterable[Any] = ()) -> slice:
        """Place some words, which begin with 0 where no value is given."""
        first = len(self.formats)
        self.formats += formats
        self.values += values
        self.values += [0] * (len(self.formats) - len(self.values))
        return slice(first, len(self.formats))

    def one(self, form: str = POINTER, value: Any = 0) -> int:
        """Place one word."""
        return int(self.add([form], [value]).start)


class PlanLayout:
    """Where everything lies, and what fills it for a geometry.

    Attributes:
        places: the words of the parameters that launches write, by name.
        formats: how the number in the word of a parameter is packed, by name.
        described: every different descriptor once.
        map_places: where each lies.
        kernels: the places of each kernel.
    """

    def __init__(self, binding: Binding, layouts: Sequence[Layout]) -> None:
        """Place the parameters of all kernels.

        Args:
            binding: the kernels, and what their parameters stand for.
            layouts: of each kernel's parameters.
        """
        words, self._device = _Words(), binding.compiled.device
        self.formats, self.places = dict[str, str](), dict[str, int]()
        self.kernels = list[KernelPlace]()
        named = self._place_plain(words, binding, layouts)
        described = self._place_descriptors(words, binding, layouts)
        self._place_addresses(words, layouts, named, described)
        self._programs = [(kernel.config, kernel.programs) for kernel in self.kernels]
        self.map_places = self._map_places(WORD_BYTES * len(words.values))
        self._undescribed: list[int | dict[int, int]] = [0] * len(self.map_places)
        room = len(self.described) * TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT if self.described else 0
        constants = struct.pack("<" + "".join(words.formats), *words.values) + bytes(room)
        self._begin = -1, constants  # in one piece: another thread may make it anew
        self._copy: Any = (ctypes.c_uint64 * (len(constants) // WORD_BYTES)).from_buffer_copy

    def filled(self, geometry: Geometry, scratch: ScratchPlan, sizes: Sizes, scalars: Sequence[int]) -> PlanMemory:
        """The memory of a geometry, with everything but what launches write.

        Args:
            geometry: one of the kind that the parameters were placed for.
            scratch: its scratch memory.
            sizes: what the blocks of a launch follow from.
            scalars: the `scalar_values` of the geometry, and how many CTAs share the keys of a tile.
        """
        stream, constants = self._begin
        words = self._copy(constants)
        start = ctypes.addressof(words)
        tensors, last, width, packed, found = geometry.tensors, None, 0, list[bytes](), b""
        for subject, rank, element_bytes in self._sized:
            view = tensors.get(subject)
            if view is None or rank != 4:
                packed.append(_packed_view(*view_of(subject, rank, geometry, scratch), element_bytes))
            else:
                # q, k, v and the output are often alike, or even one view
                if (view is not last and view != last) or element_bytes != width:
                    last, width, found = view, element_bytes, _packed_tensor(*view, element_bytes)
                packed.append(found)
        addresses = (start * self._ones + self._offsets).to_bytes(self._addresses_bytes, "little")
        self._pack(words, self._sizes_at, *self._scalars(scalars), b"".join(packed), addresses)
        device = self._device
        for config, programs in self._programs:
            words[config] = programs(device, sizes) | HIGH
        return PlanMemory(words, start, self._undescribed.copy(), stream)

    @property
    def stream(self) -> int:
        """That of later geometries as they begin, or -1."""
        return self._begin[0]

    def begin_on(self, stream: int, written: Mapping[int, int]) -> None:
        """Have later geometries begin on a stream, with these numbers in words, which launches need not write then."""
        constants = bytearray(self._begin[1])
        for word, number in written.items():
            struct.pack_into("<" + POINTER, constants, WORD_BYTES * word, number)
        self._begin = stream, bytes(constants)

    def _place_plain(self, words: _Words, binding: Binding, layouts: Sequence[Layout]) -> dict[str, int]:
        """Place what is no descriptor and the same in all kernels; returns the words by name."""
        plain = {p.name: p for layout in layouts for p in layout.parameters if not is_descriptor(p)}
        plain.pop(COUNTER, None)
        self.formats = {name: WORD_FORMATS.get(parameter.type, POINTER) for name, parameter in plain.items()}
        fixed = tuple(name for name, parameter in plain.items() if binding.is_fixed(parameter))
        tensors = [tensor.pointer for tensor in binding.direction.tensors]
        pieces = [piece.pointer for piece in binding.scratch.pieces.values()]
        written = dict.fromkeys(["", *tensors, *pieces, OFFSET_TENSOR], POINTER)
        written |= dict.fromkeys(SCALES, WORD_FORMATS["fp32"])
        written |= dict.fromkeys(binding.direction.rows, WORD_FORMATS["i32"])
        written |= {name: form for name, form in self.formats.items() if name not in (*fixed, "q_offset")}
        known = dict(zip(SCALES, (binding.default_scale, binding.default_scale * LOG2E), strict=True))
        self.places = {name: words.one(form, known.get(name, 0)) for name, form in written.items()}
        self._place_kernels(words, binding.compiled.parts)
        self.places["q_offset"] = words.one(WORD_FORMATS["i32"])  # with the sizes: a geometry says what it begins with
        known_scalars = (*scalar_names(binding.geometry), KEY_SPLITS)
        places = [known_scalars.index(name) for name in ("q_offset", *fixed)]
        self._scalars: Callable[[Sequence[int]], Sequence[int]]
        self._scalars = itemgetter(*places) if fixed else itemgetter(slice(places[0], places[0] + 1))
        scalars = words.add(self.formats[name] for name in fixed)
        return self.places | dict(zip(fixed, range(scalars.start, scalars.stop), strict=True))

    def _place_descriptors(
        self, words: _Words, binding: Binding, layouts: Sequence[Layout]
    ) -> list[dict[str, DescribedTensor]]:
        """Place the sizes of every different descriptor; returns those of each kernel by name."""
        known: dict[tuple[object, ...], DescribedTensor] = {}
        sizes: dict[tuple[str, int, int], int] = {}
        found = []
        for part, layout in zip(binding.compiled.parts, layouts, strict=True):
            own = dict[str, DescribedTensor]()
            parameters = [parameter for parameter in layout.parameters if is_descriptor(parameter)]
            boxes = getattr(part.handle.metadata, "tensordesc_meta", None) or ()
            for parameter, box in zip(parameters, boxes, strict=True):
                subject, size, swizzle = binding.subject(parameter), tuple(box["block_size"]), box["swizzle"]
                element, rank = element_of(parameter), len(block_of(parameter))
                key = (subject, rank, element, size, swizzle)
                if key not in known:
                    of_sizes = subject, rank, ELEMENT_BYTES[element]
                    if of_sizes not in sizes:
                        sizes[of_sizes] = words.add([POINTER] * (3 * rank - 1)).start
                    encoding = Encoding(
                        dtype=element, rank=rank, box=size, swizzle=swizzle, element_bytes=ELEMENT_BYTES[element]
                    )
                    known[key] = DescribedTensor(subject=subject, encoding=encoding, sizes=sizes[of_sizes])
                own[parameter.name] = known[key]
            found.append(own)
        self.described, self._sized = tuple(known.values()), tuple(sizes)
        return found

    def _place_kernels(self, words: _Words, parts: Sequence[CompiledPart]) -> None:
        """Place what each kernel has of its own but the addresses, and a null pointer."""
        self._null = words.one()
        for part in parts:
            kernel = part.kernel
            config = _place_config(words, part.handle.metadata, overlaps=kernel.overlaps)
            counter = words.one() if COUNTER in kernel.names else None
            self.kernels.append(
                KernelPlace(entry=kernel.entry, programs=kernel.programs, config=config, counter=counter)
            )

    def _place_addresses(
        self,
        words: _Words,
        layouts: Sequence[Layout],
        named: Mapping[str, int],
        described: Sequence[Mapping[str, DescribedTensor]],
    ) -> None:
        """Place the addresses of the parameters of each kernel."""
        first, offsets = len(words.values), list[int]()
        for kernel, layout, own in zip(self.kernels, layouts, described, strict=True):
            kernel.addresses = first + len(offsets)
            for parameter in layout.parameters:
                one = own.get(parameter.name)
                if one is None:
                    read = [kernel.counter if parameter.name == COUNTER else named[parameter.name]]
                else:
                    one.entries.append(first + len(offsets))
                    read = [0, *one.read]
                offsets += [WORD_BYTES * word for word in read if word is not None]
            offsets += [WORD_BYTES * self._null] * layout.trailing
        words.add([POINTER] * len(offsets))
        self._addresses_bytes = WORD_BYTES * len(offsets)
        sizes_from = self.places["q_offset"]
        of_tensors = sum(3 * rank - 1 for _, rank, _ in self._sized)
        formats = "".join(words.formats[sizes_from : first - of_tensors])
        formats += f"{WORD_BYTES * of_tensors}s{self._addresses_bytes}s"
        self._sizes_at, self._pack = WORD_BYTES * sizes_from, struct.Struct("<" + formats).pack_into
        # one number with an address in each 64 bits: a start is added to all of them at once
        self._offsets, self._ones = (
            sum(one << 64 * n for n, one in enumerate(each)) for each in (offsets, [1] * len(offsets))
        )

    def _map_places(self, first: int) -> list[MapPlace]:
        """Where everything of each descriptor lies, where they come behind `first` bytes."""
        return [
            MapPlace(number, one.encoding, sizes=WORD_BYTES * one.driver_sizes, room=first + number * TENSOR_MAP_BYTES)
            for number, one in enumerate(self.described)
        ]


def _packed_view(shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> bytes:
    """Strides for kernels; then for the driver, innermost first, shape and strides in bytes without that of 1."""
    steps = [stride * element_bytes for stride in strides[-2::-1]]
    return struct.pack(f"<{len(strides)}q{len(shape) + len(steps)}Q", *strides, *shape[::-1], *steps)


_pack_tensor = struct.Struct("<4q7Q").pack


def _packed_tensor(shape: Shape4, strides: Shape4, element_bytes: int) -> bytes:
    """The same of a tensor as it is described in its own four axes, written out (`legal_strides`)."""
    (a, b, c, d), (e, f, g, _) = shape, strides
    if a < 2:
        e = ALIGNMENT_BYTES
    if b < 2:
        f = ALIGNMENT_BYTES
    if c < 2:
        g = ALIGNMENT_BYTES
    return _pack_tensor(e, f, g, 1, d, c, b, a, g * element_bytes, f * element_bytes, e * element_bytes)


def _place_config(words: _Words, metadata: Any, *, overlaps: bool) -> int:
    """A `driver.LaunchConfig` of blocks that a geometry says, on the default stream."""
    threads = metadata.num_warps * 32  # of all partitions, where a kernel specialises its warps
    attributes = [driver.PROGRAMMATIC_ATTRIBUTE, 1] if overlaps else []
    values = [HIGH, 1 | threads * HIGH, 1 | HIGH, metadata.shared, 0, *attributes]
    return int(words.add([POINTER] * CONFIG_WORDS, values).start)
