"""Plans: a compiled kernel bound to one set of shapes and strides, ready to be launched on any pointers.

Two kinds do the same thing. `DriverPlan` prepares the parameters of a launch once and calls the CUDA driver;
`TritonPlan` calls Triton's `CompiledKernel[grid]` and serves wherever the parameter layout is not the known one
(another Triton, AMD). Tests hold them equal.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.families import family
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.core.workload import DTYPE_BYTES, Specialization
from flashgen.launch import driver
from flashgen.launch.parameters import trailing_pointers

LOG2E = 1.4426950408889634
ALIGNMENT_BYTES = 16

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shapes and strides (in elements) of q, k, v and out, each in (batch, head, sequence, head_dim) order."""

    q_shape: Shape4
    k_shape: Shape4
    v_shape: Shape4
    q_strides: Shape4
    k_strides: Shape4
    v_strides: Shape4
    o_strides: Shape4

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Geometry:
        """The geometry of four tensors in bhsd order."""
        shapes = {f"{name}_shape": tuple(tensor.shape) for name, tensor in (("q", q), ("k", k), ("v", v))}
        named = (("q", q), ("k", k), ("v", v), ("o", out))
        strides = {f"{name}_strides": tuple(tensor.stride()) for name, tensor in named}
        return cls(**shapes, **strides)  # type: ignore[arg-type]

    @property
    def o_shape(self) -> Shape4:
        """Shape of the output: that of q with v's head_dim."""
        return (*self.q_shape[:3], self.v_shape[3])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query row, or no key at all."""
        return 0 in self.q_shape or 0 in self.k_shape

    def tensor(self, letter: str) -> tuple[Shape4, Shape4]:
        """Shape and strides of the tensor named q, k, v or o."""
        return getattr(self, f"{letter}_shape"), getattr(self, f"{letter}_strides")


def aligned16(geometry: Geometry, pointers: int, element_bytes: int) -> bool:
    """Whether every pointer (or-ed together in `pointers`) and every stride in use is a multiple of 16 bytes."""
    if pointers % ALIGNMENT_BYTES:
        return False
    for letter in "qkvo":
        shape, strides = geometry.tensor(letter)
        if any(
            size > 1 and stride * element_bytes % ALIGNMENT_BYTES
            for size, stride in zip(shape[:3], strides, strict=False)
        ):
            return False
    return True


class Launch(Protocol):
    """A launch that is ready but for the pointers, the scale and the query offset."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
        q_offset: int | torch.Tensor | None = None,
    ) -> None:
        """Launch on the current stream of the plan's device.

        The tensors have the shapes and strides that the plan was made for (in any view: only their memory is used);
        `lse` is fp32 (batch, nheads, seqlen_q), contiguous, or None; `q_offset` None means seqlen_k - seqlen_q.
        """


def make_plan(
    compiled: CompiledKernel, spec: Specialization, config: Config, geometry: Geometry, device_index: int
) -> Launch:
    """Bind a compiled kernel to a geometry on a GPU of this process.

    Raises:
        LaunchError: the driver refuses the binary or a tensor descriptor.
    """
    if geometry.is_empty:
        return EmptyPlan()
    parameters = family(config.family).parameters(spec, config)
    metadata = compiled.handle.metadata
    usual = getattr(metadata, "num_ctas", 1) == 1 and not getattr(metadata, "launch_pdl", False)
    usual = (
        usual and not getattr(metadata, "global_scratch_size", 0) and not getattr(metadata, "profile_scratch_size", 0)
    )
    trailing = trailing_pointers(compiled.handle.asm["ptx"], parameters) if "ptx" in compiled.handle.asm else None
    with torch.cuda.device(device_index):
        if trailing is None or not usual:
            return TritonPlan(compiled, spec, config, geometry, device_index)
        return DriverPlan(compiled, spec, config, geometry, device_index, trailing).on_its_device()


def load(compiled: CompiledKernel, device_index: int) -> int:
    """The handle of a kernel on a GPU, loaded there once a process.

    Raises:
        LaunchError: the driver refuses the binary, or a CUDA graph is being captured.
    """
    metadata = compiled.handle.metadata
    key = (compiled.handle.hash, device_index)
    if key not in _FUNCTIONS:
        check_capture(device_index, f"loading {compiled.source.module}")
        with torch.cuda.device(device_index):
            torch.cuda.current_stream()  # the driver needs torch's context to exist
            _FUNCTIONS[key] = driver.load_function(compiled.handle.asm["cubin"], metadata.name, metadata.shared)
    return _FUNCTIONS[key]


_FUNCTIONS: dict[tuple[str, int], int] = {}


