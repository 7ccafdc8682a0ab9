"""Calls whose gradients will be asked for: without torch's dispatcher where that would do nothing but call the op.

An `autograd.Function` of our own costs some 30 us beside its kernels, forward and backward together and with torch's
engine in them. The op of `flashgen.runtime.training_ops` costs three times the whole of such a call, most of it in
torch's wrapper for gradients, which is why it is left to torch.compile and to modes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.runtime import transforms
from flashgen.runtime.keys import can_bypass_dispatcher, is_transformed
from flashgen.runtime.ops import attention_kernel
from flashgen.runtime.training_kernels import (
    asked_of,
    attention_backward_kernel,
    attention_train_kernel,
    plain_backward_kernel,
)
from flashgen.runtime.training_ops import attention_backward_op, attention_train_op, differentiate, save

Tensor = torch.Tensor
NO_FEATURES: tuple[Any, ...] = (None, None, 0.0, None, None, None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    flat_features: tuple[Any, ...],
    *,
    deterministic: bool,
    return_lse: bool,
    can_bypass_dispatcher: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that autograd knows.

    Args:
        q: as the user gave it.
        k: likewise.
        v: likewise.
        options: causal, softmax_scale, bshd, q_offset and its tensor.
        flat_features: window_left, window_right, softcap, alibi_slopes, sinks, bias and mask.
        deterministic: whether the backward pass gives the same bits every time.
        return_lse: whether the LSE is returned, too.
        can_bypass_dispatcher: whether torch's dispatcher would do nothing but call the op.
    """
    found: Tensor | tuple[Tensor, Tensor]
    if can_bypass_dispatcher:
        found = _apply(q, k, v, flat_features[4], flat_features[5], options, flat_features, deterministic, return_lse)
        return found
    if not is_dynamo_compiling() and is_transformed():
        out, lse = transforms.attention(q, k, v, options, flat_features, deterministic=deterministic)
    else:
        out, lse = attention_train_op(q, k, v, *options, *flat_features, deterministic)
    return (out, lse) if return_lse else out


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], deterministic: bool, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """The same without flat_features, for calls that are not direct."""
    return attention(
        q, k, v, options, NO_FEATURES, deterministic=deterministic, return_lse=return_lse, can_bypass_dispatcher=False
    )


class _Plain(torch.autograd.Function):
    """Without flat_features: what most models train with has fewer tensors to keep and arguments to pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: tuple[Any, ...],
        deterministic: bool,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        causal, scale, bshd, offset, offset_tensor = options
        asked = asked_of(deterministic)
        out, lse = attention_kernel(q, k, v, causal, scale, bshd, offset, offset_tensor, asked)
        if return_lse:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, offset_tensor)
        ctx.numbers = causal, scale, bshd, offset, deterministic
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, offset_tensor = ctx.saved_tensors
        causal, scale, bshd, offset, deterministic = ctx.numbers
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled() or not can_bypass_dispatcher(
            q, k, v
        ):  # the op says that there is no second derivative
            options = (causal, scale, bshd, offset, offset_tensor)
            dq, dk, dv, _, _ = attention_backward_op(
                dout, dlse, q, k, v, out, lse, *options, *NO_FEATURES, deterministic
            )
        else:
            dq, dk, dv, _, _ = plain_backward_kernel(
                dout, dlse, q, k, v, out, lse, causal, scale, bshd, offset, offset_tensor, deterministic
            )
        return dq, dk, dv, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        options: tuple[Any, ...],
        flat_features: tuple[Any, ...],
        deterministic: bool,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        arguments = (*options, *flat_features, deterministic)
        outputs = attention_train_kernel(q, k, v, *arguments)
        save(ctx, (q, k, v), outputs, options, flat_features, deterministic)
        return outputs if return_lse else outputs[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        _, _, _, needs_sinks, needs_bias, *_ = ctx.needs_input_grad
        saved = ctx.saved_tensors
        is_plain = not torch.is_grad_enabled() and can_bypass_dispatcher(*saved[:3])
        backward = attention_backward_kernel if is_plain else attention_backward_op
        dq, dk, dv, dbias, dsinks = differentiate(
            saved, ctx.numbers, (dout, dlse), backward, needs_bias=needs_bias, needs_sinks=needs_sinks
        )
        return dq, dk, dv, dsinks if needs_sinks else None, dbias if needs_bias else None, None, None, None, None


direct_attention: Any = super(torch.autograd.Function, _Plain).apply
"""`plain_attention` for calls that are direct."""

_apply: Any = super(torch.autograd.Function, _Attention).apply
"""`apply` without the questions about transforms, to which `can_bypass_dispatcher` has the answers."""
