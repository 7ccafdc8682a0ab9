"""Eager attention by the reference that kernels are judged by."""

from __future__ import annotations

import torch

from flashgen.core.features.values import Features
from flashgen.measure.reference import rounded
from flashgen.measure.score_rule import ScoreRule


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    features: Features | None = None,
    tf32: bool = False,
    block_bytes: int | None = None,
) -> torch.Tensor:
    """The output in the dtype of `q`; the arguments are those of `reference.oracle` and `reference.rounded`."""
    rule = ScoreRule.of(q, k, causal=causal, q_offset=q_offset, softmax_scale=softmax_scale, features=features)
    return rounded(q, k, v, rule, tf32=tf32, block_bytes=block_bytes).out
