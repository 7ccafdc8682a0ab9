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
from typing import Any

import torch

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.core.config import Config
from flashgen.launch import driver
from flashgen.launch.decode_numbers import DecodeNumbers, DecodeShape
from flashgen.launch.parameters import WORD_BYTES, WORD_FORMATS, Layout
from flashgen.launch.plan import known_layout, load_part

POINTERS = ("Q", "K", "V", "O", "LSE", "Lens", "Leftpad", "Table", "BatchIdx", "OwnLens", "Sinks", "AlibiSlopes")
"""Parameters that a call writes, in the order in which it gives them; then come those of scratch memory."""

SCRATCH = ("PartO", "PartLse", "Splits")
SPLIT_NUMBERS = 4
"""Numbers that say what was split of a program's share."""

PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a kernel need not wait for the end of the one before it."""

ATTRIBUTE_WORDS = 9
"""A CUlaunchAttribute: its id, padded to 8 bytes, and a value of 64 bytes."""

CONFIG_WORDS = ctypes.sizeof(driver.LaunchConfig) // WORD_BYTES
STREAM_WORD = driver.LaunchConfig.stream.offset // WORD_BYTES

Launch = Callable[[tuple[int, ...], torch.Tensor, int, bool], None]
"""Launches on a stream: the pointers of `POINTERS` (0 where absent), a tensor of the device, the stream's handle.

The last one says whether memory may be kept for the next call. In graphs of torch.compile it may not: their memory is
counted, and what is kept of it is an error.
"""


class DecodePlan:
    """The loaded kernels of a decode config on a GPU of this process."""

    def __init__(self, compiled: CompiledKernel, config: Config, device_index: int) -> None:
        """Load the kernels.

        Raises:
            LaunchError: the driver refuses a binary, or a CUDA graph is being captured.
        """
        self._compiled, self._config = compiled, config
        self._layouts = [known_layout(part) for part in compiled.parts]
        self._functions = [load_part(part, device_index) for part in compiled.parts]
        self._overlaps = bool(config.get("pdl", False))
        self._context = driver.use_context(device_index) if all(self._functions) else 0

    def sized(self, shape: DecodeShape) -> Launch:
        """The launch of calls of one shape."""
        numbers = DecodeNumbers.of(shape, self._config, self._compiled.device)
        memory = _scratch_maker(numbers, shape.head_dim_v)
        known = [layout for layout in self._layouts if layout is not None]
        if len(known) < len(self._layouts):
            return _through_triton(self._compiled.parts, numbers, memory)
        return self._through_driver(known, numbers, memory)

    def _through_driver(self, layouts: list[Layout], numbers: DecodeNumbers, memory: _MakeScratch) -> Launch:
        parts = [part for part, programs in zip(self._compiled.parts, numbers.programs, strict=True) if programs]
        words, starts = _filled(parts, layouts, numbers, overlaps=self._overlaps)
        start = ctypes.addressof(words)
        calls = [
            (start + WORD_BYTES * config, function, start + WORD_BYTES * addresses, None)
            for (config, addresses), function in zip(starts, self._functions, strict=False)
        ]
        streams = [config + STREAM_WORD for config, _ in starts]
        pack, launch_kernel = (
            struct.Struct(f"<{len(POINTERS) + len(SCRATCH)}Q").pack_into,
            driver.library().cuLaunchKernelEx,
        )
        last_stream, context = -1, self._context

        def launch(pointers: tuple[int, ...], beside: torch.Tensor, stream: int, keeps: bool = True) -> None:
            nonlocal last_stream
            with _LOCK:
                scratch, pieces = memory(beside, stream, keeps)  # kept until both kernels are in the stream's queue
                pack(words, 0, *pointers, *pieces)
                if stream != last_stream:
                    for word in streams:
                        words[word] = stream
                    last_stream = stream
                for call in calls:
                    code = launch_kernel(*call)
                    if code and driver.adopt_context(context):  # a new thread has no context until now
                        code = launch_kernel(*call)
                    if code:
                        driver.check(code, f"launch {parts[calls.index(call)].kernel.entry}")
            del scratch

        return launch


_MakeScratch = Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, tuple[int, int, int]]]
"""What the kernels share, on the device of a tensor and a stream: the memory, and the addresses of its pieces."""

_LOCK = threading.Lock()
"""Held for both kernels of a call: no other one on their stream comes between them."""

_SHARED: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
"""Memory by torch's index of a GPU and a stream, and its address."""

LARGEST_SHARED = 2**23
"""fp32 numbers of memory that is kept: 32 MiB."""


def _scratch_maker(numbers: DecodeNumbers, head_dim_v: int) -> _MakeScratch:
    first = numbers.part_rows * head_dim_v
    second = first + numbers.part_rows
    total = second + SPLIT_NUMBERS * numbers.splits
    float32 = torch.float32

    def make(beside: torch.Tensor, stream: int, keeps: bool) -> tuple[torch.Tensor, tuple[int, int, int]]:
        where = (beside.get_device(), stream)
        keeps = keeps and total <= LARGEST_SHARED and not torch.cuda.is_current_stream_capturing()
        memory, start = _SHARED.get(where, _NONE) if keeps else _NONE
        if memory.numel() < total:
            memory = beside.new_empty(total, dtype=float32)
            start = memory.data_ptr()
            if keeps:
                _SHARED[where] = memory, start
        return memory, (start, start + 4 * first, start + 4 * second)

    return make


_NONE = (torch.empty(0), 0)


def _filled(
    parts: list[CompiledPart], layouts: list[Layout], numbers: DecodeNumbers, *, overlaps: bool
) -> tuple[Any, list[tuple[int, int]]]:
    """All that the driver reads, and the first words of each kernel's launch configuration and of its addresses."""
    formats = {parameter.name: parameter.type for layout in layouts for parameter in layout.parameters}
    names = [name for name in formats if not formats[name].startswith("*")]
    places = {name: word for word, name in enumerate((*POINTERS, *SCRATCH, "", *names))}  # "" stays 0
    attribute = len(places)
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
        launch.grid_x, launch.grid_y, launch.grid_z = numbers.programs[number], 1, 1
        launch.block_x, launch.block_y, launch.block_z = part.handle.metadata.num_warps * 32, 1, 1
        launch.shared_bytes = part.handle.metadata.shared
        if number and overlaps:
            launch.attributes, launch.num_attributes = start + WORD_BYTES * attribute, 1
        read = [places[parameter.name] for parameter in layout.parameters] + [places[""]] * layout.trailing
        words[addresses : addresses + len(read)] = [start + WORD_BYTES * word for word in read]
    return words, starts


def _through_triton(parts: tuple[CompiledPart, ...], numbers: DecodeNumbers, memory: _MakeScratch) -> Launch:
    """The same through Triton's own launcher, for a parameter layout that is not the known one."""

    def launch(pointers: tuple[int, ...], beside: torch.Tensor, stream: int, keeps: bool = True) -> None:
        scratch, pieces = memory(beside, stream, keeps)
        known = numbers.values | dict(zip((*POINTERS, *SCRATCH), (*pointers, *pieces), strict=True))
        for part, programs in zip(parts, numbers.programs, strict=True):
            if programs:
                part.handle[(programs, 1, 1)](*(known[name] for name in part.kernel.names))
        del scratch

    return launch
