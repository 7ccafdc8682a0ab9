"""What the memo holds for backward passes: a function that allocates the gradients and computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flashgen.launch.backward_geometry import BackwardTensors
from flashgen.launch.extras import Extras
from flashgen.runtime.gradients import bias_gradient, empty_bias_gradient, empty_gradient, sink_gradient
from flashgen.runtime.runs import Offset

if TYPE_CHECKING:
    from flashgen.launch.backward_plan import BackwardLaunch
    from flashgen.runtime.backward_calls import BackwardProblem

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Of q, k, v, bias and sinks; None where it was not asked for."""

BackwardRun = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, float | None, Offset, Extras | None], Gradients
]
"""Serves every backward pass of one key of the memo: (dout, dlse, q, k, v, out, lse, softmax_scale, q_offset, extras).

Tensors are in the layout of the call: a launch uses only their memory.
"""


def backward_run(launch: BackwardLaunch, problem: BackwardProblem, *, sink_grad: bool) -> BackwardRun:
    """Allocate the gradients, launch the kernels of a config, and add what needs no kernel."""
    copies_dout, copies_bias, rule = problem.copies_dout, problem.copies_bias, problem.bias_rule
    sizes = problem.geometry.sizes
    per_key = (sizes.batch, sizes.nheads, sizes.seqlen_k)

    def run(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float | None,
        offset: Offset,
        extras: Extras | None,
    ) -> Gradients:
        if copies_dout:
            dout = torch.empty_like(out).copy_(dout)
        if dlse is not None:
            dlse = dlse.contiguous()
        dq, dk, dv = empty_gradient(q), empty_gradient(k), empty_gradient(v)
        dbias = dsinks = None
        if extras is None:
            tensors = BackwardTensors(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, dlse=dlse)
            launch(tensors, scale, offset)
            return dq, dk, dv, None, None
        bias, sinks = extras.bias, extras.sinks
        if bias is not None:
            dbias = empty_bias_gradient(bias, rule, per_key)
        tensors = BackwardTensors(
            q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv, dlse=dlse, dbias=dbias
        )
        given = replace(extras, bias=bias.contiguous()) if copies_bias and bias is not None else extras
        neg_delta = launch(tensors, scale, offset, given)
        if rule and bias is not None:
            dbias = bias_gradient(bias, rule, dbias, lse=lse, dlse=dlse, neg_delta=neg_delta, sinks=sinks)
        if sink_grad and sinks is not None:
            dsinks = sink_gradient(sinks, lse, neg_delta)
        return dq, dk, dv, dbias, dsinks

    return run
