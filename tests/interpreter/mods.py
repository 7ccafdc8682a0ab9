"""User functions of scores and masks, for kernels and as formulas of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from flashgen.core.features.values import BlockMask
from flashgen.runtime.block_mask import block_mask

Formula = Callable[..., torch.Tensor]


def causal(b, h, q_idx, k_idx):
    return k_idx <= q_idx


def document(b, h, q_idx, k_idx, doc):
    return tl.load(doc + q_idx) == tl.load(doc + k_idx)


def prefix_lm(b, h, q_idx, k_idx, prefix):
    return (k_idx <= q_idx) | (k_idx < tl.load(prefix + b))


def by_head(b, h, q_idx, k_idx):
    return (k_idx % (h + 2) != 0) & (k_idx >= 3 * b)


def of_keys(b, h, q_idx, k_idx, keep):
    return tl.load(keep + k_idx)


def late(b, h, q_idx, k_idx):
    return k_idx >= 250


def relative(score, b, h, q_idx, k_idx, table):
    return score + tl.load(table + h * 1024 + k_idx - q_idx + 512)


def of_query(score, b, h, q_idx, k_idx):
    return q_idx * 0.01


def indices(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sizes = (*q.shape[:3], k.shape[2])
    return tuple(torch.arange(size).view([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate(sizes))


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    batch, nheads, nheads_k, seqlen_q, seqlen_k = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = ((nheads, seqlen_q, 16), (nheads_k, seqlen_k, 16), (nheads_k, seqlen_k, 16))
    return tuple(torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mask_cases(seqlen_q: int, seqlen_k: int) -> dict[str, tuple[Any, tuple[torch.Tensor, ...], Formula, bool]]:
    """For each name: the function, its tensors, the same for torch, and whether batches or heads differ."""
    length = max(seqlen_q, seqlen_k)
    doc = (torch.arange(length) * 5 // length).to(torch.int32)
    prefix = integers(30, 150)
    keep = torch.arange(seqlen_k) % 7 < 3
    return {
        "causal": (causal, (), lambda b, h, i, j: j <= i, False),
        "document": (document, (doc,), lambda b, h, i, j: doc[i] == doc[j], False),
        "prefix_lm": (prefix_lm, (prefix,), lambda b, h, i, j: (j <= i) | (j < prefix[b]), True),
        "by_head": (by_head, (), lambda b, h, i, j: (j % (h + 2) != 0) & (j >= 3 * b), True),
        "of_keys": (of_keys, (keep,), lambda b, h, i, j: keep[j], False),
        "late": (late, (), lambda b, h, i, j: j >= 250, False),
    }


def built(mask_mod: Any, aux: tuple[torch.Tensor, ...], qkv: tuple[torch.Tensor, ...], differ: bool) -> BlockMask:
    heads = qkv[0].shape[:2] if differ else (None, None)
    lengths = {"seqlen_q": qkv[0].shape[2], "seqlen_k": qkv[1].shape[2]}
    return block_mask(mask_mod, *heads, **lengths, aux=aux, device="cpu")
