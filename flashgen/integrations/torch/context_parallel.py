"""Attention of a sequence that lies in parts on several ranks: each has its queries, and keys and values come to it.

By all-gather, Llama 3's way (Dubey et al. 2024, section 3.3.2): K and V are gathered once, each rank computes its rows
against the keys that they see, and gradients of keys and values are summed where they belong. A rank holds K and V of
the whole sequence for as long as its call or its backward pass needs them. By a ring (`ring.py` beside this file) it
holds those of two parts, and computes with one of them while the other arrives.
"""

from __future__ import annotations

from typing import Any

import torch

import flashgen
from flashgen.core.checks import flag, is_name_in, torch_tensor
from flashgen.core.errors import WorkloadError
from flashgen.core.quoting import shown
from flashgen.core.settings import settings
from flashgen.integrations.torch.ring import GroupExchange, ScoreOptions, ring_attention
from flashgen.integrations.torch.sequence_parts import (
    CONSECUTIVE,
    ZIGZAG,
    check_order,
    halves_of,
    join_sequence,
    ring_steps,
    runs,
)
from flashgen.runtime.argument_types import refuse_names
from flashgen.runtime.arguments import CallArguments, features_of, in_autocast

Tensor = torch.Tensor

ALL_GATHER, RING = "all_gather", "ring"
_REASONS = {
    "layout": "parts are (batch, nheads, seqlen, head_dim)",
    "return_lse": "the LSE of a part is not returned",
}
"""Why there is no argument that `flashgen.attention` has, where it is not that places are of the whole sequence."""

TAKEN = ("window", "softmax_scale", "softcap", "sinks", "deterministic")


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    *,
    causal: bool = False,
    method: str = ALL_GATHER,
    order: str = CONSECUTIVE,
    **arguments: Any,
) -> Tensor:
    """`flashgen.attention` of a sequence whose parts lie on the ranks of a group.

    Args:
        q: queries of this rank's part, (batch, nheads, seqlen, head_dim), as long on every rank.
        k: its keys, (batch, nheads_k, seqlen, head_dim).
        v: its values, (batch, nheads_k, seqlen, head_dim_v).
        group: a process group of `torch.distributed`; None is the default one. All of its ranks make the same calls,
            backward passes included.
        causal: key j is visible to query i iff `j <= i`, in places of the whole sequence.
        method: "all_gather" has K and V of the whole sequence on every rank; "ring" passes them on, part by part. What
            ranks add to the gradients of k and v is rounded to their dtype before it is summed, in a ring also what
            blocks add to the output and the gradient of q.
        order: which rows a part has, as `split_sequence` makes parts. In "consecutive" order a causal mask gives the
            last rank most to do; in "zigzag" order all ranks have as much.
        arguments: window, softmax_scale, softcap, sinks and deterministic of `flashgen.attention`.

    Returns:
        The output of this rank's part, with gradients of q, k and v of every rank. Those of sinks are of this part
        alone: sum them over the group.

    Raises:
        WorkloadError: the parts of q, k and v differ in length, an argument knows places of this part alone, or there
            is no such method or order, torch.distributed is not initialized, or this process is not in the group. With
            `FLASHGEN_CHECKS=1` also where ranks make other calls, which else may end them, or mix up keys.
        UnsupportedError: a ring is asked for gradients by a transform of torch.func, or for second derivatives.
        TypeError: there is no such argument.
    """
    _check_names(arguments)
    _check(q, k, v, method, order)
    causal = flag("causal", causal)
    q, k, v, sinks = in_autocast(q, k, v, arguments.get("sinks"))
    arguments |= {} if sinks is None else {"sinks": sinks}
    options = _options(causal, **arguments)
    exchange = _exchange(group)
    if settings().checks:
        of_scores = [arguments.get(name) for name in ("window", "softmax_scale", "softcap")]
        _check_alike(exchange, (q, k, v), causal, *of_scores, method, order)
    if not q.shape[2]:  # as long on every rank: no key is anywhere
        return flashgen.attention(q, k, v, causal=causal, **arguments)  # type: ignore[no-any-return]
    if method == ALL_GATHER:
        return _by_all_gather(q, k, v, exchange, causal, order, arguments)
    steps = ring_steps(order, exchange.rank, exchange.ranks, q.shape[2], causal, options.features.window)
    return ring_attention(q, k, v, exchange, steps, options)


