"""Launches of a `DriverPlan` as functions, one for the signature of each direction.

All that a launch uses lies in variables of its own, because attribute look-ups cost a microsecond; only what differs
from the last launch is written; and both functions spell out what they have in common, because a call of a third costs
more than 2% of a launch. A lock keeps two threads from mixing their parameters, for all kernels of a call together; the
driver copies them before it returns.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.launch import driver
from flashgen.launch.backward import BackwardTensors, neg_delta_view
from flashgen.launch.driver_plan import DriverPlan
from flashgen.launch.feature_arguments import LOG2E, NO_FEATURES
from flashgen.launch.geometry import offset_range
from flashgen.launch.vocabulary import OFFSET_TENSOR

Offset = int | torch.Tensor | None

FAILED = 1 << 32
"""What a launch of several kernels gives is the number of the kernel that was refused times this, and its code."""


def launcher(plan: DriverPlan) -> Callable[..., Any]:
    """The plan as a function: a `Launch` or a `BackwardLaunch` of `flashgen.launch.plan`, by its direction."""
    return _LAUNCHERS[plan.binding.spec.direction](plan)


def _forward(plan: DriverPlan) -> Callable[..., None]:  # noqa: C901, PLR0915
    set_q, set_k, set_v, set_o = (plan.setter(name, name.upper()) for name in "qkvo")
    lse_slot, rows_slot = plan.slot("LSE"), plan.slot("lse_rows")
    rows, new_scratch = plan.binding.geometry.q_shape[2], _scratch_maker(plan)
    index, only_device, lock = plan.device_index, torch.cuda.device_count() == 1, threading.Lock()
    default_scale, set_scale, write_features = plan.binding.default_scale, _scale_setter(plan), plan.features_writer()
    offset_slot, default_offset, offset_of = _offset(plan)
    set_stream, is_capturing = _stream_setter(plan)
    run, (config, function, parameters, _) = _runner(plan), plan.calls[0]
    stream_of, current = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    last_q = last_k = last_v = last_o = last_rows = 0
    last_scale, last_offset, last_stream = 0.0, 0, -1

    def launch(  # noqa: C901, PLR0912 - one branch a parameter, and no call for what did not change
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        q_offset: Offset = None,
        features: Features | None = None,
    ) -> None:
        nonlocal last_q, last_k, last_v, last_o, last_rows, last_scale, last_offset, last_stream
        if not only_device and current() != index:
            with torch.cuda.device(index):
                return launch(q, k, v, out, lse, softmax_scale, q_offset, features)
        new_q, new_k, new_v, new_o = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        scale = default_scale if softmax_scale is None else softmax_scale
        offset = default_offset if q_offset is None else offset_of(q_offset)
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
                if lse is not None:
                    lse_slot.value = lse.data_ptr()
                    rows_slot.value = last_rows = rows
                elif last_rows:
                    rows_slot.value = last_rows = 0
                if scale != last_scale:
                    set_scale(scale)
                    last_scale = scale
                if offset != last_offset:
                    offset_slot.value = last_offset = offset_of(None) if offset is None else offset
                if write_features is not None:
                    write_features(features or NO_FEATURES, scale)
                stream = stream_of(index)
                is_captured = is_capturing is not None and is_capturing()
                if stream != last_stream or is_captured:
                    last_stream = -1  # where a counter is refused, the next launch writes all of this again
                    held = set_stream(stream)  # noqa: F841 - until the kernels are launched
                    if not is_captured:
                        last_stream = stream
                if new_scratch is not None:
                    scratch = new_scratch(q)  # noqa: F841 - likewise
                code = run(config, function, parameters, None)
        except LaunchError:
            if not plan.adopt():
                raise
            return launch(q, k, v, out, lse, softmax_scale, q_offset, features)
        if code == 0:
            return None
        if not plan.adopt():
            plan.fail(*divmod(code, FAILED))
        return launch(q, k, v, out, lse, softmax_scale, q_offset, features)

    return launch


def _backward(plan: DriverPlan) -> Callable[..., torch.Tensor]:  # noqa: C901
    floats, (sizes, strides), fp32 = plan.binding.scratch.floats, neg_delta_view(plan.binding.scratch), torch.float32
    write_pointers = _pointers_writer(plan)
    index, only_device, lock = plan.device_index, torch.cuda.device_count() == 1, threading.Lock()
    default_scale, set_scale, write_features = plan.binding.default_scale, _scale_setter(plan), plan.features_writer()
    offset_slot, default_offset, offset_of = _offset(plan)
    set_stream, is_capturing = _stream_setter(plan)
    run, (config, function, parameters, _) = _runner(plan), plan.calls[0]
    stream_of, current = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    last_pointers: tuple[int, ...] = ()
    last_scale, last_offset, last_stream = 0.0, 0, -1

    def launch(
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: Offset = None,
        features: Features | None = None,
        with_neg_delta: bool = True,
    ) -> torch.Tensor:
        nonlocal last_pointers, last_scale, last_offset, last_stream
        if not only_device and current() != index:
            with torch.cuda.device(index):
                return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)
        lse, dlse, dbias = tensors.lse, tensors.dlse, tensors.dbias
        scratch = lse.new_empty(floats, dtype=fp32)
        pointers = (  # in the order of the direction's tensors
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
        offset = default_offset if q_offset is None else offset_of(q_offset)
        try:
            with lock:
                if pointers != last_pointers:
                    last_pointers = ()  # where a descriptor is refused, the next call writes all of them again
                    write_pointers(pointers)
                    last_pointers = pointers
                if scale != last_scale:
                    set_scale(scale)
                    last_scale = scale
                if offset != last_offset:
                    offset_slot.value = last_offset = offset_of(None) if offset is None else offset
                if write_features is not None:
                    write_features(features or NO_FEATURES, scale)
                stream = stream_of(index)
                is_captured = is_capturing is not None and is_capturing()
                if stream != last_stream or is_captured:
                    last_stream = -1  # where a counter is refused, the next launch writes all of this again
                    held = set_stream(stream)  # noqa: F841 - until the kernels are launched
                    if not is_captured:
                        last_stream = stream
                code = run(config, function, parameters, None)
        except LaunchError:
            if not plan.adopt():
                raise
            return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)
        if code == 0:
            return scratch.as_strided(sizes, strides) if with_neg_delta else scratch
        if not plan.adopt():
            plan.fail(*divmod(code, FAILED))
        return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)

    return launch


_LAUNCHERS: dict[str, Callable[[DriverPlan], Callable[..., Any]]] = {"forward": _forward, "backward": _backward}


def _runner(plan: DriverPlan) -> Callable[..., int]:
    """The driver's own launch of a kernel; of several, what launches all of them in order until one is refused."""
    launch_kernel, calls = driver.library().cuLaunchKernelEx, plan.calls
    if len(calls) == 1:
        return launch_kernel  # type: ignore[no-any-return]

    def run(*first: object) -> int:
        for call in calls:
            code: int = launch_kernel(*call)
            if code:
                return calls.index(call) * FAILED + code
        return 0

    return run


