"""Calls whose gradients will be asked for: without torch's dispatcher where that would do nothing but call the op.

An `autograd.Function` of our own costs some 30 us beside its kernels, forward and backward together and with torch's
engine in them. The op of `flashgen.runtime.autograd.ops` costs three times the whole of such a call, most of it in
torch's wrapper for gradients, which is why it is left to torch.compile and to modes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.features.values import Features
from flashgen.runtime.autograd import transforms
from flashgen.runtime.autograd.learned import learned_attention
from flashgen.runtime.autograd.ops import (
    asked_of,
    attention_backward_op,
    attention_train_op,
    differentiate,
    differentiate_by_op,
    save,
    train,
)
from flashgen.runtime.ops.backward import attention_backward_kernel
from flashgen.runtime.ops.forward import attention_kernel
from flashgen.runtime.ops.keys import can_bypass_dispatcher, is_transformed
from flashgen.runtime.ops.schemas import DIFFERENTIATED, TRAINED, differentiable_of

Tensor = torch.Tensor
NO_FEATURES = Features()
_NO_FLAT_FEATURES = DIFFERENTIATED.flat(NO_FEATURES)


def features_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    features: Features,
    deterministic: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that autograd knows, by torch's dispatcher.

    Args:
        q: as the user gave it.
        k: likewise.
        v: likewise.
        options: causal, softmax_scale, bshd, q_offset and its tensor.
        features: of the call.
        deterministic: whether the backward pass gives the same bits every time.
        return_lse: whether the LSE is returned, too.
    """
    if any(tensor.requires_grad for tensor in features.aux):
        return learned_attention(q, k, v, options, features, deterministic, return_lse)
    if not is_dynamo_compiling() and is_transformed():
        out, lse = transforms.attention(q, k, v, options, features, deterministic=deterministic)
    else:
        out, lse = attention_train_op(q, k, v, *options, *TRAINED.flat(features, deterministic))
    return (out, lse) if return_lse else out


def direct_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    features: Features,
    deterministic: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same for calls for which torch's dispatcher would do nothing but call the op."""
    found: Tensor | tuple[Tensor, Tensor]
    found = _apply(q, k, v, options, features, deterministic, return_lse, *differentiable_of(features))
    return found


def direct_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    features: Features,
    deterministic: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same of packed sequences, in and out as (rows, heads, columns), the LSE as (heads, rows).

    They become one batch element where autograd does not look: four views that it sees cost as much as a launch.
    """
    found: Tensor | tuple[Tensor, Tensor]
    found = _apply_packed(q, k, v, options, features, deterministic, return_lse, *differentiable_of(features))
    return found


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], deterministic: bool, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`features_attention` without features."""
    return features_attention(q, k, v, options, NO_FEATURES, deterministic, return_lse)


class _Plain(torch.autograd.Function):
    """Without features: what most models train with has fewer tensors to keep and arguments to pass."""

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
            dq, dk, dv, *_ = attention_backward_op(
                dout, dlse, q, k, v, out, lse, *options, *_NO_FLAT_FEATURES, deterministic
            )
        else:
            dq, dk, dv, *_ = attention_backward_kernel(
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
        options: tuple[Any, ...],
        features: Features,
        deterministic: bool,
        return_lse: bool,
        *differentiable: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        outputs = train(q, k, v, options, features, deterministic)
        save(ctx, (q, k, v), outputs, options, features, deterministic)
        return outputs if return_lse else outputs[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout, dlse)


class _Packed(torch.autograd.Function):
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
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        out, lse = train(q, k, v, options, features, deterministic)
        save(ctx, (q, k, v), (out, lse), options, features, deterministic)
        return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        one, one_lse = (None if each is None else each.unsqueeze(0) for each in (dout, dlse))
        dq, dk, dv, *others = _gradients(ctx, one, one_lse)
        return *(None if each is None else each.squeeze(0) for each in (dq, dk, dv)), *others


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Those of q, k, v, of four arguments that have none, and of features."""
    _, _, _, _, _, _, _, *needs = ctx.needs_input_grad
    saved = ctx.saved_tensors
    q, k, v, *_ = saved
    is_plain = not torch.is_grad_enabled() and can_bypass_dispatcher(q, k, v)
    backward = differentiate if is_plain else differentiate_by_op
    dq, dk, dv, *others = backward(saved, ctx.numbers, (dout, dlse), tuple(needs))
    given = (gradient if needed else None for gradient, needed in zip(others, needs, strict=True))
    return dq, dk, dv, None, None, None, None, *given


direct_attention: Any = super(torch.autograd.Function, _Plain).apply
"""`plain_attention` for calls that bypass the dispatcher."""

_apply: Any = super(torch.autograd.Function, _Attention).apply
_apply_packed: Any = super(torch.autograd.Function, _Packed).apply
"""`apply` without the questions about transforms, to which `can_bypass_dispatcher` has the answers."""
