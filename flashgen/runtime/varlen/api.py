"""The public call `attention_varlen`: sequences of different lengths in one tensor, without padding."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import are_deterministic_algorithms_enabled
from torch.compiler import is_dynamo_compiling

from flashgen.core.checks import whole_number
from flashgen.core.features.values import Features, Window
from flashgen.core.settings import settings
from flashgen.runtime.argument_types import UNEXPECTED, explain_failure, refuse_names
from flashgen.runtime.arguments import check_scale, drawn_state, features_of, in_autocast
from flashgen.runtime.ops.keys import (
    are_plain,
    can_bypass_dispatcher,
    have_plain_functions,
    refuse_lists_mapped_alone,
    refuse_tangents,
    refuse_traced_transforms,
    tensors_of,
)
from flashgen.runtime.ops.mods import UserCallable
from flashgen.runtime.varlen.arguments import packed_features
from flashgen.runtime.varlen.contents import check_contents
from flashgen.runtime.varlen.featured import attend_featured
from flashgen.runtime.varlen.rows import attend_rows

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
NO_FEATURES = Features()


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = ...,
    seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ...,
    num_decodes: int = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    score_mod: UserCallable | None = ...,
    mask_mod: UserCallable | None = ...,
    aux: tuple[torch.Tensor, ...] = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = ...,
    seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ...,
    num_decodes: int = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    score_mod: UserCallable | None = ...,
    mask_mod: UserCallable | None = ...,
    aux: tuple[torch.Tensor, ...] = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_decodes: int = 0,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: UserCallable | None = None,
    mask_mod: UserCallable | None = None,
    aux: tuple[torch.Tensor, ...] = (),
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of sequences of different lengths that lie in one tensor, one behind the other.

    Each sequence is a call of `flashgen.attention` of its own: its queries see its keys and no others', and nothing of
    a neighbour is used, whatever it holds. Where sequences begin stays on the GPU: the call never waits for it, and one
    CUDA graph that has captured it serves all lengths that are in the tensors when it is replayed, as long as the rows
    and `max_seqlen_q` are enough. A sequence may have no queries, or no keys: rows that see no key have output 0 and
    LSE -inf. So have rows that are not used, and rows behind the last sequence.

    It trains as `flashgen.attention` does, with gradients of q, k, v, sinks and what a score_mod loads. They are 0 in
    rows that are not used and in those of no sequence.

    Any strides are taken without a copy, as long as the last dimension of q, k and v is contiguous.

    With a `block_table`, k and v are a paged cache, and the queries of a sequence are the last ones of the `seqused_k`
    keys that it has there: a chunk of a prompt behind what is in the cache already, whose keys have been appended
    before (`flashgen.append_kv`). Of the cache, visible keys are used and nothing else: what lies behind a length,
    before a window, in other pages or in entries of the table that stand behind a length may hold anything. There is no
    gradient then.

    Args:
        q: queries of all sequences, (total_q, nheads, head_dim); bfloat16, float16 or float32 on a GPU.
        k: keys, (total_k, nheads_k, head_dim), or (pages, page_size, nheads_k, head_dim) with a `block_table`; nheads
            must be a multiple of nheads_k (GQA, MQA).
        v: values, (total_k, nheads_k, head_dim_v), or (pages, page_size, nheads_k, head_dim_v).
        cu_seqlens_q: where sequences begin, and where the last one ends, int32 (batch + 1,) on the GPU: the queries of
            sequence b are rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`. It begins with 0 and never falls.
        cu_seqlens_k: the same of the keys; None where they are those of the queries. With a `block_table` its
            differences are the lengths, where `seqused_k` does not say them.
        max_seqlen_q: the most queries of a sequence. It may be more, as in a graph for batches to come.
        max_seqlen_k: the most keys of a sequence; None is max_seqlen_q, where cu_seqlens_k is None, or what a row of
            the `block_table` has pages for.
        seqused_q: how many of the queries of each sequence are used, int32 (batch,); None is all.
        seqused_k: the same of the keys; with a `block_table`, how many keys each sequence has.
        block_table: the pages of each sequence in order, int32 (batch, pages of a sequence); pages of any size.
        num_decodes: how many sequences, from the first on, have one query each: steps of decoding beside chunks of
            prompts in one batch. They are computed by `flashgen.attention_decode`, where that is expected to be faster.
        causal: key j of a sequence is visible to its query i iff `j <= i + n - m`, of n keys and m queries that are
            used (aligned to the bottom right).
        window: (left, right), inclusive, around `i + n - m`; None is unlimited, and causal makes right 0.
        softmax_scale: factor of the scores, above 0; None is head_dim ** -0.5.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: `-slope * |i + n - m - j|` is added; float32 (nheads,) or (batch, nheads).
        sinks: one more score for each head, (nheads,) in float32 or the dtype of q, that every row sees and that has no
            value. The LSE includes it.
        score_mod: as in `flashgen.attention`: `(score, b, h, q_idx, k_idx, *aux)`, where b is the sequence and places
            are those in it.
        mask_mod: as in `flashgen.attention`, likewise.
        aux: tensors for these functions.
        dropout_p: the probability with which a weight is dropped, as in `flashgen.attention`; the weights of a sequence
            that are dropped follow from its number, its head and the places in it.
        rng_state: as in `flashgen.attention`, int64 (2,).
        deterministic: gradients have the same bits every time, and outputs and gradients of a sequence have them
            whatever its neighbours are: one config serves batches of all sizes, which is not the fastest for each.
            `torch.use_deterministic_algorithms` asks for it, too. Without it outputs have the same bits every time, and
            in all batches that one config serves.
        return_lse: also return the natural logarithm of the row sums, fp32 (nheads, total_q).
        unknown: none; names that torch's SDPA and FlashAttention have are answered with what they are here.

    Returns:
        The output, (total_q, nheads, head_dim_v); with `return_lse`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule. With `FLASHGEN_CHECKS=1` also what lengths hold.
        UnsupportedError: no kernel family does this here, or a gradient is asked for through a
            `block_table` or an operation of a score_mod that is not derived.
        LaunchError: the first call of its kind happens while a CUDA graph is captured.
        TypeError: there is no such argument.
    """
    if unknown:
        refuse_names("attention_varlen", unknown)
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    try:
        if softmax_scale is not None:
            check_scale(softmax_scale)
        is_traced = is_dynamo_compiling()
        if is_traced or _is_any_autocast_enabled():
            q, k, v, sinks = in_autocast(q, k, v, sinks)
        has_numbers_alone = not (
            is_traced
            or dropout_p != 0.0
            or alibi_slopes is not None
            or sinks is not None
            or score_mod is not None
            or mask_mod is not None
            or aux
        )
        if has_numbers_alone and softcap == 0.0 and window == (None, None):
            scores = NO_FEATURES
        else:
            scores = features_of(
                window=window,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                bias=None,
                mask=None,
                score_mod=score_mod,
                mask_mod=mask_mod,
                aux=aux,
                block_mask=None,
                dropout_p=dropout_p,
                rng_state=drawn_state(dropout_p, rng_state, q),
                is_traced=is_traced,
            )
        if type(num_decodes) is not int:
            num_decodes = whole_number("num_decodes", num_decodes, 0)
        paged = block_table is not None
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
        is_invariant = bool(deterministic) or are_deterministic_algorithms_enabled()
        page_size = k.shape[1] if paged and k.dim() == 4 else 0
        features = packed_features(scores, *lengths, is_invariant, block_table, page_size)
        bypasses_dispatcher = (
            not is_traced
            and can_bypass_dispatcher(q, k, v)
            and are_plain(tensors_of(features))
            and (not features.mods or have_plain_functions(features))
        )
        if is_traced:
            refuse_traced_transforms("attention_varlen")
        elif not bypasses_dispatcher:
            tensors = (q, k, v, *tensors_of(features))
            refuse_tangents("attention_varlen", (*tensors, *features.aux))
            refuse_lists_mapped_alone("attention_varlen", tensors, features)
        if bypasses_dispatcher and has_numbers_alone and not paged and num_decodes == 0:
            found = attend_rows(q, k, v, causal, softmax_scale, deterministic, return_lse, features)
        else:
            options = (causal, softmax_scale, num_decodes, deterministic, return_lse)
            found = attend_featured(q, k, v, *options, features, bypasses_dispatcher, is_traced)
        if not is_traced and settings().checks:
            check_contents(q, k, features, num_decodes)
        return found
    except UNEXPECTED as error:
        explain_failure(error, locals())
        raise
