"""The tensors of a race and the right answer of a part of them, for a forward and for a backward pass."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.backward import BackwardTensors
from flashgen.measure.backward_reference import exact_gradients
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.inputs import Inputs, make_inputs
from flashgen.measure.reference import oracle
from flashgen.measure.score_rule import ScoreRule

TINY = 1e-30
"""Keeps a quotient finite where what is right is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs(Inputs):
    """What a backward pass starts from: `dout` is the gradient of the output, (batch, nheads, seqlen_q, head_dim_v)."""

    dout: tuple[torch.Tensor, ...]

    def leaves(self, layout: str = "bhsd") -> TrainingInputs:
        """The same numbers in q, k and v that require a gradient, and in dout; ordered in memory as `layout` says."""
        groups = (self.q, self.k, self.v, self.dout)
        q, k, v, dout = (tuple(_laid(tensor, layout) for tensor in group) for group in groups)
        for tensor in (*q, *k, *v):
            tensor.requires_grad_()
        return replace(self, q=q, k=k, v=v, dout=dout)

    def tensors(self, n: int) -> BackwardTensors:
        """The n-th set, for what reads q, k, v and dout alone and writes nothing of it."""
        q, k, v = self.q[n], self.k[n], self.v[n]
        return BackwardTensors(q=q, k=k, v=v, out=self.out[n], lse=self.lse[n], dout=self.dout[n], dq=q, dk=k, dv=v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Inputs, and what the last head of the first batch element must give, in float64.

    `expected` is (out,) of a forward pass and (dq, dk, dv, out) of a backward pass, each for the query heads that share
    the last KV head: enough to see that all compute one function.

    Attributes:
        every_row: whether each row of a result is compared on its own. On hard data the whole says little: where one
            key takes nearly all of the weight, a forgotten causal mask is 0.02 of 16k rows, and 1 of the worst one.
    """

    inputs: Inputs
    expected: tuple[torch.Tensor, ...]
    every_row: bool = False

    def distance(self, found: torch.Tensor, right: torch.Tensor) -> float:
        """The relative error of the last heads of the first batch element; with `every_row`, of the worst row."""
        part = found[:1, -right.shape[1] :].double()
        if not self.every_row:
            return float((part - right).norm() / right.norm().clamp_min(TINY))
        return float(((part - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(TINY)).max())


def problem(workload: Workload, *, copies: int, where: torch.device, data: str = NORMAL) -> Problem:
    """Reproducible inputs of a workload and what to compare results with.

    Args:
        workload: a forward or a backward pass.
        copies: sets of inputs.
        where: the device of the tensors.
        data: a name of `measure.data_kinds.DATA_KINDS`. On hard data each row of a forward pass is compared on its own.

    Raises:
        WorkloadError: the kind of data is unknown.
    """
    if workload.direction == "backward":
        training = training_inputs(workload, copies=copies, where=where, data=data)
        return Problem(inputs=training, expected=expected_of(workload, training, training.features[0]))
    inputs = make_inputs(workload, copies=copies, seed=INPUT_SEED, device=where, data=data)
    expected = expected_of(workload, inputs, inputs.features[0])
    return Problem(inputs=inputs, expected=expected, every_row=data != NORMAL)


def expected_of(workload: Workload, inputs: Inputs, features: Features) -> tuple[torch.Tensor, ...]:
    """What `Problem.expected` says of the first set of inputs, with these features in the place of its own."""
    if isinstance(inputs, TrainingInputs):
        return _last_gradients(workload, inputs, features)
    q, k, v = inputs.q[0][:1, -1:], inputs.k[0][:1, -1:], inputs.v[0][:1, -1:]
    return (oracle(q, k, v, causal=workload.causal, features=last_heads(features, 1))[0],)


def _last_gradients(workload: Workload, inputs: TrainingInputs, features: Features) -> tuple[torch.Tensor, ...]:
    group = workload.nheads // workload.nheads_k
    q, dout = inputs.q[0][:1, -group:], inputs.dout[0][:1, -group:]
    k, v = inputs.k[0][:1, -1:], inputs.v[0][:1, -1:]
    features = last_heads(features, group)
    rule = ScoreRule.of(q, k, causal=workload.causal, q_offset=None, softmax_scale=None, features=features)
    exact = exact_gradients(q, k, v, dout, rule)
    return (*(exact.gradients[name] for name in ("dq", "dk", "dv")), exact.forward.out)


def training_inputs(workload: Workload, *, copies: int, where: torch.device, data: str = NORMAL) -> TrainingInputs:
    """Standard normal q, k, v and dout; q and k changed as the kind of data says."""
    inputs = make_inputs(forward_of(workload), copies=copies, seed=INPUT_SEED, device=where, data=data)
    generator = torch.Generator(device=where).manual_seed(INPUT_SEED + 1)
    dout = tuple(torch.empty_like(out).normal_(generator=generator) for out in inputs.out)
    return TrainingInputs(**{field.name: getattr(inputs, field.name) for field in fields(Inputs)}, dout=dout)


def forward_of(workload: Workload) -> Workload:
    """The forward pass that a backward pass belongs to."""
    return replace(workload, direction="forward")


def last_heads(features: Features, count: int) -> Features:
    """The features of the last heads of the first batch; what is broadcast has one head or batch and keeps it."""
    slopes, bias, mask = features.alibi_slopes, features.bias, features.mask
    return replace(
        features,
        alibi_slopes=None if slopes is None else (slopes if slopes.dim() == 1 else slopes[0])[-count:],
        sinks=None if features.sinks is None else features.sinks[-count:],
        bias=None if bias is None else bias[:1, -count:],
        mask=None if mask is None else mask[:1, -count:],
    )


def _laid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.clone() if layout == "bhsd" else tensor.transpose(1, 2).contiguous().transpose(1, 2)
