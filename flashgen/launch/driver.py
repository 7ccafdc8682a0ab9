"""The few calls of the CUDA driver that a launch needs, through ctypes.

Triton's own launcher builds a C extension for every signature, parses every argument of every call, and in 3.6
encodes tensor descriptors again at each launch. With prepared parameters a launch is one call of the driver, whatever
the number of arguments. `PyDLL` keeps the interpreter lock during these calls: they only put work into a queue.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_int, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from flashgen.core.errors import LaunchError

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
STATIC_SHARED_LIMIT = 48 * 1024
"""A block gets more than this only after asking for it."""

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
TENSOR_MAPS_KEPT = 64
"""Descriptors of one tensor of a plan, each for another pointer."""

L2_PROMOTION_128B = 2
TENSOR_MAP_DTYPES = {"u8": 0, "fp16": 6, "fp32": 7, "tf32": 7, "bf16": 9}  # CUtensorMapDataType


class LaunchConfig(Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid_x", c_uint),
        ("grid_y", c_uint),
        ("grid_z", c_uint),
        ("block_x", c_uint),
        ("block_y", c_uint),
        ("block_z", c_uint),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    )


PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a kernel need not wait for the end of the one before it."""

_ATTRIBUTE_WORDS = 9
"""A CUlaunchAttribute: its id, padded to 8 bytes, and a value of 64 bytes."""

_PROGRAMMATIC: Any = (ctypes.c_uint64 * _ATTRIBUTE_WORDS)(PROGRAMMATIC_SERIALIZATION, 1)
PROGRAMMATIC_ATTRIBUTE = ctypes.addressof(_PROGRAMMATIC)
"""The address of that attribute, the only one of a `LaunchConfig` that has one."""


pointer_to = c_void_p.from_param
"""What ctypes makes of an address that it is to give as it is."""


@functools.cache
def library() -> Any:
    """The CUDA driver of this machine.

    Raises:
        LaunchError: there is none.
    """
    try:
        cuda = ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"launching needs the CUDA driver, and libcuda.so.1 cannot be opened: {error}") from error
    cuda.cuLaunchKernelEx.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
    cuda.cuTensorMapReplaceAddress.argtypes = (c_void_p, c_void_p)
    cuda.cuModuleLoadData.argtypes = (POINTER(c_void_p), c_void_p)
    cuda.cuModuleGetFunction.argtypes = (POINTER(c_void_p), c_void_p, ctypes.c_char_p)
    cuda.cuFuncSetAttribute.argtypes = (c_void_p, c_int, c_int)
    cuda.cuFuncSetCacheConfig.argtypes = (c_void_p, c_int)
    return cuda


def launch_function() -> Any:
    """`cuLaunchKernelEx` for `launch_arguments`; otherwise ctypes converts the same arguments at every launch."""
    return library()["cuLaunchKernelEx"]


def launch_arguments(config: int, function: int, parameters: int) -> tuple[Any, ...]:
    """The arguments of a launch: addresses of its configuration and of those of its parameters, and a kernel."""
    return pointer_to(config), pointer_to(function), pointer_to(parameters), None


def check(code: int, action: str) -> None:
    """Raise what the driver says.

    Raises:
        LaunchError: `code` is not success; the message has the driver's name and text for it.
    """
    if code == 0:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library().cuGetErrorName(code, ctypes.byref(name))
    library().cuGetErrorString(code, ctypes.byref(text))
    said = f"{(name.value or b'?').decode()}: {(text.value or b'?').decode()}"
    raise LaunchError(f"the CUDA driver could not {action}: {said} ({code})")


