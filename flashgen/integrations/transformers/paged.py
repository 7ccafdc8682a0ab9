"""Continuous batching of transformers: requests packed into one row, over a paged cache that transformers keeps."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from flashgen.integrations.flash_attention import with_rows
from flashgen.integrations.transformers.lengths import Lengths

Tensor = torch.Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator] # the cache is written in place, of which a compiled function would copy all
def attend_paged(
    calls: Any,
    module: torch.nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    cache: Any,
    lengths: Lengths,
    sliding_window: int | None,
    scores: dict[str, Any],
    others: dict[str, Any],
) -> Tensor:
    """Write the new keys and values into the cache, then attend over those of each request.

    Batches of single tokens have a table of blocks, and their keys are read where they lie; those of others the cache
    gathers.

    Args:
        calls: has `attention_varlen` and `append_kv`.
        module: the layer.
        tensors: query, key and value of the new tokens, (1, heads, tokens, head_dim).
        cache: a `PagedAttentionCache`.
        lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; those of the keys by kind of layer.
        sliding_window: the layer's.
        scores: arguments of the call.
        others: where tokens go and come from.

    Returns:
        (1, tokens, nheads, head_dim_v).
    """
    query, key, value = tensors
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    longest: Any = others.get("max_seqlen_q", max_seqlen_q)
    given: dict[str, Any] = {
        "cu_seq_lens_k": cu_seqlens_k,
        "max_length_k": others.get("max_seqlen_k", max_seqlen_k),
        **others,
    }
    window = sliding_window or getattr(module, "sliding_window", None)
    if "kwargs" in inspect.signature(cache.update).parameters:  # transformers 5.20 or so
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=given)
        key, value = (x.squeeze(0).transpose(0, 1) for x in (key, value))
        if given.get("block_table") is not None:
            return _by_table(calls, query, (key, value), given, cu_seqlens_q, scores)[None]
    else:
        where = {name: given[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **where)
        kind = "sliding_attention" if window else "full_attention"
        for name in ("cu_seq_lens_k", "max_length_k"):
            given[name] = given[name][kind] if isinstance(given[name], dict) else given[name]
    query, key, value = with_rows(query.squeeze(0).transpose(0, 1), key, value)
    found: Tensor = calls.attention_varlen(
        query,
        key,
        value,
        cu_seqlens_q.to(torch.int32),
        given["cu_seq_lens_k"].to(torch.int32),
        max_seqlen_q=int(longest),
        max_seqlen_k=int(given["max_length_k"]),
        causal=True,
        window=(window - 1 if window else None, None),
        **scores,
    )
    return found[None]


def _by_table(
    calls: Any,
    query: Tensor,
    rows: tuple[Tensor, Tensor],
    given: dict[str, Any],
    cu_seqlens_q: Tensor,
    scores: dict[str, Any],
) -> Tensor:
    """One token of each request, over pages; padded requests have a length of 0, and nothing is written for them."""
    query = query.squeeze(0).transpose(0, 1)
    ends, tokens = given["cu_seq_lens_k"].to(torch.int32), len(query)
    caches, table = _apart(given["k_cache"], given["v_cache"], given["block_table"][:tokens])
    lengths = ends.diff()[: len(table)]
    key, value = (x[:, None] for x in with_rows(*rows))
    calls.append_kv(key[: len(table)], value[: len(table)], *caches, lengths - 1, block_table=table)
    found: Tensor = calls.attention_varlen(
        *with_rows(query),
        *caches,
        cu_seqlens_q.to(torch.int32)[: len(table) + 1],
        block_table=table,
        seqused_k=lengths,
        max_seqlen_q=1,
        num_decodes=len(table),
        causal=True,
        **scores,
    )
    return found


def _apart(k_cache: Tensor, v_cache: Tensor, table: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pages of keys and of values that share no memory, and their table.

    transformers lets pages of keys and of values take turns, and gives two views of all of them, one a page behind the
    other, with a table of the even ones.
    """
    if v_cache.data_ptr() - k_cache.data_ptr() != k_cache.stride(0) * k_cache.element_size():
        return (k_cache, v_cache), table
    return (k_cache[::2], v_cache[::2]), table >> 1