def _scale_setter(plan: DriverPlan) -> Callable[[float], None]:
    scale_slot, scale_log2_slot = plan.slot("softmax_scale"), plan.slot("softmax_scale_log2")

    def set_scale(scale: float) -> None:
        scale_slot.value, scale_log2_slot.value = scale, scale * LOG2E

    return set_scale


def _stream_setter(plan: DriverPlan) -> tuple[Callable[[int], list[torch.Tensor]], Callable[[], bool] | None]:
    """What points all kernels to a stream and to their counters on it, and what says whether a graph is captured.

    The first returns the counters, to be kept until the kernels are launched. They are others in each capture, so that
    is asked before every launch of a plan that has any; the second is None for a plan that has none.
    """
    configs, counted = [kernel.config for kernel in plan.kernels], plan.counted()

    def set_stream(stream: int) -> list[torch.Tensor]:
        for config in configs:
            config.stream = stream
        return [point(stream) for point in counted]

    return set_stream, torch.cuda.is_current_stream_capturing if counted else None


def _scratch_maker(plan: DriverPlan) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Allocates scratch memory beside a tensor and points parameters to its pieces, one by one; None without any."""
    scratch = plan.binding.scratch
    setters = [(plan.setter(name, piece.pointer), piece.offset_bytes) for name, piece in scratch.pieces.items()]

    def new_scratch(beside: torch.Tensor) -> torch.Tensor:
        memory = scratch.allocate(beside)
        start = memory.data_ptr()
        for point_to, offset in setters:
            point_to(start + offset)
        return memory

    return new_scratch if setters else None


def _offset(plan: DriverPlan) -> tuple[Any, int | None, Callable[[Offset], int]]:
    """Where the query offset goes, its default (None for a tensor, which has none), and its value for a call.

    The function raises LaunchError for the other kind than what is compiled in.
    """
    binding = plan.binding
    low, high = offset_range(binding.geometry, is_far=binding.is_far)

    def address(q_offset: Offset) -> int:
        if not isinstance(q_offset, torch.Tensor):
            binding.check_offset(q_offset)
        return q_offset.data_ptr()  # type: ignore[union-attr]

    def clamped(q_offset: Offset) -> int:
        if isinstance(q_offset, torch.Tensor):
            binding.check_offset(q_offset)
        return max(low, min(q_offset, high))  # type: ignore[return-value, type-var]

    if binding.spec.offset_tensor:
        return plan.slot(OFFSET_TENSOR), None, address
    return plan.slot("q_offset"), binding.scalars["q_offset"], clamped


def _pointers_writer(plan: DriverPlan) -> Callable[[tuple[int, ...]], None]:
    """What makes every parameter point to the memory of a call: scratch memory, and tensors in their direction's order.

    An absent tensor is 0.
    """
    tensors, pieces = plan.binding.direction.tensors, plan.binding.scratch.pieces
    offsets = [piece.offset_bytes for piece in pieces.values()]
    write_all, memory = struct.Struct(f"<{1 + len(tensors) + len(pieces)}Q").pack_into, plan.memory
    numbers = {tensor.name: (number, 0) for number, tensor in enumerate(tensors, start=1)}
    numbers |= {name: (0, piece.offset_bytes) for name, piece in pieces.items()}
    described = [
        (*numbers[one.subject], one.maps.known.get, one.maps.at, addresses, position)
        for one in plan.maps
        if one.subject in numbers
        for addresses, position in one.places
    ]
    optional = [(numbers[one.name][0], plan.slots[one.rows]) for one in tensors if one.rows in plan.slots]
    rows = plan.binding.geometry.q_shape[2]

    def write(pointers: tuple[int, ...]) -> None:
        scratch = pointers[0]
        write_all(memory, 0, *pointers, *[scratch + offset for offset in offsets])
        for number, slot in optional:
            slot.value = rows if pointers[number] else 0
        for number, offset, known, at, addresses, position in described:
            pointer = pointers[number] + offset
            addresses[position] = known(pointer) or at(pointer)

    return write
