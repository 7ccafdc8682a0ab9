"""The functions of autograd: what each kind of call keeps, and which kernels compute its gradients.

All of them are asked with as few arguments as their kind needs, and keep every tensor by way of torch's hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.errors import UnsupportedError
from flashgen.core.features.functions import FUNCTIONS
from flashgen.core.features.values import Features
from flashgen.runtime.autograd.ops import (
    NO_BATCH_OF_LEARNED,
    NO_DOUBLE_BACKWARD,
    asked_of,
    attention_backward_op,
    differentiate,
    differentiate_by_op,
    save,
    train,
)
from flashgen.runtime.ops.backward import attention_backward_kernel
from flashgen.runtime.ops.forward import attention_kernel
from flashgen.runtime.ops.keys import can_bypass_dispatcher
from flashgen.runtime.ops.rows import features_of_rows, rows_backward
from flashgen.runtime.ops.runs import FeatureRun
from flashgen.runtime.ops.schemas import DIFFERENTIATED

Tensor = torch.Tensor
Gradients = tuple[Tensor | None, ...]
_NO_FLAT_FEATURES = DIFFERENTIATED.flat(Features())
_FIXED = 7
"""Arguments of a function of calls with features before those that have a gradient of their own."""

_is_batch = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient stands for several, as those of `torch.autograd.grad(..., is_grads_batched=True)`."""


class Plain(torch.autograd.Function):
    """Without features: what most models train with has fewer tensors to keep and arguments to pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Tensor | tuple[Tensor, Tensor]:
        """Output, and LSE where it is asked for; all options are one argument, as each costs 0.3 us."""
        causal, scale, bshd, offset, offset_tensor, deterministic, return_lse = options
        asked = asked_of(deterministic)
        out, lse = attention_kernel(q, k, v, causal, scale, bshd, offset, offset_tensor, asked)
        if return_lse:
            ctx.set_materialize_grads(False)
        if offset_tensor is None:
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = options
        else:
            ctx.save_for_backward(q, k, v, out, lse, offset_tensor)
            ctx.options = causal, scale, bshd, offset, None, deterministic, return_lse
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Gradients:
        """Gradients of the arguments."""
        q, k, v, out, lse, *others = ctx.saved_tensors
        causal, scale, bshd, offset, offset_tensor, deterministic, _ = ctx.options
        if others:
            (offset_tensor,) = others
        if dout is None:
            dout = torch.zeros_like(out)
        # where a second derivative may be asked for, the op says that there is none
        if _needs_op(dout, dlse) or not can_bypass_dispatcher(q, k, v):
            options = (causal, scale, bshd, offset, offset_tensor)
            dq, dk, dv, *_ = attention_backward_op(
                dout, dlse, q, k, v, out, lse, *options, *_NO_FLAT_FEATURES, deterministic
            )
        else:
            dq, dk, dv, *_ = attention_backward_kernel(
                dout, dlse, q, k, v, out, lse, causal, scale, bshd, offset, offset_tensor, deterministic
            )
        return dq, dk, dv, None


class Rows(torch.autograd.Function):
    """Packed sequences and features without a gradient of their own, as (rows, heads, columns)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        run: FeatureRun,
        features: Features,
        causal: bool,
        scale: float | None,
        deterministic: bool,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The same; `run` is that of the call's key, of an output and an LSE."""
        out, lse = run(q, k, v, scale, None, features)
        if return_lse:
            ctx.set_materialize_grads(False)
        f = features
        ctx.save_for_backward(q, k, v, out, lse, f.cu_seqlens_q, f.cu_seqlens_k, f.seqused_q, f.seqused_k)
        ctx.numbers = causal, scale, deterministic, f.window, f.softcap, f.max_seqlens, f.batch_invariant
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Gradients:
        """Gradients of the arguments."""
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        causal, scale, deterministic, *numbers = ctx.numbers
        features = features_of_rows(*lengths, *numbers)
        if dout is None:
            dout = torch.zeros_like(out)
        if _needs_op(dout, dlse) or not can_bypass_dispatcher(q, k, v):
            given = (None if each is None else each.unsqueeze(0) for each in (dout, dlse, q, k, v, out, lse))
            flat = DIFFERENTIATED.flat(features, deterministic)
            dq, dk, dv, *_ = attention_backward_op(*given, causal, scale, True, None, None, *flat)
            dq, dk, dv = dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
        else:
            dq, dk, dv = rows_backward(dout, dlse, q, k, v, out, lse, causal, scale, deterministic, features)
        return dq, dk, dv, None, None, None, None, None, None


