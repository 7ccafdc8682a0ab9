"""FlashAttention-2's `S_dmask`: all weights of a call, with signs that say which ones dropout has dropped.

It is meant for looking at, and for FlashAttention's own tests: a matrix of all scores in memory, computed in float64 in
plain torch, in seconds rather than milliseconds.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.reference.dense import rule_of
from flashgen.reference.packed import used_rows
from flashgen.reference.philox import Dropout
from flashgen.reference.weights import signed_weights
from flashgen.runtime.varlen.arguments import packed_features

Tensor = torch.Tensor

ROUNDED_TO = 128
"""Rows and columns are padded to a multiple of it, as in FlashAttention."""


@torch.no_grad()
def dense_weights(q: Tensor, k: Tensor, *, causal: bool, softmax_scale: float | None, **scores: Any) -> Tensor:
    """(batch, nheads, rounded seqlen_q, rounded seqlen_k) in the dtype of q, 0 in what is hidden and padded.

    A weight is `exp(score - largest score of its row)`, negative where it is dropped.

    Args:
        q: (batch, seqlen_q, nheads, head_dim).
        k: (batch, seqlen_k, nheads_k, head_dim).
        causal: of the call, as all others.
        softmax_scale: likewise.
        scores: other fields of `Features`, with those of dropout.
    """
    features = Features(**scores)
    one, two = q.transpose(1, 2), k.transpose(1, 2)
    rule = rule_of(one, two, features, causal=causal, q_offset=None, softmax_scale=softmax_scale)
    found = _empty(q, len(q), q.shape[1], k.shape[1])
    for b in range(len(q)):
        weights = signed_weights(one[b], two[b], b, rule, Dropout.of(features, b * q.shape[2]))
        found[b, :, : q.shape[1], : k.shape[1]] = weights
    return found


@torch.no_grad()
def packed_weights(
    q: Tensor,
    k: Tensor,
    *places: Any,
    causal: bool,
    softmax_scale: float | None,
    seqused_k: Tensor | None = None,
    **scores: Any,
) -> Tensor:
    """The same of packed sequences, each from the first row and column on; it waits for their lengths.

    Args:
        q: (total_q, nheads, head_dim).
        k: (total_k, nheads_k, head_dim).
        places: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
        causal: of the call, as all others.
        softmax_scale: likewise.
        seqused_k: likewise.
        scores: other fields of `Features`, with those of dropout.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = places
    lengths = (cu_seqlens_q, cu_seqlens_k, None, seqused_k, max_seqlen_q, max_seqlen_k)
    features = packed_features(Features(**scores), *lengths)
    slices = list(zip(used_rows(features, "q"), used_rows(features, "k"), strict=True))
    found = _empty(q, len(slices), max_seqlen_q, max_seqlen_k)
    for b, (rows, keys) in enumerate(slices):
        one, two = q[rows].transpose(0, 1), k[keys].transpose(0, 1)
        own = Features(**{**scores, "alibi_slopes": _of_sequence(features.alibi_slopes, b)})
        rule = rule_of(one[None], two[None], own, causal=causal, q_offset=None, softmax_scale=softmax_scale)
        weights = signed_weights(one, two, 0, rule, Dropout.of(features, b * q.shape[1]))
        found[b, :, : one.shape[1], : two.shape[1]] = weights
    return found


def _of_sequence(slopes: Tensor | None, b: int) -> Tensor | None:
    return slopes[b] if slopes is not None and slopes.dim() == 2 else slopes


def _empty(q: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    rows, keys = (-(-size // ROUNDED_TO) * ROUNDED_TO for size in (seqlen_q, seqlen_k))
    return q.new_zeros(batch, q.shape[-2], rows, keys)
