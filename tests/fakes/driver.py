"""A CUDA driver of pure memory: it keeps what each launch would have read from the addresses it was given."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashgen.codegen.family import Parameter
from flashgen.launch.driver import LaunchConfig
from flashgen.launch.parameters import slot_sizes

INVALID_CONTEXT = 201
INVALID_VALUE = 1
TEXTS = {
    INVALID_CONTEXT: (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context"),
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    700: (b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
}
READ: dict[str, Callable[[bytes], Any]] = {
    "i32": lambda raw: int.from_bytes(raw, "little", signed=True),
    "i64": lambda raw: int.from_bytes(raw, "little", signed=True),
    "fp32": lambda raw: ctypes.c_float.from_buffer_copy(raw).value,
}


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What one call to cuTensorMapEncodeTiled asked for, dimensions as the driver wants them: innermost first."""

    dtype: int
    shape: tuple[int, ...]
    byte_strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One launch: every kernel parameter by name (a descriptor is its pointer), the grid, and where it ran."""

    values: dict[str, Any]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    function: int
    attributes: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class FakeDriver:
    """Reads the parameters of a launch in the layout that PTX of this signature has."""

    parameters: tuple[Parameter, ...] = ()
    named: dict[str, tuple[Parameter, ...]] = field(default_factory=dict)  # of several kernels, by name
    kernels: dict[int, tuple[Parameter, ...]] = field(default_factory=dict)  # the same by handle, once they are loaded
    trailing: int = 2
    context: int = 0x1000
    primary: int = 0x1000
    needs_context: bool = False
    code: int = 0  # what the next launches return
    refused: set[int] = field(default_factory=set)  # pointers that no descriptor can be made for
    launches: list[Launched] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    replaced: list[tuple[int, int]] = field(default_factory=list)
    loaded: list[tuple[bytes, bytes]] = field(default_factory=list)
    attributes: list[tuple[int, int]] = field(default_factory=list)
    capture: int | None = None  # the graph that every stream records

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        assert extra is None
        config, function, parameters = map(as_number, (config, function, parameters))
        if self.code or (self.needs_context and not self.context):
            return self.code or INVALID_CONTEXT
        read = LaunchConfig.from_address(config)
        parameters_of = self.kernels.get(function, self.parameters)
        sizes = [size for parameter in parameters_of for size in _slots(parameter)] + [8] * self.trailing
        addresses = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        raw = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        assert raw[len(raw) - self.trailing :] == [bytes(8)] * self.trailing, "scratch pointers are null"
        self.launches.append(
            Launched(
                values=self._values(parameters_of, raw, list(addresses)),
                grid=(read.grid_x, read.grid_y, read.grid_z),
                block=(read.block_x, read.block_y, read.block_z),
                shared_bytes=read.shared_bytes,
                stream=read.stream or 0,
                function=function,
                attributes=_attributes(read),
            )
        )
        return 0

    def _values(self, parameters_of: tuple[Parameter, ...], raw: list[bytes], addresses: list[int]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        position = 0
        for parameter in parameters_of:
            count = len(_slots(parameter))
            parts, at = raw[position : position + count], addresses[position]
            position += count
            values[parameter.name] = READ.get(parameter.type, lambda part: int.from_bytes(part, "little"))(parts[0])
            if count > 1:
                assert at % 64 == 0, "a descriptor lies at a multiple of 64 bytes"
                values[parameter.name] = int.from_bytes(parts[0][:8], "little")
                numbers = [int.from_bytes(part, "little") for part in parts[1:]]  # sizes, then strides
                values[f"{parameter.name}.shape"] = tuple(numbers[: len(numbers) // 2])
                values[f"{parameter.name}.strides"] = tuple(numbers[len(numbers) // 2 :])
                values[f"{parameter.name}.encoded"] = self._encoded_at(at)
        return values

    def cuTensorMapEncodeTiled(
        self,
        address: Any,
        dtype: int,
        rank: int,
        pointer: Any,
        shape: Any,
        byte_strides: Any,
        box: Any,
        steps: Any,
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        address, pointer, shape, byte_strides, box, steps = map(
            as_number, (address, pointer, shape, byte_strides, box, steps)
        )
        shape, byte_strides = (
            (ctypes.c_uint64 * rank).from_address(shape),
            (ctypes.c_uint64 * (rank - 1)).from_address(byte_strides),
        )
        box, steps = ((ctypes.c_uint32 * rank).from_address(at) for at in (box, steps))
        assert (interleave, promotion, fill, list(steps)) == (0, 2, 0, [1] * rank)
        if self.needs_context and not self.context:
            return INVALID_CONTEXT
        if pointer in self.refused or pointer % 16 or any(stride % 16 for stride in byte_strides):
            return INVALID_VALUE
        self.encoded.append(
            Encoded(dtype=dtype, shape=tuple(shape), byte_strides=tuple(byte_strides), box=tuple(box), swizzle=swizzle)
        )
        # 128 bytes of the driver's own making: here the pointer, and which encoding it is, counted from 1
        content = pointer.to_bytes(8, "little") + len(self.encoded).to_bytes(8, "little")
        ctypes.memmove(address, content.ljust(128, b"\0"), 128)
        return 0

    def _encoded_at(self, address: int) -> Encoded:
        number = int.from_bytes(ctypes.string_at(address + 8, 8), "little")
        assert 0 < number <= len(self.encoded), "only an encoded descriptor, or a copy of one, describes a tensor"
        return self.encoded[number - 1]

    def cuTensorMapReplaceAddress(self, address: int, pointer: int) -> int:
        self._encoded_at(address)
        if pointer in self.refused:
            return INVALID_VALUE
        self.replaced.append((address, pointer))
        ctypes.memmove(address, pointer.to_bytes(8, "little"), 8)
        return 0

    def cuStreamGetCaptureInfo_v2(
        self, stream: ctypes.c_void_p, status: Any, identity: Any, graph: None, dependencies: None, count: None
    ) -> int:
        assert (graph, dependencies, count) == (None, None, None)
        status._obj.value = 0 if self.capture is None else 1
        identity._obj.value = self.capture or 0
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.context = context.value or 0
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = self.primary + device.value
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        if not self.context:
            return INVALID_CONTEXT
        module._obj.value = 0x5000
        self.loaded.append((cubin, b""))
        return self.code

    def cuModuleGetFunction(self, function: Any, module: ctypes.c_void_p, name: bytes) -> int:
        assert module.value == 0x5000
        function._obj.value = 0x6000
        if name.decode() in self.named:
            function._obj.value = 0x6000 + len(self.loaded)
            self.kernels[function._obj.value] = self.named[name.decode()]
        self.loaded[-1] = (self.loaded[-1][0], name)
        return 0

    def _is_loaded(self, function: ctypes.c_void_p) -> bool:
        return function.value == 0x6000 or function.value in self.kernels

    def cuFuncSetCacheConfig(self, function: ctypes.c_void_p, preference: int) -> int:
        assert self._is_loaded(function)
        assert preference == 1
        return 0

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, attribute: int, value: int) -> int:
        assert self._is_loaded(function)
        self.attributes.append((attribute, value))
        return INVALID_VALUE if value > 227 * 1024 else 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = TEXTS[code][0] if code in TEXTS else None
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = TEXTS[code][1] if code in TEXTS else None
        return 0


_slots = functools.cache(slot_sizes)
"""Asked for each parameter of each launch, of which there are few."""


def as_number(argument: Any) -> int:
    """An argument, which may be one that ctypes has converted: it shows its number and does not give it."""
    return argument if isinstance(argument, int) else int(repr(argument).split("(")[1].rstrip(")>"), 16)


def _attributes(read: LaunchConfig) -> list[tuple[int, int]]:
    """The id and the first number of each CUlaunchAttribute of 72 bytes."""
    if not read.num_attributes:
        return []
    words = (ctypes.c_uint64 * (9 * read.num_attributes)).from_address(read.attributes)
    return [(words[9 * i] & 0xFFFFFFFF, words[9 * i + 1] & 0xFFFFFFFF) for i in range(read.num_attributes)]
