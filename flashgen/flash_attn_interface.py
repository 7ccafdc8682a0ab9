"""FlashAttention-3's functions (Dao-AILab's `hopper/flash_attn_interface.py`) on flashgen's kernels.

The order of arguments is not FlashAttention-2's: the fourth is `softmax_scale`. With `return_attn_probs` a function
returns two values, the output and the LSE, which is fp32 and natural, with -inf in rows that see no key. Arguments that
say how to split work are taken and have no effect. Not supported, and refused by name: `qv`, descales and
`attention_chunk`. `flashgen.flash_attn_interface.install()` puts this module under the name
`flash_attn_interface`, for programs that import it. See docs/flash-attn.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.flash_attn.installation import NAMES_3, put, take_back
from flashgen.integrations.flash_attention import OutAndLse, dense, heads_behind, packed, packed_batch, refuse, unpacked
from flashgen.integrations.flash_attention_3_cache import flash_attn_with_kvcache, get_scheduler_metadata
from flashgen.runtime.argument_types import check_tensor

Tensor = torch.Tensor

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
    "uninstall",
]


def install(*, force: bool = False) -> None:
    """Put this module under the name `flash_attn_interface`, as `flashgen.flash_attn.install` does with its own.

    A program that looks for FlashAttention-3 finds it then, and calls it in place of version 2.

    Args:
        force: also where another `flash_attn_interface` is imported already.

    Raises:
        UnsupportedError: another one is imported, and `force` is False.
    """
    put(NAMES_3, "flash_attn_interface", force=force)


def uninstall() -> None:
    """Take it away again, and put back what `install(force=True)` has replaced."""
    take_back("flash_attn_interface")


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | OutAndLse:
    """Self-attention of q, k and v that lie in one tensor, and get one gradient.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim), or with `num_heads_q` four dimensions.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        q_descale: not supported.
        k_descale: not supported.
        v_descale: not supported.
        window_size: (left, right), inclusive; -1 is unlimited.
        attention_chunk: not supported.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        deterministic: the same bits of every gradient every time.
        num_heads_q: heads of q, where qkv is (batch, seqlen, nheads + 2 * nheads_k, head_dim).
        sm_margin: without effect: how work is split is flashgen's.
        return_attn_probs: also return the LSE.

    Returns:
        The output; with `return_attn_probs`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: an argument asks for what flashgen does not compute, or no kernel does this here.
    """
    check_tensor("qkv", qkv)
    if num_heads_q is not None and qkv.dim() == 4:
        nheads_k = heads_behind(num_heads_q, qkv)
        q, k, v = torch.split(qkv, [num_heads_q, nheads_k, nheads_k], dim=2)
    else:
        q, k, v = unpacked("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | OutAndLse:
    """`flashgen.attention` with FlashAttention-3's arguments.

    Args:
        q: queries, (batch, seqlen_q, nheads, head_dim).
        k: keys, (batch, seqlen_k, nheads_k, head_dim).
        v: values, like k with head_dim_v.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        qv: not supported.
        q_descale: not supported.
        k_descale: not supported.
        v_descale: not supported.
        window_size: (left, right), inclusive; -1 is unlimited.
        attention_chunk: not supported.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        num_splits: without effect: how work is split is flashgen's.
        pack_gqa: without effect: how work is split is flashgen's.
        deterministic: the same bits of every gradient every time.
        sm_margin: without effect: how work is split is flashgen's.
        return_attn_probs: also return the LSE.

    Returns:
        The output; with `return_attn_probs`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: an argument asks for what flashgen does not compute, or no kernel does this here.
    """
    refuse(
        "flash_attn_func",
        {
            "qv": qv,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
            "attention_chunk": attention_chunk or None,
        },
    )
    out, lse = dense(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=None,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int | None] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | OutAndLse:
    """`flashgen.attention_varlen` with FlashAttention-3's arguments.

    Args:
        q: queries of all sequences, (total_q, nheads, head_dim), or (batch, seqlen_q, nheads, head_dim) where
            `cu_seqlens_q` is None.
        k: keys, (total_k, nheads_k, head_dim), or (batch, seqlen_k, nheads_k, head_dim) where `cu_seqlens_k` is None.
        v: values, like k with head_dim_v.
        cu_seqlens_q: where sequences of queries begin, and where the last one ends, int32 (batch + 1,); None where each
            batch element of q is one.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q: the most queries of a sequence; without effect where `cu_seqlens_q` is None.
        max_seqlen_k: the most keys of a sequence; without effect where `cu_seqlens_k` is None.
        seqused_q: how many queries of each sequence are used, int32 (batch,); None is all.
        seqused_k: the same of the keys.
        softmax_scale: factor of the scores; None is head_dim ** -0.5.
        causal: aligned to the bottom right.
        qv: not supported.
        q_descale: not supported.
        k_descale: not supported.
        v_descale: not supported.
        window_size: (left, right), inclusive; -1 is unlimited.
        attention_chunk: not supported.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        num_splits: without effect: how work is split is flashgen's.
        pack_gqa: without effect: how work is split is flashgen's.
        deterministic: the same bits of every gradient every time.
        sm_margin: without effect: how work is split is flashgen's.
        return_attn_probs: also return the LSE.

    Returns:
        The output; with `return_attn_probs`, the output and the LSE, (nheads, total_q), or (batch, nheads, seqlen_q)
        where `cu_seqlens_q` is None.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: an argument asks for what flashgen does not compute, or no kernel does this here.
    """
    refuse(
        "flash_attn_varlen_func",
        {
            "qv": qv,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
            "attention_chunk": attention_chunk or None,
        },
    )
    rule = "without cu_seqlens_q, q is (batch, seqlen_q, nheads, head_dim)"
    (rows,), ends_q, longest_q = packed_batch((q,), cu_seqlens_q, max_seqlen_q, rule)
    rule = "without cu_seqlens_k, k and v are (batch, seqlen_k, nheads_k, head_dim)"
    (keys, values), ends_k, longest_k = packed_batch((k, v), cu_seqlens_k, max_seqlen_k, rule)
    out, lse = packed(
        rows,
        keys,
        values,
        ends_q,
        ends_k,
        longest_q,
        longest_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=None,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    if cu_seqlens_q is None:
        out = out.view(*q.shape[:2], *out.shape[1:])
        lse = lse.view(len(lse), *q.shape[:2]).transpose(0, 1) if return_attn_probs else lse
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> OutAndLse:
    """`flashgen.merge_states` with FlashAttention-3's arguments.

    Args:
        out_partial: outputs over disjoint sets of keys, (states, batch, seqlen, nheads, head_dim).
        lse_partial: their LSEs, float32 (states, batch, seqlen, nheads).
        out: where the merged output goes, or None.
        out_dtype: of the merged output; None is that of `out`, or of the states.

    Returns:
        The output, (batch, seqlen, nheads, head_dim), and the LSE, (batch, seqlen, nheads).

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule.
        UnsupportedError: the tensors are not on a GPU.
    """
    check_tensor("out_partial", out_partial)
    check_tensor("lse_partial", lse_partial)
    if lse_partial.dim() < 2:
        raise WorkloadError(f"lse_partial is (states, batch, seqlen, nheads), got {tuple(lse_partial.shape)}")
    if out is not None:
        check_tensor("out", out)
        if out.shape != out_partial.shape[1:] or out_dtype not in (None, out.dtype):
            asked = f"{tuple(out_partial.shape[1:])} of {out_dtype or 'any dtype'}"
            raise WorkloadError(f"out is {asked}, got {tuple(out.shape)} of {out.dtype}")
    dtype = out.dtype if out is not None and out_dtype is None else out_dtype
    merged, lse = flashgen.merge_states(out_partial, lse_partial.transpose(-1, -2), layout="bshd", dtype=dtype)
    return (merged if out is None else out.copy_(merged)), lse.transpose(-1, -2)
