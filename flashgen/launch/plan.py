"""Plans: the kernels of a config bound to one set of shapes and strides, ready to be launched on any pointers.

Two kinds do the same thing. `DriverPlan` prepares the parameters of all kernels once and calls the CUDA driver;
`TritonPlan` calls Triton's `CompiledKernel[grid]` and serves wherever the parameter layout of a kernel is not the known
one (another Triton, AMD). Tests hold them equal. Both run the kernels in order on the current stream and hand all of
them one piece of scratch memory, if their family asks for any, which a call takes from torch's allocator: inside a CUDA
graph it belongs to the graph, on another stream to that stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from flashgen.codegen.build import CompiledKernel, CompiledPart
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.errors import LaunchError
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import counters, driver
from flashgen.launch.backward import BackwardTensors
from flashgen.launch.binding import Binding
from flashgen.launch.driver_launch import launcher
from flashgen.launch.driver_plan import DriverPlan, SizedPlan
from flashgen.launch.geometry import Geometry
from flashgen.launch.parameters import Layout, ptx_sizes, trailing_pointers
from flashgen.launch.triton_plan import TritonBackward, TritonForward
from flashgen.launch.vocabulary import COUNTER

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


class BackwardLaunch(Protocol):
    """A backward pass that is ready but for pointers, scale, query offset and what the features hold."""

    def __call__(
        self,
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
        with_neg_delta: bool = True,
    ) -> torch.Tensor:
        """Launch on the current stream of the plan's device; dq, dk, dv and dbias are completely overwritten.

        The tensors have the shapes and strides that the plan was made for (in any view: only their memory is used).
        `softmax_scale` None means head_dim ** -0.5, and `q_offset` None seqlen_k - seqlen_q: both, and `features`, are
        those of the forward pass.

        Returns:
            neg_delta, fp32 (batch, nheads, seqlen_q): dlse minus the row sums of dout * out. It is a view of the
            scratch memory of this call and keeps all of that alive. With `with_neg_delta` False it may be the memory as
            it is, which saves the time of making a view that nobody asked for.

        Raises:
            LaunchError: the driver refuses, or a kernel needs what the call does not have.
        """


class OpenPlan:
    """The kernels of a config on a GPU of this process, to be launched at any sizes.

    What depends on the specialization alone is found at the first geometry of a kind; a later one of the same kind
    costs what depends on it.
    """

    def __init__(self, compiled: CompiledKernel, spec: Specialization, config: Config, device_index: int) -> None:
        """Hold the kernels; nothing is loaded yet.

        Args:
            compiled: of a config.
            spec: what is compiled in.
            config: how.
            device_index: torch's index of the GPU.
        """
        self._compiled, self._spec, self._config, self._device_index = compiled, spec, config, device_index
        self._empty, self._through_triton = _KINDS[spec.direction]
        self._head_dims = spec.head_dim, spec.head_dim_v
        self._made: tuple[DriverPlan, Callable[[SizedPlan], Any]] | None = None

    def sized(self, geometry: Geometry, sizes: Sizes | None = None) -> Any:
        """The `Launch` or `BackwardLaunch` at a geometry.

        Args:
            geometry: of the calls.
            sizes: its sizes, where they are known and none is 0.

        Raises:
            LaunchError: as `make_plan` and `make_backward_plan`; or the tensors have other head dims than the kernels,
                which would run on them and give wrong results without a word.
        """
        tensors = geometry.tensors
        found = tensors["q"][0][3], tensors["v"][0][3]
        if found != self._head_dims:
            raise LaunchError(f"the kernels are for head_dim and head_dim_v {self._head_dims}, got {found}")
        if sizes is None and geometry.is_empty:
            return self._empty()
        if self._made is not None:
            plan, launch_at = self._made
            sized = plan.sized(geometry, sizes)
            if sized is not None:
                return launch_at(sized)
        return self._planned(geometry)

    def _planned(self, geometry: Geometry) -> Any:
        """The same at the first geometry of a kind."""
        binding, index = Binding.of(self._compiled, self._spec, self._config, geometry), self._device_index
        parts = self._compiled.parts
        layouts = [known_layout(part) for part in parts]
        known = [layout for layout in layouts if layout is not None]
        with torch.cuda.device(index):
            if len(known) < len(layouts):
                return self._through_triton(binding, index)
            functions = [load_part(part, index) for part in parts]
            plan = DriverPlan(binding, functions=functions, layouts=known, device_index=index)
            launch_at = launcher(plan)
        self._made = plan, launch_at
        sized = plan.sized(geometry)
        assert sized is not None
        return launch_at(sized)


def make_plan(
    compiled: CompiledKernel, spec: Specialization, config: Config, geometry: Geometry, device_index: int
) -> Launch:
    """Bind the kernels of a forward config to a geometry on a GPU of this process.

    Raises:
        LaunchError: a kernel has a parameter that no launch writes, or the driver refuses a binary or a tensor
            descriptor.
    """
    launch: Launch = OpenPlan(compiled, spec, config, device_index).sized(geometry)
    return launch


def make_backward_plan(
    compiled: CompiledKernel, spec: Specialization, config: Config, geometry: Geometry, device_index: int
) -> BackwardLaunch:
    """Bind the kernels of a backward config to a geometry on a GPU of this process.

    Raises:
        LaunchError: as `make_plan`; or the family leaves no `neg_delta`, or the gradient of the bias has an impossible
            shape.
    """
    launch: BackwardLaunch = OpenPlan(compiled, spec, config, device_index).sized(geometry)
    return launch


def known_layout(part: CompiledPart) -> Layout | None:
    """The known layout of a kernel's parameters, or None; found once a kernel, because a PTX text is long."""
    handle = part.handle
    if handle in _LAYOUTS:
        return _LAYOUTS[handle]
    parameters, found = part.kernel.parameters, None
    metadata = handle.metadata
    sizes = getattr(handle, "parameter_bytes", None) or ptx_sizes(handle.asm.get("ptx") or "")
    if getattr(metadata, "num_ctas", 1) == 1 and not any(getattr(metadata, name, 0) for name in _UNUSUAL) and sizes:
        trailing = trailing_pointers(sizes, parameters)
        found = None if trailing is None else Layout(parameters=parameters, trailing=trailing)
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
        if COUNTER in part.kernel.names:
            counters.prepare(device_index)  # a wait for the GPU, which a launch behind a warm-up must not need
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
        """Fill `out` with 0, and `lse` with -inf or, where a row is a query's, the sinks."""
        out.zero_()
        if lse is None:
            return
        if features is None or features.sinks is None:
            lse.fill_(float("-inf"))
            return
        lse.copy_(features.sinks.view(1, -1, 1).expand_as(lse))
        if features.cu_seqlens_q is not None:
            lse.masked_fill_(~_rows_of_queries(features, lse.shape[-1]), float("-inf"))


