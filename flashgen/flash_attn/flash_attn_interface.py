"""FlashAttention-2's functions, in its order of arguments and with its defaults.

Keys and queries are aligned to the bottom right, windows are inclusive and -1 is unlimited. An LSE is fp32 and natural,
(batch, nheads, seqlen_q) or (nheads, total_q), with +inf in rows that see no key. With `return_attn_probs` a function
returns three values: the output, the LSE and `S_dmask`. Gradients flow as in `flashgen.attention`, and through the LSE,
too.

`S_dmask` is empty without dropout. With it, it has (batch, nheads, seqlen_q, seqlen_k) weights, both lengths rounded up
to multiples of 128, in the dtype of q: `exp(score - largest score of the row)`, negative where dropout has dropped it
and 0 where nothing is seen. It is computed in plain torch for looking at, with a matrix of all scores in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashgen.flash_attn.for_tests import USE_TRITON_ROCM, _get_block_size_n  # noqa: F401 - likewise
from flashgen.flash_attn.kvcache import flash_attn_with_kvcache  # noqa: F401 - FlashAttention has it here
from flashgen.flash_attn.passes import (  # noqa: F401 - and these
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)
from flashgen.integrations.flash_attention import Results, dense_results, packed_results, unpacked

Tensor = torch.Tensor


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Self-attention of q, k and v that lie in one tensor, and get one gradient.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim).
        dropout_p: the probability with which a weight is dropped, below 1; 0 in evaluation.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        deterministic: the same bits of every gradient every time.
        return_attn_probs: also return the LSE and `S_dmask`, for looking at.

    Returns:
        The output; with `return_attn_probs`, the output, the LSE and `S_dmask`, which is empty without dropout.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    q, k, v = unpacked("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention over keys and values that lie in one tensor, and get one gradient.

    Args:
        q: queries, (batch, seqlen_q, nheads, head_dim).
        kv: keys and values, (batch, seqlen_k, 2, nheads_k, head_dim).
        dropout_p: the probability with which a weight is dropped, below 1; 0 in evaluation.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        deterministic: the same bits of every gradient every time.
        return_attn_probs: also return the LSE and `S_dmask`, for looking at.

    Returns:
        The output; with `return_attn_probs`, the output, the LSE and `S_dmask`, which is empty without dropout.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    k, v = unpacked("kv", kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flashgen.attention` with FlashAttention-2's arguments.

    Args:
        q: queries, (batch, seqlen_q, nheads, head_dim).
        k: keys, (batch, seqlen_k, nheads_k, head_dim).
        v: values, like k with head_dim_v.
        dropout_p: the probability with which a weight is dropped, below 1; 0 in evaluation.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        deterministic: the same bits of every gradient every time.
        return_attn_probs: also return the LSE and `S_dmask`, for looking at.

    Returns:
        The output; with `return_attn_probs`, the output, the LSE and `S_dmask`, which is empty without dropout.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    return dense_results(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Self-attention of packed sequences whose q, k and v lie in one tensor.

    Args:
        qkv: (total, 3, nheads, head_dim).
        cu_seqlens: where sequences begin, and where the last one ends, int32 (batch + 1,).
        max_seqlen: the most tokens of a sequence.
        dropout_p: the probability with which a weight is dropped, below 1; 0 in evaluation.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        deterministic: the same bits of every gradient every time.
        return_attn_probs: also return the LSE and `S_dmask`, for looking at.

    Returns:
        The output; with `return_attn_probs`, the output, the LSE and `S_dmask`, which is empty without dropout.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    q, k, v = unpacked("qkv", qkv, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of packed sequences whose keys and values lie in one tensor.

    Args:
        q: queries of all sequences, (total_q, nheads, head_dim).
        kv: keys and values, (total_k, 2, nheads_k, head_dim).
        cu_seqlens_q: where sequences of queries begin, and where the last one ends, int32 (batch + 1,).
        cu_seqlens_k: the same of the keys.
        max_seqlen_q: the most queries of a sequence.
        max_seqlen_k: the most keys of a sequence.
        dropout_p: the probability with which a weight is dropped, below 1; 0 in evaluation.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        deterministic: the same bits of every gradient every time.
        return_attn_probs: also return the LSE and `S_dmask`, for looking at.

    Returns:
        The output; with `return_attn_probs`, the output, the LSE and `S_dmask`, which is empty without dropout.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    k, v = unpacked("kv", kv, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """`flashgen.attention_varlen` with FlashAttention-2's arguments.

    Args:
        q: queries of all sequences, (total_q, nheads, head_dim).
        k: keys, (total_k, nheads_k, head_dim), or (pages, page_size, nheads_k, head_dim) with a `block_table`.
        v: values, likewise with head_dim_v.
        cu_seqlens_q: where sequences of queries begin, and where the last one ends, int32 (batch + 1,).
        cu_seqlens_k: the same of the keys; with a `block_table`, its differences are the keys that sequences have.
        max_seqlen_q: the most queries of a sequence.
        max_seqlen_k: the most keys of a sequence.
        dropout_p: the probability with which a weight is dropped, below 1; 0 in evaluation.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        window_size: (left, right), inclusive; -1 is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: float32 (nheads,) or (batch, nheads).
        deterministic: the same bits of every gradient every time.
        return_attn_probs: also return the LSE and `S_dmask`, for looking at.
        block_table: the pages of each sequence, int32 (batch, pages), or None; without dropout. Then a backward pass
            through the output raises `UnsupportedError`.

    Returns:
        The output; with `return_attn_probs`, the output, the LSE and `S_dmask`, which is empty without dropout.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: no kernel does this here.
    """
    return packed_results(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        block_table=block_table,
    )