class EmptyPlan:
    """Nothing to launch: rows that see no key have output 0 and LSE -inf."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
        q_offset: int | torch.Tensor | None = None,
    ) -> None:
        """Fill `out` with 0 and `lse` with -inf."""
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))


def _scalars(geometry: Geometry) -> dict[str, int]:
    """The integer arguments of the launch vocabulary that a geometry fixes."""
    _, nheads, seqlen_q, _ = geometry.q_shape
    _, nheads_k, seqlen_k, _ = geometry.k_shape
    found = {
        "nheads": nheads,
        "group_size": nheads // nheads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "q_offset": seqlen_k - seqlen_q,
        "lse_rows": 0,
    }
    for letter in "qkvo":
        for axis, stride in zip("bhs", geometry.tensor(letter)[1], strict=False):
            found[f"stride_{letter}{axis}"] = stride
    return found


def _clamp(q_offset: int, geometry: Geometry) -> int:
    """Beyond these bounds nothing changes, and within them 32-bit arithmetic in the kernel cannot overflow."""
    return max(-geometry.q_shape[2], min(q_offset, geometry.k_shape[2]))


def _programs(config: Config, geometry: Geometry) -> int:
    batch, nheads, seqlen_q, _ = geometry.q_shape
    return family(config.family).programs(config, batch, nheads, seqlen_q)


class DriverPlan:
    """A launch through the CUDA driver with all parameters prepared."""

    def __init__(
        self,
        compiled: CompiledKernel,
        spec: Specialization,
        config: Config,
        geometry: Geometry,
        device_index: int,
        trailing: int,
    ) -> None:
        metadata = compiled.handle.metadata
        self._function = load(compiled, device_index)
        self._geometry = geometry
        self._device_index = device_index
        self._slots: dict[str, Any] = {}
        self._maps: dict[str, driver.TensorMap] = {}
        self._keep: list[Any] = []
        maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
        addresses: list[int] = []
        for parameter in family(config.family).parameters(spec, config):
            addresses += self._prepare(parameter, spec, maps)
        addresses += [self._slot(ctypes.c_uint64(0)) for _ in range(trailing)]
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        self._config = driver.LaunchConfig(
            grid_x=_programs(config, geometry),
            grid_y=1,
            grid_z=1,
            block_x=metadata.num_warps * 32,
            block_y=1,
            block_z=1,
            shared_bytes=metadata.shared,
        )
        self.launch = self._bind()

    def _prepare(self, parameter: Parameter, spec: Specialization, maps: Any) -> list[int]:
        """The addresses of the kernel parameters of one parameter of the signature, filled as far as it is known."""
        if parameter.type.startswith("tensordesc"):
            letter = parameter.name[0]
            shape, strides = self._geometry.tensor(letter)
            meta = next(maps)
            # a dimension of size 1 is never stepped over, so any legal stride describes it
            legal = tuple(s if n > 1 else ALIGNMENT_BYTES for n, s in zip(shape, strides, strict=True))
            tensor_map = driver.TensorMap(
                spec.dtype, shape, legal, tuple(meta["block_size"]), meta["swizzle"], DTYPE_BYTES[spec.dtype]
            )
            self._maps[letter] = tensor_map
            rest = [ctypes.c_int32(size) for size in shape] + [ctypes.c_int64(stride) for stride in legal]
            return [tensor_map.address, *(self._slot(value) for value in rest)]
        kinds: dict[str, Callable[..., Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
        make = kinds.get(parameter.type, ctypes.c_uint64)
        value = make(_scalars(self._geometry).get(parameter.name, 0))
        self._slots[parameter.name] = value
        return [self._slot(value)]

    def _slot(self, value: Any) -> int:
        self._keep.append(value)
        return ctypes.addressof(value)

    def _bind(self) -> Launch:  # noqa: C901 - one branch a parameter, and a call less for each
        """A function with all that a launch uses in its own variables: attribute look-ups would cost a microsecond.

        Only what differs from the last launch is written. The lock keeps two threads from mixing their parameters;
        the driver copies them before it returns.
        """
        set_q, set_k, set_v, set_o = (self._setter(letter) for letter in "qkvo")
        scale, lse_slot, rows_slot = (self._slots[name] for name in ("softmax_scale_log2", "LSE", "lse_rows"))
        offset = self._slots.get("q_offset", self._slots.get("QOffset", ctypes.c_uint64(0)))
        geometry, index, config, function = self._geometry, self._device_index, self._config, self._function
        rows, default_offset = geometry.q_shape[2], _scalars(geometry)["q_offset"]
        launch, stream_of, lock = (
            driver.library().cuLaunchKernelEx,
            torch._C._cuda_getCurrentRawStream,
            threading.Lock(),
        )
        config_address, parameters_address = ctypes.addressof(config), ctypes.addressof(self._parameters)
        last_q = last_k = last_v = last_o = 0
        last_scale, last_stream, last_offset = 0.0, -1, default_offset
        offset.value = default_offset

        def call(  # noqa: PLR0912
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            softmax_scale: float,
            q_offset: int | torch.Tensor | None = None,
        ) -> None:
            nonlocal last_q, last_k, last_v, last_o, last_scale, last_stream, last_offset
            new_q, new_k, new_v, new_o = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
            if q_offset is None:
                new_offset = default_offset
            elif isinstance(q_offset, torch.Tensor):
                new_offset = q_offset.data_ptr()
            else:
                new_offset = _clamp(q_offset, geometry)
            with lock:
                if new_q != last_q:
                    set_q(new_q)
                    last_q = new_q
                if new_k != last_k:
                    set_k(new_k)
                    last_k = new_k
                if new_v != last_v:
                    set_v(new_v)
                    last_v = new_v
                if new_o != last_o:
                    set_o(new_o)
                    last_o = new_o
                if softmax_scale != last_scale:
                    scale.value = softmax_scale * LOG2E
                    last_scale = softmax_scale
                if new_offset != last_offset:
                    offset.value = last_offset = new_offset
                if lse is None:
                    rows_slot.value = 0
                else:
                    lse_slot.value = lse.data_ptr()
                    rows_slot.value = rows
                stream = stream_of(index)
                if stream != last_stream:
                    config.stream = last_stream = stream
                code = launch(config_address, function, parameters_address, None)
            if code:
                self._refused(code)  # naming self also keeps alive what the addresses above point to

        return call

    def _refused(self, code: int) -> None:
        driver.check(code, f"launch a kernel of {self._config.grid_x} x {self._config.block_x} threads")

    def _setter(self, letter: str) -> Callable[[int], None]:
        if letter in self._maps:
            return self._maps[letter].point_to
        slot = self._slots[letter.upper()]

        def set_pointer(pointer: int) -> None:
            slot.value = pointer

        return set_pointer

    def on_its_device(self) -> Launch:
        """The launch, with the device made current first where this process has more than one."""
        if torch.cuda.device_count() == 1:
            return self.launch
        launch, index, current = self.launch, self._device_index, torch._C._cuda_getDevice

        def call(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            softmax_scale: float,
            q_offset: int | torch.Tensor | None = None,
        ) -> None:
            if current() == index:
                return launch(q, k, v, out, lse, softmax_scale, q_offset)
            with torch.cuda.device(index):
                return launch(q, k, v, out, lse, softmax_scale, q_offset)

        return call


class TritonPlan:
    """A launch through Triton's `CompiledKernel[grid]`."""

    def __init__(
        self, compiled: CompiledKernel, spec: Specialization, config: Config, geometry: Geometry, device_index: int
    ) -> None:
        self._runner = compiled.handle[(_programs(config, geometry), 1, 1)]
        self._parameters = family(config.family).parameters(spec, config)
        self._geometry = geometry
        self._device_index = device_index

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
        q_offset: int | torch.Tensor | None = None,
    ) -> None:
        """See `Launch`."""
        scalars: dict[str, Any] = dict(_scalars(self._geometry))
        if isinstance(q_offset, int):
            scalars["q_offset"] = _clamp(q_offset, self._geometry)
        scalars |= {"QOffset": q_offset, "softmax_scale_log2": softmax_scale * LOG2E, "LSE": lse}
        scalars["lse_rows"] = self._geometry.q_shape[2] if lse is not None else 0
        tensors = {"q": q, "k": k, "v": v, "o": out}
        arguments = [self._argument(parameter, tensors, scalars) for parameter in self._parameters]
        with torch.cuda.device(self._device_index):
            self._runner(*arguments)

    def _argument(self, parameter: Parameter, tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> Any:
        if parameter.name in scalars:
            return scalars[parameter.name]
        tensor = tensors[parameter.name[0].lower()]
        if not parameter.type.startswith("tensordesc"):
            return tensor
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape, strides = self._geometry.tensor(parameter.name[0])
        legal = [s if n > 1 else ALIGNMENT_BYTES for n, s in zip(shape, strides, strict=True)]
        block = [int(size) for size in parameter.type.split("[")[1].split("]")[0].split(",")]
        return TensorDescriptor(tensor, list(shape), [*legal[:3], 1], block)


def check_capture(device_index: int, action: str) -> None:
    """Refuse work that a CUDA graph under capture cannot hold.

    Raises:
        LaunchError: the current stream is capturing.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"{action} is not possible while a CUDA graph is being captured on cuda:{device_index}; "
            "call flashgen.warmup, or the function once, before the capture"
        )
