"""A GPU whose kernels are plain torch on tensors of the CPU: everything of a call but the kernels is the real thing.

A launch knows a tensor by its memory and the geometry that its plan was made for, as a kernel does, and writes into
memory alone; what `aligned16` promised is checked at every launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.core.config import Config
from flashgen.core.features.values import Features
from flashgen.core.workload import DTYPE_BYTES, Specialization
from flashgen.launch.backward import FIELDS, BackwardTensors
from flashgen.launch.geometry import Geometry, aligned16
from tests.runtime.fake_gpu import FakeGpu

Offset = int | torch.Tensor | None


@dataclass
class Scores:
    """Scores of all queries and keys in fp32, -inf where hidden, and the derivative of the softcap."""

    values: torch.Tensor
    slope: torch.Tensor | float

    @classmethod
    def of(
        cls,
        spec: Specialization,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: float | None,
        offset: Offset,
        features: Features,
    ) -> Scores:
        assert (spec.window, spec.softcap, spec.alibi, spec.bias == "", spec.mask == "") == (
            features.window != (None, None),
            features.softcap > 0,
            features.alibi_slopes is not None,
            features.bias is None,
            features.mask is None,
        )
        group = q.shape[1] // k.shape[1]
        values = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        slope: torch.Tensor | float = 1.0
        if features.softcap:
            flat = torch.tanh(values / features.softcap)
            values, slope = features.softcap * flat, 1 - flat**2
        shift = k.shape[2] - q.shape[2] if offset is None else offset
        shift = shift.view(-1, 1, 1, 1) if isinstance(shift, torch.Tensor) else shift
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - shift  # of a key to its query
        if features.alibi_slopes is not None:
            assert features.alibi_slopes.stride(-1) == 1
            values = values - features.alibi_slopes.view(-1, q.shape[1], 1, 1) * ahead.abs()
        if features.bias is not None:
            values = values + features.bias.float()
        left, right = features.window
        hidden = ahead > (0 if spec.causal else math.inf if right is None else right)
        if left is not None:
            hidden = hidden | (ahead < -left)
        if features.mask is not None:
            hidden = hidden | ~features.mask
        return cls(values=values.masked_fill(hidden, -math.inf), slope=slope)


@dataclass
class EmulatedGpu(FakeGpu):
    """Forward and backward plans that compute."""

    def make_plan(self, kernel: Any, spec: Specialization, config: Config, geometry: Geometry, index: int) -> Any:
        mark = super().make_plan(kernel, spec, config, geometry, index)

        def launch(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor | None = None,
            softmax_scale: float | None = None,
            q_offset: Offset = None,
            features: Features | None = None,
        ) -> None:
            mark(q, k, v, out, lse, softmax_scale, q_offset, features)
            views = [x.as_strided(*geometry.tensor(name)) for name, x in zip("qkvo", (q, k, v, out), strict=True)]
            pointers = _pointers(views)
            assert not spec.aligned16 or aligned16(geometry, pointers, DTYPE_BYTES[spec.dtype])
            features = features or Features()
            q, k, v = (x.float() for x in views[:3])
            scores = Scores.of(spec, q, k, softmax_scale, q_offset, features).values
            sums = scores.logsumexp(-1)
            if features.sinks is not None:
                sums = torch.logaddexp(sums, features.sinks.float().view(-1, 1).expand_as(sums))
            weights = (scores - sums.unsqueeze(-1)).exp().nan_to_num(0.0)
            views[3].copy_(weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1))
            if lse is not None:
                lse.copy_(sums)

        return launch

    def make_backward_plan(
        self, kernel: Any, spec: Specialization, config: Config, geometry: Geometry, index: int
    ) -> Any:
        mark = super().make_backward_plan(kernel, spec, config, geometry, index)

        def launch(
            tensors: BackwardTensors,
            softmax_scale: float | None = None,
            q_offset: Offset = None,
            features: Features | None = None,
            with_neg_delta: bool = True,
        ) -> torch.Tensor:
            mark(tensors, softmax_scale, q_offset, features)
            views = {n: getattr(tensors, f).as_strided(*geometry.tensor(n)) for n, f in FIELDS.items()}
            assert not spec.aligned16 or aligned16(geometry, _pointers(views.values()), DTYPE_BYTES[spec.dtype])
            assert tensors.lse.is_contiguous()
            features = features or Features()
            q, k, v, out, dout = (views[name].float() for name in ("q", "k", "v", "o", "do"))
            group = q.shape[1] // k.shape[1]
            neg_delta = -(dout * out).sum(-1) + (0.0 if tensors.dlse is None else tensors.dlse)
            scores = Scores.of(spec, q, k, softmax_scale, q_offset, features)
            weights = (scores.values - tensors.lse.unsqueeze(-1)).exp().nan_to_num(0.0)
            dscores = weights * (dout @ v.repeat_interleave(group, 1).mT + neg_delta.unsqueeze(-1))
            _write_bias_gradient(spec, geometry, tensors, dscores)
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            products = dscores * scores.slope * scale
            views["dq"].copy_(products @ k.repeat_interleave(group, 1))
            views["dk"].copy_((products.mT @ q).unflatten(1, (-1, group)).sum(2))
            views["dv"].copy_((weights.mT @ dout).unflatten(1, (-1, group)).sum(2))
            return neg_delta

        return launch


def _write_bias_gradient(
    spec: Specialization, geometry: Geometry, tensors: BackwardTensors, dscores: torch.Tensor
) -> None:
    dbias = tensors.dbias
    assert (dbias is not None) is spec.bias_grad
    if dbias is None:
        return
    assert dbias.is_contiguous()
    if spec.bias == "keys":
        assert (dbias.dtype, geometry.dbias_shape) == (torch.float32, None)
        dbias.copy_(dscores.sum(2))
    else:
        assert tuple(dbias.shape) == geometry.dbias_shape
        dbias.copy_(dscores.sum_to_size(dbias.shape))


def _pointers(views: Any) -> int:
    found = 0
    for view in views:
        found |= view.data_ptr()
    return found
