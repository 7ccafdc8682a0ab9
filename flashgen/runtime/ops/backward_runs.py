"""What the memo holds for backward passes: a function that allocates the gradients and computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flashgen.core.features.sequences import is_packed
from flashgen.core.features.values import Features
from flashgen.launch.allocation import Layout, elsewhere, empty_beside, layout_of, layout_of_view
from flashgen.launch.backward import BackwardTensors
from flashgen.runtime.ops.gradients import FORMULAS, bias_gradient, empty_bias_gradient
from flashgen.runtime.ops.outputs import META, aligned_copy, dense_like, without_padding
from flashgen.runtime.ops.runs import Offset
from flashgen.runtime.ops.schemas import GRADIENT_FIELDS

if TYPE_CHECKING:
    from flashgen.launch.plan import BackwardLaunch
    from flashgen.runtime.ops.backward_calls import CheckedBackwardCall

Tensor = torch.Tensor
Gradients = tuple[Tensor | None, ...]
"""Of q, k and v, then those of features in the order of the table; None where it was not asked for.

Behind them are those of aux tensors, where any has one."""

Allocator = Callable[[Tensor], Tensor]
BackwardRun = Callable[
    [Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, float | None, Offset, Features | None], Gradients
]
"""Serves the backward passes of a key of the memo: (dout, dlse, q, k, v, out, lse, softmax_scale, q_offset, features).

