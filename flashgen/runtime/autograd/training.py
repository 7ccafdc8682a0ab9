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
from flashgen.runtime.autograd import functions, transforms
from flashgen.runtime.autograd.learned import learned_attention
from flashgen.runtime.autograd.ops import attention_train_op
from flashgen.runtime.ops.keys import is_transformed, refuse_traced_transforms
from flashgen.runtime.ops.schemas import TRAINED, differentiable_of

Tensor = torch.Tensor
NO_FEATURES = Features()


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
    is_traced = is_dynamo_compiling()
    if is_traced:  # maybe this alone, where Dynamo has left the call to Python
        refuse_traced_transforms("attention")
    if not is_traced and is_transformed():
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


def plain_attention(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Tensor | tuple[Tensor, Tensor]:
    """`features_attention` without features; its other options are the last ones of `options`."""
    *others, deterministic, return_lse = options
    return features_attention(q, k, v, tuple(others), NO_FEATURES, deterministic, return_lse)


direct_attention: Any = super(torch.autograd.Function, functions.Plain).apply
"""`plain_attention` for calls that bypass the dispatcher."""

direct_rows: Any = super(torch.autograd.Function, functions.Rows).apply
"""The same of packed sequences and numbers: `(q, k, v, run, features, causal, softmax_scale, deterministic,
return_lse)`, where `run` is what the memo has for the call, with an LSE."""

_apply: Any = super(torch.autograd.Function, functions.Featured).apply
_apply_packed: Any = super(torch.autograd.Function, functions.Packed).apply
"""`apply` without the questions about transforms, to which `can_bypass_dispatcher` has the answers."""
