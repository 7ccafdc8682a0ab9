"""Gradients in torch: where they are written, and those that need no kernel (sinks, and a bias that is one a row)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from flashgen.core.features.values import Features

BiasRule = Literal["", "full", "keys", "rows"]
"""How the gradient of a bias is made: not at all; by a kernel, one number a score; by a kernel that sums over the
queries; or, where it has one number for all keys of a row, by a formula."""

Formula = Callable[[Features, torch.Tensor, torch.Tensor], torch.Tensor | None]
"""From the features of a call, its LSE and what kernels leave of every row: `neg_delta`."""


def bias_rule(bias: torch.Tensor, seqlen_k: int) -> BiasRule:
    """How the gradient of a bias in four dimensions is made, for a call with this many keys."""
    if bias.shape[3] != seqlen_k:
        return "rows"
    return "keys" if bias.shape[2] == 1 else "full"


def empty_bias_gradient(
    bias: torch.Tensor, rule: BiasRule, sizes: tuple[int, int, int], device: torch.device | None = None
) -> torch.Tensor | None:
    """What a kernel writes of the gradient of a bias, uninitialised; `sizes` are batch, nheads and seqlen_k."""
    if rule == "full":
        return bias.new_empty((1,) * (4 - bias.dim()) + tuple(bias.shape), device=device)
    return bias.new_empty(sizes, dtype=torch.float32, device=device) if rule == "keys" else None


def bias_gradient(
    features: Features,
    bias: torch.Tensor,
    rule: BiasRule,
    written: torch.Tensor | None,
    *,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    neg_delta: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a bias, contiguous in its own shape and dtype.

    Args:
        features: of the call.
        bias: as the call had it, up to four dimensions.
        rule: how the gradient is made.
        written: what the kernels wrote.
        lse: fp32 (batch, nheads, seqlen_q), of the forward pass.
        dlse: its gradient, or None for 0.
        neg_delta: `dlse - rowsum(dout * out)`, fp32, likewise.
    """
    if rule == "full" and written is not None:
        return written.view(bias.shape)
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    scores = (
        written.unsqueeze(2) if written is not None else _row_sums(lse, dlse, neg_delta, features.sinks).unsqueeze(3)
    )
    return scores.sum_to_size(shape).to(bias.dtype).reshape(bias.shape)


def sink_gradient(sinks: torch.Tensor, lse: torch.Tensor, neg_delta: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks, (nheads,) in their dtype: the sum of dS over the column that a sink is.

    A sink has the probability `exp(sink - lse)` in every row, and no value: its dP is 0, so dS is P times neg_delta.
    """
    return (_sink_probability(sinks, lse) * neg_delta).sum((0, 2)).to(sinks.dtype)


def _sink_gradient(features: Features, lse: torch.Tensor, neg_delta: torch.Tensor) -> torch.Tensor | None:
    return None if features.sinks is None else sink_gradient(features.sinks, lse, neg_delta)


FORMULAS: dict[str, Formula] = {"sinks": _sink_gradient}
"""The gradients that need no kernel, by the fields of the features; None where a call has no such tensor."""


def _row_sums(
    lse: torch.Tensor, dlse: torch.Tensor | None, neg_delta: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The sum of dS over the keys of every row, without dS: a softmax does not change with what all its scores share.

    `sum_j P_ij (dP_ij + neg_delta_i)` is `delta_i + neg_delta_i (1 - P_sink)`, and delta_i + neg_delta_i is dlse_i.
    """
    sums = torch.zeros_like(lse) if dlse is None else torch.where(lse > -torch.inf, dlse, 0.0)
    return sums if sinks is None else sums - _sink_probability(sinks, lse) * neg_delta


def _sink_probability(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    # a sink of -inf beside no visible key leaves an LSE of -inf, and no probability
    return torch.where(lse > -torch.inf, (sinks.float().view(1, -1, 1) - lse).exp(), 0.0)
