"""`DriverPlan`: a launch through the CUDA driver with all parameters prepared."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.core.workload import DTYPE_BYTES, Specialization
from flashgen.launch import driver, features
from flashgen.launch.counters import Counters
from flashgen.launch.extras import Extras
from flashgen.launch.features import LOG2E, NO_EXTRAS
from flashgen.launch.geometry import Geometry, clamp_offset, legal_strides, scalars
from flashgen.launch.parameters import SLOT_BYTES, Layout

C_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}

WriteExtras = Callable[[Extras, float], None]


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
        layout: Layout,
        device_index: int,
    ) -> None:
        """Prepare everything but the pointers, in this thread's CUDA context (made that of the GPU if it had none).

        Args:
            compiled: the kernel.
            spec: what is compiled in.
            config: its config.
            geometry: shapes and strides of every later call.
            function: the driver's handle of the loaded kernel.
            layout: of the kernel's parameters.
            device_index: torch's index of the GPU.
        """
        metadata = compiled.handle.metadata
        self._geometry = geometry
        self._scalars = scalars(geometry)
        self._causal = spec.causal
        self._device_index = device_index
        self._function = function
        self._context = driver.use_context(device_index)
        self._maps: dict[str, list[tuple[int, driver.TensorMaps]]] = {}  # by tensor: position of a parameter, its maps
        boxes = iter(getattr(metadata, "tensordesc_meta", None) or ())
        values: list[int] = []
        for parameter in layout.parameters:
            if parameter.type.startswith("tensordesc"):
                values += self._described(parameter, spec, len(values), next(boxes))
            else:
                values.append(self._scalars.get(parameter.name, 0))
        count = layout.count
        self._memory = ctypes.create_string_buffer(2 * SLOT_BYTES * count)  # the parameters, and their addresses
        layout.packed.pack_into(self._memory, 0, *values, *[0] * (count - len(values)))
        start = ctypes.addressof(self._memory)
        self._addresses = (ctypes.c_uint64 * count).from_buffer(self._memory, SLOT_BYTES * count)
        self._addresses[:] = list(range(start, start + SLOT_BYTES * count, SLOT_BYTES))
        self._slots = self._bound_slots(layout)
        self._config = driver.LaunchConfig(
            grid_x=compiled.main.kernel.programs(compiled.device, geometry.sizes),
            grid_y=1,
            grid_z=1,
            block_x=metadata.num_warps * 32,  # of all partitions, where a kernel specialises its warps
            block_y=1,
            block_z=1,
            shared_bytes=metadata.shared,
        )
        self.launch = self._bind()

    def _described(self, parameter: Parameter, spec: Specialization, position: int, box: dict[str, Any]) -> list[int]:
        """The kernel parameters of a descriptor: its map, whose address comes with a pointer, shape and strides."""
        letter = parameter.name[0]
        shape, strides = self._geometry.tensor(letter)[0], legal_strides(self._geometry, letter)
        maps = driver.TensorMaps(
            dtype=spec.dtype,
            shape=shape,
            strides=strides,
            box=tuple(box["block_size"]),
            swizzle=box["swizzle"],
            element_bytes=DTYPE_BYTES[spec.dtype],
        )
        self._maps.setdefault(letter, []).append((position, maps))
        return [0, *shape, *strides]

    def _bound_slots(self, layout: Layout) -> dict[str, Any]:
        """The parameters that launches write, by name: those that a geometry does not fix."""
        fixed = self._scalars.keys() - {"q_offset", "lse_rows"}
        return {
            parameter.name: C_TYPES.get(parameter.type, ctypes.c_uint64).from_buffer(
                self._memory, SLOT_BYTES * layout.positions[parameter.name]
            )
            for parameter in layout.parameters
            if parameter.name not in fixed and not parameter.type.startswith("tensordesc")
        }

    def _bind(self) -> Callable[..., None]:  # noqa: C901, PLR0915
        """The launch as a function with all it uses in variables of its own: attribute look-ups cost a microsecond.

        Only what differs from the last launch is written. The lock keeps two threads from mixing their parameters;
        the driver copies them before it returns.
        """
        set_q, set_k, set_v, set_o = (self._setter(letter) for letter in "qkvo")
        unused = ctypes.c_uint64(0)
        lse_slot, rows_slot = self._slots["LSE"], self._slots["lse_rows"]
        scale_slot = self._slots.get("softmax_scale_log2", ctypes.c_float(0))
        offset_slot = self._slots.get("q_offset", self._slots.get("QOffset", unused))
        counter_slot = self._slots.get("Counter")
        counters = None if counter_slot is None else Counters(self._device_index)
        write_extras = self._extras_writer()
        geometry, index, config, function = self._geometry, self._device_index, self._config, self._function
        rows, default_offset = geometry.q_shape[2], self._scalars["q_offset"]
        is_far = not features.FAR_FEATURES.isdisjoint(self._slots)
        default_scale = geometry.q_shape[3] ** -0.5
        run, stream_of, current = (
            driver.library().cuLaunchKernelEx,
            torch._C._cuda_getCurrentRawStream,
            torch._C._cuda_getDevice,
        )
        only_device, lock, plan = torch.cuda.device_count() == 1, threading.Lock(), self
        config_address, parameters_address = ctypes.addressof(config), ctypes.addressof(self._addresses)
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
            extras: Extras | None = None,
        ) -> None:
            nonlocal last_q, last_k, last_v, last_o, last_rows, last_scale, last_stream, last_offset
            if not only_device and current() != index:
                with torch.cuda.device(index):
                    return launch(q, k, v, out, lse, softmax_scale, q_offset, extras)
            new_q, new_k, new_v, new_o = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
            scale = default_scale if softmax_scale is None else softmax_scale
            if q_offset is None:
                offset = default_offset
            elif isinstance(q_offset, torch.Tensor):
                offset = q_offset.data_ptr()
            else:
                offset = clamp_offset(q_offset, geometry, is_far=is_far)
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
                    if write_extras is not None:
                        write_extras(extras or NO_EXTRAS, scale)
                    stream = stream_of(index)
                    if stream != last_stream:
                        config.stream = last_stream = stream
                    if counters is not None:
                        counter = counters.of(stream)
                        counter_slot.value = counter.data_ptr()  # type: ignore[union-attr]
                    code = run(config_address, function, parameters_address, None)
            except LaunchError:
                if not plan._adopt():
                    raise
                return launch(q, k, v, out, lse, softmax_scale, q_offset, extras)
            if code == 0:
                return None
            if not plan._adopt():
                driver.check(code, f"launch {config.grid_x} blocks of {config.block_x} threads")
            return launch(q, k, v, out, lse, softmax_scale, q_offset, extras)

        return launch

    def _adopt(self) -> bool:
        """Whether this thread had no CUDA context, and now has the plan's.

        A new thread has none until something makes one current, and torch's allocator does not. (The launch above
        names the plan for this call, which also keeps alive what its addresses point to.)
        """
        return driver.adopt_context(self._context)

    def _setter(self, letter: str) -> Callable[[int], None]:
        """What makes every parameter of a tensor point to it."""
        describe = self._maps_setter(self._maps[letter]) if letter in self._maps else None
        if describe is not None and letter.upper() not in self._slots:
            return describe
        slot = self._slots[letter.upper()]

        def set_pointer(pointer: int) -> None:
            if describe is not None:
                describe(pointer)
            slot.value = pointer

        return set_pointer

    def _maps_setter(self, placed: list[tuple[int, driver.TensorMaps]]) -> Callable[[int], None]:
        parameters, (position, maps) = self._addresses, placed[0]
        known, at = maps.known.get, maps.at

        def point_to(pointer: int) -> None:
            parameters[position] = known(pointer) or at(pointer)

        def point_all_to(pointer: int) -> None:
            addresses = [each.at(pointer) for _, each in placed]  # all or, where one is refused, none
            for (place, _), address in zip(placed, addresses, strict=True):
                parameters[place] = address

        return point_to if len(placed) == 1 else point_all_to

    def _extras_writer(self) -> WriteExtras | None:
        """What writes the arguments of features, or None for a kernel that has none: plain calls pay nothing."""
        writers = [*self._window_writers(), *self._softcap_writers(), *self._tensor_writers()]
        if not writers:
            return None

        def write(extras: Extras, scale: float) -> None:
            for writer in writers:
                writer(extras, scale)

        return write

    def _window_writers(self) -> list[WriteExtras]:
        if not any(name in self._slots for name in features.WINDOW):
            return []
        left_slot, right_slot = (self._slots.get(name, ctypes.c_int32(0)) for name in features.WINDOW)
        seqlen_q, seqlen_k, causal = self._scalars["seqlen_q"], self._scalars["seqlen_k"], self._causal
        last: tuple[int | None, int | None] | None = None

        def write(extras: Extras, scale: float) -> None:
            nonlocal last
            if extras.window != last:
                left_slot.value, right_slot.value = features.window_edges(extras, seqlen_q, seqlen_k, causal=causal)
                last = extras.window

        return [write]

    def _softcap_writers(self) -> list[WriteExtras]:
        if not any(name in self._slots for name in features.SOFTCAP):
            return []
        rate_slot, scale_slot = (self._slots.get(name, ctypes.c_float(0)) for name in features.SOFTCAP)
        last = (0.0, 0.0)

        def write(extras: Extras, scale: float) -> None:
            nonlocal last
            if (extras.softcap, scale) != last:
                rate_slot.value, scale_slot.value = features.softcap_factors(extras, scale)
                last = (extras.softcap, scale)

        return [write]

    def _tensor_writers(self) -> list[WriteExtras]:
        def writer(slot: Any, find: Callable[[Extras], torch.Tensor]) -> WriteExtras:
            def write(extras: Extras, scale: float) -> None:
                slot.value = find(extras).data_ptr()

            return write

        named = [(name, slot) for name, slot in self._slots.items() if features.is_tensor(name)]
        return [writer(slot, features.tensor_of(name)) for name, slot in named]
