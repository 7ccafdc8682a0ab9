"""FlashAttention-3's `flash_attn_with_kvcache`, and what plans for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashgen.integrations.cached_attention import CachedCall
from flashgen.integrations.flash_attention import OutAndLse, refuse, window_of
from flashgen.runtime.argument_types import check_tensor

Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | OutAndLse:
    """Append new keys and values to a cache in place, then attend to all that it has.

    As `flashgen.flash_attn.flash_attn_with_kvcache`, with FlashAttention-3's arguments.

    Args:
        q: queries, (batch, seqlen_q, nheads, head_dim); bfloat16 or float16.
        k_cache: (rows, slots, nheads_k, head_dim), or with a `page_table` (pages, page_size, nheads_k, head_dim).
        v_cache: the same with head_dim_v.
        k: new keys, (batch, seqlen_new, nheads_k, head_dim), or None; with `cu_seqlens_k_new` (total_k_new, nheads_k,
            head_dim).
        v: new values.
        qv: not supported.
        rotary_cos: (positions, rotary_dim / 2), for new keys and queries; None rotates nothing.
        rotary_sin: likewise.
        cache_seqlens: keys of each sequence **before** the new ones; None is all slots.
        cache_batch_idx: the row of the cache of each sequence, or of the `page_table`, int32 (batch,).
        cache_leftpad: the first valid slot of each sequence, int32 (batch,); of pages that lie one behind the other.
        page_table: the pages of each sequence, int32 (batch, pages).
        cu_seqlens_q: where the queries of sequences begin, and where the last ones end, int32 (batch + 1,): then q is
            (total_q, nheads, head_dim), and so are the output and (nheads, total_q) the LSE.
        cu_seqlens_k_new: where the new keys of sequences begin, and where the last ones end, int32 (batch + 1,): a
            sequence may have none. Without effect where k is None.
        max_seqlen_q: the most queries of a sequence, with `cu_seqlens_q`.
        rotary_seqlens: positions of the first new tokens, int32 (batch,), where they are not `cache_seqlens`; without
            effect where nothing is rotated.
        q_descale: not supported.
        k_descale: not supported.
        v_descale: not supported.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        window_size: (left, right), inclusive; -1 is unlimited.
        attention_chunk: not supported.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        rotary_interleaved: pairs of columns are (0, 1), (2, 3) and so on, else i and i + rotary_dim / 2.
        scheduler_metadata: without effect: flashgen plans nothing beforehand.
        num_splits: without effect: how work is split is flashgen's.
        pack_gqa: without effect: how work is split is flashgen's.
        sm_margin: without effect: how work is split is flashgen's.
        return_softmax_lse: also return the LSE.

    Returns:
        The output, (batch, seqlen_q, nheads, head_dim_v), or the output and the LSE, (batch, nheads, seqlen_q).

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: an argument asks for what flashgen does not compute, or no kernel does this here.
    """
    not_supported = {
        "qv": qv,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "attention_chunk": attention_chunk or None,
    }
    refuse("flash_attn_with_kvcache", not_supported)
    call = CachedCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=page_table,
        rotary={
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "rotary_interleaved": rotary_interleaved,
            "rotary_seqlens": rotary_seqlens,
        },
        window=window_of(window_size),
        scores={"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, "alibi_slopes": None},
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
    )
    out, lse = call.run(return_lse=return_softmax_lse)
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty tensor, for programs that hand it to `flash_attn_with_kvcache`: flashgen plans nothing beforehand.

    Of its arguments, those of FlashAttention-3, it looks at `cache_seqlens` alone, for the device.

    Raises:
        WorkloadError: cache_seqlens is no tensor.
    """
    check_tensor("cache_seqlens", cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
