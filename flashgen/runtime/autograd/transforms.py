"""Attention under transforms of functions (`torch.func.grad`, `vjp`, and `vmap` around or inside them).

They differentiate an `autograd.Function` only if it keeps its context apart from its computation, which the wrapper
behind `torch.library.register_autograd` does not. Under `vmap`, the ops run once for each of the mapped calls.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.features.values import Features
from flashgen.runtime.autograd.ops import NO_DOUBLE_BACKWARD, attention_backward_op, attention_train_op
from flashgen.runtime.ops.schemas import (
    DIFFERENTIATED,
    GRADIENT_FIELDS,
    TENSOR_FIELDS,
    TRAINED,
    differentiable_of,
    joined,
    split,
)

Tensor = torch.Tensor

_ARGUMENTS = ("q", "k", "v", "offset_tensor", *TENSOR_FIELDS, "numbers")
"""What `_Transformed` is applied to: every tensor by itself, as transforms ask for. Those of fields that hold several
stand before the numbers."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], features: Features, *, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """Output and LSE; the arguments are those of `flashgen.runtime.autograd.training.features_attention`."""
    *others, offset_tensor = options
    tensors, rest = split(features)
    apply: Any = _Transformed.apply
    found: tuple[Tensor, Tensor] = apply(q, k, v, offset_tensor, *tensors, (others, rest, deterministic))
    return found


class _Transformed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, offset_tensor: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
        *tensors, (options, rest, deterministic) = others
        flat = TRAINED.flat(joined(tensors, rest), deterministic)
        found: tuple[Tensor, Tensor] = attention_train_op(q, k, v, *options, offset_tensor, *flat)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.numbers = inputs
        ctx.places = [tensor is not None for tensor in tensors]
        ctx.save_for_backward(*output, *(tensor for tensor in tensors if tensor is not None))

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *present = ctx.saved_tensors
        given = iter(present)
        tensors = [next(given) if is_there else None for is_there in ctx.places]
        apply: Any = _Gradients.apply
        dq, dk, dv, *others = apply(dout, dlse, out, lse, *tensors, ctx.numbers)
        is_there = dict(zip(_ARGUMENTS, ctx.places, strict=False))
        found = {"q": dq, "k": dk, "v": dv}
        found |= {name: one for name, one in zip(GRADIENT_FIELDS, others, strict=True) if is_there[name]}
        several = [None] * (len(ctx.places) - len(_ARGUMENTS) + 1)
        return (*(found.get(name) for name in _ARGUMENTS[:-1]), *several, None)


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
        *others: Any,
    ) -> tuple[Tensor, ...]:
        *tensors, (options, rest, deterministic) = others
        features = joined(tensors, rest)
        needs = (tensor is not None for tensor in differentiable_of(features))
        flat = DIFFERENTIATED.flat(features, deterministic, *needs)
        found: tuple[Tensor, ...]
        found = attention_backward_op(dout, dlse, q, k, v, out, lse, *options, offset_tensor, *flat)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(NO_DOUBLE_BACKWARD)
