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
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import driver, feature_arguments
from flashgen.launch.counters import Counters
from flashgen.launch.feature_arguments import LOG2E, NO_FEATURES
from flashgen.launch.feature_writers import features_writer
from flashgen.launch.geometry import Geometry, clamp_offset, scalars
from flashgen.launch.parameter_buffer import ParameterBuffer, View
from flashgen.launch.parameters import Layout, block_of, is_descriptor, subject_of


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
        self._geometry = geometry
        self._scalars = scalars(geometry)
        self._causal = spec.causal
        self._device_index = device_index
        self._function = function
        self._context = driver.use_context(device_index)
        self._prepared = ParameterBuffer(
            compiled.main,
            layout,
            programs=compiled.main.kernel.programs(compiled.device, geometry.sizes),
            scalars=self._scalars,
            view=self._view,
        )
        self._maps: dict[str, list[tuple[int, driver.TensorMaps]]] = {}  # by tensor: position of a parameter, its maps
        for one in self._prepared.descriptors:
            self._maps.setdefault(subject_of(one.parameter), []).append((one.position, one.maps()))
        self._slots = self._bound_slots(layout)
        self.launch = self._bind()

    def _view(self, parameter: Parameter) -> View:
        return self._geometry.described(subject_of(parameter), len(block_of(parameter)))

    def _bound_slots(self, layout: Layout) -> dict[str, Any]:
        """The parameters that launches write, by name: those that a geometry does not fix."""
        fixed = self._scalars.keys() - {"q_offset", "lse_rows"}
        return {
            parameter.name: self._prepared.slot(parameter)
            for parameter in layout.parameters
            if parameter.name not in fixed and not is_descriptor(parameter)
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
        describe = {
            name.capitalize(): self._maps_setter(maps) for name, maps in self._maps.items() if name not in "qkvo"
        }
        write_features = features_writer(self._slots, self._scalars, causal=self._causal, describe=describe)
        geometry, index, config, function = self._geometry, self._device_index, self._prepared.config, self._function
        rows, default_offset = geometry.q_shape[2], self._scalars["q_offset"]
        is_far = not feature_arguments.FAR_FEATURES.isdisjoint(self._slots)
        default_scale = geometry.q_shape[3] ** -0.5
        run, stream_of, current = (
            driver.library().cuLaunchKernelEx,
            torch._C._cuda_getCurrentRawStream,
            torch._C._cuda_getDevice,
        )
        only_device, lock, plan = torch.cuda.device_count() == 1, threading.Lock(), self
        config_address, parameters_address = ctypes.addressof(config), ctypes.addressof(self._prepared.addresses)
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
            features: Features | None = None,
        ) -> None:
            nonlocal last_q, last_k, last_v, last_o, last_rows, last_scale, last_stream, last_offset
            if not only_device and current() != index:
                with torch.cuda.device(index):
                    return launch(q, k, v, out, lse, softmax_scale, q_offset, features)
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
                    if write_features is not None:
                        write_features(features or NO_FEATURES, scale)
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
                return launch(q, k, v, out, lse, softmax_scale, q_offset, features)
            if code == 0:
                return None
            if not plan._adopt():
                driver.check(code, f"launch {config.grid_x} blocks of {config.block_x} threads")
            return launch(q, k, v, out, lse, softmax_scale, q_offset, features)

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
        parameters, (position, maps) = self._prepared.addresses, placed[0]
        known, at = maps.known.get, maps.at

        def point_to(pointer: int) -> None:
            parameters[position] = known(pointer) or at(pointer)

        def point_all_to(pointer: int) -> None:
            addresses = [each.at(pointer) for _, each in placed]  # all or, where one is refused, none
            for (place, _), address in zip(placed, addresses, strict=True):
                parameters[place] = address

        return point_to if len(placed) == 1 else point_all_to
