"""The public call `append_kv`."""

from __future__ import annotations

from typing import overload

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.core.checks import whole_number
from flashgen.core.errors import UnsupportedError
from flashgen.runtime.argument_types import UNEXPECTED, explain_failure
from flashgen.runtime.ops.append import append, append_op, append_q_op
from flashgen.runtime.ops.append_rules import AppendArguments
from flashgen.runtime.ops.keys import (
    are_plain,
    can_bypass_dispatcher,
    is_tracked,
    refuse_hidden_derivatives,
)

Tensor = torch.Tensor


@overload
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor | int | None = ...,
    *,
    block_table: Tensor | None = ...,
    slot_mapping: Tensor | None = ...,
    batch_idx: Tensor | None = ...,
    leftpad: Tensor | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    rotary_interleaved: bool = ...,
    rotary_seqlens: Tensor | None = ...,
    q: None = ...,
    q_causal: bool = ...,
) -> None: ...
@overload
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor | int | None = ...,
    *,
    block_table: Tensor | None = ...,
    slot_mapping: Tensor | None = ...,
    batch_idx: Tensor | None = ...,
    leftpad: Tensor | None = ...,
    rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ...,
    rotary_interleaved: bool = ...,
    rotary_seqlens: Tensor | None = ...,
    q: Tensor,
    q_causal: bool = ...,
) -> Tensor: ...
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor | int | None = None,
    *,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Tensor | None = None,
    q: Tensor | None = None,
    q_causal: bool = True,
) -> Tensor | None:
    """Write new keys and values into a cache, in place, as `flash_attn_with_kvcache` does before it attends.

    Token i of sequence b goes to position `seqlens[b] + i`: of row b of a cache without pages (or row `batch_idx[b]`),
    or of the pages that `block_table[b]` lists. With a `slot_mapping` each token has a slot of its own. A token without
    a place (a position past the last slot, a table entry or slot that is negative or past the cache) is left out, so
    nothing is ever written elsewhere; entries of tables that no token needs are not read.

    Nothing is copied to the host, and a CUDA graph may hold the call: lengths and tables are read when it is replayed.
    Any strides are taken as long as the last dimension is contiguous, so a cache may be (.., page_size, nheads_k, ..)
    or a transposed view of (.., nheads_k, page_size, ..), and K and V may be halves of one tensor. Tensors without data
    (`torch.compile`, meta) are checked as others are, but for strides and overlaps.

    Args:
        k: new keys, (batch, seqlen_new, nheads_k, head_dim) in bfloat16, float16 or float32; with a `slot_mapping` also
            (tokens, nheads_k, head_dim).
        v: new values, the same with head_dim_v.
        k_cache: (rows, slots, nheads_k, head_dim), or with pages (num_blocks, page_size, nheads_k, head_dim).
        v_cache: the same with head_dim_v. It shares no element with k_cache, nor do k, v and q with either.
        seqlens: keys of each sequence before, int32 (batch,), or one number for all. The caller counts on.
        block_table: the blocks of each sequence's pages, int32 (batch, max_blocks).
        slot_mapping: `block * page_size + place` of each token, int64, negative for none (vLLM's); (batch, seqlen_new)
            or flat. For packed tokens it may be shorter than k: the rest is padding.
        batch_idx: rows of the cache, int32 (batch,); where two are equal, which one wins is not defined.
        leftpad: the first valid slot of each sequence, int32 (batch,). As in FlashAttention it moves neither the new
            keys, whose slots `seqlens` counts, nor their angles: give `rotary_seqlens` for those that count from it.
        rotary_cos: cosines (positions, rotary_dim / 2), in the dtype of k or float32; rotary_dim is a multiple of 16,
            and columns behind it stay as they are. Key i is rotated by the angles of position `seqlens + i`.
        rotary_sin: sines, likewise.
        rotary_interleaved: pairs are columns (0, 1), (2, 3) and so on (GPT-J), else i and i + rotary_dim / 2 (GPT-NeoX,
            Llama).
        rotary_seqlens: the position of the first new key, int32 (batch,), where it is not `seqlens`. Positions past the
            tables take their last one.
        q: queries to rotate, (batch, seqlen_q, nheads, head_dim), nheads a multiple of nheads_k.
        q_causal: query i is rotated as key i is; False rotates all queries by the position of the first new key, which
            is FlashAttention's rule for attention that is neither causal nor in a window.

    Returns:
        The rotated queries, a new tensor, where q is given; else None.

    Raises:
        WorkloadError: shapes, dtypes, strides or arguments break a rule, or what is written lies in something else.
        UnsupportedError: the tensors are not on a GPU, or a gradient is asked for.
        BuildError: the kernel does not compile, or FLASHGEN_NO_COMPILE forbids it.
        LaunchError: the first call of its kind happens while a CUDA graph is captured.
    """
    try:
        is_traced = is_dynamo_compiling()
        lengths, seqlen = (seqlens, None) if isinstance(seqlens, Tensor) else (None, seqlens)
        if seqlen is not None and type(seqlen) is not int and not is_traced:
            seqlen = whole_number("seqlens, where it is no tensor,", seqlen, 0)
        tables = (block_table, slot_mapping, batch_idx, leftpad, rotary_cos, rotary_sin, rotary_seqlens)
        bypasses_dispatcher = (
            not is_traced and can_bypass_dispatcher(k, v, k_cache) and are_plain((v_cache, q, lengths, *tables))
        )
        is_hidden = False
        if not bypasses_dispatcher:
            numbers = (k, v, k_cache, v_cache, q, rotary_cos, rotary_sin)
            refuse_hidden_derivatives("append_kv", numbers, is_traced=is_traced)
            is_hidden = not is_traced and is_tracked(numbers)
        if torch.is_grad_enabled() and (
            is_hidden
            or k.requires_grad
            or v.requires_grad
            or k_cache.requires_grad
            or v_cache.requires_grad
            or (q is not None and q.requires_grad)
            or (rotary_cos is not None and rotary_cos.requires_grad)
            or (rotary_sin is not None and rotary_sin.requires_grad)
        ):
            raise UnsupportedError("append_kv has no gradient: call it under torch.no_grad() or inference_mode()")
        if not bypasses_dispatcher:
            flat = (k, v, k_cache, v_cache, lengths, seqlen, *tables, rotary_interleaved)
            if q is None:
                return append_op(*flat)  # type: ignore[no-any-return]
            return append_q_op(q, *flat, q_causal)  # type: ignore[no-any-return]
        return append(
            AppendArguments(k, v, k_cache, v_cache, lengths, seqlen, *tables, rotary_interleaved, q, q_causal)
        )
    except UNEXPECTED as error:
        explain_failure(error, {name: value for name, value in locals().items() if name != "q" or value is not None})
        raise