Tensors are in the layout of the call: a launch uses only their memory.
"""


def backward_run(launch: BackwardLaunch, problem: CheckedBackwardCall) -> BackwardRun:
    """Allocate the gradients, launch the kernels of a config, and add what needs no kernel."""
    run = _run_of_tensors(launch, problem)
    if not problem.copies:
        return run

    pads, default_scale = problem.pads, problem.call.q.shape[-1] ** -0.5

    def copying(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
    ) -> Gradients:
        inputs = aligned_copy(q), aligned_copy(k), aligned_copy(v)
        if not pads:
            return run(dout, dlse, *inputs, out, lse, *others)
        scale, offset, features = others
        scale = default_scale if scale is None else scale
        found: Any = run(aligned_copy(dout, out), dlse, *inputs, aligned_copy(out), lse, scale, offset, features)
        wider = zip(found[:3], (q, k, v), strict=True)
        return (*(without_padding(gradient, dense_like(of)) for gradient, of in wider), *found[3:])

    return copying


def _run_of_tensors(launch: BackwardLaunch, problem: CheckedBackwardCall) -> BackwardRun:
    """The same for tensors of the geometry."""
    copies_dout, copies_bias, rule = problem.copies_dout, problem.copies_bias, problem.bias_rule
    sizes, tensors, forward = problem.geometry.sizes, problem.geometry.tensors, problem.call.forward
    inputs = forward.q, forward.k, forward.v
    formulas = {name: FORMULAS[name] for name in problem.call.gradients if name in FORMULAS}
    per_key = (sizes.batch, sizes.nheads, sizes.seqlen_k)
    learned = problem.spec.mods.aux_grads if problem.spec.mods else ()
    if not (rule or formulas or learned):
        if is_packed(forward.features):
            return packed_run(
                launch, forward.q, tuple(_allocator(tensor) for tensor in inputs), copies_dout=copies_dout
            )
        gradients = zip(("dq", "dk", "dv"), inputs, strict=True)
        layouts = [layout_of_view(*tensors[name], like.dtype, bshd=forward.bshd) for name, like in gradients]
        return plain_run_maker(forward.q, copies_dout=copies_dout)(launch, layouts)

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
        features: Features | None,
    ) -> Gradients:
        assert features is not None
        bias = features.bias
        dbias = None if bias is None else empty_bias_gradient(bias, rule, per_key)
        tensors = BackwardTensors(
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            dout=torch.empty_like(out).copy_(dout) if copies_dout else dout,
            dq=dense_like(q),
            dk=dense_like(k),
            dv=dense_like(v),
            dlse=None if dlse is None else dlse.contiguous(),
            dbias=dbias,
        )
        given = replace(features, bias=bias.contiguous()) if copies_bias and bias is not None else features
        sums = [torch.zeros_like(features.aux[n], dtype=torch.float32) for n in learned]
        if sums:
            given = replace(given, aux=(*given.aux, *reversed(sums)))
        neg_delta = launch(tensors, scale, offset, given)
        if rule and bias is not None:
            dbias = bias_gradient(features, bias, rule, dbias, lse=lse, dlse=tensors.dlse, neg_delta=neg_delta)
        others = {"bias": dbias, **{name: formula(features, lse, neg_delta) for name, formula in formulas.items()}}
        found = tensors.dq, tensors.dk, tensors.dv, *[others.get(name) for name in GRADIENT_FIELDS]
        return (*found, *_of_aux(features, dict(zip(learned, sums, strict=True)))) if sums else found

    return run


def _of_aux(features: Features, sums: dict[int, Tensor]) -> list[Tensor | None]:
    """The gradient of each aux tensor in its own dtype, of those that have one."""
    return [None if n not in sums else sums[n].to(tensor.dtype) for n, tensor in enumerate(features.aux)]


def plain_run_maker(beside: Tensor, *, copies_dout: bool) -> Callable[[BackwardLaunch, Sequence[Layout]], BackwardRun]:
    """The same where features have no gradient: no more than a training step of most models needs.

    Args:
        beside: a tensor of the GPU, of which everything is asked once for many launches.
        copies_dout: whether kernels get a copy of the output's gradient.

    Returns:
        What makes it of a launch and the layouts of the gradients of q, k and v.
    """
    empty, is_elsewhere, index = empty_beside(beside), elsewhere(beside), beside.get_device()
    absent = (None,) * len(GRADIENT_FIELDS)

    def made(launch: BackwardLaunch, layouts: Sequence[Layout]) -> BackwardRun:
        layout_q, layout_k, layout_v = layouts

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
            features: Features | None,
        ) -> Gradients:
            if is_elsewhere is not None and is_elsewhere():
                with torch.cuda.device(index):
                    return run(dout, dlse, q, k, v, out, lse, scale, offset, features)
            if copies_dout:
                dout = torch.empty_like(out).copy_(dout)
            if dlse is not None:
                dlse = dlse.contiguous()
            dq, dk, dv = empty(*layout_q), empty(*layout_k), empty(*layout_v)
            launch(BackwardTensors(q, k, v, out, lse, dout, dq, dk, dv, dlse), scale, offset, features, False)
            return dq, dk, dv, *absent

        return run

    return made


def packed_run(
    launch: BackwardLaunch, beside: Tensor, allocators: tuple[Allocator, ...], *, copies_dout: bool
) -> BackwardRun:
    """The same of packed sequences, which may come as (rows, heads, columns), too.

    Args:
        launch: of the kernels.
        beside: a tensor of their GPU.
        allocators: `dense_like`, or what does the same, for q, k and v.
        copies_dout: whether the kernels get a copy of the output's gradient.
    """
    empty, is_elsewhere, index = empty_beside(beside), elsewhere(beside), beside.get_device()
    layouts: dict[int, list[Layout]] = {}
    absent = (None,) * len(GRADIENT_FIELDS)

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
        features: Features | None,
    ) -> Gradients:
        if is_elsewhere is not None and is_elsewhere():
            with torch.cuda.device(index):
                return run(dout, dlse, q, k, v, out, lse, scale, offset, features)
        known = layouts.get(q.dim())
        if known is None:
            likes = zip(allocators, (q, k, v), strict=True)
            known = layouts[q.dim()] = [layout_of(allocate(tensor)) for allocate, tensor in likes]
        if copies_dout:
            dout = torch.empty_like(out).copy_(dout)
        if dlse is not None:
            dlse = dlse.contiguous()
        layout_q, layout_k, layout_v = known
        dq, dk, dv = empty(*layout_q), empty(*layout_k), empty(*layout_v)
        launch(BackwardTensors(q, k, v, out, lse, dout, dq, dk, dv, dlse), scale, offset, features, False)
        return dq, dk, dv, *absent

    return run


def _allocator(tensor: Tensor) -> Allocator:
    """`dense_like` for tensors of this shape and these strides."""
    return torch.empty_like if torch.empty_like(tensor, device=META).stride(-1) == 1 else dense_like