class Featured(torch.autograd.Function):
    """With any features; tensors that may have a gradient come last."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: tuple[Any, ...],
        features: Features,
        deterministic: bool,
        return_lse: bool,
        *differentiable: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Output, and LSE where it is asked for."""
        outputs = train(q, k, v, options, features, deterministic)
        save(ctx, (q, k, v), outputs, options, features, deterministic)
        return outputs if return_lse else outputs[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Gradients:
        """Gradients of the arguments."""
        return _gradients(ctx, dout, dlse)


class Learned(Featured):
    """With aux tensors that have a gradient, too: for them there is no op."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Gradients:
        """Gradients of the arguments."""
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_DOUBLE_BACKWARD)
        dout, dlse = _waited_for(dout), _waited_for(dlse)
        if _needs_op(dout, dlse) and not is_dynamo_compiling():
            raise UnsupportedError(NO_BATCH_OF_LEARNED)
        return _gradients(ctx, dout, dlse, has_op=False)


class Packed(Featured):
    """Packed sequences with any features: one batch element where autograd does not look."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: tuple[Any, ...],
        features: Features,
        deterministic: bool,
        return_lse: bool,
        *differentiable: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Output, and LSE where it is asked for."""
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        out, lse = train(q, k, v, options, features, deterministic)
        save(ctx, (q, k, v), (out, lse), options, features, deterministic)
        return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Gradients:
        """Gradients of the arguments."""
        one, one_lse = (None if each is None else each.unsqueeze(0) for each in (dout, dlse))
        dq, dk, dv, *others = _gradients(ctx, one, one_lse)
        return *(None if each is None else each.squeeze(0) for each in (dq, dk, dv)), *others


def _needs_op(dout: Tensor | None, dlse: Tensor | None) -> bool:
    """Whether these gradients may have some of their own, are several in one, or are of a class of their own.

    One of those that collectives of torch.distributed return has no address: it may not even be here yet.
    """
    return (
        torch.is_grad_enabled()
        or is_dynamo_compiling()
        or (dout is not None and (type(dout) is not Tensor or _is_batch(dout)))
        or (dlse is not None and (type(dlse) is not Tensor or _is_batch(dlse)))
    )


def _waited_for(gradient: Tensor | None) -> Tensor | None:
    """A gradient that a collective returned, as a tensor of torch's own: for calls without an op, which would wait.

    Raises:
        UnsupportedError: it is of another class, a DTensor say.
    """
    if gradient is None or type(gradient) is Tensor:
        return gradient
    found = gradient.clone()
    if type(found) is not Tensor:
        raise UnsupportedError(FUNCTIONS.no_gradient)
    return found


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *, has_op: bool = True) -> Gradients:
    """Those of q, k, v, of four arguments that have none, and of features."""
    needs = ctx.needs_input_grad[_FIXED:]
    saved = ctx.saved_tensors
    q, k, v, *_ = saved
    is_plain = not has_op or (not _needs_op(dout, dlse) and can_bypass_dispatcher(q, k, v))
    backward = differentiate if is_plain else differentiate_by_op
    dq, dk, dv, *others = backward(saved, ctx.numbers, (dout, dlse), needs)
    given = (gradient if needed else None for gradient, needed in zip(others, needs, strict=True))
    return dq, dk, dv, *[None] * (_FIXED - 3), *given


for _function in (Plain, Rows, Featured, Learned, Packed):
    # torch's engine calls `apply` of the node, which looks for `backward` and calls that: 1.2 us of every backward pass
    _function._backward_cls.apply = _function.backward  # type: ignore[attr-defined]
