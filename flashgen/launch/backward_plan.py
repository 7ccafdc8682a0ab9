"""Plans of a backward config: its kernels bound to one set of shapes and strides, ready to be launched on any pointers.

As for a forward pass, two kinds do the same thing. `DriverBackwardPlan` calls the CUDA driver with prepared parameters,
`TritonBackwardPlan` calls Triton's `CompiledKernel[grid]` where the parameter layout of a kernel is not the known one.
Both run the kernels in order on the current stream and hand all of them one piece of scratch memory, which a call takes
from torch's allocator: inside a CUDA graph it belongs to the graph, on another stream to that stream.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from flashgen.codegen.build import CompiledKernel
from flashgen.codegen.family import Parameter
from flashgen.core.config import Config
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch import feature_arguments
from flashgen.launch.backward_binding import OWN, POINTERS, BackwardBinding
from flashgen.launch.backward_driver_plan import DriverBackwardPlan
from flashgen.launch.backward_geometry import FIELDS, BackwardGeometry, BackwardTensors
from flashgen.launch.counters import Counters
from flashgen.launch.feature_arguments import LOG2E, NO_FEATURES
from flashgen.launch.parameters import block_of, is_descriptor
from flashgen.launch.plan import known_layout, load_part


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


def make_backward_plan(
    compiled: CompiledKernel, spec: Specialization, config: Config, geometry: BackwardGeometry, device_index: int
) -> BackwardLaunch:
    """Bind the kernels of a backward config to a geometry on a GPU of this process.

    Raises:
        LaunchError: a kernel has a parameter that no launch knows, the gradient of the bias has an impossible shape,
            or the driver refuses a binary.
    """
    if geometry.is_empty:
        return EmptyBackwardPlan()
    binding = BackwardBinding.of(compiled, spec, config, geometry)
    layouts = [known_layout(part) for part in compiled.parts]
    known = [layout for layout in layouts if layout is not None]
    with torch.cuda.device(device_index):
        if len(known) < len(layouts):
            return TritonBackwardPlan(binding, device_index)
        functions = [load_part(part, device_index) for part in compiled.parts]
        return DriverBackwardPlan(binding, functions=functions, layouts=known, device_index=device_index).launch


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
        """Fill the gradients with 0; `out` is 0, so neg_delta is `dlse`, or zeros."""
        for gradient in (tensors.dq, tensors.dk, tensors.dv, tensors.dbias):
            if gradient is not None:
                gradient.zero_()
        return torch.zeros_like(tensors.lse) if tensors.dlse is None else tensors.dlse


class TritonBackwardPlan:
    """Launches through Triton's `CompiledKernel[grid]`."""

    def __init__(self, binding: BackwardBinding, device_index: int) -> None:
        self._binding = binding
        self._device_index = device_index
        parts = zip(binding.compiled.parts, binding.programs, strict=True)
        self._runners = [
            (
                part.handle[(programs, 1, 1)],
                part.kernel.parameters,
                Counters(device_index) if OWN in part.kernel.names else None,
            )
            for part, programs in parts
        ]

    def __call__(
        self,
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
        with_neg_delta: bool = True,
    ) -> torch.Tensor:
        """See `BackwardLaunch`."""
        binding, index = self._binding, self._device_index
        scale = binding.geometry.forward.q_shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        with torch.cuda.device(index):
            memory = binding.scratch.allocate(tensors.lse)
            pieces = {name: piece.of(memory) for name, piece in binding.scratch.pieces.items()}
            known = self._call_arguments(tensors, scale, q_offset, features or NO_FEATURES)
            known |= {binding.scratch.pieces[name].pointer: piece for name, piece in pieces.items()}
            for runner, parameters, counters in self._runners:
                if counters is not None:
                    known[OWN] = counters.of(torch._C._cuda_getCurrentRawStream(index))
                runner(*(self._argument(parameter, tensors, pieces, known) for parameter in parameters))
        return memory.as_strided(*binding.scratch.neg_delta_view)

    def _call_arguments(
        self, tensors: BackwardTensors, scale: float, q_offset: int | torch.Tensor | None, features: Features
    ) -> dict[str, Any]:
        """What every parameter but those of scratch memory and descriptors is bound to, by name."""
        binding = self._binding
        known: dict[str, Any] = dict(binding.scalars)
        known |= {name: getattr(tensors, field) for name, field in POINTERS.items()}
        known["dlse_rows"] = 0 if tensors.dlse is None else binding.scalars["seqlen_q"]
        known |= {"softmax_scale": scale, "softmax_scale_log2": scale * LOG2E}
        known["QOffset" if binding.spec.offset_tensor else "q_offset"] = binding.offset(q_offset)
        return known | feature_arguments.arguments(
            binding.names, features, scale, binding.scalars, causal=binding.spec.causal
        )

    def _argument(
        self, parameter: Parameter, tensors: BackwardTensors, pieces: dict[str, torch.Tensor], known: dict[str, Any]
    ) -> Any:
        if not is_descriptor(parameter):
            return known[parameter.name]
        # a launch reads no more than this of a descriptor, of Triton's or of Gluon's class
        from triton.tools.tensor_descriptor import TensorDescriptor

        subject = self._binding.subject(parameter)
        base = getattr(tensors, FIELDS[subject]) if subject in FIELDS else pieces[subject]
        shape, strides = self._binding.view(parameter)
        return TensorDescriptor(base, list(shape), list(strides), list(block_of(parameter)))
