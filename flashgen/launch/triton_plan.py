"""Plans that call Triton's `CompiledKernel[grid]`: slower, and right whatever the layout of the parameters."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.codegen.family import Parameter
from flashgen.core.features.values import Features
from flashgen.launch import feature_arguments
from flashgen.launch.backward import BackwardTensors, neg_delta_view
from flashgen.launch.binding import Binding
from flashgen.launch.counters import Counters
from flashgen.launch.feature_arguments import LOG2E, NO_FEATURES
from flashgen.launch.parameters import block_of, is_descriptor
from flashgen.launch.vocabulary import COUNTER, OFFSET_TENSOR

Named = dict[str, torch.Tensor | None]
"""Tensors of a call by their ids in the launch vocabulary."""


class TritonPlan:
    """Launches of a config's kernels, one after the other on the current stream."""

    def __init__(self, binding: Binding, device_index: int) -> None:
        """Bind Triton's own launchers.

        Args:
            binding: the kernels, and what their parameters stand for.
            device_index: torch's index of the GPU.
        """
        self._binding = binding
        self._device_index = device_index
        self._runners = [
            (
                part.handle[(programs, 1, 1)],
                part.kernel.parameters,
                Counters(device_index) if COUNTER in part.kernel.names else None,
            )
            for part, programs in zip(binding.compiled.parts, binding.programs, strict=True)
        ]

    def _run(
        self,
        tensors: Named,
        softmax_scale: float | None,
        q_offset: int | torch.Tensor | None,
        features: Features | None,
    ) -> torch.Tensor:
        """Launch all kernels; returns the scratch memory that they shared."""
        binding, index = self._binding, self._device_index
        scale = binding.default_scale if softmax_scale is None else softmax_scale
        with torch.cuda.device(index):
            q = tensors["q"]
            assert q is not None
            memory = binding.scratch.allocate(q)
            pieces = {name: piece.of(memory) for name, piece in binding.scratch.pieces.items()}
            known = self._arguments(tensors, scale, q_offset, features or NO_FEATURES)
            known |= {binding.scratch.pieces[name].pointer: piece for name, piece in pieces.items()}
            for runner, parameters, counters in self._runners:
                if counters is not None:
                    known[COUNTER] = counters.of(torch._C._cuda_getCurrentRawStream(index))
                runner(*(self._argument(parameter, {**tensors, **pieces}, known) for parameter in parameters))
        return memory

    def _arguments(
        self, tensors: Named, scale: float, q_offset: int | torch.Tensor | None, features: Features
    ) -> dict[str, Any]:
        """What every parameter but those of scratch memory and descriptors is bound to, by name."""
        binding = self._binding
        known: dict[str, Any] = dict(binding.scalars)
        for tensor in binding.direction.tensors:
            given = known[tensor.pointer] = tensors[tensor.name]
            if tensor.rows:
                known[tensor.rows] = 0 if given is None else binding.scalars["seqlen_q"]
        known |= {"softmax_scale": scale, "softmax_scale_log2": scale * LOG2E}
        known[OFFSET_TENSOR if binding.spec.offset_tensor else "q_offset"] = binding.offset(q_offset)
        return known | feature_arguments.arguments(
            binding.names, features, scale, binding.scalars, causal=binding.spec.causal
        )

    def _argument(self, parameter: Parameter, tensors: Named, known: dict[str, Any]) -> Any:
        if not is_descriptor(parameter):
            return known[parameter.name]
        # a launch reads no more than this of a descriptor, of Triton's or of Gluon's class
        from triton.tools.tensor_descriptor import TensorDescriptor

        subject = self._binding.subject(parameter)
        shape, strides = self._binding.view(parameter)
        base = tensors[subject] if subject in tensors else known[subject.capitalize()]
        return TensorDescriptor(base, list(shape), list(strides), list(block_of(parameter)))


class TritonForward(TritonPlan):
    """A forward pass through Triton."""

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
        """See `flashgen.launch.plan.Launch`."""
        self._run({"q": q, "k": k, "v": v, "o": out, "lse": lse}, softmax_scale, q_offset, features)


class TritonBackward(TritonPlan):
    """A backward pass through Triton."""

    def __call__(
        self,
        tensors: BackwardTensors,
        softmax_scale: float | None = None,
        q_offset: int | torch.Tensor | None = None,
        features: Features | None = None,
        with_neg_delta: bool = True,
    ) -> torch.Tensor:
        """See `flashgen.launch.plan.BackwardLaunch`."""
        memory = self._run(tensors.named(), softmax_scale, q_offset, features)
        return memory.as_strided(*neg_delta_view(self._binding.scratch))
