"""Plans of decode configs: both kernels on the current stream, with nothing but pointers left to be written.

Unlike the plans of passes they know no lengths, so one launch that a CUDA graph has captured serves all of them, and a
batch of a new size costs the packing of its numbers. What the first kernel leaves for the second lies in memory that
all calls on a stream share, one after the other. Inside of a graph it comes from torch's allocator and belongs to the
graph: two graphs that were captured on one stream may be replayed on two.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.core.config import Config
from flashgen.launch import driver
from flashgen.launch.decode_numbers import DecodeNumbers, DecodeShape
from flashgen.launch.parameters import WORD_BYTES, WORD_FORMATS, Layout
from flashgen.launch.plan import known_layout, load_part

POINTERS = ("O", "LSE", "Q", "K", "V", "Lens", "Table", "Leftpad", "BatchIdx", "OwnLens", "Sinks", "AlibiSlopes")
"""Parameters that a call writes, in the order in which it gives those that it has; the others are null."""

SCRATCH = ("PartO", "PartLse", "Splits")
SPLIT_NUMBERS = 4
"""Numbers that say what was split of a program's share."""

PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a kernel need not wait for the end of the one before it."""

ATTRIBUTE_WORDS = 9
"""A CUlaunchAttribute: its id, padded to 8 bytes, and a value of 64 bytes."""

CONFIG_WORDS = ctypes.sizeof(driver.LaunchConfig) // WORD_BYTES
STREAM_WORD = driver.LaunchConfig.stream.offset // WORD_BYTES

Launch = Callable[[tuple[int, ...], torch.Tensor, bool], None]
"""Launches on the current stream of the current GPU: the addresses of a call's tensors, and a tensor of that GPU.

The last argument says whether memory may be kept for the next call. In graphs of torch.compile it may not: their memory
is counted, and what is kept of it is an error.
"""


class DecodePlan:
    """The loaded kernels of a decode config on a GPU of this process."""

    def __init__(self, compiled: CompiledKernel, config: Config, device_index: int) -> None:
        """Load the kernels.

        Raises:
            LaunchError: the driver refuses a binary, or a CUDA graph is being captured.
        """
        self._compiled, self._config, self._index = compiled, config, device_index
        self._layouts = [known_layout(part) for part in compiled.parts]
        self._functions = [load_part(part, device_index) for part in compiled.parts]
        self._overlaps = bool(config.get("early", False)), bool(config.get("pdl", False))
        self._context = driver.use_context(device_index) if all(self._functions) else 0

    def sized(self, shape: DecodeShape, names: tuple[str, ...] = POINTERS) -> Launch:
        """The launch of calls of one shape, which give addresses for these names of `POINTERS`."""
        numbers = DecodeNumbers.of(shape, self._config, self._compiled.device)
        pieces = Pieces.of(numbers, shape.head_dim_v)
        known = [layout for layout in self._layouts if layout is not None]
        if len(known) < len(self._layouts):
            return _through_triton(self._compiled.parts, numbers, pieces, names)
        return self._through_driver(known, numbers, pieces, names)

    def _through_driver(
        self, layouts: list[Layout], numbers: DecodeNumbers, pieces: Pieces, names: tuple[str, ...]
    ) -> Launch:
        parts = [part for part, grid in zip(self._compiled.parts, numbers.grids, strict=True) if grid]
        words, starts = _filled(parts, layouts, numbers, names, overlaps=self._overlaps)
        start = ctypes.addressof(words)
        calls = [
            (start + WORD_BYTES * config, function, start + WORD_BYTES * addresses, None)
            for (config, addresses), function in zip(starts, self._functions, strict=False)
        ]
        streams = [config + STREAM_WORD for config, _ in starts]
        pack = struct.Struct(f"<{len(names)}Q").pack_into
        pack_pieces, behind = struct.Struct(f"<{len(SCRATCH)}Q").pack_into, WORD_BYTES * len(names)
        launch_kernel, stream_of = driver.library().cuLaunchKernelEx, torch._C._cuda_getCurrentRawStream
        index, context, lock, is_large = self._index, self._context, _LOCK, pieces.total > LARGEST_SHARED
        last_stream, last_start, shared = -1, -1, _NONE

        def launch(pointers: tuple[int, ...], beside: torch.Tensor, keeps: bool = True) -> None:
            nonlocal last_stream, last_start, shared
            stream = stream_of(index)
            with lock:
                # the stream 0 is never captured
                is_alone = is_large or not keeps or (stream and torch.cuda.is_current_stream_capturing())
                if is_alone or stream != last_stream or shared[1] != last_start:
                    last_stream = -1
                    memory = pieces.new(beside) if is_alone else pieces.shared(beside, index, stream)
                    pack_pieces(words, behind, *pieces.addresses(memory[1]))
                    for word in streams:
                        words[word] = stream
                    if not is_alone:
                        last_stream, last_start, shared = stream, memory[1], memory
                pack(words, 0, *pointers)
                for call in calls:
                    code = launch_kernel(*call)
                    if code and driver.adopt_context(context):  # a new thread has no context until now
                        code = launch_kernel(*call)
                    if code:
                        driver.check(code, f"launch {parts[calls.index(call)].kernel.entry}")

        return launch


_LOCK = threading.Lock()
"""Held for both kernels of a call: no other one on their stream comes between them."""

Memory = list[Any]
"""A tensor and its address."""

_SHARED: dict[tuple[int, int], Memory] = {}
"""Memory by torch's index of a GPU and a stream: the tensor gives way to larger ones."""

