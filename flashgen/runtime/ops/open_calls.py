"""Calls that differ from an earlier one in sizes alone, without features: what is left of the slow path for them.

A new length is the rule where a model reads texts, so what is the same at all sizes is found at the first call of its
kind: the specialization, the records that may serve it, the kernels. Only well-aligned tensors whose shapes fit
together are served this way; whatever else there is, an error among it, is left to the slow path. So is a call whose
kernel has not been built, and one that goes to torch's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flashgen.codegen.family import Sizes
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.checks import MAX_SIZE
from flashgen.core.errors import LaunchError
from flashgen.core.workload import DTYPE_BYTES
from flashgen.launch.allocation import layout_of_view
from flashgen.launch.geometry import Geometry, View4
from flashgen.runtime.ops.backward_runs import BackwardRun, plain_run_maker
from flashgen.runtime.ops.calls import MAX_ROW_STRIDE, CheckedCall
from flashgen.runtime.ops.outputs import empty_output
from flashgen.runtime.ops.runs import Run, run_maker

if TYPE_CHECKING:
    from flashgen.core.config import Config
    from flashgen.launch.plan import OpenPlan
    from flashgen.runtime.lookup.by_sizes import SizesLookup
    from flashgen.runtime.ops.backward_calls import CheckedBackwardCall

Tensor = torch.Tensor
PlanOf = Callable[["Config"], "OpenPlan | None"]
"""The kernels of a config, where they have been built for this specialization."""

Key = tuple[Any, ...]
"""Of the memo: flags, the shapes of q, k and v, their strides, and what is the same for all calls here."""

BACKWARD = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
"""The tensors of a backward pass in the order of its geometry."""


class OpenCall:
    """Forward calls without features of one specialization, with pointers that are multiples of 16 bytes."""

    def __init__(self, problem: CheckedCall, lookup: SizesLookup, plan_of: PlanOf) -> None:
        """Keep what the sizes of a call do not change.

        Args:
            problem: one of the calls.
            lookup: what serves them by their sizes.
            plan_of: finds the kernels of a config.
        """
        call = problem.call
        self._bshd, self._with_lse, self._generated_only = call.bshd, call.with_lse, call.generated_only
        self._has_own_offset = call.explicit_offset or call.offset_tensor
        self._same_head_dim = call.q.shape[-1] == call.v.shape[-1]
        self._step = ALIGNMENT_BYTES // DTYPE_BYTES[problem.workload.dtype]
        self._lookup, self._plan_of = lookup, plan_of
        self._dtype, self._made = call.q.dtype, run_maker(call.q)

    def run(self, key: Key, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
        """What serves the calls of a key of the memo, or None where the slow path has to be asked."""
        bshd, step, with_lse = self._bshd, self._step, self._with_lse
        _, shape_q, shape_k, shape_v, strides_q, strides_k, strides_v = key[:7]
        view_q = view_of(shape_q, strides_q, bshd)
        view_k = view_q if shape_k == shape_q and strides_k == strides_q else view_of(shape_k, strides_k, bshd)
        view_v = view_k if shape_v == shape_k and strides_v == strides_k else view_of(shape_v, strides_v, bshd)
        sizes = sizes_of(view_q, view_k, view_v, step)
        if sizes is None:
            return None
        if not self._same_head_dim:
            out = view(empty_output(q, v, bshd=bshd), bshd)
        else:
            out = view_q if q.is_contiguous() else _without_holes(q, shape_q, strides_q, bshd)
        if out is not view_q and not is_aligned(out, step):
            return None
        config = self._lookup.config(
            sizes, generated_only=self._generated_only, with_lse=with_lse, has_own_offset=self._has_own_offset
        )
        plan = None if config is None else self._plan_of(config)
        if plan is None:
            return None
        try:
            launch = plan.sized(Geometry({"q": view_q, "k": view_k, "v": view_v, "o": out}), sizes)
        except LaunchError:
            return None
        layout = layout_of_view(*out, self._dtype, bshd=bshd) if bshd else (*out, self._dtype)
        run: Run = self._made(launch, layout, view_q[0][:3] if with_lse else None)
        return run


class OpenBackwardCall:
    """Backward passes without features of one specialization, with such pointers, the output's gradient among them."""

    def __init__(self, problem: CheckedBackwardCall, lookup: SizesLookup, plan_of: PlanOf) -> None:
        """As of an `OpenCall`."""
        forward = problem.call.forward
        self._bshd, self._dtype = forward.bshd, forward.q.dtype
        self._step = ALIGNMENT_BYTES // DTYPE_BYTES[problem.workload.dtype]
        self._lookup, self._plan_of = lookup, plan_of
        self._made = plain_run_maker(forward.q, copies_dout=False)

    def run(self, key: Key, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, dout: Tensor) -> BackwardRun | None:
        """What serves the backward passes of a key of the memo, or None as of an `OpenCall`."""
        bshd, (q, _, v) = self._bshd, inputs
        expected = (*q.shape[:3], v.shape[3])
        if not (self._is_output(out, q, expected) and self._is_output(dout, q, expected)):
            return None
        views = [view_of(key[n], key[n + 3], bshd) for n in (1, 2, 3)]
        views += view(out, bshd), view(dout, bshd)
        sizes = sizes_of(views[0], views[1], views[2], self._step)
        if sizes is None:
            return None
        gradients = [like(tensor, bshd) for tensor in inputs]
        if not all(is_aligned(view, self._step) for view in (*views[3:], *gradients)):
            return None
        config = self._lookup.config(sizes, generated_only=True)
        plan = None if config is None else self._plan_of(config)
        if plan is None:
            return None
        try:
            launch = plan.sized(Geometry(dict(zip(BACKWARD, (*views, *gradients), strict=True))), sizes)
        except LaunchError:
            return None
        return self._made(launch, [layout_of_view(*gradient, self._dtype, bshd=bshd) for gradient in gradients])

    def _is_output(self, tensor: Tensor, q: Tensor, shape: tuple[int, ...]) -> bool:
        return tensor.shape == shape and tensor.dtype is self._dtype and tensor.device == q.device


