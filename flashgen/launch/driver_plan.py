"""`DriverPlan`: a launch through the CUDA driver with all parameters prepared."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.families import family
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.core.workload import DTYPE_BYTES, Specialization
from flashgen.launch import driver
from flashgen.launch.geometry import Geometry, clamp_offset, legal_strides, scalars

LOG2E = 1.4426950408889634
C_TYPES: dict[str, Callable[..., Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class DriverPlan:
    """Parameters of a launch in fixed places of memory; a launch writes what changed and calls the driver.

    Attributes:
        launch: the plan as a function, see `flashgen.launch.plan.Launch`.
    """

    def __init__(
        self,
        compiled: CompiledKernel,
        spec: Specialization,
        config: Config,
        geometry: Geometry,
        *,
        function: int,
        trailing_pointers: int,
        device_index: int,
    ) -> None:
        """Prepare everything but the pointers, in this thread's CUDA context (made that of the GPU if it had none).

        Args:
            compiled: the kernel.
            spec: what is compiled in.
            config: its config.
            geometry: shapes and strides of every later call.
            function: the driver's handle of the loaded kernel.
            trailing_pointers: scratch pointers after the kernel's own parameters (unused, null).
            device_index: torch's index of the GPU.
        """
        metadata = compiled.handle.metadata
        row = family(config.family)
        self._geometry = geometry
        self._device_index = device_index
        self._function = function
        self._context = driver.use_context(device_index)
        self._slots: dict[str, Any] = {}
        self._maps: dict[str, driver.TensorMap] = {}
        self._kept: list[Any] = []  # what the addresses below point to
        boxes = iter(getattr(metadata, "tensordesc_meta", None) or ())
        addresses: list[int] = []
        for parameter in row.parameters(spec, config):
            addresses += self._prepare(parameter, spec, boxes)
        addresses += [self._address(ctypes.c_uint64(0)) for _ in range(trailing_pointers)]
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        batch, nheads, seqlen_q, _ = geometry.q_shape
        self._config = driver.LaunchConfig(
            grid_x=row.programs(config, compiled.device, batch, nheads, seqlen_q),
            grid_y=1,
            grid_z=1,
            block_x=metadata.num_warps * 32,
            block_y=1,
            block_z=1,
            shared_bytes=metadata.shared,
        )
        self.launch = self._bind()

    def _prepare(self, parameter: Parameter, spec: Specialization, boxes: Iterator[dict[str, Any]]) -> list[int]:
        """The addresses of the kernel parameters of one parameter of the signature, filled as far as it is known."""
        if not parameter.type.startswith("tensordesc"):
            value = C_TYPES.get(parameter.type, ctypes.c_uint64)(scalars(self._geometry).get(parameter.name, 0))
            self._slots[parameter.name] = value
            return [self._address(value)]
        letter, box = parameter.name[0], next(boxes)
        shape, strides = self._geometry.tensor(letter)[0], legal_strides(self._geometry, letter)
        tensor_map = driver.TensorMap(
            dtype=spec.dtype,
            shape=shape,
            strides=strides,
            box=tuple(box["block_size"]),
            swizzle=box["swizzle"],
            element_bytes=DTYPE_BYTES[spec.dtype],
        )
        self._maps[letter] = tensor_map
        sizes = [*map(ctypes.c_int32, shape), *map(ctypes.c_int64, strides)]
        return [tensor_map.address, *map(self._address, sizes)]

    def _address(self, value: Any) -> int:
        self._kept.append(value)
        return ctypes.addressof(value)

    def _bind(self) -> Callable[..., None]:  # noqa: C901, PLR0915
        """The launch as a function with all it uses in variables of its own: attribute look-ups cost a microsecond.

        Only what differs from the last launch is written. The lock keeps two threads from mixing their parameters;
        the driver copies them before it returns.
        """
        set_q, set_k, set_v, set_o = (self._setter(letter) for letter in "qkvo")
        scale_slot, lse_slot, rows_slot = (self._slots[name] for name in ("softmax_scale_log2", "LSE", "lse_rows"))
        offset_slot = self._slots.get("q_offset", self._slots.get("QOffset", ctypes.c_uint64(0)))
        geometry, index, config, function = self._geometry, self._device_index, self._config, self._function
        rows, default_offset = geometry.q_shape[2], scalars(geometry)["q_offset"]
        default_scale = geometry.q_shape[3] ** -0.5
        run, stream_of, current = (
            driver.library().cuLaunchKernelEx,
            torch._C._cuda_getCurrentRawStream,
            torch._C._cuda_getDevice,
        )
        only_device, lock, plan = torch.cuda.device_count() == 1, threading.Lock(), self
        config_address, parameters_address = ctypes.addressof(config), ctypes.addressof(self._parameters)
        last_q = last_k = last_v = last_o = last_rows = 0
        last_scale, last_stream, last_offset = 0.0, -1, default_offset
        offset_slot.value = default_offset

        def launch(  # noqa: C901, PLR0912 - one branch a parameter, and no call for what did not change
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None = None,
            softmax_scale: float | None = None,
            q_offset: int | torch.Tensor | None = None,
        ) -> None:
            nonlocal last_q, last_k, last_v, last_o, last_rows, last_scale, last_stream, last_offset
            if not only_device and current() != index:
                with torch.cuda.device(index):
                    return launch(q, k, v, out, lse, softmax_scale, q_offset)
            new_q, new_k, new_v, new_o = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
            scale = default_scale if softmax_scale is None else softmax_scale
            if q_offset is None:
                offset = default_offset
            elif isinstance(q_offset, torch.Tensor):
                offset = q_offset.data_ptr()
            else:
                offset = clamp_offset(q_offset, geometry)
            try:
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
                    if scale != last_scale:
                        scale_slot.value = scale * LOG2E
                        last_scale = scale
                    if offset != last_offset:
                        offset_slot.value = last_offset = offset
                    if lse is not None:
                        lse_slot.value = lse.data_ptr()
                        rows_slot.value = last_rows = rows
                    elif last_rows:
                        rows_slot.value = last_rows = 0
                    stream = stream_of(index)
                    if stream != last_stream:
                        config.stream = last_stream = stream
                    code = run(config_address, function, parameters_address, None)
            except LaunchError:
                if not plan._adopt():
                    raise
                return launch(q, k, v, out, lse, softmax_scale, q_offset)
            if code == 0:
                return None
            if not plan._adopt():
                driver.check(code, f"launch {config.grid_x} blocks of {config.block_x} threads")
            return launch(q, k, v, out, lse, softmax_scale, q_offset)

        return launch

    def _adopt(self) -> bool:
        """Whether this thread had no CUDA context, and now has the plan's.

        A new thread has none until something makes one current, and torch's allocator does not. (The launch above
        names the plan for this call, which also keeps alive what its addresses point to.)
        """
        return driver.adopt_context(self._context)

    def _setter(self, letter: str) -> Callable[[int], None]:
        if letter in self._maps:
            return self._maps[letter].point_to
        slot = self._slots[letter.upper()]

        def set_pointer(pointer: int) -> None:
            slot.value = pointer

        return set_pointer