class EmptyBackwardPlan:
    """Nothing to launch: no query sees a key, so nothing flows anywhere."""

    def __call__(
        self,
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
        with_neg_delta: bool = True,
    ) -> torch.Tensor:
        """Fill the gradients with 0; `out` is 0, so neg_delta is `dlse` where a row is a query's, or zeros."""
        for gradient in (tensors.dq, tensors.dk, tensors.dv, tensors.dbias):
            if gradient is not None:
                gradient.zero_()
        if tensors.dlse is None:
            return torch.zeros_like(tensors.lse)
        if features is None or features.cu_seqlens_q is None:
            return tensors.dlse
        return torch.where(_rows_of_queries(features, tensors.lse.shape[-1]), tensors.dlse, 0.0)


def _rows_of_queries(features: Features, rows: int) -> torch.Tensor:
    """Whether each of some packed rows is one of the queries of a sequence, bool (rows,)."""
    ends, used = features.cu_seqlens_q, features.seqused_q
    assert ends is not None
    if len(ends) < 2:
        return torch.zeros(rows, dtype=torch.bool, device=ends.device)
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    number = torch.searchsorted(ends[1:].contiguous(), row, right=True)
    number = number.clamp_(max=len(ends) - 2)  # rows behind the last sequence are at or behind its end
    begins, behind = ends[number], ends[number + 1]
    if used is not None:
        behind = torch.minimum(behind, begins + used[number])
    return (begins <= row) & (row < behind)


_KINDS = {"forward": (EmptyPlan, TritonForward), "backward": (EmptyBackwardPlan, TritonBackward)}
"""By direction: what computes without a kernel where there is no query or no key, and what launches through Triton."""


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