def load_function(cubin: bytes, name: str, shared_bytes: int) -> int:
    """Load a binary into the current context and return the handle of its kernel; it stays loaded.

    Raises:
        LaunchError: the driver refuses the binary or the amount of shared memory.
    """
    cuda = library()
    module, function = c_void_p(), c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), f"load kernel {name}")
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"find kernel {name}")
    if shared_bytes > STATIC_SHARED_LIMIT:
        check(cuda.cuFuncSetCacheConfig(function, PREFER_SHARED), "prefer shared memory")
        code = cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        check(code, f"give a block {shared_bytes} bytes of shared memory")
    if function.value is None:
        raise LaunchError(f"the CUDA driver gave no handle for kernel {name}")
    return function.value


def current_context() -> int:
    """The CUDA context of this thread; 0 if it has none."""
    context = c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(context)), "name the current context")
    return context.value or 0


def use_context(index: int) -> int:
    """The CUDA context of this thread; a thread without one gets the primary context of GPU `index`, torch's own.

    A new thread has none until something makes one current, and neither torch's allocator nor `torch.cuda.device` does.

    Raises:
        LaunchError: the driver gives none.
    """
    found = current_context()
    if not found:
        found = _primary_context(index)
        check(library().cuCtxSetCurrent(c_void_p(found)), "make a context current")
    return found


@functools.cache
def _primary_context(index: int) -> int:
    # retained once and never released: torch keeps it as long as the process, too
    device, context = c_int(), c_void_p()
    check(library().cuDeviceGet(ctypes.byref(device), index), f"find GPU {index}")
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"name the context of GPU {index}")
    if context.value is None:
        raise LaunchError(f"the CUDA driver gave no context for GPU {index}")
    return context.value


def adopt_context(context: int) -> bool:
    """Make `context` current if this thread has none; returns whether it had none."""
    if current_context():
        return False
    check(library().cuCtxSetCurrent(c_void_p(context)), "make a context current")
    return True


def capture_id(stream: int) -> int:
    """What tells the capture that `stream` takes part in from every other capture of this process."""
    status, identity = c_int(), c_uint64()
    code = library().cuStreamGetCaptureInfo_v2(
        c_void_p(stream), ctypes.byref(status), ctypes.byref(identity), None, None, None
    )
    check(code, "name the CUDA graph under capture")
    return identity.value


