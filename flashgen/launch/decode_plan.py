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
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.core.config import Config
from flashgen.launch import driver
from flashgen.launch.decode_numbers import DecodeNumbers, DecodeShape
from flashgen.launch.parameters import WORD_BYTES, WORD_FORMATS, Layout
from flashgen.launch.plan import known_layout, load_part

NUMBERS_OF_HEADS = ("Sinks", "AlibiSlopes")
"""Parameters that features of a call are bound to. Its table of pages is an argument of its own and no feature."""

POINTERS = ("O", "LSE", "Q", "K", "V", "Lens", "Table", "Leftpad", "BatchIdx", "OwnLens", *NUMBERS_OF_HEADS)
"""Parameters that a call writes, in the order in which it gives those that it has; the others are null."""

SCRATCH = ("PartO", "PartLse")

GRID = struct.Struct("<3I")
"""How the first numbers of a launch configuration lie."""

CONFIG_WORDS = ctypes.sizeof(driver.LaunchConfig) // WORD_BYTES
STREAM_WORD = driver.LaunchConfig.stream.offset // WORD_BYTES


class Launch(NamedTuple):
    """Launches calls of one shape on the current stream of the current GPU.

    Attributes:
        run: what does so for all shapes of a plan.
        sized: what it does for these.
    """

    run: Callable[[Any, tuple[int, ...], torch.Tensor, bool], None]
    sized: Any

    def __call__(self, pointers: tuple[int, ...], beside: torch.Tensor, keeps: bool = True) -> None:
        """Launch a call.

        Args:
            pointers: the addresses of its tensors, in the order of the names that the plan was asked for.
            beside: a tensor of the GPU.
            keeps: whether memory may be kept for the next call. In graphs of torch.compile it may not: their memory is
                counted, and what is kept of it is an error.

        Raises:
            LaunchError: the driver refuses.
        """
        self.run(self.sized, pointers, beside, keeps)


class DecodePlan:
    """The loaded kernels of a decode config on a GPU of this process."""

    def __init__(self, compiled: CompiledKernel, config: Config, device_index: int) -> None:
        """Load the kernels.

        Raises:
            LaunchError: the driver refuses a binary, or a CUDA graph is being captured.
        """
        self._compiled, self._config, self._index = compiled, config, device_index
        layouts = [known_layout(part) for part in compiled.parts]
        self._layouts = [layout for layout in layouts if layout is not None]
        self._functions = [load_part(part, device_index) for part in compiled.parts]
        self._context = driver.use_context(device_index) if all(self._functions) else 0
        self._words: dict[tuple[str, ...], tuple[_Words, Callable[..., None]]] = {}

    def sized(self, shape: DecodeShape, names: tuple[str, ...] = POINTERS) -> Launch:
        """The launch of calls of one shape, which give addresses for these names of `POINTERS`."""
        return self.opened(shape, names)(shape)

    def opened(self, first: DecodeShape, names: tuple[str, ...] = POINTERS) -> Callable[[DecodeShape], Launch]:
        """What gives the launch of each shape that differs from this one in batch, keys and strides alone."""
        config, device = self._config, self._compiled.device
        fixed = DecodeNumbers.of(first, config, device).fixed
        if len(self._layouts) < len(self._compiled.parts):
            run, words = _through_triton(self._compiled.parts, config, names), None
        else:
            if names not in self._words:
                memory = _Words(self._compiled.parts, self._layouts, self._functions, names, config)
                self._words[names] = memory, self._through_driver(memory, names)
            words, run = self._words[names]
        packed = b"" if words is None else words.pack_fixed(fixed)

        def sized(shape: DecodeShape) -> Launch:
            numbers = DecodeNumbers.of(shape, config, device, fixed)
            pieces = Pieces.of(numbers, shape.head_dim_v)
            return Launch(run, (numbers, pieces) if words is None else words.sized(packed, numbers, pieces))

        return sized

    def _through_driver(self, memory: _Words, names: tuple[str, ...]) -> Callable[..., None]:
        words, streams, all_calls, parts = memory.words, memory.streams, memory.calls, self._compiled.parts
        pack = struct.Struct(f"<{len(names)}Q").pack_into
        pack_pieces, behind = struct.Struct(f"<{len(SCRATCH)}Q").pack_into, WORD_BYTES * len(names)
        launch_kernel, stream_of = driver.launch_function(), torch._C._cuda_getCurrentRawStream
        index, context, lock = self._index, self._context, _LOCK
        last_sized: _Sized | None = None
        calls: tuple[tuple[Any, ...], ...] = ()
        last_stream, last_start, shared = -1, -1, _NONE

        def launch(sized: _Sized, pointers: tuple[int, ...], beside: torch.Tensor, keeps: bool) -> None:
            nonlocal calls, last_sized, last_stream, last_start, shared
            stream = stream_of(index)
            with lock:
                if (
                    sized is not last_sized
                    or not keeps
                    or stream != last_stream
                    or shared[1] != last_start
                    or (stream and torch.cuda.is_current_stream_capturing())  # the stream 0 never is
                ):
                    last_sized, calls, pieces = None, sized.calls, sized.pieces
                    is_alone = sized.is_large or not keeps or (stream and torch.cuda.is_current_stream_capturing())
                    used = pieces.new(beside) if is_alone else pieces.shared(beside, index, stream)
                    memory.write(sized)
                    pack_pieces(words, behind, *pieces.addresses(used[1]))
                    for word in streams:
                        words[word] = stream
                    if not is_alone:
                        last_sized, last_stream, last_start, shared = sized, stream, used[1], used
                pack(words, 0, *pointers)
                for call in calls:
                    code = launch_kernel(*call)
                    if code and driver.adopt_context(context):  # a new thread has no context until now
                        code = launch_kernel(*call)
                    if code:
                        driver.check(code, f"launch {parts[all_calls.index(call)].kernel.entry}")

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