def _check_names(arguments: dict[str, Any]) -> None:
    unknown = sorted(arguments.keys() - set(TAKEN))
    known = CallArguments.__annotations__.keys() | _REASONS.keys()
    refuse_names("context_parallel_attention", (name for name in unknown if name not in known))
    for name in unknown:
        reason = _REASONS.get(name, "it knows places of one part alone")
        raise WorkloadError(f"context parallel attention takes no {name}: {reason}")


def _exchange(group: Any) -> GroupExchange:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise WorkloadError(
            "context parallel attention needs init_process_group of torch.distributed, and nobody called it"
        )
    if group is None:  # as functions of torch.distributed call the default one
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise WorkloadError(
            "context parallel attention is of a process group of torch.distributed (get_group() of a DeviceMesh), got "
            f"{shown(group)}"
        )
    exchange = GroupExchange(group)
    if exchange.rank < 0:
        raise WorkloadError("context parallel attention is called on the ranks of its group, and this process is none")
    return exchange


def _check_alike(exchange: GroupExchange, tensors: tuple[Tensor, ...], *options: object) -> None:
    """Refuse calls of other shapes, dtypes or options on other ranks, which would end them or mix up their keys.

    Raises:
        WorkloadError: there are some.
    """
    import torch.distributed as dist

    own = [(str(x.dtype), tuple(x.shape)) for x in tensors], options
    found: list[Any] = [None] * exchange.ranks
    dist.all_gather_object(found, own, exchange.group)
    for rank, other in enumerate(found):
        if other != own:
            raise WorkloadError(
                f"all ranks make the same calls of context parallel attention, got {shown(own)} here and "
                f"{shown(other)} on rank {rank}"
            )


def _check(q: Tensor, k: Tensor, v: Tensor, method: str, order: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        torch_tensor(name, tensor)
        if tensor.dim() != 4:
            raise WorkloadError(f"{name} is (batch, nheads, seqlen, head_dim), got shape {tuple(tensor.shape)}")
    length = q.shape[2]
    if k.shape[2] != length or v.shape[2] != length:
        raise WorkloadError(f"parts of q, k and v are of one length, got {length}, {k.shape[2]} and {v.shape[2]}")
    if not is_name_in(method, (ALL_GATHER, RING)):
        raise WorkloadError(f'method is "all_gather" or "ring", got {shown(method)}')
    check_order(order)
    if order == ZIGZAG:
        halves_of(q, 2)


def _options(
    causal: bool,
    *,
    window: Any = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> ScoreOptions:
    absent: dict[str, Any] = dict.fromkeys(("alibi_slopes", "bias", "mask", "score_mod", "mask_mod", "block_mask"))
    features = features_of(
        **absent,
        window=window,
        softcap=softcap,
        sinks=sinks,
        aux=(),
        dropout_p=0.0,
        rng_state=None,
        is_traced=False,
    )
    return ScoreOptions(causal, softmax_scale, features, flag("deterministic", deterministic))


def _by_all_gather(
    q: Tensor, k: Tensor, v: Tensor, exchange: GroupExchange, causal: bool, order: str, arguments: dict[str, Any]
) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    # newer versions of torch have another name for it, and warn of the old one
    gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    whole_k, whole_v = (gather(part.contiguous(), 2, exchange.group) for part in (k, v))
    if order == ZIGZAG:
        whole_k, whole_v = (join_sequence(x.chunk(exchange.ranks, 2)) for x in (whole_k, whole_v))
    if not causal and tuple(arguments.get("window", (None, None))) == (None, None):
        return flashgen.attention(q, whole_k, whole_v, **arguments)  # type: ignore[no-any-return]
    outs = []
    for first, rows in runs(order, exchange.rank, exchange.ranks, q.shape[2]):
        # with a causal mask no row of a run sees a key behind its end
        seen = slice(0, first + rows.stop - rows.start if causal else None)
        given = {**arguments, "causal": causal, "q_offset": first}
        outs.append(flashgen.attention(q[:, :, rows], whole_k[:, :, seen], whole_v[:, :, seen], **given))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)