def view(tensor: Tensor, bshd: bool) -> View4:
    """Shape and strides in (batch, head, sequence, head_dim) order."""
    return view_of(tensor.shape, tensor.stride(), bshd)


def view_of(shape: tuple[int, ...], strides: tuple[int, ...], bshd: bool) -> View4:
    """The same of a tensor of this shape and these strides."""
    (a, b, c, d), (e, f, g, h) = shape, strides
    return ((a, c, b, d), (e, g, f, h)) if bshd else ((a, b, c, d), (e, f, g, h))


def like(tensor: Tensor, bshd: bool) -> View4:
    """Those of `torch.empty_like`, most often without allocating any.

    It keeps the strides of a tensor without holes, and gives others no holes in the order that theirs have.
    """
    if tensor.is_contiguous():
        return view(tensor, bshd)
    return _without_holes(tensor, tensor.shape, tensor.stride(), bshd)


def _without_holes(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], bshd: bool) -> View4:
    """The same of a tensor that is not contiguous, of this shape and these strides."""
    (a, b, c, d), (e, f, g, h) = shape, strides
    if e > f > g > h:
        e, f, g, h = b * c * d, c * d, d, 1
    else:
        e, f, g, h = torch.empty_like(tensor).stride()
    return ((a, c, b, d), (e, g, f, h)) if bshd else ((a, b, c, d), (e, f, g, h))


def is_aligned(view: View4, step: int) -> bool:
    """Whether the last dimension is contiguous and all other strides are multiples of `step`, those not in use, too.

    `step` is a power of 2.
    """
    batch, heads, rows, last = view[1]
    return last == 1 and rows < MAX_ROW_STRIDE and not (batch | heads | rows) % step


def sizes_of(q: View4, k: View4, v: View4, step: int) -> Sizes | None:
    """The sizes of a call, or None where shapes do not fit together, one is 0, or a stride is unusual."""
    # in one piece for calls of a new length, `is_aligned` of all three among it; most have the strides of one or two
    (shape_q, strides_q), (shape_k, strides_k) = q, k
    (batch, nheads, seqlen_q, head_dim), (batch_k, nheads_k, seqlen_k, head_dim_k) = shape_q, shape_k
    fit = batch == batch_k and head_dim == head_dim_k and (v is k or shape_k[:3] == v[0][:3])
    if not (fit and batch and seqlen_q and seqlen_k and nheads and nheads_k) or nheads % nheads_k:
        return None
    if (batch | nheads | seqlen_q | seqlen_k) > MAX_SIZE:  # which is all ones
        return None
    a, b, rows, last = strides_q
    others = a | b
    if k is not q:
        a, b, c, last_k = strides_k
        others, rows, last = others | a | b, rows | c, last if last_k == 1 else 0
    if v is not k:
        a, b, c, last_v = v[1]
        others, rows, last = others | a | b, rows | c, last if last_v == 1 else 0
    if last != 1 or (others | rows) % step or rows >= MAX_ROW_STRIDE:  # a power of 2
        return None
    return Sizes(batch, nheads, nheads_k, seqlen_q, seqlen_k)
