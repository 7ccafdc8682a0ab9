"""`flash_attn_with_kvcache` of versions 2 and 3: which of flashgen's calls append, and which attend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import flashgen
from flashgen.core.checks import flag, whole_number
from flashgen.core.decode_limits import MAX_SEQLEN_Q
from flashgen.core.errors import WorkloadError
from flashgen.core.features.scores import check_slopes
from flashgen.core.features.values import Window
from flashgen.integrations.cached_refusals import check_parts, check_queries, no_pages_in_order, no_rows_in_order
from flashgen.integrations.cached_rows import (
    PackedKeys,
    check_leftpad,
    check_numbers,
    first_slots,
    packed_keys,
    pages_behind,
)
from flashgen.integrations.flash_attention import OutAndLse, both, in_order, length_of, with_rows, without_backward
from flashgen.integrations.packed_tokens import (
    append_packed,
    as_lengths,
    check_new_keys,
    first_positions,
    may_read,
    rotated_queries,
)
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.arguments import check_scale
from flashgen.runtime.decode.call import checked_scores

Tensor = torch.Tensor

NUMBERS = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "cu_seqlens_q", "cu_seqlens_k_new")
"""Arguments of a call that may be columns of a larger tensor."""

NO_BACKWARD = "flash_attn_with_kvcache has no backward pass: call it under torch.no_grad()"


class BlockTableError(WorkloadError, RuntimeError):
    """Lengths lead behind what a block table has room for: FlashAttention raises a RuntimeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCall:
    """A call of `flash_attn_with_kvcache`, with the names of version 2; `scores` are those of `SCORES`.

    With `cu_seqlens_q`, which version 3 has, q is (total_q, nheads, head_dim), and with `cu_seqlens_k_new` k is
    (total_k_new, nheads_k, head_dim).
    """

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
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    cu_seqlens_k_new: Tensor | None = None

    def run(self, *, return_lse: bool) -> OutAndLse:
        """Append the new keys and values in place, rotated if asked for, then attend over all keys.

        Raises:
            WorkloadError: there are no new keys where something needs them, or they have no place.
            UnsupportedError: a kernel does not do this, or, later, a gradient of the output is asked for.
        """
        tensors = (self.q, self.k_cache, self.v_cache, self.k, self.v)
        call = self._with_numbers_in_order()._with_rows_of_the_table()
        return without_backward(lambda: call._run(return_lse), tensors, NO_BACKWARD)

    def _with_numbers_in_order(self) -> CachedCall:
        """The same with copies of numbers that lie apart, as FlashAttention makes them."""
        numbers = _copies({name: getattr(self, name) for name in NUMBERS})
        rotary = _copies(self.rotary)
        return replace(self, **numbers, rotary=self.rotary | rotary) if numbers or rotary else self

    def _with_rows_of_the_table(self) -> CachedCall:
        """The same with a row of the block table for each sequence, where `cache_batch_idx` says which."""
        table, rows = self.block_table, self.cache_batch_idx
        if table is None or rows is None:
            return self
        check_tensor("block_table", table)
        check_numbers("cache_batch_idx", rows, (self._batch(),), table.device)
        return replace(self, block_table=table.index_select(0, rows), cache_batch_idx=None)

    def _run(self, return_lse: bool) -> OutAndLse:
        flag("causal", self.scores["causal"])
        if self.cache_seqlens is not None and not isinstance(self.cache_seqlens, Tensor):
            whole_number("cache_seqlens, where it is no tensor,", self.cache_seqlens, 0)
        if self.block_table is not None:
            check_tensor("block_table", self.block_table)
        for name in ("q", "k_cache", "v_cache"):
            check_tensor(name, getattr(self, name))
        q, batch = with_rows(self.q)[0], self._batch()
        new: int | Tensor = 0
        if self.k is None or self.v is None:
            self._check_nothing_new()
            self._check_room(0)
        else:
            new = self._count_new(self.k, self.v, batch)
            self._check_room(new)
            k, v = with_rows(self.k, self.v)
            self._check_scores(batch)
            check_queries(self, q)
            q = self._appended(q, k, v, batch)
        caches = self.k_cache, self.v_cache
        if self.block_table is None and self.cache_batch_idx is None:
            caches = self.k_cache[:batch], self.v_cache[:batch]
        return self._attended(q, caches, self._lengths(batch, new), return_lse)

    def _check_scores(self, batch: int) -> None:
        """Refuse scores before new keys are written, as one launch that does both does."""
        checked_scores(self.window, self.scores["softcap"])
        check_scale(self.scores["softmax_scale"])
        slopes = self.scores["alibi_slopes"]
        if slopes is not None and self.q.dim() > 1:
            check_tensor("alibi_slopes", slopes)
            check_slopes(slopes, self.q, batch, self.q.shape[-2])

    def _batch(self) -> int:
        """How many sequences there are."""
        ends = self.cu_seqlens_q
        if ends is None:
            return len(self.q) if self.q.dim() else 0
        check_tensor("cu_seqlens_q", ends)
        if self.max_seqlen_q is None:
            raise WorkloadError("packed queries come with max_seqlen_q, the most queries of a sequence, got None")
        return max(len(ends) - 1, 0) if ends.dim() else 0

    def _count_new(self, k: Tensor, v: Tensor, batch: int) -> int | Tensor:
        """How many new keys each sequence has: of packed ones int32 (batch,)."""
        if self.cache_seqlens is None:
            raise WorkloadError("new keys go behind cache_seqlens, the keys that the cache has, got None")
        check_tensor("k", k)
        check_tensor("v", v)
        ends = self.cu_seqlens_k_new
        if ends is None:
            return k.shape[1] if k.dim() > 1 else 0
        check_new_keys(
            k,
            v,
            ends,
            self.cache_seqlens,
            batch=batch,
            k_cache=self.k_cache,
            block_table=self.block_table,
            batch_idx=self.cache_batch_idx,
            leftpad=self.cache_leftpad,
        )
        return ends.diff()

    def _check_room(self, new: int | Tensor) -> None:
        """Refuse lengths behind the block table: those of a tensor only where checks may wait for the GPU."""
        table, known = self.block_table, self.cache_seqlens
        if table is None or known is None:
            return
        if table.dim() != 2 or self.k_cache.dim() != 4:
            return
        if isinstance(known, Tensor) or isinstance(new, Tensor):
            if not may_read(self.k_cache):
                return
            after = torch.as_tensor(known + new)
            last = after.argmax() if after.numel() else None
            known, new = (_number_at(last, one) for one in (known, new))
        room = table.shape[1] * self.k_cache.shape[1]
        if known + new > room:
            raise BlockTableError(
                f"cache_seqlens and the new keys fit into the {room} keys that block_table has room for, "
                f"got {known} and {new}"
            )

    def _check_nothing_new(self) -> None:
        if (self.k is None) != (self.v is None):
            raise WorkloadError("new keys k and new values v come together, got one alone")
        named = [name for name in ("rotary_cos", "rotary_sin") if self.rotary.get(name) is not None]
        if named:
            raise WorkloadError(f"rotary embeddings are of new keys k and values v, got {named} without them")

    def _appended(self, q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
        """The queries, rotated if asked for, once the new keys and values are in the cache."""
        is_rotated, is_packed = self.rotary.get("rotary_cos") is not None, self.cu_seqlens_k_new is not None
        is_placed, is_alone = self.scores["causal"] or self.window != (None, None), False
        if is_rotated and (is_packed or self.cu_seqlens_q is not None):
            caches, ends, is_alone = (self.k_cache, self.v_cache), self.cu_seqlens_q, True
            if batch:
                first = self._first(batch)
                q = rotated_queries(q, caches, first, ends=ends, in_order=is_placed, rotary=self.rotary)
        if is_packed:
            self._append_packed(k, v, batch)
            return q
        given: dict[str, Any] = dict(self.rotary)
        if not is_rotated:
            given.pop("rotary_seqlens", None)  # which version 3 takes beside no angles
        elif not is_alone:
            given |= {"q": q, "q_causal": is_placed}
        rotated = flashgen.append_kv(
            k,
            v,
            self.k_cache,
            self.v_cache,
            self.cache_seqlens,
            block_table=self.block_table,
            batch_idx=self.cache_batch_idx,
            leftpad=None if self.block_table is not None else self.cache_leftpad,
            **given,
        )
        return q if rotated is None else rotated

    def _append_packed(self, k: Tensor, v: Tensor, batch: int) -> None:
        if not batch:
            return
        assert self.cache_seqlens is not None
        assert self.cu_seqlens_k_new is not None
        append_packed(
            k,
            v,
            (self.k_cache, self.v_cache),
            self.cu_seqlens_k_new.contiguous(),
            as_lengths(self.cache_seqlens, batch, self.k_cache),
            block_table=self.block_table,
            batch_idx=self.cache_batch_idx,
            first=None if self.rotary.get("rotary_cos") is None else self._first(batch),
            rotary=self.rotary,
        )

    @property
    def _pages(self) -> int:
        """Pages of a sequence; a row of a cache without pages is one."""
        if self.block_table is None:
            return 1
        if self.block_table.dim() != 2:
            raise WorkloadError(f"block_table is (batch, pages), got {tuple(self.block_table.shape)}")
        return self.block_table.shape[1]

    def _first(self, batch: int) -> Tensor:
        """Positions of the first new keys, int32 (batch,)."""
        assert self.cache_seqlens is not None
        cos, given = self.rotary["rotary_cos"], self.rotary.get("rotary_seqlens")
        return first_positions(
            self.cache_seqlens, given, batch=batch, rotary_cos=cos, k_cache=self.k_cache, pages=self._pages
        )

    def _lengths(self, batch: int, new: int | Tensor) -> Tensor:
        """Keys of each sequence with the new ones, int32 (batch,)."""
        known = self.cache_seqlens
        if isinstance(known, Tensor):
            return known if isinstance(new, int) and not new else known + new
        if known is None:
            known = self.k_cache.shape[1] * self._pages
        after = known + new
        return after if isinstance(after, Tensor) else as_lengths(after, batch, self.q)

    def _attended(self, q: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor, return_lse: bool) -> OutAndLse:
        """A call of decoding for few queries, and one of packed sequences for more."""
        if self.block_table is not None and self.cache_leftpad is not None:
            check_leftpad(self.cache_leftpad, lengths, caches[0], is_by_row=False)
            found = pages_behind(*caches, self.block_table, self.cache_leftpad)
            if found is None:
                raise no_pages_in_order(*caches)
            room = self.block_table.shape[1] * caches[0].shape[1]
            lengths = (lengths.clamp(max=room) - self.cache_leftpad).clamp_(min=0)
            behind = replace(self, block_table=found[2], cache_leftpad=None)
            return behind._attended(q, found[:2], lengths, return_lse)
        if self.cu_seqlens_q is None and q.dim() == 4 and 0 < q.shape[1] <= MAX_SEQLEN_Q:
            return self._decoded(q, caches, lengths, return_lse)
        if self.block_table is None and caches[0].dim() > 1:  # what lies behind the slots is another sequence's
            lengths = lengths.clamp(max=caches[0].shape[1])
        keys = packed_keys(
            *caches, lengths, block_table=self.block_table, leftpad=self.cache_leftpad, batch_idx=self.cache_batch_idx
        )
        if self.cu_seqlens_q is not None:
            if keys is None:
                raise no_rows_in_order(*caches)
            return self._packed(q, self.cu_seqlens_q, length_of(self.max_seqlen_q), keys, return_lse)
        if keys is None or q.dim() != 4:
            return self._in_parts(q, caches, lengths, return_lse)
        batch, rows = q.shape[:2]
        ends = first_slots(batch + 1, rows, q)
        out, lse = self._packed(q.flatten(0, 1), ends, rows, keys, return_lse)
        out = out.view(batch, rows, *out.shape[1:])
        return out, lse.view(len(lse), batch, rows).transpose(0, 1) if return_lse else lse

    def _packed(self, q: Tensor, ends: Tensor, longest: int, keys: PackedKeys, return_lse: bool) -> OutAndLse:
        attend: Any = flashgen.attention_varlen  # whose overloads ask for a flag that is known
        named = {**keys.named, **self.scores, "window": self.window, "return_lse": return_lse}
        if keys.is_behind_one:
            ends, slopes = torch.cat([ends.new_zeros(1), ends]), named["alibi_slopes"]
            if slopes is not None and slopes.dim() == 2:  # of each sequence
                named["alibi_slopes"] = torch.cat([slopes[:1], slopes])
        return both(attend(q, keys.k, keys.v, ends, max_seqlen_q=longest, **named))

    def _in_parts(self, q: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor, return_lse: bool) -> OutAndLse:
        """A call of decoding for every `MAX_SEQLEN_Q` queries, where caches do not lie as packed sequences may."""
        rows = q.shape[1]
        causal, leftpad = self.scores["causal"], self.cache_leftpad
        check_parts(rows, self.window, self.scores)
        found = []
        for first in range(0, rows, MAX_SEQLEN_Q):
            some = q[:, first : first + MAX_SEQLEN_Q]
            behind = rows - first - some.shape[1]  # queries that stand behind these, whose keys none of them sees
            seen = (lengths - behind).clamp(min=0) if causal else lengths
            seen = seen if leftpad is None else torch.maximum(seen, leftpad)  # where they see no key
            found.append(self._decoded(some, caches, seen, return_lse))
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2) if return_lse else lses[0]

    def _decoded(self, q: Tensor, caches: tuple[Tensor, Tensor], lengths: Tensor, return_lse: bool) -> OutAndLse:
        attend: Any = flashgen.attention_decode  # whose overloads ask for a flag that is known
        return both(
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


def _copies(given: dict[str, Any]) -> dict[str, Any]:
    """Those of these tensors that had to be copied to lie in order, by name."""
    found = {name: in_order(value) for name, value in given.items()}
    return {name: value for name, value in found.items() if value is not given[name]}


def _number_at(place: Tensor | None, of: int | Tensor) -> int:
    """The number of one sequence; 0 where there is no sequence."""
    if isinstance(of, int):
        return of
    return 0 if place is None else int(of.flatten()[place])