class Pieces(NamedTuple):
    """Where in the memory that both kernels share the second piece begins, in fp32 numbers, and how large it is."""

    second: int
    total: int

    @classmethod
    def of(cls, numbers: DecodeNumbers, head_dim_v: int) -> Pieces:
        """Those of `SCRATCH`, one behind the other."""
        second = numbers.part_rows * head_dim_v
        return cls(second, second + numbers.part_rows)

    def addresses(self, start: int) -> tuple[int, int]:
        """Of the pieces of memory that begins at an address."""
        return start, start + 4 * self.second

    def shared(self, beside: torch.Tensor, index: int, stream: int) -> Memory:
        """What the calls on a stream of a GPU share; nothing for one that splits no sequence."""
        if not self.total:
            return _NONE
        found = _SHARED.setdefault((index, stream), [*_NONE])
        if found[0].numel() < self.total:
            found[:] = self.new(beside)
        return found

    def new(self, beside: torch.Tensor) -> Memory:
        """Memory of one call, until nobody has it."""
        made = beside.new_empty(self.total, dtype=torch.float32)
        return [made, made.data_ptr()]


class _Sized(NamedTuple):
    """What is written for calls of one shape, as bytes, and which kernels are launched."""

    numbers: bytes
    grids: tuple[bytes, ...]
    calls: tuple[tuple[Any, ...], ...]
    pieces: Pieces
    is_large: bool


