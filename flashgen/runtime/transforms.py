"""Attention under transforms of functions (`torch.func.grad`, `vjp`, and `vmap` around or inside them).

They differentiate an `autograd.Function` only if it keeps its context apart from its computation, which the wrapper
behind `torch.library.register_autograd` does not. Under `vmap`, the ops run once for each of the mapped calls.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.runtime.training_ops import NO_DOUBLE_BACKWARD, attention_backward_op, attention_train_op

Tensor = torch.Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], flat_features: tuple[Any, ...], *, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Output and LSE; the arguments are those of `flashgen.runtime.training.attention`."""
    numbers = (*options[:4], *flat_features[:3], deterministic)
    apply: Any = _Transformed.apply
    found: tuple[Tensor, Tensor] = apply(q, k, v, options[4], *flat_features[3:], numbers)
    return found


class _Transformed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offset_tensor: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        numbers: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        causal, scale, bshd, offset, left, right, softcap, fixed = numbers
        options = (causal, scale, bshd, offset, offset_tensor)
        found: tuple[Tensor, Tensor]
        found = attention_train_op(q, k, v, *options, left, right, softcap, slopes, sinks, bias, mask, fixed)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, ctx.numbers = inputs[:8], inputs[8]
        ctx.places = [tensor is not None for tensor in tensors]
        ctx.save_for_backward(*output, *(tensor for tensor in tensors if tensor is not None))

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *present = ctx.saved_tensors
        given = iter(present)
        tensors = [next(given) if is_there else None for is_there in ctx.places]
        apply: Any = _Gradients.apply
        dq, dk, dv, dbias, dsinks = apply(dout, dlse, out, lse, *tensors, ctx.numbers)
        _, _, _, _, _, has_sinks, has_bias, _ = ctx.places
        return dq, dk, dv, None, None, dsinks if has_sinks else None, dbias if has_bias else None, None, None


class _Gradients(torch.autograd.Function):
    """The backward pass; `torch.func.grad` records it, as if its derivative would be asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dout: Tensor,
        dlse: Tensor,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offset_tensor: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        numbers: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        causal, scale, bshd, offset, left, right, softcap, fixed = numbers
        options = (causal, scale, bshd, offset, offset_tensor)
        flat_features = (left, right, softcap, slopes, sinks, bias, mask)
        asked = (fixed, bias is not None, sinks is not None)
        found: tuple[Tensor, ...]
        found = attention_backward_op(dout, dlse, q, k, v, out, lse, *options, *flat_features, *asked)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(NO_DOUBLE_BACKWARD)
