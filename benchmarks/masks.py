"""What `scaled_dot_product_attention` needs to have a workload's features: one mask tensor for all of them."""

from __future__ import annotations

import torch

from flashgen.core.workload import Workload
from flashgen.measure.inputs import Inputs


def dense_mask(workload: Workload, inputs: Inputs) -> tuple[torch.Tensor, int]:
    """One mask for all that a workload hides and adds, and how many bytes of it are no input of the workload.

    A user's own mask or bias is taken as it is; with a causal mask, a window or ALiBi it is combined with them.
    """
    w, features, device = workload, inputs.features[0], inputs.q[0].device
    rows = torch.arange(w.seqlen_q, device=device)[:, None] + (w.seqlen_k - w.seqlen_q)
    keys = torch.arange(w.seqlen_k, device=device)[None, :]
    hidden = None
    for wanted, edge in ((w.causal, keys > rows), (w.window_left is not None, keys < rows - (w.window_left or 0))):
        if wanted:
            hidden = edge if hidden is None else hidden | edge
    if w.window_right is not None:
        edge = keys > rows + w.window_right
        hidden = edge if hidden is None else hidden | edge
    if features.mask is not None and hidden is None and features.bias is None and not w.alibi:
        return features.mask, 0
    if features.bias is not None and hidden is None and features.mask is None and not w.alibi:
        return features.bias, 0
    mask = features.mask if hidden is None else (~hidden if features.mask is None else features.mask & ~hidden)
    added = features.bias
    if w.alibi and features.alibi_slopes is not None:
        slopes = features.alibi_slopes.view(-1, w.nheads, 1, 1)
        alibi = (-slopes * (rows - keys).abs()).to(inputs.q[0].dtype)
        added = alibi if added is None else added + alibi
    if added is not None:
        mask = added if mask is None else added.masked_fill(~mask, float("-inf"))
    assert mask is not None
    return mask, mask.numel() * mask.element_size()
