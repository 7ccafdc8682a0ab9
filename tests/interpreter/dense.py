"""Attention written down directly in float64: every score exists, every rule is one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

Edge = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a call asks for beside q, k and v; tensors broadcast to (batch, nheads, seqlen_q, seqlen_k).

    `dropped` are factors of the weights: 0 or 1 / (1 - p).
    """

    causal: bool = False
    q_offset: int | torch.Tensor | None = None
    softmax_scale: float | None = None
    window: tuple[Edge, Edge] | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    dropped: torch.Tensor | None = None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules = Rules()
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64; keys and values that no row sees may hold anything."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    visible = _visible(q, k, rules)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if rules.softmax_scale is None else rules.softmax_scale)
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.alibi_slopes is not None:
        slopes = rules.alibi_slopes.double().expand(q.shape[0], q.shape[1])
        scores = scores - slopes[:, :, None, None] * _distance(q, k, rules).abs()
    if rules.bias is not None:
        scores = scores + rules.bias.double()
    scores = scores.masked_fill(~visible, -math.inf)
    weights, lse = _softmax(scores, rules.sinks)
    v = v.masked_fill(~visible.any(2)[..., None], 0.0)
    return (weights if rules.dropped is None else weights * rules.dropped) @ v, lse


def unseen_keys(q: torch.Tensor, k: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Which keys no query of their group sees, (batch, nheads_k, seqlen_k, 1)."""
    return ~_visible(q, k, rules).any(2).unflatten(1, (k.shape[1], -1)).any(2)[..., None]


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).masked_fill((lse == -math.inf)[..., None], 0.0)
    return (weights if sinks is None else weights[..., :-1]), lse


def _distance(q: torch.Tensor, k: torch.Tensor, rules: Rules) -> torch.Tensor:
    """How far each query stands behind each key, (batch or 1, 1, seqlen_q, seqlen_k)."""
    offset = k.shape[2] - q.shape[2] if rules.q_offset is None else rules.q_offset
    shift = torch.as_tensor(offset).view(-1, 1, 1, 1)
    return torch.arange(q.shape[2])[:, None] + shift - torch.arange(k.shape[2])


def _visible(q: torch.Tensor, k: torch.Tensor, rules: Rules) -> torch.Tensor:
    distance = _distance(q, k, rules)
    seen = torch.ones(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=torch.bool)
    left, right = rules.window or (None, None)
    if rules.causal:
        right = 0
    if left is not None:
        seen = seen & (distance <= left)
    if right is not None:
        seen = seen & (distance >= -right)
    return seen if rules.mask is None else seen & rules.mask


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    rules: Rules,
) -> dict[str, torch.Tensor]:
    """What a backward pass takes and returns, by name: out, lse, and dq, dk, dv and dbias by autograd, in float64.

    Keys and values that no row sees are 0 here; they may hold anything in what the kernel gets.
    """
    hidden = unseen_keys(q, k, rules)
    leaves = [q.double(), *(x.double().masked_fill(hidden, 0.0) for x in (k, v))]
    if rules.bias is not None:
        leaves.append(rules.bias.double())
        rules = replace(rules, bias=leaves[3])
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = attention(*leaves[:3], rules)
    blind = ~_visible(q, k, rules).any(3)
    share = dout.double().masked_fill(blind[..., None], 0.0)
    total = (out * share).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(blind, 0.0) * dlse.double()).sum()
    found = dict(zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(total, leaves), strict=False))
    return {"out": out.detach(), "lse": lse.detach(), **found}
