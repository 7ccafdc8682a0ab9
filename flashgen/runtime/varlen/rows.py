"""Calls of packed sequences whose features are numbers, past torch's dispatcher: what most models train with."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.runtime.arguments import requires_gradient
from flashgen.runtime.autograd.training import direct_rows
from flashgen.runtime.ops.keys import DETERMINISTIC, TRAINS, WITH_LSE
from flashgen.runtime.ops.rows import forward_key, prepared_rows, remembered
from flashgen.runtime.varlen.arguments import check_rows

_TRAINS = WITH_LSE | TRAINS
_TRAINS_THE_SAME_BITS = _TRAINS | DETERMINISTIC


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    deterministic: bool,
    return_lse: bool,
    features: Features,
) -> Any:
    """The output, (total_q, nheads, head_dim_v), and the LSE where it is asked for.

    What the memo knows has passed all checks before: its key has all that they look at.

    Args:
        q: (total_q, nheads, head_dim), of no class but torch's own, as all tensors here.
        k: (total_k, nheads_k, head_dim).
        v: (total_k, nheads_k, head_dim_v).
        causal: as in `flashgen.attention_varlen`.
        softmax_scale: as there.
        deterministic: as there.
        return_lse: as there.
        features: packed sequences and numbers, without pages, dropout and functions.

    Raises:
        WorkloadError, UnsupportedError, BuildError, LaunchError: as `flashgen.attention_varlen`.
    """
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if trains:
        asked = _TRAINS_THE_SAME_BITS if features.batch_invariant else _TRAINS
    else:
        asked = WITH_LSE if return_lse else 0
    key = forward_key(q, k, v, causal, features, asked)
    run = remembered(key)
    if run is None:
        if torch.is_grad_enabled():
            requires_gradient(q, k, v, features, is_hidden=False)
        check_rows(q, k, v)
        run = prepared_rows(key, q, k, v, features)
    if trains:
        return direct_rows(q, k, v, run, features, causal, softmax_scale, deterministic, return_lse)
    return run(q, k, v, softmax_scale, None, features)
