"""The weights of one sequence, for looking at."""

from __future__ import annotations

import math

import torch

from flashgen.measure.score_rule import ScoreRule
from flashgen.reference.attend import scores_of
from flashgen.reference.philox import Dropout

Tensor = torch.Tensor


def signed_weights(q: Tensor, k: Tensor, b: int, rule: ScoreRule, dropout: Dropout | None) -> Tensor:
    """(nheads, seqlen_q, seqlen_k) in float64: `exp(score - largest of the row)`, negative where dropped, 0 if hidden.

    Args:
        q: (nheads, seqlen_q, head_dim).
        k: (nheads_k, seqlen_k, head_dim).
        b: the index of the sequence in the tensors of `rule`.
        rule: what happens to a score.
        dropout: which weights are dropped; its first head is that of this sequence.
    """
    scores, block, seen = scores_of(q, k, b, rule)
    scores = scores.masked_fill(~seen, -math.inf)
    if not scores.numel():
        return scores.flatten(0, 1)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -math.inf, 0.0)).exp()
    if dropout is not None:
        weights = torch.where(dropout.factors(block.heads, *weights.shape[2:]) > 0, weights, -weights)
    return weights.flatten(0, 1)
