"""FlashAttention-2's `flash_attn_with_kvcache`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flashgen.core.checks import whole_number
from flashgen.integrations.cached_attention import CachedCall
from flashgen.integrations.flash_attention import blind_rows_at, window_of

Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a cache in place, then attend to all that it has.

    That is `append_kv`, then `attention_decode` for up to 16 queries of each sequence and `attention_varlen` for more.
    There is no gradient: a backward pass through the output raises `UnsupportedError`.

    Args:
        q: queries, (batch, seqlen_q, nheads, head_dim); bfloat16 or float16.
        k_cache: (rows, slots, nheads_k, head_dim), or with a `block_table` (pages, page_size, nheads_k, head_dim),
            pages of any size.
        v_cache: the same with head_dim_v.
        k: new keys, (batch, seqlen_new, nheads_k, head_dim), or None.
        v: new values.
        rotary_cos: (positions, rotary_dim / 2), for new keys and queries; None rotates nothing.
        rotary_sin: likewise.
        cache_seqlens: keys of each sequence **before** the new ones, a number or int32 (batch,). The caller counts on.
            None is all slots.
        cache_batch_idx: the row of the cache of each sequence, int32 (batch,).
        cache_leftpad: the first valid slot of each sequence, int32 (batch,).
        block_table: the pages of each sequence, int32 (batch, pages).
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right of the keys with the new ones. Without it and without a window, all queries
            are rotated as the first new key is.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        rotary_interleaved: pairs of columns are (0, 1), (2, 3) and so on, else i and i + rotary_dim / 2.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        num_splits: without effect: how work is split is flashgen's.
        return_softmax_lse: also return the LSE.

    Returns:
        The output, (batch, seqlen_q, nheads, head_dim_v), or the output and the LSE, (batch, nheads, seqlen_q).

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    whole_number("num_splits", num_splits, None)
    scores: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    call = CachedCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        rotary={"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved},
        window=window_of(window_size),
        scores=scores | {"alibi_slopes": alibi_slopes},
    )
    out, lse = call.run(return_lse=return_softmax_lse)
    return (out, blind_rows_at(lse, math.inf)) if return_softmax_lse else out
