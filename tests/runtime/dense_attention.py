"""Attention with matrices of all scores, for torch to differentiate: in float64, the truth of small calls."""

from __future__ import annotations

import math
from typing import Any

import torch


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of `flashgen.attention` with these arguments, in the dtype of the inputs."""
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    rows, keys = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    shift: Any = k.shape[2] - q.shape[2] if q_offset is None else q_offset
    shift = shift.view(-1, 1, 1, 1) if isinstance(shift, torch.Tensor) else shift
    ahead = keys - rows[:, None] - shift
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if alibi_slopes is None else scores - alibi_slopes.view(-1, q.shape[1], 1, 1) * ahead.abs()
    scores = scores if bias is None else scores + bias
    seen = torch.ones_like(scores, dtype=torch.bool)
    seen = seen & (ahead <= 0) if causal else seen
    seen = seen if window[0] is None else seen & (ahead >= -window[0])
    seen = seen if window[1] is None else seen & (ahead <= window[1])
    seen = seen if mask is None else seen & mask
    # -inf for scores would give NaN in the gradient of a row that sees no key
    scores = torch.where(seen, scores, torch.finfo(scores.dtype).min / 2)
    columns = [scores]
    if sinks is not None:
        columns.append(sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype))
    lse = torch.cat(columns, -1).logsumexp(-1)
    weights = torch.where(seen, (scores - lse.unsqueeze(-1)).exp(), 0.0)
    if sinks is None:
        lse = torch.where(seen.any(-1), lse, -math.inf)
    out = weights @ v
    return out.transpose(1, 2) if layout == "bshd" else out, lse
