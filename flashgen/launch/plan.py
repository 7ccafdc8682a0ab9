"""Plans: a compiled kernel bound to one set of shapes and strides, ready to be launched on any pointers.

Two kinds do the same thing. `DriverPlan` prepares the parameters of a launch once and calls the CUDA driver;
`TritonPlan` calls Triton's `CompiledKernel[grid]` and serves wherever the parameter layout is not the known one
(another Triton, AMD). Tests hold them equal.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import driver, feature_arguments
from flashgen.launch.counters import Counters
from flashgen.launch.driver_plan import DriverPlan
from flashgen.launch.feature_arguments import LOG2E, NO_FEATURES
from flashgen.launch.geometry import Geometry, clamp_offset, scalars
from flashgen.launch.parameters import Layout, block_of, is_descriptor, subject_of, trailing_pointers

_UNUSUAL = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")
"""What the plan through the driver does not do, by its name in Triton's metadata."""


class Launch(Protocol):
    """A launch that is ready but for the pointers, the scale, the query offset and what the features hold."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> None:
        """Launch on the current stream of the plan's device.

        The tensors have the shapes and strides that the plan was made for (in any view: only their memory is used);
        `lse` is fp32 (batch, nheads, seqlen_q), contiguous, or None; `softmax_scale` None means head_dim ** -0.5, and
        `q_offset` None seqlen_k - seqlen_q. `features` has the arguments of the features that are compiled in.

        Raises:
            LaunchError: the driver refuses, or the kernel needs what the features do not have.
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
    layout = known_layout(compiled.main)
    with torch.cuda.device(device_index):
        if layout is None:
            return TritonPlan(compiled, spec, config, geometry, device_index)
        plan = DriverPlan(
            compiled,
            spec,
            config,
            geometry,
            function=load(compiled, device_index),
            layout=layout,
            device_index=device_index,
        )
        return plan.launch


def known_layout(part: CompiledPart) -> Layout | None:
    """The known layout of a kernel's parameters, or None; found once a kernel, because a PTX text is long."""
    handle = part.handle
    if handle in _LAYOUTS:
        return _LAYOUTS[handle]
    parameters, found = part.kernel.parameters, None
    metadata, ptx = handle.metadata, handle.asm.get("ptx")
    if getattr(metadata, "num_ctas", 1) == 1 and not any(getattr(metadata, name, 0) for name in _UNUSUAL) and ptx:
        trailing = trailing_pointers(ptx, parameters)
        found = None if trailing is None else Layout.of(parameters, trailing)
    _LAYOUTS[handle] = found
    return found


_LAYOUTS: weakref.WeakKeyDictionary[Any, Layout | None] = weakref.WeakKeyDictionary()


def load(compiled: CompiledKernel, device_index: int) -> int:
    """Load all kernels of a config on a GPU; returns the handle of the main one.

    Raises:
        LaunchError: the driver refuses the binary, or a CUDA graph is being captured.
    """
    for part in compiled.parts:
        load_part(part, device_index)
    return load_part(compiled.main, device_index)


def load_part(part: CompiledPart, device_index: int) -> int:
    """The handle of a kernel on a GPU, loaded there once a process.

    Raises:
        LaunchError: the driver refuses the binary, or a CUDA graph is being captured.
    """
    metadata = part.handle.metadata
    if "cubin" not in part.handle.asm:
        return 0  # not NVIDIA: Triton loads it at the first launch
    key = (part.handle.hash, device_index)
    if key not in _FUNCTIONS:
        check_capture(device_index, f"loading {part.kernel.entry}")
        with torch.cuda.device(device_index):
            torch.cuda.current_stream()  # torch starts the driver when it is first used
            driver.use_context(device_index)  # a warm-up is often the first thing a thread or a process does
            _FUNCTIONS[key] = driver.load_function(part.handle.asm["cubin"], metadata.name, metadata.shared)
    return _FUNCTIONS[key]


_FUNCTIONS: dict[tuple[str, int], int] = {}


class EmptyPlan:
    """Nothing to launch: rows that see no key have output 0 and LSE -inf, or that of their head's sink."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> None:
        """Fill `out` with 0, and `lse` with -inf or the sinks."""
        out.zero_()
        if lse is None:
            return
        if features is None or features.sinks is None:
            lse.fill_(float("-inf"))
        else:
            lse.copy_(features.sinks.view(1, -1, 1).expand_as(lse))


class TritonPlan:
    """A launch through Triton's `CompiledKernel[grid]`."""

    def __init__(
        self, compiled: CompiledKernel, spec: Specialization, config: Config, geometry: Geometry, device_index: int
    ) -> None:
        kernel = compiled.main.kernel
        programs = kernel.programs(compiled.device, geometry.sizes)
        self._runner = compiled.handle[(programs, 1, 1)]
        self._parameters = kernel.parameters
        self._names = {parameter.name for parameter in self._parameters}
        self._geometry = geometry
        self._scalars = scalars(geometry)
        self._causal = spec.causal
        self._device_index = device_index
        self._counters = Counters(device_index) if "Counter" in self._names else None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
    ) -> None:
        """See `Launch`."""
        known: dict[str, Any] = dict(self._scalars)
        if isinstance(q_offset, int):
            is_far = not feature_arguments.FAR_FEATURES.isdisjoint(self._names)
            known["q_offset"] = clamp_offset(q_offset, self._geometry, is_far=is_far)
        scale = self._geometry.q_shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        known |= {"QOffset": q_offset, "softmax_scale_log2": scale * LOG2E, "LSE": lse}
        known["lse_rows"] = self._geometry.q_shape[2] if lse is not None else 0
        known |= feature_arguments.arguments(
            self._names, features or NO_FEATURES, scale, self._scalars, causal=self._causal
        )
        tensors = {"q": q, "k": k, "v": v, "o": out}
        with torch.cuda.device(self._device_index):
            if self._counters is not None:
                known["Counter"] = self._counters.of(torch._C._cuda_getCurrentRawStream(self._device_index))
            self._runner(*(self._argument(parameter, tensors, known) for parameter in self._parameters))

    def _argument(self, parameter: Parameter, tensors: dict[str, torch.Tensor], known: dict[str, Any]) -> Any:
        if parameter.name in known:
            return known[parameter.name]
        if not is_descriptor(parameter):
            return tensors[parameter.name[0].lower()]
        # a launch reads no more than this of a descriptor, of Triton's or of Gluon's class
        from triton.tools.tensor_descriptor import TensorDescriptor

        name = subject_of(parameter)
        shape, strides = self._geometry.described(name, len(block_of(parameter)))
        tensor = tensors[name] if name in tensors else known[name.capitalize()]
        return TensorDescriptor(tensor, list(shape), list(strides), list(block_of(parameter)))


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