_NONE: Memory = [torch.empty(0), 0]

LARGEST_SHARED = 2**23
"""fp32 numbers of memory that is kept: 32 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Where in the memory that both kernels share its pieces begin, in fp32 numbers, and how large it is."""

    second: int
    third: int
    total: int

    @classmethod
    def of(cls, numbers: DecodeNumbers, head_dim_v: int) -> Pieces:
        """Those of `SCRATCH`, one behind the other."""
        second = numbers.part_rows * head_dim_v
        third = second + numbers.part_rows
        return cls(second=second, third=third, total=third + SPLIT_NUMBERS * numbers.splits)

    def addresses(self, start: int) -> tuple[int, int, int]:
        """Of the pieces of memory that begins at an address."""
        return start, start + 4 * self.second, start + 4 * self.third

    def shared(self, beside: torch.Tensor, index: int, stream: int) -> Memory:
        """What the calls on a stream of a GPU share."""
        found = _SHARED.setdefault((index, stream), [*_NONE])
        if found[0].numel() < self.total:
            found[:] = self.new(beside)
        return found

    def new(self, beside: torch.Tensor) -> Memory:
        """Memory of one call, until nobody has it."""
        made = beside.new_empty(self.total, dtype=torch.float32)
        return [made, made.data_ptr()]


_NOTHING = (0, 0, 0)


def _filled(
    parts: list[CompiledPart],
    layouts: list[Layout],
    numbers: DecodeNumbers,
    given: tuple[str, ...],
    *,
    overlaps: tuple[bool, ...],
) -> tuple[Any, list[tuple[int, int]]]:
    """All that the driver reads, and the first words of each kernel's launch configuration and of its addresses."""
    formats = {parameter.name: parameter.type for layout in layouts for parameter in layout.parameters}
    names = [name for name in formats if not formats[name].startswith("*")]
    places = {name: word for word, name in enumerate((*given, *SCRATCH, "", *names))}  # "" stays 0
    places |= {name: places[""] for name in POINTERS if name not in given}
    attribute = places[""] + 1 + len(names)
    at = attribute + ATTRIBUTE_WORDS
    starts, count = [], at
    for layout in layouts[: len(parts)]:
        starts.append((count, count + CONFIG_WORDS))
        count += CONFIG_WORDS + len(layout.parameters) + layout.trailing
    words = (ctypes.c_uint64 * count)()
    start = ctypes.addressof(words)
    packed = struct.Struct("<" + "".join(WORD_FORMATS[formats[name]] for name in names))
    packed.pack_into(words, WORD_BYTES * places[""] + WORD_BYTES, *[numbers.values[name] for name in names])
    words[attribute], words[attribute + 1] = PROGRAMMATIC_SERIALIZATION, 1
    for number, (part, layout, (config, addresses)) in enumerate(zip(parts, layouts, starts, strict=False)):
        launch = driver.LaunchConfig.from_buffer(words, WORD_BYTES * config)
        launch.grid_x, launch.grid_y, launch.grid_z = numbers.grids[number] or _NOTHING
        launch.block_x, launch.block_y, launch.block_z = part.handle.metadata.num_warps * 32, 1, 1
        launch.shared_bytes = part.handle.metadata.shared
        if overlaps[number]:
            launch.attributes, launch.num_attributes = start + WORD_BYTES * attribute, 1
        read = [places[parameter.name] for parameter in layout.parameters] + [places[""]] * layout.trailing
        words[addresses : addresses + len(read)] = [start + WORD_BYTES * word for word in read]
    return words, starts


def _through_triton(
    parts: tuple[CompiledPart, ...], numbers: DecodeNumbers, pieces: Pieces, names: tuple[str, ...]
) -> Launch:
    """The same through Triton's own launcher, for a parameter layout that is not the known one."""
    absent = dict.fromkeys(POINTERS, 0)

    def launch(pointers: tuple[int, ...], beside: torch.Tensor, keeps: bool = True) -> None:
        memory, start = pieces.new(beside)
        given = zip((*names, *SCRATCH), (*pointers, *pieces.addresses(start)), strict=True)
        known = numbers.values | absent | dict(given)
        for part, grid in zip(parts, numbers.grids, strict=True):
            if grid:
                part.handle[grid](*(known[name] for name in part.kernel.names))
        del memory

    return launch
