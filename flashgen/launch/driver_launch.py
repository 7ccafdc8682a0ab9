"""Launches of a `DriverPlan` as functions, one for the signature of each direction.

What all launches of a plan use lies in variables of its own, because attribute look-ups cost a microsecond, and what
those of one geometry have in few bytes; only what differs from the last launch is written; and both functions spell out
what they have in common, because a call of a third costs more than 2% of a launch. A lock keeps two threads from mixing
their parameters, for all kernels of a call together; the driver copies them before it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.launch import driver
from flashgen.launch.allocation import empty_on_current
from flashgen.launch.backward import BackwardTensors, neg_delta_view
from flashgen.launch.driver_plan import DriverPlan, SizedPlan
from flashgen.launch.driver_writers import (
    FAILED,
    Offset,
    offset_writer,
    pointers_writer,
    runner,
    scales_writer,
    scratch_maker,
    stream_setter,
)
from flashgen.launch.feature_arguments import NO_FEATURES


def launcher(plan: DriverPlan) -> Callable[[SizedPlan], Callable[..., Any]]:
    """What makes the plan at a geometry a function: a `Launch` or a `BackwardLaunch` of `flashgen.launch.plan`."""
    return _LAUNCHERS[plan.binding.spec.direction](plan)


class _Forward:
    """What launches of a forward pass at one geometry have of their own, the last of them among it.

    One object of few bytes, for memory that nothing has touched before is most of what a new length costs.
    """

    __slots__ = (
        "call",
        "default_offset",
        "keys",
        "last_k",
        "last_o",
        "last_offset",
        "last_q",
        "last_rows",
        "last_scale",
        "last_stream",
        "last_v",
        "lock",
        "memory",
        "new_scratch",
        "rows",
        "run",
        "words",
        "write_features",
    )

    call: Any
    run: Callable[..., int]
    new_scratch: Callable[[torch.Tensor], torch.Tensor] | None
    write_features: Callable[[Features, float], None] | None
    default_offset: int | None
    last_offset: int | None

    def __init__(self, sized: SizedPlan, scale: float) -> None:
        tensors, memory = sized.geometry.tensors, sized.memory
        self.memory, self.words, self.lock = memory, memory.words, threading.Lock()
        self.rows, self.keys = tensors["q"][0][2], tensors["k"][0][2]
        self.new_scratch = self.write_features = None
        self.last_q = self.last_k = self.last_v = self.last_o = self.last_rows = 0
        self.last_scale, self.last_stream = scale, memory.stream


def _forward(plan: DriverPlan) -> Callable[[SizedPlan], Callable[..., None]]:  # noqa: C901, PLR0915
    # variables here are those of all geometries, and those of one lie in a `_Forward`
    binding, layout, adopt, fail = plan.binding, plan.layout, plan.adopt, plan.fail
    word_q, word_k, word_v, word_o, word_lse = (layout.places[name] for name in ("Q", "K", "V", "O", "LSE"))
    word_rows, write_scales = layout.places["lse_rows"], scales_writer(layout)
    index, only_device = plan.device_index, torch.cuda.device_count() == 1
    default_scale, set_stream, is_capturing = binding.default_scale, *stream_setter(plan)
    has_scratch, has_features = bool(binding.scratch.pieces), plan.has_features
    describe_q, describe_k = plan.describer("q", "Q"), plan.describer("k", "K")
    describe_v, describe_o = plan.describer("v", "V"), plan.describer("o", "O")
    launch_kernel, (offset_of, write_offset) = driver.launch_function(), offset_writer(plan)
    takes_tensor = binding.spec.offset_tensor
    stream_of, current = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def launch(  # noqa: C901, PLR0912, PLR0915 - one branch a parameter, and no call for what did not change
        own: _Forward,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        q_offset: Offset = None,
        features: Features | None = None,
    ) -> None:
        if not only_device and current() != index:
            with torch.cuda.device(index):
                return launch(own, q, k, v, out, lse, softmax_scale, q_offset, features)
        new_q, new_k, new_v, new_o = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        scale = default_scale if softmax_scale is None else softmax_scale
        offset = own.default_offset if q_offset is None else offset_of(q_offset, own.rows, own.keys)
        words = own.words
        try:
            with own.lock:
                if new_q != own.last_q:
                    if describe_q is None:
                        words[word_q] = new_q
                    else:
                        describe_q(own.memory, new_q)
                    own.last_q = new_q
                if new_k != own.last_k:
                    if describe_k is None:
                        words[word_k] = new_k
                    else:
                        describe_k(own.memory, new_k)
                    own.last_k = new_k
                if new_v != own.last_v:
                    if describe_v is None:
                        words[word_v] = new_v
                    else:
                        describe_v(own.memory, new_v)
                    own.last_v = new_v
                if new_o != own.last_o:
                    if describe_o is None:
                        words[word_o] = new_o
                    else:
                        describe_o(own.memory, new_o)
                    own.last_o = new_o
                if lse is not None:
                    words[word_lse] = lse.data_ptr()
                    words[word_rows] = own.last_rows = own.rows
                elif own.last_rows:
                    words[word_rows] = own.last_rows = 0
                if scale != own.last_scale:
                    write_scales(words, scale)
                    own.last_scale = scale
                if offset != own.last_offset:
                    write_offset(words, offset)
                    own.last_offset = offset
                if own.write_features is not None:
                    own.write_features(features or NO_FEATURES, scale)
                stream = stream_of(index)
                is_captured = is_capturing is not None and is_capturing()
                if stream != own.last_stream or is_captured:
                    own.last_stream = -1  # where a counter is refused, the next launch writes all of this again
                    held = set_stream(words, stream, is_captured)  # noqa: F841 - until the kernels are launched
                    if not is_captured:
                        own.last_stream = stream
                if own.new_scratch is not None:
                    scratch = own.new_scratch(q)  # noqa: F841 - likewise
                code = own.run(*own.call)
        except LaunchError:
            if not adopt():
                raise
            return launch(own, q, k, v, out, lse, softmax_scale, q_offset, features)
        if code == 0:
            return None
        if not adopt():
            fail(code // FAILED, code % FAILED, words)
        return launch(own, q, k, v, out, lse, softmax_scale, q_offset, features)

    def at_sizes(sized: SizedPlan) -> Callable[..., None]:
        own, calls = _Forward(sized, default_scale), plan.calls(sized.memory)
        own.call, own.run = calls[0], launch_kernel if len(calls) == 1 else runner(launch_kernel, calls)
        if has_scratch:
            own.new_scratch = scratch_maker(plan, sized)
        if has_features:
            own.write_features = plan.features_writer(sized)
        own.default_offset = default_offset = None if takes_tensor else sized.q_offset
        own.last_offset = default_offset or 0
        return MethodType(launch, own)

    return at_sizes


def _backward(plan: DriverPlan) -> Callable[[SizedPlan], Callable[..., torch.Tensor]]:  # noqa: C901, PLR0915
    binding, layout, adopt, fail, fp32 = plan.binding, plan.layout, plan.adopt, plan.fail, torch.float32
    write_scales, index, only_device = scales_writer(layout), plan.device_index, torch.cuda.device_count() == 1
    default_scale, set_stream, is_capturing = binding.default_scale, *stream_setter(plan)
    launch_kernel, pointers_at = driver.launch_function(), pointers_writer(plan)
    offset_of, write_offset = offset_writer(plan)
    takes_tensor, empty = binding.spec.offset_tensor, empty_on_current()
    stream_of, current = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

    def at_sizes(sized: SizedPlan) -> Callable[..., torch.Tensor]:  # noqa: C901
        memory, scratch_shape, (sizes, strides) = sized.memory, (sized.scratch.floats,), neg_delta_view(sized.scratch)
        words, calls, write_pointers = memory.words, plan.calls(memory), pointers_at(sized)
        lock, (config, function, parameters, _) = threading.Lock(), calls[0]
        run = launch_kernel if len(calls) == 1 else runner(launch_kernel, calls)
        write_features = plan.features_writer(sized)
        default_offset = None if takes_tensor else sized.q_offset
        rows, keys = sized.geometry.q_shape[2], sized.geometry.k_shape[2]
        last_pointers: tuple[int, ...] = ()
        last_scale, last_stream = default_scale, memory.stream
        last_offset: int | None = default_offset or 0

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
            q, k, v, out, lse, dout, dq, dk, dv, dlse, dbias = tensors
            scratch = empty(scratch_shape, (1,), fp32)
            pointers = (  # in the order of the direction's tensors
                scratch.data_ptr(),
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                out.data_ptr(),
                dout.data_ptr(),
                dq.data_ptr(),
                dk.data_ptr(),
                dv.data_ptr(),
                lse.data_ptr(),
                0 if dlse is None else dlse.data_ptr(),
                0 if dbias is None else dbias.data_ptr(),
            )
            scale = default_scale if softmax_scale is None else softmax_scale
            offset = default_offset if q_offset is None else offset_of(q_offset, rows, keys)
            try:
                with lock:
                    if pointers != last_pointers:
                        last_pointers = ()  # where a descriptor is refused, the next call writes all of them again
                        write_pointers(pointers)
                        last_pointers = pointers
                    if scale != last_scale:
                        write_scales(words, scale)
                        last_scale = scale
                    if offset != last_offset:
                        write_offset(words, offset)
                        last_offset = offset
                    if write_features is not None:
                        write_features(features or NO_FEATURES, scale)
                    stream = stream_of(index)
                    is_captured = is_capturing is not None and is_capturing()
                    if stream != last_stream or is_captured:
                        last_stream = -1  # where a counter is refused, the next launch writes all of this again
                        held = set_stream(words, stream, is_captured)  # noqa: F841 - until the kernels are launched
                        if not is_captured:
                            last_stream = stream
                    code = run(config, function, parameters, None)
            except LaunchError:
                if not adopt():
                    raise
                return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)
            if code == 0:
                return scratch.as_strided(sizes, strides) if with_neg_delta else scratch
            if not adopt():
                fail(code // FAILED, code % FAILED, words)
            return launch(tensors, softmax_scale, q_offset, features, with_neg_delta)

        return launch

    return at_sizes


_LAUNCHERS: dict[str, Callable[[DriverPlan], Callable[[SizedPlan], Callable[..., Any]]]]
_LAUNCHERS = {"forward": _forward, "backward": _backward}
