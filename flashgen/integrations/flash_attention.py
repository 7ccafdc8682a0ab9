"""FlashAttention's arguments as those of flashgen's calls: what versions 2 and 3 of its functions have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import flashgen
from flashgen.core.checks import flag, real_number
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import Window
from flashgen.core.quoting import shown
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.arguments import drawn_state

Tensor = torch.Tensor
OutAndLse = tuple[Tensor, Tensor]
Results = Tensor | tuple[Tensor, Tensor, Tensor]
"""Of version 2: the output, or with it the LSE and `S_dmask`."""

SCORES = ("softmax_scale", "causal", "softcap", "alibi_slopes")
"""Arguments that mean the same in flashgen's calls, and have the same names."""


def window_of(window_size: Sequence[int | None] | Tensor) -> Window:
    """A window as flashgen has it; a negative edge is unlimited, and so is None.

    Raises:
        WorkloadError: it has not two edges.
    """
    if isinstance(window_size, Tensor) and window_size.dtype == torch.int64 and window_size.device.type == "cpu":
        window_size = window_size.tolist()  # FlashAttention's own tests have such ones
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise WorkloadError(f"window_size is (left, right), got {shown(window_size)}")
    left, right = (None if type(edge) is int and edge < 0 else edge for edge in window_size)
    return left, right


def refuse(function: str, given: Mapping[str, object]) -> None:
    """Refuse arguments that ask for what flashgen does not compute: all that are not None.

    Raises:
        UnsupportedError: there is one; the message has its name.
    """
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                f"flashgen's {function} does not support {name}, got "
                f"{'a tensor' if isinstance(value, Tensor) else shown(value)}"
            )


def with_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose last dimension is contiguous: copies of those where it is not, as FlashAttention makes them.

    Raises:
        WorkloadError: one is no tensor.
    """
    for tensor in tensors:
        check_tensor("q, k or v", tensor)
    return [tensor if not tensor.dim() or tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def unpacked(name: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The parts of (..., count, nheads, head_dim), as views: their gradients are those of the whole.

    Raises:
        WorkloadError: it has not so many.
    """
    check_tensor(name, tensor)
    if tensor.dim() < 4 or tensor.shape[-3] != count:
        raise WorkloadError(f"{name} is (..., {count}, nheads, head_dim), got {tuple(tensor.shape)}")
    return tensor.unbind(-3)


def dense_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float,
    window_size: Sequence[int | None],
    deterministic: bool,
    return_attn_probs: bool,
    **scores: Any,
) -> Results:
    """What version 2 returns for (batch, seqlen, nheads, head_dim); `scores` are those of `SCORES`."""
    dropout = _dropout(q, dropout_p, return_attn_probs)
    given = {"window_size": window_size, **scores, **dropout}
    out, lse = dense(q, k, v, deterministic=deterministic, return_lse=return_attn_probs, **given)
    if not return_attn_probs:
        return out
    return out, blind_rows_at(lse, math.inf), _signed_weights("dense_weights", out, (q, k), **given)


def packed_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *places: Any,
    dropout_p: float,
    window_size: Sequence[int | None],
    deterministic: bool,
    return_attn_probs: bool,
    **scores: Any,
) -> Results:
    """The same of packed sequences; `places` are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
    dropout = _dropout(q, dropout_p, return_attn_probs)
    given = {"window_size": window_size, **scores, **dropout}
    out, lse = packed(q, k, v, *places, deterministic=deterministic, return_lse=return_attn_probs, **given)
    if not return_attn_probs:
        return out
    return out, blind_rows_at(lse, math.inf), _signed_weights("packed_weights", out, (q, k, *places), **given)


def _dropout(q: Tensor, dropout_p: float, return_attn_probs: bool) -> dict[str, Any]:
    """Dropout as flashgen's calls have it; whoever looks at weights has to know its bits beforehand."""
    if not real_number("dropout_p", dropout_p):
        return {}
    state = None
    if return_attn_probs:
        check_tensor("q", q)
        state = drawn_state(dropout_p, None, q)
    return {"dropout_p": dropout_p, "rng_state": state}


