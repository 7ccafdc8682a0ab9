"""New keys and queries of packed sequences over a cache: where each goes, and by which angles it is rotated.

What ends and lengths say is computed on the device: nothing is copied to the host, and a CUDA graph may hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

import flashgen
from flashgen.core.checks import whole_number
from flashgen.core.errors import WorkloadError
from flashgen.core.settings import settings
from flashgen.integrations.cached_rows import check_numbers
from flashgen.runtime.argument_types import check_tensor
from flashgen.runtime.ops.contents import refuse

Tensor = torch.Tensor

ANGLES = ("rotary_cos", "rotary_sin", "rotary_interleaved")


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Tokens by the ends of their sequences, of which there is one at least."""

    sequence: Tensor
    """Whose each is, int64 (tokens,); any one for a token outside of all ends."""
    place: Tensor
    """How many tokens of the sequence stand in front of it, int64 (tokens,)."""
    is_of_one: Tensor
    """Whether it is of a sequence at all, bool (tokens,)."""

    @classmethod
    def between(cls, ends: Tensor, count: int) -> PackedTokens:
        """The first `count` tokens, of sequences with these ends, int32 (batch + 1,)."""
        token = torch.arange(count, dtype=torch.int32, device=ends.device)
        found = torch.searchsorted(ends[1:], token, right=True)
        sequence = found.clamp(max=len(ends) - 2)
        place = token.long() - ends[sequence]
        return cls(sequence, place, (found == sequence) & (place >= 0))

    def positions(self, first: Tensor) -> Tensor:
        """Positions behind those of the first tokens of sequences, int64 (tokens,); 0 of those of none."""
        return (first[self.sequence] + self.place).masked_fill_(~self.is_of_one, 0)

    def slots(self, known: Tensor, cache: Tensor, block_table: Tensor | None, batch_idx: Tensor | None) -> Tensor:
        """Slots behind the known keys as a `slot_mapping` has them, int64 (tokens,).

        A token without a place has one that is negative, or past a cache that has no such row or page.
        """
        size = cache.shape[1]
        capacity = size * (1 if block_table is None else block_table.shape[1])
        if not capacity:
            return torch.full_like(self.place, -1)
        position = known[self.sequence] + self.place
        has_place = self.is_of_one & (known[self.sequence] >= 0) & (position < capacity)
        position = position.masked_fill(~has_place, 0)
        if block_table is not None:
            block = block_table[self.sequence, position // size].long()
        else:
            block = self.sequence if batch_idx is None else batch_idx[self.sequence].long()
        return (block * size + position % size).masked_fill_(~has_place, -1)


def check_new_keys(
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    known: Tensor | int,
    *,
    batch: int,
    k_cache: Tensor,
    block_table: Tensor | None,
    batch_idx: Tensor | None,
    leftpad: Tensor | None,
) -> None:
    """Refuse packed new keys, and what says where they go, in a wrong shape or dtype, before anything is written.

    Raises:
        WorkloadError: one is.
    """
    if k.dim() != 3 or v.dim() != 3 or len(k) != len(v):
        raise WorkloadError(
            "with cu_seqlens_k_new k is (total_k_new, nheads_k, head_dim), and v the same with head_dim_v, got "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k_cache.dim() != 4:
        raise WorkloadError(
            f"k_cache is (rows, slots, nheads_k, head_dim) or (pages, page_size, ..), got {tuple(k_cache.shape)}"
        )
    device = k_cache.device
    check_numbers("cu_seqlens_k_new", ends, (batch + 1,), device, "where each sequence begins, and where the last ends")
    check_numbers("cache_batch_idx", batch_idx, (batch,), device)
    check_numbers("cache_leftpad", leftpad, (batch,), device)
    pages = 1
    if block_table is not None:
        pages = block_table.shape[-1] if block_table.dim() else 0
        check_numbers("the block table", block_table, (batch, pages), device, "the pages of each sequence")
    elif batch_idx is None and len(k_cache) < batch:
        raise WorkloadError(
            "a cache without pages has a row for each sequence, or a cache_batch_idx, got "
            f"{len(k_cache)} rows for batch {batch}"
        )
    if isinstance(known, Tensor):
        check_numbers("cache_seqlens", known, (batch,), device)
    else:
        whole_number("cache_seqlens, where it is no tensor,", known, 0, k_cache.shape[1] * pages)


def append_packed(
    k: Tensor,
    v: Tensor,
    caches: tuple[Tensor, Tensor],
    ends: Tensor,
    known: Tensor,
    *,
    block_table: Tensor | None,
    batch_idx: Tensor | None,
    first: Tensor | None,
    rotary: dict[str, Any],
) -> None:
    """Write packed new keys and values behind the known keys of their sequences, which `check_new_keys` has seen.

    Args:
        k: (total_k_new, nheads_k, head_dim).
        v: the same with head_dim_v.
        caches: K and V.
        ends: of the sequences among the tokens, int32 (batch + 1,).
        known: keys of each sequence before, int32 (batch,).
        block_table: pages of each sequence, int32 (batch, pages).
        batch_idx: the row of each sequence, int32 (batch,).
        first: the position of the first new key of each, int32 (batch,); None rotates nothing.
        rotary: the arguments of rotation.

    Raises:
        WorkloadError: a rule of `append_kv` is broken; with FLASHGEN_CHECKS=1 also: a token has no slot.
    """
    tokens = PackedTokens.between(ends, len(k))
    slots = tokens.slots(known, caches[0], block_table, batch_idx)
    if may_read(k):
        refuse(ends > len(k), f"cu_seqlens_k_new is at most {len(k)}, the tokens of k", ends, "entry")
        refuse(ends.diff() < 0, "cu_seqlens_k_new never falls: a sequence has at least 0 new keys", ends.diff())
        rule = "new keys go to positions of the cache that the sequence has a slot for"
        refuse(tokens.is_of_one & (slots < 0), rule, tokens.positions(known), "token")
    given = {name: rotary[name] for name in ANGLES}
    if first is not None:
        given["rotary_seqlens"] = _within_int32(tokens.positions(first), -1, len(rotary["rotary_cos"]))
    # sequences of one token, so that each has a position of its own
    flashgen.append_kv(k[:, None], v[:, None], *caches, slot_mapping=slots, **given)


def rotated_queries(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    first: Tensor,
    *,
    ends: Tensor | None,
    in_order: bool,
    rotary: dict[str, Any],
) -> Tensor:
    """Queries (batch, seqlen_q, ..), or packed ones with `ends`, by the kernel that rotates them beside new keys.

    Args:
        q: the queries.
        caches: K and V, for their shapes: nothing is written.
        first: the position of the first new key of each sequence, int32 (batch,).
        ends: of packed sequences, int32 (batch + 1,).
        in_order: query i is i positions behind the first new key; False rotates all by that one.
        rotary: the arguments of rotation.

    Raises:
        WorkloadError: a shape or dtype breaks a rule.
    """
    whole = q
    if ends is not None:
        check_numbers("cu_seqlens_q", ends, (len(first) + 1,), q.device, "where each begins, and where the last ends")
        tokens = PackedTokens.between(ends.contiguous(), len(q))
        at = tokens.positions(first) if in_order else first[tokens.sequence]
        whole, first = q[:, None], _within_int32(at, 0, len(rotary["rotary_cos"]) - 1)
    k, v = (q.new_empty(len(whole), 0, *cache.shape[2:]) for cache in caches)
    slots = torch.empty(0, dtype=torch.int64, device=q.device)
    given = {name: rotary[name] for name in ANGLES} | {"rotary_seqlens": first.contiguous(), "q_causal": in_order}
    turned: Tensor = flashgen.append_kv(k, v, *caches, slot_mapping=slots, q=whole, **given)
    return turned if ends is None else turned[:, 0]


def first_positions(
    known: Tensor | int, given: Tensor | None, *, batch: int, rotary_cos: Tensor, k_cache: Tensor, pages: int
) -> Tensor:
    """Positions of the first new keys, int32 (batch,): those given, or behind all keys that a cache has.

    Raises:
        WorkloadError: they are not one number for each sequence, or the tables may end before the cache does.
    """
    check_tensor("rotary_cos", rotary_cos)
    if given is not None:
        check_numbers("rotary_seqlens", given, (batch,), k_cache.device)
        return given
    capacity, positions = k_cache.shape[1] * pages, rotary_cos.shape[0] if rotary_cos.dim() else 0
    if positions < capacity:
        raise WorkloadError(
            "rotary_cos and rotary_sin have a position for each slot of a sequence, or rotary_seqlens say which are "
            f"meant, got {positions} positions and {capacity} slots"
        )
    return as_lengths(known, batch, k_cache)


def as_lengths(known: Tensor | int, batch: int, cache: Tensor) -> Tensor:
    """Lengths as one for each sequence, int32 (batch,).

    Raises:
        WorkloadError: they are a tensor of something else, or no length.
    """
    if not isinstance(known, Tensor):
        known = whole_number("cache_seqlens, where it is no tensor,", known, 0)
        return torch.full((batch,), known, dtype=torch.int32, device=cache.device)
    check_numbers("cache_seqlens", known, (batch,), cache.device)
    return known


def may_read(tensor: Tensor) -> bool:
    """Whether checks may wait for the device, to see what lengths hold; never while torch.compile traces."""
    if is_dynamo_compiling():
        return False
    return settings().checks and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _within_int32(positions: Tensor, least: int, most: int) -> Tensor:
    return positions.clamp_(least, most).int()
