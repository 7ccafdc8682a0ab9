"""Attention with every feature in one formula, over all scores at once."""

from __future__ import annotations

import math

import torch

from flashgen.core.features.values import Features


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    offset: torch.Tensor,
    causal: bool,
    features: Features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores at once, heads repeated, the sink as one more column."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    behind = torch.arange(q.shape[2])[:, None] + offset.view(-1, 1, 1, 1) - torch.arange(k.shape[2])
    if features.alibi_slopes is not None:
        scores = scores - torch.einsum("bh,bhij->bhij", features.alibi_slopes.expand(q.shape[:2]), behind.abs())
    if features.bias is not None:
        scores = scores + features.bias
    visible = torch.ones_like(scores, dtype=torch.bool)
    left, right = features.window
    visible &= behind >= 0 if causal else True
    visible &= behind <= left if left is not None else True
    visible &= behind >= -right if right is not None else True
    visible &= features.mask if features.mask is not None else True
    scores = scores.masked_fill(~visible, -math.inf)
    if features.sinks is not None:
        sinks = features.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        return weights @ v, torch.logsumexp(torch.cat([scores, sinks], -1), -1)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, torch.logsumexp(scores, -1)
