"""Calls of packed sequences with any features, as one batch element: training, serving and mixed batches."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.features.pages import PAGES, is_paged
from flashgen.core.features.values import Features
from flashgen.runtime.arguments import requires_gradient
from flashgen.runtime.autograd import training
from flashgen.runtime.ops import forward as ops
from flashgen.runtime.ops.keys import WITH_LSE
from flashgen.runtime.ops.schemas import SERVED
from flashgen.runtime.varlen.arguments import check_rows, one_batch_element
from flashgen.runtime.varlen.mixed import attend_mixed, attend_mixed_by_op, check_decodes


def attend_featured(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    num_decodes: int,
    deterministic: bool,
    return_lse: bool,
    features: Features,
    bypasses_dispatcher: bool,
    is_traced: bool,
) -> Any:
    """The output, (total_q, nheads, head_dim_v), and the LSE where it is asked for.

    Args:
        q: (total_q, nheads, head_dim).
        k: (total_k, nheads_k, head_dim), or pages.
        v: (total_k, nheads_k, head_dim_v), or pages.
        causal: as in `flashgen.attention_varlen`.
        softmax_scale: as there.
        num_decodes: as there.
        deterministic: as there.
        return_lse: as there.
        features: those of the call.
        bypasses_dispatcher: whether torch's dispatcher would do nothing but call the op.
        is_traced: whether torch.compile looks on.

    Raises:
        WorkloadError, UnsupportedError, BuildError, LaunchError: as `flashgen.attention_varlen`.
    """
    options: tuple[bool, float | None, bool, None, None] = (causal, softmax_scale, True, None, None)
    paged = is_paged(features)
    found: Any
    trains = torch.is_grad_enabled() and requires_gradient(
        q, k, v, features, is_hidden=not (bypasses_dispatcher or is_traced)
    )
    if trains and paged:
        raise UnsupportedError(PAGES.no_gradient)
    if trains and num_decodes != 0:
        check_decodes(num_decodes, q.unsqueeze(0), features)  # an error: there are no pages
    if trains and bypasses_dispatcher:
        check_rows(q, k, v)
        return training.direct_packed(q, k, v, options, features, deterministic, return_lse)
    one_q, one_k, one_v = one_batch_element(q, k, v, paged=paged)
    if trains:
        found = training.features_attention(one_q, one_k, one_v, options, features, deterministic, return_lse)
    elif num_decodes != 0:
        mixed = attend_mixed if bypasses_dispatcher else attend_mixed_by_op
        found = mixed(one_q, one_k, one_v, causal, softmax_scale, num_decodes, return_lse, features)
    elif bypasses_dispatcher:
        found = ops.attention_features_kernel(one_q, one_k, one_v, *options, features, WITH_LSE if return_lse else 0)
    else:
        op: Any = ops.attention_features_lse_op if return_lse else ops.attention_features_op
        found = op(one_q, one_k, one_v, *options, *SERVED.flat(features))
    return (found[0].squeeze(0), found[1].squeeze(0)) if return_lse else found.squeeze(0)