class _Words:
    """All that the driver reads of a plan's launches.

    First come the addresses that a call writes and those of its scratch memory, then a null and the numbers of a shape,
    and behind them the launch configurations and the addresses of all parameters.
    """

    def __init__(
        self,
        parts: tuple[CompiledPart, ...],
        layouts: list[Layout],
        functions: list[int],
        given: tuple[str, ...],
        config: Config,
    ) -> None:
        formats = {parameter.name: parameter.type for layout in layouts for parameter in layout.parameters}
        numbers = [name for name in formats if not formats[name].startswith("*")]
        changing = DecodeNumbers.names(config)
        self._fixed, last = [name for name in numbers if name not in changing], [n for n in changing if n in numbers]
        self._pack_fixed = struct.Struct("<" + "".join(WORD_FORMATS[formats[name]] for name in self._fixed)).pack
        self._pack_sized = struct.Struct("<" + "".join(WORD_FORMATS[formats[name]] for name in last)).pack
        self._sized = itemgetter(*map(changing.index, last))
        numbers = [*self._fixed, *last]
        places = {name: word for word, name in enumerate((*given, *SCRATCH, "", *numbers))}  # "" stays 0
        absent = places[""]
        places |= {name: absent for name in POINTERS if name not in given}
        end = absent + 1 + len(numbers)
        starts, count = [], end
        for layout in layouts:
            starts.append((count, count + CONFIG_WORDS))
            count += CONFIG_WORDS + len(layout.parameters) + layout.trailing
        self.words: Any = (ctypes.c_uint64 * count)()
        self._bytes = memoryview(self.words).cast("B")
        self._numbers = slice(WORD_BYTES * (absent + 1), WORD_BYTES * end)
        self._grids = [slice(WORD_BYTES * word, WORD_BYTES * word + GRID.size) for word, _ in starts]
        self.streams = [word + STREAM_WORD for word, _ in starts]
        start = ctypes.addressof(self.words)
        self.calls = tuple(
            driver.launch_arguments(start + WORD_BYTES * word, function, start + WORD_BYTES * addresses)
            for (word, addresses), function in zip(starts, functions, strict=True)
        )
        for part, layout, (word, addresses) in zip(parts, layouts, starts, strict=True):
            launch = driver.LaunchConfig.from_buffer(self.words, WORD_BYTES * word)
            launch.block_x, launch.block_y, launch.block_z = part.handle.metadata.num_warps * 32, 1, 1
            launch.shared_bytes = part.handle.metadata.shared
            if part.kernel.overlaps:
                launch.attributes, launch.num_attributes = driver.PROGRAMMATIC_ATTRIBUTE, 1
            read = [places[parameter.name] for parameter in layout.parameters] + [absent] * layout.trailing
            self.words[addresses : addresses + len(read)] = [start + WORD_BYTES * word for word in read]

    def pack_fixed(self, fixed: dict[str, int | float]) -> bytes:
        """The numbers that sizes leave as they are."""
        return self._pack_fixed(*[fixed[name] for name in self._fixed])

    def sized(self, fixed: bytes, numbers: DecodeNumbers, pieces: Pieces) -> _Sized:
        """What is written for a shape."""
        grids = tuple([GRID.pack(*grid) for grid in numbers.grids if grid])
        packed = fixed + self._pack_sized(*self._sized(numbers.sized))
        return _Sized(packed, grids, self.calls[: len(grids)], pieces, pieces.total > LARGEST_SHARED)

    def write(self, sized: _Sized) -> None:
        """Have the next launches be those of a shape."""
        self._bytes[self._numbers] = sized.numbers
        for place, grid in zip(self._grids, sized.grids, strict=False):
            self._bytes[place] = grid


def _through_triton(parts: tuple[CompiledPart, ...], config: Config, names: tuple[str, ...]) -> Callable[..., None]:
    """The same through Triton's own launcher, for a parameter layout that is not the known one."""
    absent = dict.fromkeys(POINTERS, 0)

    def launch(
        sized: tuple[DecodeNumbers, Pieces], pointers: tuple[int, ...], beside: torch.Tensor, keeps: bool
    ) -> None:
        numbers, pieces = sized
        memory, start = pieces.new(beside)
        given = zip((*names, *SCRATCH), (*pointers, *pieces.addresses(start)), strict=True)
        known = numbers.values(config) | absent | dict(given)
        for part, grid in zip(parts, numbers.grids, strict=True):
            if grid:
                part.handle[grid](*(known[name] for name in part.kernel.names))
        del memory

    return launch
