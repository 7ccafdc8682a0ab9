"""Launches of helper kernels: pointers, then numbers of the call, then numbers that equal calls share.

What the CUDA driver reads lies in words of 8 bytes, as for plans (`flashgen.launch.plan_layout`); one set of them
serves all shapes, since what shapes and strides say is packed once for each of them and copied at a launch.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.generated import load_module
from flashgen.codegen.helper import HelperKernel, render_helper
from flashgen.launch import driver
from flashgen.launch.parameters import WORD_BYTES, WORD_FORMATS, Layout
from flashgen.launch.plan import known_layout, load_part
from flashgen.launch.plan_layout import CONFIG_WORDS, HIGH, POINTER, STREAM_WORD

Tensors = Sequence[torch.Tensor | None]
HelperRun = Callable[[Tensors, Sequence[int]], None]
"""Launches on the current stream: tensors for the pointers in order, None for null, and the numbers of the call."""

WithNumbers = Callable[[int, Sequence[int]], HelperRun]
"""Binds a number of programs, at least 1, and the numbers that follow those of the call."""


_TORCH = {
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp32": torch.float32,
    "*i32": torch.int32,
    "*i64": torch.int64,
}


def helper_launcher(compiled: CompiledKernel, device_index: int) -> WithNumbers:
    """What launches a compiled helper kernel on a GPU of this process.

    Raises:
        LaunchError: the driver refuses the binary, or a CUDA graph is being captured.
    """
    (part,) = compiled.parts
    layout = known_layout(part)
    if layout is None:
        return _through_triton(part, device_index)
    return _through_driver(part, layout, load_part(part, device_index), device_index)


def interpreted_launcher(helper: HelperKernel) -> WithNumbers:
    """What runs a helper kernel in Triton's interpreter, on tensors of the CPU."""
    function: Any = getattr(load_module(render_helper(helper)), helper.id)
    # nothing is read through a null pointer, but the interpreter takes types from tensors
    null = {parameter.name: torch.empty(1, dtype=_TORCH.get(parameter.type)) for parameter in helper.parameters}
    names = [parameter.name for parameter in helper.parameters]

    def with_numbers(programs: int, numbers: Sequence[int]) -> HelperRun:
        def run(tensors: Tensors, of_the_call: Sequence[int]) -> None:
            given = [null[name] if tensor is None else tensor for name, tensor in zip(names, tensors, strict=False)]
            function[programs,](*given, *of_the_call, *numbers)

        return run

    return with_numbers


def _through_triton(part: CompiledPart, index: int) -> WithNumbers:
    def with_numbers(programs: int, numbers: Sequence[int]) -> HelperRun:
        def run(tensors: Tensors, of_the_call: Sequence[int]) -> None:
            with torch.cuda.device(index):
                part.handle[(programs, 1, 1)](*tensors, *of_the_call, *numbers)

        return run

    return with_numbers


class _Words:
    """The memory of a kernel's launches: its configuration, its parameters, a null and the addresses of all of them."""

    def __init__(self, part: CompiledPart, layout: Layout) -> None:
        self.forms = [WORD_FORMATS.get(parameter.type, POINTER) for parameter in layout.parameters]
        null = CONFIG_WORDS + len(self.forms)
        read = [*range(CONFIG_WORDS, null), *[null] * layout.trailing]
        self.memory = bytearray(WORD_BYTES * (null + 1 + len(read)))
        self.words: Any = (ctypes.c_uint64 * (null + 1 + len(read))).from_buffer(self.memory)
        self.config = ctypes.addressof(self.words)
        self.addresses = self.config + WORD_BYTES * (null + 1)
        metadata = part.handle.metadata
        self.words[:4] = [HIGH, 1 | metadata.num_warps * 32 * HIGH, 1 | HIGH, metadata.shared]
        self.words[null + 1 :] = [self.config + WORD_BYTES * word for word in read]


def _through_driver(part: CompiledPart, layout: Layout, function: int, index: int) -> WithNumbers:
    memory = _Words(part, layout)
    content, words, forms = memory.memory, memory.words, memory.forms
    config, addresses, lock = memory.config, memory.addresses, threading.Lock()
    launch_kernel, stream_of = driver.library().cuLaunchKernelEx, torch._C._cuda_getCurrentRawStream
    only_device, current = torch.cuda.device_count() == 1, torch._C._cuda_getDevice
    context, first = driver.use_context(index), WORD_BYTES * CONFIG_WORDS

    def with_numbers(programs: int, numbers: Sequence[int]) -> HelperRun:
        own = len(forms) - len(numbers)
        pack = struct.Struct("<" + "".join(forms[:own])).pack_into
        shared = struct.pack("<" + "".join(forms[own:]), *numbers)
        place = slice(first + WORD_BYTES * own, first + WORD_BYTES * len(forms))

        def run(tensors: Tensors, of_the_call: Sequence[int]) -> None:
            if not only_device and current() != index:
                with torch.cuda.device(index):
                    return run(tensors, of_the_call)
            pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            with lock:
                pack(content, first, *pointers, *of_the_call)
                content[place] = shared
                words[0], words[STREAM_WORD] = programs | HIGH, stream_of(index)
                code = launch_kernel(config, function, addresses, None)
            if code == 0:
                return None
            if not driver.adopt_context(context):
                driver.check(code, f"launch {programs} blocks of {part.kernel.entry}")
            return run(tensors, of_the_call)

        return run

    return with_numbers
