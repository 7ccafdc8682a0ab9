"""The same implementations in training: their backward pass alone, and forward and backward pass together.

Whatever has no call of its own for its backward pass is called through torch's autograd, with an autograd graph that is
kept: what autograd adds to a call is time of the host, of which a race keeps none.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import flashgen
from benchmarks import fa4
from benchmarks.impls import EFFICIENT, IMPLS, Call, Impl, results_of
from benchmarks.problems import TrainingInputs, forward_of
from flashgen.core.workload import Workload
from flashgen.measure import backward_baselines
from flashgen.measure.inputs import Inputs

Gradients = tuple[torch.Tensor, ...]

SDPA = ("sdpa-flash", "sdpa-cudnn")
NOT_TRAINING = "a forward pass is not training"

BSHD = ("fa3", "fa4")
"""Implementations whose tensors lie in memory as (batch, seqlen, nheads, head_dim)."""


def graph_kept(impl: Impl, workload: Workload, inputs: Inputs) -> Call:
    """The backward pass alone: the forward pass of `impl` runs here, once for each set of inputs."""
    torch._functorch.config.donated_buffer = False  # a compiled graph gives its memory away otherwise
    leaves = _training(inputs).leaves(_layout(impl))
    call = _forward(impl, workload, leaves)
    with call.context():
        outs = [results_of(call.run(n))[0] for n in range(inputs.copies)]

    def run(n: int) -> Gradients:
        wanted = (leaves.q[n], leaves.k[n], leaves.v[n])
        return torch.autograd.grad(outs[n], wanted, leaves.dout[n], retain_graph=True)

    return Call(run=run, context=call.context)


def both_passes(impl: Impl, workload: Workload, inputs: Inputs) -> Call:
    """Forward and backward pass as a training step calls them."""
    leaves = _training(inputs).leaves(_layout(impl))
    call = _forward(impl, workload, leaves)

    def run(n: int) -> Gradients:
        out = results_of(call.run(n))[0]
        wanted = (leaves.q[n], leaves.k[n], leaves.v[n])
        return *torch.autograd.grad(out, wanted, leaves.dout[n]), out.detach()

    return Call(run=run, context=call.context)


def _forward(impl: Impl, workload: Workload, leaves: TrainingInputs) -> Call:
    """The forward pass of `impl` on leaves, with a graph whatever the caller's mode is."""
    with torch.enable_grad():
        call = impl.prepare(forward_of(workload), leaves)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with torch.enable_grad(), call.context():
            yield

    return replace(call, context=context)


def _layout(impl: Impl) -> str:
    return "bshd" if impl.name in BSHD else "bhsd"


def _training(inputs: Inputs) -> TrainingInputs:
    assert isinstance(inputs, TrainingInputs)
    return inputs


def _why_not(impl: Impl, workload: Workload) -> str | None:
    if workload.direction != "backward":
        return NOT_TRAINING
    # standard attention is asked for the memory, FA4 for the features of both passes; the others for their forward pass
    return impl.unsupported(workload if impl.name in ("standard", "fa4") else forward_of(workload))


def _attend_deterministic(workload: Workload, inputs: Inputs) -> Call:
    q, k, v, causal = inputs.q, inputs.k, inputs.v, workload.causal

    def run(n: int) -> torch.Tensor:
        out = flashgen.attention(q[n], k[n], v[n], causal=causal, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out

    return Call(run=run)


def _fa4_backward(workload: Workload, inputs: Inputs) -> Call:
    given = _training(inputs)
    return Call(run=fa4.backward(given.q, given.k, given.v, given.dout, causal=workload.causal))


def _backward_op() -> Callable[..., Any]:
    op: Callable[..., Any] = importlib.import_module("flashgen.runtime.autograd.ops").attention_backward_op
    return op


def _flashgen_backward(workload: Workload, inputs: Inputs, *, deterministic: bool) -> Call:
    given, causal = _training(inputs), workload.causal
    op = _backward_op()
    with torch.no_grad():
        tensors = list(zip(given.q, given.k, given.v, strict=True))
        saved = [(*each, *flashgen.attention(*each, causal=causal, return_lse=True)) for each in tensors]

    def run(n: int) -> Gradients:
        dq, dk, dv, _, _ = op(given.dout[n], None, *saved[n], causal, deterministic=deterministic)
        return dq, dk, dv

    return Call(run=run)


def _sdpa_backward(impl: str, workload: Workload, inputs: Inputs) -> Call:
    given, scale = _training(inputs), workload.head_dim**-0.5
    with torch.no_grad():
        calls = [
            backward_baselines.gradients_call(impl, workload, given.tensors(n), given.features[n], scale)
            for n in range(inputs.copies)
        ]
    return Call(run=lambda n: calls[n]())


def _why_not_sdpa_backward(impl: str, workload: Workload) -> str | None:
    return NOT_TRAINING if workload.direction != "backward" else backward_baselines.unsupported(impl, workload)


_FORWARD = {impl.name: impl for impl in IMPLS}
_SAME_BITS = replace(_FORWARD["flashgen"], name="flashgen-deterministic", prepare=_attend_deterministic)
_TRAINING: tuple[Impl, ...] = (
    _FORWARD["flashgen"],
    _SAME_BITS,
    *(_FORWARD[name] for name in (*SDPA, "flex", "fa4", "standard")),
)

_OWN_BACKWARD: dict[str, Callable[[Workload, Inputs], Call]] = {
    "flashgen": partial(_flashgen_backward, deterministic=False),
    "flashgen-deterministic": partial(_flashgen_backward, deterministic=True),
    **{name: partial(_sdpa_backward, name) for name in backward_baselines.BACKENDS},
    "fa4": _fa4_backward,
}
"""Backward passes that are called without autograd."""


def alone(impl: Impl) -> Impl:
    """The backward pass of an implementation."""
    is_torchs = impl.name in backward_baselines.BACKENDS
    unsupported = partial(_why_not_sdpa_backward, impl.name) if is_torchs else partial(_why_not, impl)
    return replace(impl, unsupported=unsupported, prepare=_OWN_BACKWARD.get(impl.name) or partial(graph_kept, impl))


def alone_through_autograd(impl: Impl) -> Impl:
    """The backward pass of an implementation, whatever features and functions its forward pass has."""
    return replace(impl, unsupported=partial(_why_not, impl), prepare=partial(graph_kept, impl))


def together(impl: Impl) -> Impl:
    """Both passes of an implementation."""
    return replace(impl, unsupported=partial(_why_not, impl), prepare=partial(both_passes, impl))


BACKWARD: tuple[Impl, ...] = tuple(alone(impl) for impl in _TRAINING)
FORWARD_BACKWARD: tuple[Impl, ...] = tuple(together(impl) for impl in _TRAINING)
EFFICIENT_BACKWARD = alone(EFFICIENT)
