"""FlashAttention's rotary embeddings of queries and keys, in plain torch: on any device, computed in float32.

Column i of the first half of `rotary_dim` turns with column i of the second, or with `interleaved` even columns with
the odd ones beside them. Columns behind `rotary_dim`, and positions behind the last row of a table, stay as they are.
New keys of a cache are better rotated by the kernel that appends them: `flash_attn_with_kvcache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flashgen.core.errors import WorkloadError
from flashgen.integrations.flash_attention import heads_behind
from flashgen.runtime.argument_types import check_tensor

Tensor = torch.Tensor
Turn = tuple[Tensor, Tensor]
"""Cosines and sines, (positions, rotary_dim / 2)."""


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first `rotary_dim` columns of queries or keys, each by its position.

    Args:
        x: (batch, seqlen, nheads, head_dim), or with `cu_seqlens` (total, nheads, head_dim).
        cos: (positions, rotary_dim / 2).
        sin: likewise.
        interleaved: pairs of columns are (0, 1), (2, 3) and so on, else i and i + rotary_dim / 2.
        inplace: write into x, and return it; autograd takes x for what it was rotated from.
        seqlen_offsets: the position of the first row of each sequence, int32 (batch,), or one for all.
        cu_seqlens: where packed sequences begin, and where the last one ends, int32 (batch + 1,).
        max_seqlen: without effect.

    Returns:
        The rotated tensor, with a gradient for x.

    Raises:
        WorkloadError: shapes break a rule.
    """
    check_tensor("x", x)
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank:
        raise WorkloadError(
            f"x is {'(batch, seqlen, nheads, head_dim)' if rank == 4 else '(total, nheads, head_dim) with cu_seqlens'}"
            f", got {tuple(x.shape)}"
        )
    _check_turn(x, cos, sin)
    places = _positions(x, seqlen_offsets, cu_seqlens)
    found: Tensor = _Rotated.apply(x, [...], [(cos, sin)], places, interleaved, inplace)  # type: ignore[no-untyped-call]
    return found


apply_rotary_emb_func = apply_rotary_emb
"""The same by its former name."""


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of a tensor with q, k and v, in place.

    Args:
        qkv: (batch, seqlen, 3, nheads, head_dim), or (batch, seqlen, nheads + 2 * nheads_k, head_dim).
        cos: as of `apply_rotary_emb`.
        sin: likewise.
        cos_k: those of k, where they are others.
        sin_k: likewise.
        interleaved: as there.
        seqlen_offsets: as there.
        num_heads_q: heads of q, where qkv has four dimensions.

    Returns:
        `qkv`, with a gradient.

    Raises:
        WorkloadError: shapes break a rule.
    """
    check_tensor("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        parts: list[Any] = [(slice(None), slice(None), 0), (slice(None), slice(None), 1)]
    elif qkv.dim() == 4 and num_heads_q is not None:
        last = num_heads_q + heads_behind(num_heads_q, qkv)
        parts = [(slice(None), slice(None), slice(*both)) for both in ((0, num_heads_q), (num_heads_q, last))]
    else:
        raise WorkloadError(
            "qkv is (batch, seqlen, 3, nheads, head_dim), or with num_heads_q (batch, seqlen, nheads + 2 * nheads_k, "
            f"head_dim), got {tuple(qkv.shape)} and num_heads_q {num_heads_q}"
        )
    turns = [(cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)]
    return _in_place(qkv, parts, turns, seqlen_offsets, interleaved)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of a tensor with k and v, (batch, seqlen, 2, nheads, head_dim), in place.

    As `apply_rotary_emb`, whose arguments these are.

    Raises:
        WorkloadError: shapes break a rule.
    """
    check_tensor("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise WorkloadError(f"kv is (batch, seqlen, 2, nheads, head_dim), got {tuple(kv.shape)}")
    return _in_place(kv, [(slice(None), slice(None), 0)], [(cos, sin)], seqlen_offsets, interleaved)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """FlashAttention's definition: `apply_rotary_emb` in the dtype of its arguments, differentiable in all of them.

    `cos` and `sin` are (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
    """
    width = 2 * cos.shape[-1]
    if interleaved:
        cos, sin = (table.repeat_interleave(2, -1)[..., None, :] for table in (cos, sin))
        turned = torch.stack((-x[..., 1:width:2], x[..., :width:2]), -1).flatten(-2)
    else:
        cos, sin = (table.repeat(*[1] * (table.dim() - 1), 2)[..., None, :] for table in (cos, sin))
        turned = torch.cat((-x[..., width // 2 : width], x[..., : width // 2]), -1)
    return torch.cat((x[..., :width] * cos + turned * sin, x[..., width:]), -1)


def _in_place(
    whole: Tensor, parts: Sequence[Any], turns: Sequence[Turn], offsets: int | Tensor, interleaved: bool
) -> Tensor:
    for turn in turns:
        _check_turn(whole, *turn)
    places = _positions(whole, offsets, None)
    found: Tensor = _Rotated.apply(whole, parts, turns, places, interleaved, True)  # type: ignore[no-untyped-call]
    return found


def _check_turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_tensor("cos", cos)
    check_tensor("sin", sin)
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise WorkloadError(
            f"cos and sin are (positions, rotary_dim / 2), and rotary_dim is at most head_dim, {x.shape[-1]}, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each row: (seqlen,), (batch, seqlen) or (total,)."""
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=x.device)
        return rows + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    rows = torch.arange(len(x), device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1], rows, right=True)
    more = offsets[sequence] if isinstance(offsets, Tensor) else offsets
    return rows - cu_seqlens[sequence] + more


class _Rotated(torch.autograd.Function):
    """Parts of a tensor, each turned by its own cosines and sines; backwards the same by the opposite angles.

    As FlashAttention's, it does not tell autograd what it writes in place, so that a leaf may be.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parts: Sequence[Any],
        turns: Sequence[Turn],
        places: Tensor,
        interleaved: bool,
        inplace: bool,
    ) -> Tensor:
        ctx.save_for_backward(places, *(table for turn in turns for table in turn))
        ctx.others = parts, interleaved
        out = x if inplace else x.clone()
        for part, (cos, sin) in zip(parts, turns, strict=True):
            _turn_(out[part], _at(cos, places, 1.0), _at(sin, places, 0.0), interleaved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        places, *tables = ctx.saved_tensors
        parts, interleaved = ctx.others
        dx = dout.clone()
        for part, cos, sin in zip(parts, tables[::2], tables[1::2], strict=True):
            _turn_(dx[part], _at(cos, places, 1.0), -_at(sin, places, 0.0), interleaved)
        return dx, None, None, None, None, None


def _at(table: Tensor, places: Tensor, beyond: float) -> Tensor:
    """Rows of a table at positions, for every head the same; `beyond` where it has none."""
    rows = table[places.clamp(0, max(len(table) - 1, 0))].to(torch.promote_types(table.dtype, torch.float32))
    return rows.masked_fill((places >= len(table))[..., None], beyond)[..., None, :]


def _turn_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turn pairs of columns of x in place."""
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    pair = x[..., first], x[..., second]
    one, two = (column.to(torch.promote_types(x.dtype, torch.float32)) for column in pair)
    turned = one * cos - two * sin, one * sin + two * cos
    for column, new in zip(pair, turned, strict=True):
        column.copy_(new)
