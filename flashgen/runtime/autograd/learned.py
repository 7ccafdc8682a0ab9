"""Calls whose score_mod loads from tensors that are learned: gradients of aux tensors, beside those of all others.

The ops of `flashgen.runtime.autograd.ops` have none of these: their gradients would be a list beside the others. So
such calls are left to autograd itself, and refused where only ops are understood.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.errors import UnsupportedError
from flashgen.core.features.functions import FUNCTIONS
from flashgen.core.features.values import Features
from flashgen.runtime.autograd import functions
from flashgen.runtime.ops.keys import are_plain, is_transformed
from flashgen.runtime.ops.schemas import differentiable_of

Tensor = torch.Tensor


def learned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: tuple[Any, ...],
    features: Features,
    deterministic: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that autograd knows, with gradients of aux tensors; the arguments are those of `training`.

    Raises:
        UnsupportedError: torch.compile, a transform of functions, a dispatch mode or a subclass of tensors is at work.
    """
    if is_dynamo_compiling():  # which knows nothing of the reader of the fields
        raise UnsupportedError(FUNCTIONS.no_gradient)
    tensors = (*differentiable_of(features), *features.aux)
    if is_transformed() or torch._C._len_torch_dispatch_stack() or not are_plain((q, k, v, options[-1], *tensors)):
        raise UnsupportedError(FUNCTIONS.no_gradient)
    found: Tensor | tuple[Tensor, Tensor]
    found = functions.Learned.apply(  # type: ignore[no-untyped-call]
        q, k, v, options, features, deterministic, return_lse, *tensors
    )
    return found
