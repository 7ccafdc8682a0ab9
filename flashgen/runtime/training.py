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
from flashgen.runtime.keys import is_direct, is_transformed
from flashgen.runtime.training_kernels import attention_backward_kernel, attention_train_kernel
from flashgen.runtime.training_ops import attention_backward_op, attention_train_op, differentiate, save

Tensor = torch.Tensor
NO_FEATURES: tuple[Any, ...] = (None, None, 0.0, None, None, None, None)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    features: tuple[Any, ...],
    *,
    deterministic: bool,
    return_lse: bool,
    is_direct: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that autograd knows.

    Args:
        q: as the user gave it.
        k: likewise.
        v: likewise.
        options: causal, softmax_scale, bshd, q_offset and its tensor.
        features: window_left, window_right, softcap, alibi_slopes, sinks, bias and mask.
        deterministic: whether the backward pass gives the same bits every time.
        return_lse: whether the LSE is returned, too.
        is_direct: whether torch's dispatcher would do nothing but call the op.
    """
    found: Tensor | tuple[Tensor, Tensor]
    if is_direct:
        found = _apply(q, k, v, features[4], features[5], options, features, deterministic, return_lse)
        return found
    if not is_dynamo_compiling() and is_transformed():
        out, lse = transforms.attention(q, k, v, options, features, deterministic=deterministic)
    else:
        out, lse = attention_train_op(q, k, v, *options, *features, deterministic)
    return (out, lse) if return_lse else out


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
        features: tuple[Any, ...],
        deterministic: bool,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        arguments = (*options, *features, deterministic)
        outputs = attention_train_kernel(q, k, v, *arguments)
        save(ctx, (q, k, v), outputs, options, features, deterministic)
        return outputs if return_lse else outputs[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        _, _, _, needs_sinks, needs_bias, *_ = ctx.needs_input_grad
        saved = ctx.saved_tensors
        q, k, v, *_ = saved
        # the op says that there is no second derivative
        backward = (
            attention_backward_op if torch.is_grad_enabled() or not is_direct(q, k, v) else attention_backward_kernel
        )
        dq, dk, dv, dbias, dsinks = differentiate(
            saved, ctx.numbers, (dout, dlse), backward, needs_bias=needs_bias, needs_sinks=needs_sinks
        )
        return dq, dk, dv, dsinks if needs_sinks else None, dbias if needs_bias else None, None, None, None, None


_apply: Any = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without the questions about transforms, to which `is_direct` has the answers."""
