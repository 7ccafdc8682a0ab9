"""`append_kv` in plain torch."""

from __future__ import annotations

from typing import Any, overload

import torch

from flashgen.core.checks import whole_number
from flashgen.core.errors import UnsupportedError
from flashgen.reference.stand_ins import stand_in
from flashgen.runtime.argument_types import check_types
from flashgen.runtime.ops.append_rules import AppendArguments, check, check_apart, check_memory

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
    """`flashgen.append_kv` in plain torch on any device; a token without a place is left out here, too.

    Args:
        k: new keys as in `flashgen.append_kv`, float64 as well, on any device.
        v: new values.
        k_cache: where keys go, in place.
        v_cache: where values go, in place.
        seqlens: and all others as there.
        block_table: as there.
        slot_mapping: as there.
        batch_idx: as there.
        leftpad: as there.
        rotary_cos: as there; products are computed in float64 and rounded once.
        rotary_sin: as there.
        rotary_interleaved: as there.
        rotary_seqlens: as there.
        q: as there.
        q_causal: as there.

    Returns:
        The rotated queries, a new tensor, where q is given; else None.

    Raises:
        WorkloadError: shapes, dtypes, strides or arguments break a rule of `flashgen.append_kv`.
        UnsupportedError: a gradient is asked for, as the kernel has none.
    """
    named = locals()
    check_types({name: value for name, value in named.items() if name != "q" or value is not None})
    if torch.is_grad_enabled() and any(
        isinstance(one, Tensor) and one.requires_grad for one in (k, v, k_cache, v_cache, q, rotary_cos, rotary_sin)
    ):
        raise UnsupportedError("append_kv has no gradient: call it under torch.no_grad() or inference_mode()")
    lengths, seqlen = (seqlens, None) if isinstance(seqlens, Tensor) else (None, seqlens)
    if seqlen is not None:
        seqlen = whole_number("seqlens, where it is no tensor,", seqlen, 0)
    tables = (block_table, slot_mapping, batch_idx, leftpad, rotary_cos, rotary_sin, rotary_seqlens)
    given = AppendArguments(k, v, k_cache, v_cache, lengths, seqlen, *tables, rotary_interleaved, q, q_causal)
    check(_small(given))
    check_memory(given)
    check_apart(given)
    angles = None if rotary_cos is None else _first_positions(given)
    _write(given, k if angles is None else _rotated(given, k, angles, in_order=True))
    if q is None or angles is None:
        return None
    return _rotated(given, q, angles, in_order=q_causal)


def _small(given: AppendArguments) -> AppendArguments:
    names = ("k", "v", "k_cache", "v_cache", "q", "rotary_cos", "rotary_sin")
    changes: dict[str, Any] = {name: stand_in(getattr(given, name), torch.float32) for name in names}
    return given._replace(**changes)


def _lengths(given: AppendArguments) -> Tensor:
    """Keys of each sequence before, int64 (batch,)."""
    if given.seqlens is not None:
        return given.seqlens.long()
    return torch.full((given.batch,), given.seqlen or 0, device=given.k.device)


def _first_positions(given: AppendArguments) -> Tensor:
    """The position of the first new token of each sequence, int64 (batch,)."""
    return _lengths(given) if given.rotary_seqlens is None else given.rotary_seqlens.long()


def _rotated(given: AppendArguments, x: Tensor, first: Tensor, *, in_order: bool) -> Tensor:
    """Rows (batch, tokens, heads, head_dim), or packed ones, turned by the angles of their positions."""
    cos, sin = given.rotary_cos, given.rotary_sin
    assert cos is not None
    assert sin is not None
    whole = x if x.dim() == 4 else x[None]
    steps = torch.arange(whole.shape[1], device=x.device) * int(in_order)
    place = (first.clamp(max=len(cos))[:, None] + steps).clamp(0, len(cos) - 1)
    one, two = (table.double()[place][:, :, None] for table in (cos, sin))
    width = 2 * cos.shape[1]
    turned, rest = whole[..., :width].double(), whole[..., width:]
    if given.rotary_interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        found = torch.stack([a * one - b * two, a * two + b * one], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        found = torch.cat([a * one - b * two, a * two + b * one], -1)
    return torch.cat([found.to(x.dtype), rest], -1).view(x.shape)


def _write(given: AppendArguments, k: Tensor) -> None:
    """Write the keys, and the values of the call, where their tokens have a place."""
    block, slot, has_place = _places(given)
    for new, cache in ((k, given.k_cache), (given.v, given.v_cache)):
        tokens = new.reshape(-1, *new.shape[-2:])[: len(block)]
        cache[block[has_place], slot[has_place]] = tokens[has_place]


def _places(given: AppendArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Block and slot of each token, flat, and whether it has them."""
    rows, size = given.k_cache.shape[:2]
    if given.slot_mapping is not None:
        place = given.slot_mapping.flatten()
        has_place = (place >= 0) & (place < rows * size)
        place = torch.where(has_place, place, 0)
        return place // max(size, 1), place % max(size, 1), has_place
    first = _lengths(given)[:, None]
    position = first + torch.arange(given.seqlen_new, device=given.k.device)
    has_place = (first >= 0) & (position < given.capacity)
    position = torch.where(has_place, position, 0)
    if given.block_table is None:
        row = torch.arange(given.batch, device=position.device) if given.batch_idx is None else given.batch_idx.long()
        block, slot = row[:, None].expand_as(position), position
    elif not given.num_pages:
        block, slot = torch.zeros_like(position), position
    else:
        block, slot = given.block_table.long().gather(1, position // size), position % size
    has_place = has_place & (block >= 0) & (block < rows)
    return block.flatten(), slot.flatten(), has_place.flatten()