class Encoding:
    """What the driver is told of a tensor descriptor whatever the sizes of the tensor.

    Attributes:
        rank: axes of the tensor.
        element_bytes: bytes of one element.
    """

    __slots__ = ("_box", "_boxes", "_dtype", "_encode", "_kind", "_steps", "_swizzle", "element_bytes", "rank")

    def __init__(self, *, dtype: str, rank: int, box: tuple[int, ...], swizzle: int, element_bytes: int) -> None:
        """Describe what one copy takes: `box` elements of each axis."""
        self._dtype, self._swizzle, self.rank, self.element_bytes = dtype, swizzle, rank, element_bytes
        self._kind = TENSOR_MAP_DTYPES[dtype]
        self._boxes = (c_uint32 * (2 * rank))(*box[::-1], *[1] * rank)
        boxes = ctypes.addressof(self._boxes)
        self._box, self._steps = pointer_to(boxes), pointer_to(boxes + 4 * rank)
        # without `argtypes`, which would look at each of 12 arguments: what is no address is an int or an enum
        self._encode = library()["cuTensorMapEncodeTiled"]

    def encode(self, address: int, pointer: int, sizes: int) -> None:
        """Have the driver encode a descriptor at `address` of the tensor at `pointer`.

        `sizes` is the address of the tensor's shape, innermost first, then of its strides in bytes but the innermost.

        Raises:
            LaunchError: the driver refuses, e.g. for an address or a stride that is not a multiple of 16 bytes.
        """
        rank = self.rank
        code = self._encode(
            pointer_to(address),
            self._kind,
            rank,
            pointer_to(pointer),
            pointer_to(sizes),
            pointer_to(sizes + 8 * rank),
            self._box,
            self._steps,
            0,
            self._swizzle,
            L2_PROMOTION_128B,
            0,
        )
        if code:
            numbers = list((c_uint64 * (2 * rank - 1)).from_address(sizes))
            shape, steps, box = (tuple(one[::-1]) for one in (numbers[:rank], numbers[rank:], self._boxes[:rank]))
            strides = (*(step // self.element_bytes for step in steps), 1)
            check(code, f"describe a {self._dtype} tensor of shape {shape}, strides {strides}, box {box}")


@dataclass(frozen=True, slots=True)
class MapPlace:
    """Where the descriptors of one tensor of a plan lie, whatever the sizes; bytes are counted from its memory's start.

    Attributes:
        encoding: what the driver is told of them but the sizes.
        sizes: bytes before those, see `Encoding.encode`.
        room: bytes before the first descriptor, or up to `TENSOR_MAP_ALIGNMENT` more than that.
        entry: the word that holds the address of a descriptor.
        pointer: the word of the tensor's own address, where a kernel reads that as well.
    """

    encoding: Encoding
    sizes: int
    room: int
    entry: int
    pointer: int | None


class TensorMaps:
    """The descriptors (CUtensorMap) of one tensor for TMA, one for each of its last pointers.

    Tensors of a model come back to the same few places. The first descriptor is encoded; those for other pointers are
    copies of it with another address, and a pointer that was seen lately costs no call of the driver at all.
    """

    __slots__ = ("_buffers", "_first", "_place", "_start", "_words", "known")

    def __init__(self, place: MapPlace, start: int, words: Any) -> None:
        """Describe a tensor.

        Args:
            place: where everything lies.
            start: the address of a plan's memory, which is kept by whoever holds this object.
            words: that memory.
        """
        self._place, self._start, self._words = place, start, words
        self._buffers: tuple[Any, ...] = ()
        self._first = 0  # the pointer of the first descriptor, which is not `known` until there is another one
        self.known: dict[int, int] = {}

    def at(self, pointer: int) -> int:
        """The address of the descriptor of the tensor at `pointer`.

        Raises:
            LaunchError: the driver refuses, e.g. for an address or a stride that is not a multiple of 16 bytes.
        """
        return self.known.get(pointer) or self.describe(pointer)

    def point_to(self, pointer: int) -> None:
        """Have the plan's word hold that address.

        Raises:
            LaunchError: likewise.
        """
        self._words[self._place.entry] = self.known.get(pointer) or self.describe(pointer)

    def point_both_to(self, pointer: int) -> None:
        """And the word of the tensor's own address.

        Raises:
            LaunchError: likewise.
        """
        words, place = self._words, self._place
        words[place.entry] = self.known.get(pointer) or self.describe(pointer)
        words[place.pointer] = pointer

    def describe(self, pointer: int) -> int:
        """The same for a pointer that is not `known`.

        Raises:
            LaunchError: likewise.
        """
        first, known, place = self._first, self.known, self._place
        if not known:
            room = self._start + place.room
            room += -room % TENSOR_MAP_ALIGNMENT
            if not first:
                place.encoding.encode(room, pointer, self._start + place.sizes)
                self._first = pointer
                return room
            known[first] = room  # no sooner: at a new length most tensors have one pointer for a while
            if pointer == first:
                return room
        pattern = next(iter(known.values()))
        is_full = len(known) >= TENSOR_MAPS_KEPT
        address, buffer = (pattern, None) if is_full else _copy_of(pattern)
        code = library().cuTensorMapReplaceAddress(address, pointer)
        if code:
            check(code, f"describe a tensor at {pointer:#x}")
        if is_full:
            del known[next(iter(known))]
        else:
            self._buffers = (*self._buffers, buffer)
        known[pointer] = address
        return address


def _copy_of(pattern: int) -> tuple[int, Any]:
    """The address of a copy of a descriptor, and what keeps it."""
    buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    address = ctypes.addressof(buffer)
    address += -address % TENSOR_MAP_ALIGNMENT
    ctypes.memmove(address, pattern, TENSOR_MAP_BYTES)
    return address, buffer
