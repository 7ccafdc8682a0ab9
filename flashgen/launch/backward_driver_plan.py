"""`DriverBackwardPlan`: the kernels of one backward config launched through the CUDA driver, all parameters prepared.

What differs from call to call (pointers, scale, query offset, features) is the same in all kernels, so it lies in one
place that the parameter lists of all of them point to: a launch writes it once, however many kernels there are.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.launch import driver
from flashgen.launch.backward_binding import CALL_SCALARS, OWN, POINTERS, BackwardBinding
from flashgen.launch.backward_geometry import FIELDS, BackwardTensors
from flashgen.launch.counters import Counters
from flashgen.launch.feature_arguments import LOG2E, NO_FEATURES
from flashgen.launch.feature_writers import features_writer
from flashgen.launch.parameter_buffer import C_TYPES, ParameterBuffer
from flashgen.launch.parameters import SLOT_BYTES, Layout, is_descriptor

Pointers = tuple[int, ...]
"""Addresses of one call: its scratch memory, then the tensors in the order of `POINTERS`, 0 for what is absent."""

SharedMaps = tuple[int, int, list[tuple[Any, int]], driver.TensorMaps]
"""Of one descriptor: number and offset of its pointer, every array of addresses and place that name it, its maps."""

_PLACES = {name: number for number, name in enumerate(POINTERS, start=1)}


class DriverBackwardPlan:
    """Parameters of several kernels in fixed places of memory; a launch writes what changed and calls the driver.

    Attributes:
        launch: the plan as a function, see `flashgen.launch.backward_plan.BackwardLaunch`.
    """

    def __init__(
        self,
        binding: BackwardBinding,
        *,
        functions: Sequence[int],
        layouts: Sequence[Layout],
        device_index: int,
    ) -> None:
        """Prepare everything but the pointers, in this thread's CUDA context (made that of the GPU if it had none).

        Args:
            binding: the kernels, and what their parameters stand for.
            functions: the driver's handle of each loaded kernel.
            layouts: of each kernel's parameters.
            device_index: torch's index of the GPU.
        """
        self._binding = binding
        self._device_index = device_index
        self._functions = functions
        self._context = driver.use_context(device_index)
        parts, programs = binding.compiled.parts, binding.programs
        self._kernels = [
            ParameterBuffer(part, layout, programs=count, scalars=binding.scalars, view=binding.view)
            for part, layout, count in zip(parts, layouts, programs, strict=True)
        ]
        self._share(layouts)
        self._maps = self._shared_maps()
        self.launch = self._bind()

    def _share(self, layouts: Sequence[Layout]) -> None:
        """Have the parameter lists of all kernels point to one place for everything that launches write."""
        pieces = [piece.pointer for piece in self._binding.scratch.pieces.values()]
        places = _PLACES | {name: number for number, name in enumerate(pieces, start=1 + len(POINTERS))}
        fixed = self._binding.scalars.keys() - set(CALL_SCALARS)
        shared = [
            (kernel, layout, parameter)
            for kernel, layout in zip(self._kernels, layouts, strict=True)
            for parameter in layout.parameters
            if not is_descriptor(parameter) and parameter.name not in fixed and parameter.name != OWN
        ]
        for _, _, parameter in shared:
            places.setdefault(parameter.name, 1 + len(places))
        self._memory = ctypes.create_string_buffer(SLOT_BYTES * (1 + len(places)))
        start = ctypes.addressof(self._memory)
        self._slots: dict[str, Any] = {}
        for kernel, layout, parameter in shared:
            offset = SLOT_BYTES * places[parameter.name]
            kernel.addresses[layout.positions[parameter.name]] = start + offset
            kind = C_TYPES.get(parameter.type, ctypes.c_uint64)
            self._slots[parameter.name] = kind.from_buffer(self._memory, offset)

    def _shared_maps(self) -> list[SharedMaps]:
        """Every different descriptor once."""
        pieces = self._binding.scratch.pieces
        found: dict[tuple[object, ...], SharedMaps] = {}
        for kernel in self._kernels:
            for one in kernel.descriptors:
                subject = self._binding.subject(one.parameter)
                number = _PLACES[subject.upper()] if subject in FIELDS else 0
                offset = 0 if subject in FIELDS else pieces[subject].offset_bytes
                key = (subject, one.view, one.box, one.swizzle, one.element)
                entry = found.setdefault(key, (number, offset, [], one.maps()))
                entry[2].append((kernel.addresses, one.position))
        return list(found.values())

    def _pointer_writer(self) -> Callable[[Pointers], None]:
        """What makes every parameter point to the memory of a call."""
        pieces = [piece.offset_bytes for piece in self._binding.scratch.pieces.values()]
        write_all = struct.Struct(f"<{1 + len(POINTERS) + len(pieces)}Q").pack_into
        memory = self._memory
        described = [
            (number, offset, maps.known.get, maps.at, addresses, position)
            for number, offset, places, maps in self._maps
            for addresses, position in places
        ]
        rows_slot = self._slots.get("dlse_rows", ctypes.c_int32(0))
        rows, dlse = self._binding.scalars["seqlen_q"], _PLACES["DLSE"]

        def write(pointers: Pointers) -> None:
            scratch = pointers[0]
            write_all(memory, 0, *pointers, *[scratch + offset for offset in pieces])
            rows_slot.value = rows if pointers[dlse] else 0
            for number, offset, known, at, addresses, position in described:
                pointer = pointers[number] + offset
                addresses[position] = known(pointer) or at(pointer)

        return write

    def _bind(self) -> Callable[..., torch.Tensor]:  # noqa: C901, PLR0915
        """The launch as a function with all it uses in variables of its own: attribute look-ups cost a microsecond.

        Only what differs from the last launch is written. The lock keeps two threads from mixing their parameters, for
        all kernels of a call together; the driver copies parameters before it returns.
        """
        unused = ctypes.c_float(0)
        scale_slot = self._slots.get("softmax_scale", unused)
        scale_log2_slot = self._slots.get("softmax_scale_log2", unused)
        offset_slot = self._slots.get("q_offset", self._slots.get("QOffset", ctypes.c_uint64(0)))
        binding, index = self._binding, self._device_index
        offset_of, scalars = binding.offset, binding.scalars
        write_pointers = self._pointer_writer()
        write_features = features_writer(self._slots, scalars, causal=binding.spec.causal)
        default_offset = None if binding.spec.offset_tensor else scalars["q_offset"]
        default_scale = binding.geometry.forward.q_shape[3] ** -0.5
        run, stream_of, current = (
            driver.library().cuLaunchKernelEx,
            torch._C._cuda_getCurrentRawStream,
            torch._C._cuda_getDevice,
        )
        only_device, lock, plan = torch.cuda.device_count() == 1, threading.Lock(), self
        configs = [kernel.config for kernel in self._kernels]
        calls = [
            (ctypes.addressof(kernel.config), function, ctypes.addressof(kernel.addresses), None)
            for kernel, function in zip(self._kernels, self._functions, strict=True)
        ]
        counted = self._counted()
        floats, (sizes, strides) = binding.scratch.floats, binding.scratch.neg_delta_view
        fp32 = torch.float32
        last_pointers: Pointers = ()
        last_scale, last_stream, last_offset = 0.0, -1, 0

        def launch(  # noqa: C901, PLR0912 - one branch a parameter, and no call for what did not change
            tensors: BackwardTensors,
            softmax_scale: float | None = None,
            q_offset: int | torch.Tensor | None = None,
            features: Features | None = None,
            with_neg_delta: bool = True,
        ) -> torch.Tensor:
            nonlocal last_pointers, last_scale, last_stream, last_offset
            if not only_device and current() != index:
                with torch.cuda.device(index):
                    return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)
            lse, dlse, dbias = tensors.lse, tensors.dlse, tensors.dbias
            scratch = lse.new_empty(floats, dtype=fp32)
            pointers = (
                scratch.data_ptr(),
                tensors.q.data_ptr(),
                tensors.k.data_ptr(),
                tensors.v.data_ptr(),
                tensors.out.data_ptr(),
                tensors.dout.data_ptr(),
                tensors.dq.data_ptr(),
                tensors.dk.data_ptr(),
                tensors.dv.data_ptr(),
                lse.data_ptr(),
                0 if dlse is None else dlse.data_ptr(),
                0 if dbias is None else dbias.data_ptr(),
            )
            scale = default_scale if softmax_scale is None else softmax_scale
            if q_offset is None and default_offset is not None:
                offset = default_offset
            else:
                given = offset_of(q_offset)
                offset = given if isinstance(given, int) else given.data_ptr()
            code, call = 0, calls[0]
            try:
                with lock:
                    if pointers != last_pointers:
                        last_pointers = ()  # where a descriptor is refused, the next call writes all of them again
                        write_pointers(pointers)
                        last_pointers = pointers
                    if scale != last_scale:
                        scale_slot.value, scale_log2_slot.value = scale, scale * LOG2E
                        last_scale = scale
                    if offset != last_offset:
                        offset_slot.value = last_offset = offset
                    if write_features is not None:
                        write_features(features or NO_FEATURES, scale)
                    stream = stream_of(index)
                    if stream != last_stream:
                        for config in configs:
                            config.stream = stream
                        last_stream = stream
                    held = [point(stream) for point in counted] if counted else None  # until they are launched
                    for call in calls:
                        code = run(*call)
                        if code:
                            break
                    del held
            except LaunchError:
                if not plan._adopt():
                    raise
                return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)
            if code == 0:
                return scratch.as_strided(sizes, strides) if with_neg_delta else scratch
            if not plan._adopt():
                plan._fail(code, calls.index(call))
            return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)

        return launch

    def _counted(self) -> list[Callable[[int], torch.Tensor]]:
        """For each kernel with a counter, what points it to that of a stream (and returns it, to be kept so long)."""

        def pointing(counters: Counters, slot: Any) -> Callable[[int], torch.Tensor]:
            def point(stream: int) -> torch.Tensor:
                counter = counters.of(stream)
                slot.value = counter.data_ptr()
                return counter

            return point

        own = [
            (kernel, parameter)
            for kernel, part in zip(self._kernels, self._binding.compiled.parts, strict=True)
            for parameter in part.kernel.parameters
            if parameter.name == OWN
        ]
        return [pointing(Counters(self._device_index), kernel.slot(parameter)) for kernel, parameter in own]

    def _adopt(self) -> bool:
        """Whether this thread had no CUDA context, and now has the plan's (see `DriverPlan`)."""
        return driver.adopt_context(self._context)

    def _fail(self, code: int, number: int) -> None:
        """Raise what the driver says to the launch of a kernel."""
        entry, config = self._binding.compiled.parts[number].kernel.entry, self._kernels[number].config
        driver.check(code, f"launch {config.grid_x} blocks of {config.block_x} threads of {entry}")
