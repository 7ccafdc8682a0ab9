"""What a backend of an engine computes, in float64, and its numbers of heads."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

HEADS, HEADS_K, DIM = 4, 2, 16


def attention(q: Tensor, k: Tensor, v: Tensor, m: int, n: int, given: dict[str, Any]) -> Tensor:
    """One sequence in float64, written out."""
    q, k, v = q.double(), *(x.double().repeat_interleave(HEADS // HEADS_K, 1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q, k) * 0.3
    if cap := given.get("logits_soft_cap"):
        scores = cap * (scores / cap).tanh()
    distance = torch.arange(n - m, n)[:, None] - torch.arange(n)
    scores = scores - torch.tensor(given.get("alibi_slopes", [0.0] * HEADS)).double()[:, None, None] * distance
    hidden = (distance < 0) | (distance >= given.get("sliding_window", n))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    sinks = given.get("sinks", torch.full((HEADS,), -torch.inf)).double().exp()
    return torch.einsum("hmn,nhd->mhd", weights / (weights.sum(-1, True) + sinks[:, None, None]), v)
