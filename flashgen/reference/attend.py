"""Attention of one batch with every score in memory, in float64, for torch to differentiate."""

from __future__ import annotations

import math

import torch

from flashgen.measure.score_rule import Block, ScoreRule
from flashgen.reference.functions import ScoreFunctions
from flashgen.reference.philox import Dropout

Tensor = torch.Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    functions: ScoreFunctions | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), any dtype.
        k: (batch, nheads_k, seqlen_k, head_dim).
        v: (batch, nheads_k, seqlen_k, head_dim_v).
        rule: what happens to a score; its tensors are those of this batch.
        functions: the caller's own.
        dropout: which weights are dropped.

    Returns:
        (batch, nheads, seqlen_q, head_dim_v), and (batch, nheads, seqlen_q).
    """
    batch, wide = len(q), v.shape[3]
    if not batch:
        nothing = sum(one.double().sum() for one in (q, k, v))  # 0, of which autograd knows what it is made of
        empty = q.new_zeros(q.shape[:3], dtype=torch.float64)
        return nothing + empty.new_zeros((*empty.shape, wide)), nothing + empty
    both = [_of_sequence(q[b], k[b], v[b], b, rule, functions, dropout) for b in range(batch)]
    return torch.stack([out for out, _ in both]), torch.stack([lse for _, lse in both])


def _of_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: int,
    rule: ScoreRule,
    functions: ScoreFunctions | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    """The same of one sequence: tensors of three dimensions."""
    scores, block, seen = scores_of(q, k, b, rule, functions)
    v = _seen_rows(v, seen)
    sink = rule.sink(block, torch.float64)
    last = scores.new_full((), -math.inf) if sink is None else sink
    scores = torch.cat([scores.masked_fill(~seen, -math.inf), last.expand(*scores.shape[:3], 1)], -1)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)  # -inf - -inf would be NaN
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    safe = total.masked_fill(total == 0, 1.0)
    shares = weights[..., :-1] / safe
    if dropout is not None:
        shares = shares * dropout.factors(b * len(q) + block.heads, q.shape[1], k.shape[1])
    out = torch.einsum("ugqk,ukd->ugqd", shares, v)
    lse = (top + safe.log()).masked_fill(total == 0, -math.inf)
    return out.flatten(0, 1), lse.flatten(0, 1).squeeze(-1)


def scores_of(
    q: Tensor, k: Tensor, b: int, rule: ScoreRule, functions: ScoreFunctions | None = None
) -> tuple[Tensor, Block, Tensor]:
    """Scores of one sequence, (units, group, rows, keys), where they are, and which ones are visible."""
    (nheads, rows, _), (units, keys, _) = q.shape, k.shape
    heads = torch.arange(nheads, device=q.device).view(units, nheads // units)
    block = Block(batches=torch.full((units,), b, device=q.device), heads=heads, rows=range(rows), keys=range(keys))
    seen = _seen(block, rule, functions)
    scaled = q.double().reshape(*heads.shape, *q.shape[1:]) * rule.softmax_scale
    scores = rule.modify(torch.einsum("ugqd,ukd->ugqk", scaled, _seen_rows(k, seen)), block)
    if functions is not None:
        scores = functions.modified(scores.flatten(0, 1), b).view_as(scores)
    return scores, block, seen


def _seen_rows(tensor: Tensor, seen: Tensor) -> Tensor:
    """K or V with 0 in rows that no query sees: they may hold anything, and 0 times NaN is NaN."""
    return torch.where(seen.flatten(1, 2).any(1)[..., None], tensor.double(), 0.0)


def _seen(block: Block, rule: ScoreRule, functions: ScoreFunctions | None) -> Tensor:
    """True where a key is visible, (units, group, rows, keys)."""
    shape = (*block.heads.shape, len(block.rows), len(block.keys))
    hidden = rule.hidden(block)
    seen = torch.ones(shape, dtype=torch.bool, device=block.heads.device)
    seen = seen if hidden is None else seen & ~hidden
    if functions is None:
        return seen
    return seen & functions.visible(int(block.batches[0]), shape[0] * shape[1], *shape[2:]).view(shape)
