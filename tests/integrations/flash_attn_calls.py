"""Tensors of FlashAttention's layouts, caches of every kind, and plain answers in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.interpreter.dense import Rules, attention

B, SQ, SK, H, HK, D, DV = 2, 5, 7, 4, 2, 16, 8
WIDE = torch.float64
Tensor = torch.Tensor


def randn(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=WIDE).requires_grad_(grad)


def plain(q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> tuple[Tensor, Tensor]:
    """Output (batch, seqlen, nheads, head_dim) and LSE of tensors in this order, in float64."""
    out, lse = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), Rules(**rules))
    return out.transpose(1, 2), lse


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


QUERIES, KEYS = (3, 0, 4), (5, 2, 4)


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], keys: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Causal attention of each sequence of its own."""
    parts = zip(q.split(lengths), k.split(keys), v.split(keys), strict=True)
    found = [plain(*(x[None] for x in part), causal=True) for part in parts]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


SLOTS = 24


def caches(kind: str) -> tuple[Tensor, Tensor, dict[str, Any], Callable[[Tensor, int], Tensor]]:
    """K and V, the arguments that say which rows they are in, and what finds the slots of a sequence."""
    if kind == "pages":
        table = torch.tensor([[3, 1, 6], [0, 5, 2]], dtype=torch.int32)
        k, v = (randn(7, 8, HK, width) for width in (D, DV))
        return k, v, {"block_table": table}, lambda cache, b: cache[table[b].long()].flatten(0, 1)
    if kind == "batch_idx":
        k, v = (randn(4, SLOTS, HK, width) for width in (D, DV))
        rows = torch.tensor([2, 0], dtype=torch.int32)
        return k, v, {"cache_batch_idx": rows}, lambda cache, b: cache[int(rows[b])]
    k, v = (randn(B + 1, SLOTS, HK, width) for width in (D, DV))  # a row more than sequences
    given = {"cache_leftpad": torch.tensor([1, 0], dtype=torch.int32)} if kind == "leftpad" else {}
    return k, v, given, lambda cache, b: cache[b]


def long_caches(kind: str, slots: int) -> tuple[Tensor, Tensor, dict[str, Any], Callable[[Tensor, int], Tensor]]:
    """As `caches` has them, K and V of one width and of many more slots, which hold NaN."""
    if kind == "pages":
        table = torch.tensor([[3, 1, 6, 2], [0, 5, 4, 7]], dtype=torch.int32)
        k, v = torch.full((2, 8, slots // 4, HK, D), math.nan, dtype=WIDE)
        return *seeded(k, v), {"block_table": table}, lambda cache, b: cache[table[b].long()].flatten(0, 1)
    if kind == "batch_idx":
        rows = torch.tensor([2, 0], dtype=torch.int32)
        k, v = torch.full((2, 4, slots, HK, D), math.nan, dtype=WIDE)
        return *seeded(k, v), {"cache_batch_idx": rows}, lambda cache, b: cache[int(rows[b])]
    shape = {"heads first": (2, B, HK, slots, D), "halves": (B, 2, slots, HK, D)}.get(kind, (2, B + 1, slots, HK, D))
    k, v = torch.full(shape, math.nan, dtype=WIDE).unbind(1 if kind == "halves" else 0)
    k, v = (x.transpose(1, 2) if kind == "heads first" else x for x in (k, v))
    return *seeded(k, v), {}, lambda cache, b: cache[b]


def seeded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The first 9 slots of each row, or all of each page of 8, filled with numbers."""
    for seed, tensor in enumerate(tensors):
        tensor[:, :9] = randn(*tensor[:, :9].shape, seed=seed)
    return tensors
