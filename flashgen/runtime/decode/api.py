"""The public call `attention_decode`: few queries of many sequences over caches of keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.checks import instance
from flashgen.core.errors import UnsupportedError
from flashgen.core.features.positions import checked_window
from flashgen.core.features.values import Features, Window
from flashgen.launch.feature_arguments import NO_FEATURES
from flashgen.runtime.argument_types import UNEXPECTED, check_tensor, explain_failure, refuse_names
from flashgen.runtime.decode.call import NO_BACKWARD, checked_scores, checked_split
from flashgen.runtime.decode.op import FEATURES, OP
from flashgen.runtime.decode.open_calls import OPEN
from flashgen.runtime.decode.prefix import Prefix, attend_with_prefix, flat
from flashgen.runtime.decode.recent import NOTHING, RECENT, with_others
from flashgen.runtime.decode.runs import attend
from flashgen.runtime.ops.generated import packed
from flashgen.runtime.ops.keys import are_plain, can_bypass_dispatcher, is_tracked, refuse_hidden_derivatives


@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    leftpad: torch.Tensor | None = ...,
    batch_idx: torch.Tensor | None = ...,
    fixed_split_size: int | None = ...,
    prefix: Prefix | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    leftpad: torch.Tensor | None = ...,
    batch_idx: torch.Tensor | None = ...,
    fixed_split_size: int | None = ...,
    prefix: Prefix | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention_decode(  # noqa: C901, PLR0912 - in one piece, as `flashgen.attention` is
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    leftpad: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    fixed_split_size: int | None = None,
    prefix: Prefix | None = None,
    return_lse: bool = False,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of the last queries of each sequence over a contiguous or paged cache of its keys and values.

    Lengths, page ids and indices stay on the GPU: the call never waits for it, needs no plan beforehand, and one
    CUDA graph that has captured it serves all lengths that are in the tensors when it is replayed. A call of shapes
    that are new to the process packs some numbers; kernels are compiled for dtypes, head dimensions, page sizes, kinds
    of scores and, in steps, for numbers of query rows and sequences. Of the caches it reads the visible keys and
    nothing else: what lies behind a length, before a window, or in pages that only lie there may hold anything.

    Scores are computed as `flashgen.attention` does: `softmax_scale * q_i . k_j`, softcap, ALiBi. Query i of a sequence
    of n keys stands at key `n - seqlen_q + i`: the queries are its last tokens, whose keys are in the cache already. A
    row that sees no key has output 0 and LSE -inf. There is no backward pass.

    Any strides are taken without a copy, as long as the last dimension of q and of the caches is contiguous: caches of
    (pages, nheads_k, page_size, head_dim) are passed as `cache.transpose(1, 2)`, and keys and values that lie in one
    tensor as its two halves.

    Args:
        q: queries, (batch, seqlen_q, nheads, head_dim) with 1 to 16 queries; bfloat16 or float16 on a GPU.
        k_cache: keys, (batch, slots, nheads_k, head_dim), or (pages, page_size, nheads_k, head_dim) with a
            `block_table`; pages of any size. nheads must be a multiple of nheads_k.
        v_cache: values, like k_cache with head_dim_v.
        seqlens: keys of each sequence in the cache, int32 (batch,) on the GPU; 0 is allowed. Those that are longer than
            what there is room for count as just as long.
        block_table: the pages of each sequence in order, int32 (batch, pages); entries behind its length are not read.
        causal: key j is visible to query i iff `j <= n - seqlen_q + i`; without it, every key is, to each query.
        window: (left, right), inclusive, around the place of a query; None is unlimited, and causal makes right 0. The
            time of a call follows the visible keys.
        softmax_scale: factor of the scores, above 0; None is head_dim ** -0.5.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: `-slope * |n - seqlen_q + i - j|` is added; float32 (nheads,) or (batch, nheads).
        sinks: one more score for each head, (nheads,) in float32 or the dtype of q, that every row sees and that has no
            value. The LSE includes it.
        leftpad: the first slot of each sequence that holds a key, int32 (batch,); of contiguous caches.
        batch_idx: the row of the caches of each sequence, int32 (batch,); of contiguous caches. Lengths and page ids
            are bounded, rows are not: one that the caches do not have reads other memory. FLASHGEN_CHECKS=1 finds it.
        fixed_split_size: partial results are of this many keys, a multiple of 128, wherever they are computed. Then the
            bits of a sequence's output depend on its own keys and queries alone: not on the batch, its order, the
            other lengths or the pages. None shares the keys of all sequences equally, which is faster where few
            sequences are long; the same lengths then still give the same bits.
        prefix: keys that sequences share in front of their own, read once for all of them (`flashgen.Prefix`). The
            caches, `seqlens` and what goes with them are then of the keys behind it, and the call is attention over
            both, with every position counted from the first key of the prefix.
        return_lse: also return the natural logarithm of the row sums, fp32 (batch, nheads, seqlen_q).
        unknown: none; names that torch's SDPA and FlashAttention have are answered with what they are here.

    Returns:
        The output, (batch, seqlen_q, nheads, head_dim_v); with `return_lse`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule. With `FLASHGEN_CHECKS=1` also what lengths and page ids
            hold.
        UnsupportedError: no kernel family does this here, or a gradient is asked for.
        LaunchError: the first call of its kind happens while a CUDA graph is captured.
        TypeError: there is no such argument.
    """
    if unknown:
        refuse_names("attention_decode", unknown)
    try:
        kind: tuple[Any, ...] | None = None
        is_traced = is_dynamo_compiling()
        if type(window) is not tuple:  # a list, which `attention` takes, too: a kind is hashed
            window = checked_window(window)
        if not is_traced and prefix is None:
            tensors: tuple[torch.Tensor, ...] = (q, k_cache, v_cache, seqlens)
            if block_table is not None:
                tensors = (q, k_cache, v_cache, seqlens, block_table)
            others = 0
            if sinks is not None or alibi_slopes is not None or leftpad is not None or batch_idx is not None:
                _refuse_gradients(alibi_slopes, sinks)
                tensors, others = with_others(tensors, (leftpad, batch_idx, sinks, alibi_slopes))
            kind = (len(tensors), others, causal, window, softmax_scale, softcap, fixed_split_size, return_lse)
            try:
                recent = RECENT.get(kind, NOTHING)
            except TypeError:  # symbolic numbers of a graph have no hash
                kind = None
            else:
                for again in recent:
                    found = again(tensors)
                    if found is not None:
                        return found
                for again in OPEN.get(kind, NOTHING):
                    found = again(tensors)
                    if found is not None:
                        return found
        features = NO_FEATURES
        if softcap or window != (None, None) or alibi_slopes is not None or sinks is not None:
            features = _features_of(window, softcap, alibi_slopes, sinks)
        fixed_split_size = checked_split(fixed_split_size)
        if prefix is not None:
            instance("prefix", prefix, Prefix)
        options, (*of_prefix, starts) = (leftpad, batch_idx, fixed_split_size, return_lse), flat(prefix)
        others_given = (seqlens, block_table, leftpad, batch_idx, alibi_slopes, sinks, *of_prefix)
        if is_traced or not (can_bypass_dispatcher(q, k_cache, v_cache) and are_plain(others_given)):
            numbers = (q, k_cache, v_cache, alibi_slopes, sinks, *of_prefix)
            check_tensor("seqlens", seqlens)
            refuse_hidden_derivatives("attention_decode", numbers, is_traced=is_traced)
            if torch.is_grad_enabled() and not is_traced and is_tracked(numbers):
                raise UnsupportedError(NO_BACKWARD)
            given = (block_table, causal, softmax_scale, *options, *of_prefix, starts)
            both: tuple[torch.Tensor, torch.Tensor] = OP(q, k_cache, v_cache, seqlens, *given, *FEATURES.flat(features))
            return both if return_lse else both[0]
        serving = partial(attend, kind=kind) if prefix is None else partial(attend_with_prefix, prefix)
        out, lse = serving(q, k_cache, v_cache, seqlens, block_table, causal, softmax_scale, features, *options)
        return out if lse is None else (out, lse)
    except UNEXPECTED as error:
        explain_failure(error, locals())
        raise


def _features_of(
    window: Window, softcap: float, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None
) -> Features:
    """Checked as far as an op's schema needs it, and tensors of a number for every head without gaps.

    Raises:
        WorkloadError: a window or a softcap breaks a rule.
        UnsupportedError: a gradient of the tensors is asked for.
    """
    window, softcap = checked_scores(window, softcap)
    _refuse_gradients(alibi_slopes, sinks)
    slopes, sinks = (None if one is None else packed(one) for one in (alibi_slopes, sinks))
    return Features(window=window, softcap=softcap, alibi_slopes=slopes, sinks=sinks)


def _refuse_gradients(*tensors: torch.Tensor | None) -> None:
    """Of tensors of a number for every head: calls like one under `torch.no_grad()` are served before other checks."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        raise UnsupportedError(NO_BACKWARD)