def _signed_weights(
    function: str, out: Tensor, tensors: tuple[Any, ...], *, window_size: Sequence[int | None], **given: Any
) -> Tensor:
    """`S_dmask` of a call that has been served; without dropout an empty tensor."""
    if "dropout_p" not in given:
        return out.new_empty(0)
    from flashgen.integrations import signed_weights

    found: Tensor = getattr(signed_weights, function)(*tensors, window=window_of(window_size), **given)
    return found


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, window_size: Sequence[int | None], deterministic: bool, **scores: Any
) -> OutAndLse:
    """`flashgen.attention` of (batch, seqlen, nheads, head_dim); `scores` are those of `SCORES`, and `return_lse`."""
    q, k, v = with_rows(q, k, v)
    return _both(
        flashgen.attention(q, k, v, layout="bshd", window=window_of(window_size), deterministic=deterministic, **scores)
    )


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    window_size: Sequence[int | None],
    deterministic: bool,
    **scores: Any,
) -> OutAndLse:
    """`flashgen.attention_varlen`; `scores` as for `dense`, and how many rows are used."""
    q, k, v = with_rows(q, k, v)
    check_tensor("cu_seqlens_k", cu_seqlens_k)  # without it, flashgen takes the other one
    return _both(
        flashgen.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            window=window_of(window_size),
            deterministic=deterministic,
            **scores,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCall:
    """A call of `flash_attn_with_kvcache`, with the names of version 2; `scores` are those of `SCORES`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    rotary: dict[str, Any]
    window: Window
    scores: dict[str, Any]

    def run(self, *, return_lse: bool) -> OutAndLse:
        """Append the new keys and values in place, rotated if asked for, then attend over all keys.

        Raises:
            WorkloadError: there are no new keys where something needs them, or they have no place.
            UnsupportedError: a kernel does not do this.
        """
        flag("causal", self.scores["causal"])
        for name in ("q", "k_cache", "v_cache"):
            check_tensor(name, getattr(self, name))
        q, new = with_rows(self.q)[0], 0
        if self.k is None or self.v is None:
            self._check_nothing_new()
        else:
            q, new = self._appended(q, self.k, self.v), self.k.shape[1]
        caches = self.k_cache, self.v_cache
        if self.block_table is None and self.cache_batch_idx is None:
            caches = self.k_cache[: len(q)], self.v_cache[: len(q)]
        return self._attended(q, caches, self._lengths(new), return_lse)

    def _check_nothing_new(self) -> None:
        if (self.k is None) != (self.v is None):
            raise WorkloadError("new keys k and new values v come together, got one alone")
        named = [name for name in ("rotary_cos", "rotary_sin", "rotary_seqlens") if self.rotary.get(name) is not None]
        if named:
            raise WorkloadError(f"rotary embeddings are of new keys k and values v, got {named} without them")

    def _appended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The queries, rotated if asked for, once the new keys and values are in the cache."""
        if self.cache_seqlens is None:
            raise WorkloadError("new keys go behind cache_seqlens, the keys that the cache has, got None")
        check_tensor("k", k)
        check_tensor("v", v)
        given: dict[str, Any] = dict(self.rotary)
        if given.get("rotary_cos") is not None:
            given |= {"q": q, "q_causal": self.scores["causal"] or self.window != (None, None)}
        k, v = with_rows(k, v)
        rotated = flashgen.append_kv(
            k,
            v,
            self.k_cache,
            self.v_cache,
            self.cache_seqlens,
            block_table=self.block_table,
            batch_idx=self.cache_batch_idx,
            leftpad=self.cache_leftpad,
            **given,
        )
        return q if rotated is None else rotated

    def _lengths(self, new: int) -> Tensor:
        """Keys of each sequence with the new ones, int32 (batch,)."""
        known = self.cache_seqlens
        if isinstance(known, Tensor):
            return known + new if new else known
        if known is None:
            pages = 1 if self.block_table is None else self.block_table.shape[1]
            known = self.k_cache.shape[1] * pages
        return torch.full(self.q.shape[:1], known + new, dtype=torch.int32, device=self.q.device)

    def _attended(self, q: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor, return_lse: bool) -> OutAndLse:
        """One call of decoding, or one for every `MAX_SEQLEN_Q` queries."""
        rows = q.shape[1]
        if rows <= MAX_SEQLEN_Q:
            return self._decoded(q, caches, lengths, return_lse)
        causal, is_placed = (
            self.scores["causal"],
            self.window != (None, None) or self.scores["alibi_slopes"] is not None,
        )
        if is_placed and not causal:
            raise UnsupportedError(
                f"flashgen's flash_attn_with_kvcache takes more than {MAX_SEQLEN_Q} queries with a window or ALiBi "
                f"only where causal is True, got {rows}"
            )
        found = []
        for first in range(0, rows, MAX_SEQLEN_Q):
            some = q[:, first : first + MAX_SEQLEN_Q]
            behind = rows - first - some.shape[1]  # queries that stand behind these, whose keys none of them sees
            seen = (lengths - behind).clamp(min=0) if causal else lengths
            found.append(self._decoded(some, caches, seen, return_lse))
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2) if return_lse else lses[0]

    def _decoded(self, q: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor, return_lse: bool) -> OutAndLse:
        attend: Any = flashgen.attention_decode  # whose overloads ask for a flag that is known
        return _both(
            attend(
                q,
                *caches,
                lengths,
                block_table=self.block_table,
                leftpad=self.cache_leftpad,
                batch_idx=self.cache_batch_idx,
                window=self.window,
                return_lse=return_lse,
                **self.scores,
            )
        )


def blind_rows_at(lse: Tensor, value: float) -> Tensor:
    """An LSE with another value than -inf for rows that see no key."""
    return lse.masked_fill(lse == -math.inf, value)


def _both(result: Tensor | OutAndLse) -> OutAndLse:
    """The output and the LSE; an empty one where none was asked for, which nobody looks at."""
    return (result, result.new_empty(0)) if isinstance(result, Tensor) else result
