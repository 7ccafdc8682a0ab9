"""FlashAttention-2's passes without autograd, which programs of ring attention call: `_flash_attn_forward` and others.

An LSE is that of the functions, with +inf in rows that see no key; a backward pass takes the output and the LSE over
all keys, of which its own may be a part. `rng_state` is int64 (2,), a seed and an offset: that of a forward pass makes
the backward pass drop the same weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flashgen.core.checks import whole_number
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.values import Features
from flashgen.integrations.flash_attention import (
    blind_rows_at,
    dense,
    dropout_of,
    length_of,
    packed,
    refuse,
    weights_of,
    window_of,
    with_rows,
)
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.arguments import check_scale, drawn_state, features_of
from flashgen.runtime.autograd.ops import attention_backward_op
from flashgen.runtime.ops.schemas import DIFFERENTIATED, GRADIENT_FIELDS
from flashgen.runtime.varlen.arguments import one_batch_element, packed_features

Tensor = torch.Tensor
Pass = tuple[Tensor, Tensor, Tensor, Tensor]
"""Output, LSE, `S_dmask` (empty unless asked for with dropout) and `rng_state`."""


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Pass:
    """`flash_attn_func` without a gradient; arguments as there, and the two edges of the window.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    scores = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, "alibi_slopes": alibi_slopes}
    given = {"window_size": (window_size_left, window_size_right), **scores, **dropout_of(q, dropout_p, is_known=True)}
    with torch.no_grad():
        out, lse = dense(q, k, v, deterministic=False, return_lse=True, **given)
        weights = weights_of("dense_weights", out, (q, k), **given) if return_softmax else out.new_empty(0)
    return out, blind_rows_at(lse, math.inf), weights, _state(given, q)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Pass:
    """`flash_attn_varlen_func` without a gradient; arguments as there, and how many keys of sequences are used.

    `zero_tensors` is without effect: rows of no sequence are 0. `leftpad_k` and `num_splits` above 1 are refused.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    refuse("_flash_attn_varlen_forward", {"leftpad_k": leftpad_k})
    if whole_number("num_splits", num_splits, None) > 1:
        raise UnsupportedError(
            "num_splits > 1 is not supported by flashgen's _flash_attn_varlen_forward, which splits work itself, got "
            f"{num_splits}"
        )
    scores = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, "alibi_slopes": alibi_slopes}
    given = {"window_size": (window_size_left, window_size_right), **scores, **dropout_of(q, dropout_p, is_known=True)}
    if block_table is not None:
        refuse("_flash_attn_varlen_forward with a block_table", {"dropout_p": dropout_p or None})
        given["block_table"] = block_table
        if seqused_k is not None:  # of keys in pages, only the differences of their ends count
            check_tensor("seqused_k", seqused_k)
            cu_seqlens_k, seqused_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0)), None
    places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    with torch.no_grad():
        given["seqused_k"] = seqused_k
        out, lse = packed(q, k, v, *places, deterministic=False, return_lse=True, **given)
        weights = weights_of("packed_weights", out, (q, k, *places), **given) if return_softmax else out.new_empty(0)
    return out, blind_rows_at(lse, math.inf), weights, _state(given, q)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Gradients of q, k and v, written into `dq`, `dk` and `dv`.

    Args:
        dout: the gradient of the output, (batch, seqlen_q, nheads, head_dim_v).
        q: as of the forward pass, and all others.
        k: likewise.
        v: likewise.
        out: its output, or the one over more keys.
        softmax_lse: the LSE that belongs to it, float32 (batch, nheads, seqlen_q).
        dq: where the gradient goes, or None.
        dk: likewise.
        dv: likewise.
        dropout_p: as of the forward pass.
        softmax_scale: likewise.
        causal: likewise.
        window_size_left: likewise.
        window_size_right: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: the same bits every time.
        rng_state: what the forward pass has returned.

    Returns:
        The sum of `dout * out` of each row, float32 (batch, nheads, seqlen_q).

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    features = _features(q, (window_size_left, window_size_right), softcap, alibi_slopes, dropout_p, rng_state)
    tensors = with_rows(dout, q, k, v, out)
    _differentiate(tensors, softmax_lse, (dq, dk, dv), features, causal, softmax_scale, deterministic)
    return (dout.float() * out.float()).sum(-1).transpose(1, 2)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The same of packed sequences: rows are (total, nheads, head_dim), the LSE and what is returned (nheads, total_q).

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_tensor("softmax_lse", softmax_lse)
    scores = _features(q, (window_size_left, window_size_right), softcap, alibi_slopes, dropout_p, rng_state)
    lengths = (cu_seqlens_q, cu_seqlens_k, None, None, length_of(max_seqlen_q), length_of(max_seqlen_k))
    features = packed_features(scores, *lengths, deterministic)
    dout, q, k, v, out = with_rows(dout, q, k, v, out)
    tensors = [dout[None], *one_batch_element(q, k, v), out[None]]
    gradients = tuple(None if into is None else into[None] for into in (dq, dk, dv))
    _differentiate(tensors, softmax_lse[None], gradients, features, causal, softmax_scale, deterministic)
    return (dout.float() * out.float()).sum(-1).transpose(0, 1)


def _features(
    q: Tensor,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
) -> Features:
    """The features of scores, as a forward pass has them."""
    return features_of(
        window=window_of(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=None,
        bias=None,
        mask=None,
        score_mod=None,
        mask_mod=None,
        aux=(),
        block_mask=None,
        dropout_p=dropout_p,
        rng_state=drawn_state(dropout_p, rng_state, q),
        is_traced=torch.compiler.is_dynamo_compiling(),
    )


def _differentiate(
    tensors: list[Tensor],
    lse: Tensor,
    into: tuple[Tensor | None, ...],
    features: Features,
    causal: bool,
    softmax_scale: float,
    deterministic: bool,
) -> None:
    """Write the gradients of dout, q, k, v and out in (batch, seqlen, nheads, head_dim)."""
    check_scale(softmax_scale)
    dout, q, k, v, out = (tensor.detach() for tensor in tensors)
    seen = lse.detach().masked_fill(lse == math.inf, -math.inf).contiguous()
    flat = DIFFERENTIATED.flat(features, deterministic, *[False for _ in GRADIENT_FIELDS])
    found = attention_backward_op(dout, None, q, k, v, out, seen, causal, softmax_scale, True, None, None, *flat)
    for gradient, place in zip(found[:3], into, strict=True):
        if place is not None:
            place.copy_(gradient)


def _state(given: dict[str, Any], q: Tensor) -> Tensor:
    state = given.get("rng_state")
    return torch.zeros(2, dtype=torch.int64, device=q.device) if state is None else state


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
"""Names under which FlashAttention has them as ops of torch."""
