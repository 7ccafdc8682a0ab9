"""Attention of a sequence that lies in parts on several ranks: every rank has its queries and gathers keys and values.

Llama 3's way (Dubey et al. 2024, section 3.3.2): K and V are gathered once, each rank computes its rows against the
keys that they see, and gradients of keys and values are summed where they belong. A rank holds K and V of the whole
sequence for as long as its call or its backward pass needs them.
"""

from __future__ import annotations

from typing import Any

import torch

import flashgen
from flashgen.core.errors import WorkloadError

Tensor = torch.Tensor


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Any, *, causal: bool = False, **arguments: Any
) -> Tensor:
    """`flashgen.attention` of a sequence whose parts lie on the ranks of a group, in the order of the ranks.

    Args:
        q: queries of this rank's part, (batch, nheads, seqlen, head_dim), as long on every rank.
        k: its keys, (batch, nheads_k, seqlen, head_dim).
        v: its values.
        group: a process group of `torch.distributed`. All of its ranks make the same calls, backward passes included.
        causal: key j is visible to query i iff `j <= i`, in places of the whole sequence. The last rank has most to do.
        arguments: window, softmax_scale, softcap, sinks and deterministic of `flashgen.attention`.

    Returns:
        The output of this rank's part, with gradients of q, k and v of every rank. Those of sinks are of this part
        alone: sum them over the group.

    Raises:
        WorkloadError: the parts of q, k and v differ in length, or an argument knows places of this part alone.
    """
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    unknown = arguments.keys() - {"window", "softmax_scale", "softcap", "sinks", "deterministic"}
    if unknown:
        raise WorkloadError(f"context parallel attention takes no {min(unknown)}: it knows places of one part alone")
    length = q.shape[2]
    if k.shape[2] != length or v.shape[2] != length:
        raise WorkloadError(f"parts of q, k and v are of one length, got {length}, {k.shape[2]} and {v.shape[2]}")
    first = dist.get_rank(group) * length
    whole_k, whole_v = (all_gather_tensor_autograd(part.contiguous(), 2, group) for part in (k, v))
    if causal:  # no row of this part sees a key behind its end
        whole_k, whole_v = whole_k[:, :, : first + length], whole_v[:, :, : first + length]
    is_placed = causal or tuple(arguments.get("window", (None, None))) != (None, None)
    given: dict[str, Any] = {**arguments, "causal": causal, **({"q_offset": first} if is_placed else {})}
    return flashgen.attention(q, whole_k, whole_v, **given)  # type: ignore[no-any-return]
