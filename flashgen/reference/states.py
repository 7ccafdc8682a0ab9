"""`merge_states` in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown
from flashgen.reference.stand_ins import stand_in
from flashgen.runtime.argument_types import check_types
from flashgen.runtime.ops.merging import LAYOUTS, check, stacked

Tensor = torch.Tensor


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    layout: str = "bhsd",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`flashgen.merge_states` in plain torch on any device, with gradients of any order.

    Args:
        outs: outputs of the states as in `flashgen.merge_states`, float64 as well, on any device.
        lses: their natural log-sum-exps, float32, or float64 beside outputs in float64.
        layout: as there.
        dtype: as there.

    Returns:
        The output, and the LSE, in the dtype of the LSEs.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule of `flashgen.merge_states`.
    """
    check_types(locals())
    if layout not in LAYOUTS:
        raise WorkloadError(f'layout is "bhsd", "bshd" or "thd", got {shown(layout)}')
    small = [
        stand_in(states, torch.float32) if isinstance(states, Tensor) else [stand_in(x, torch.float32) for x in states]
        for states in (outs, lses)
    ]
    check(small[0], small[1], layout, torch.float32 if dtype == torch.float64 else dtype)
    out, lse = stacked(outs), stacked(lses)
    seen = ~lse.isinf()  # FlashAttention-2 has +inf where no key is seen
    score = torch.where(seen, lse, -math.inf).double()
    top = score.detach().amax(0).nan_to_num(neginf=0.0)
    weights = (score - top).exp()
    total = weights.sum(0)
    safe = total.masked_fill(total == 0, 1.0)
    shares = (weights / safe).transpose(-1, -2) if layout != "bhsd" else weights / safe
    values = torch.where(shares[..., None] > 0, out.double(), 0.0)
    merged = (shares[..., None] * values).sum(0)
    merged_lse = (top + safe.log()).masked_fill(total == 0, -math.inf)
    return merged.to(out.dtype if dtype is None else dtype), merged_lse.to(lse.dtype)
