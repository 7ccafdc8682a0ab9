"""What `flash_attn_with_kvcache` does not do, refused before new keys are written, as by one launch that does both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import Window
from flashgen.integrations.cached_rows import have_pages_in_order, lie_as_packed

if TYPE_CHECKING:
    from flashgen.integrations.cached_attention import CachedCall

Tensor = torch.Tensor


def check_queries(call: CachedCall, q: Tensor) -> None:
    """Refuse queries that no call takes beside caches of such shapes and strides.

    Args:
        call: which appends, too.
        q: its queries, with rows that a kernel reads.

    Raises:
        WorkloadError: they are not of the heads or the dtype of the cache.
        UnsupportedError: the caches do not lie as many queries, packed ones or a leftpad of pages need it.
    """
    caches, is_packed = (call.k_cache, call.v_cache), call.cu_seqlens_q is not None
    if any(cache.dim() != 4 for cache in caches):
        return  # which appending refuses
    _check_shape(q, call.k_cache, is_packed=is_packed)
    if call.block_table is not None:
        if call.cache_leftpad is not None and not have_pages_in_order(*caches):
            raise no_pages_in_order(*caches)
    elif (is_packed or q.shape[1] > MAX_SEQLEN_Q) and not lie_as_packed(*caches):
        if is_packed:
            raise no_rows_in_order(*caches)
        check_parts(q.shape[1], call.window, call.scores)


def _check_shape(q: Tensor, cache: Tensor, *, is_packed: bool) -> None:
    heads, columns = cache.shape[2:]
    fits = q.dim() == (3 if is_packed else 4) and q.shape[-1] == columns and not (heads and q.shape[-2] % heads)
    if not fits or q.dtype != cache.dtype:
        axes = "(total_q, nheads, head_dim)" if is_packed else "(batch, seqlen_q, nheads, head_dim)"
        raise WorkloadError(
            f"q is {axes} in the dtype of k_cache, {cache.dtype}, with its head_dim, {columns}, and a multiple of its "
            f"{heads} heads, got {q.dtype} {tuple(q.shape)}"
        )


def no_pages_in_order(k_cache: Tensor, v_cache: Tensor) -> UnsupportedError:
    """The error of a leftpad over pages that do not follow one another."""
    return UnsupportedError(
        "flashgen's flash_attn_with_kvcache takes cache_leftpad over pages that lie one behind the other, "
        f"got strides {k_cache.stride()} and {v_cache.stride()}"
    )


def no_rows_in_order(k_cache: Tensor, v_cache: Tensor) -> UnsupportedError:
    """The error of packed queries over rows that are no packed sequences."""
    return UnsupportedError(
        "flashgen's flash_attn_with_kvcache takes packed queries over caches whose rows lie at multiples of the "
        f"stride of their slots, got strides {k_cache.stride()} and {v_cache.stride()}"
    )


def check_parts(rows: int, window: Window, scores: dict[str, Any]) -> None:
    """Refuse queries that calls of decoding cannot share where the place of the last one counts.

    Raises:
        UnsupportedError: there is a window or ALiBi, and no causal mask.
    """
    is_placed = window != (None, None) or scores["alibi_slopes"] is not None
    if is_placed and not scores["causal"]:
        raise UnsupportedError(
            f"flashgen's flash_attn_with_kvcache takes more than {MAX_SEQLEN_Q} queries with a window or ALiBi over "
            f"such a cache only where causal is True, got {rows}"
        )
