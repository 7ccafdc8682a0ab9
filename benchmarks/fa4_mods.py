"""Functions on scores and masks for FlashAttention-4, in its CuTe DSL: importing this module imports the DSL.

Each gives the arguments of its `flash_attn_func`. Two neighbouring keys of a row come at a time where a function says
so; the queries, keys and heads of its indices are those of the call, also where heads of a group are packed.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

cutlass: Any = importlib.import_module("cutlass")
cute: Any = importlib.import_module("cutlass.cute")
mlir_math: Any = importlib.import_module("cutlass._mlir.dialects.math")
utils: Any = importlib.import_module("flash_attn.cute.utils")

ROOM = 256
"""Rows: more than any tile has."""

PAIRS = 2
"""Keys at a time: the most that its kernels for Hopper hand to a function."""


def alibi(slopes: torch.Tensor, offset: int) -> dict[str, Any]:
    """Minus the slope of a head times the distance; `offset` is the position of the first query among the keys."""

    def minus_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        slope = cutlass.Float32(aux_tensors[0][h[0]])
        steps = q_idx + offset - kv_idx
        distance = cute.TensorSSA(mlir_math.absi(steps), steps.shape, steps.dtype)
        return score - distance.to(cutlass.Float32) * slope

    return {"score_mod": _paired(minus_distance), "aux_tensors": [slopes.float()]}


def bias(values: torch.Tensor) -> dict[str, Any]:
    """Plus a tensor (batch, nheads, seqlen_q, seqlen_k), broadcast by strides of 0; two halves are read as one word."""
    words = values.element_size() == 2 and values.stride(-1) == 1 and _has_pairs(values)
    element = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}.get(values.dtype)

    def plus_pair(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        word = cute.make_rmem_tensor(1, cutlass.Int32)
        word[0] = aux_tensors[0][b[0], h[0], q_idx[0], kv_idx[0] // 2]
        return score + cute.recast_tensor(word, element).load().to(cutlass.Float32)

    def plus_one(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        found = utils.scalar_to_ssa(aux_tensors[0][b[0], h[0], q_idx[0], kv_idx[0]], cutlass.Float32)
        return score + found

    if words:
        return {"score_mod": _paired(plus_pair), "aux_tensors": [values.view(torch.int32)]}
    return {"score_mod": cute.jit(plus_one), "aux_tensors": [values]}


def mask(visible: torch.Tensor) -> dict[str, Any]:
    """A boolean tensor (batch, seqlen_q, seqlen_k), or (batch, seqlen_k) where all queries see the same keys."""

    def of_score(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        seen = utils.scalar_to_ssa(aux_tensors[0][b[0], q_idx[0], kv_idx[0]], cutlass.Int32)
        return seen != utils.scalar_to_ssa(0, cutlass.Int32)

    def of_key(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        seen = utils.scalar_to_ssa(aux_tensors[0][b[0], kv_idx[0]], cutlass.Int32)
        return seen != utils.scalar_to_ssa(0, cutlass.Int32)

    function = of_score if visible.dim() == 3 else of_key
    return {"mask_mod": cute.jit(function), "aux_tensors": [visible.view(torch.uint8)]}


def alibi_without_offset(slopes: torch.Tensor) -> dict[str, Any]:
    """`alibi` of as many queries as keys."""
    return alibi(slopes, 0)


def relative(table: torch.Tensor) -> dict[str, Any]:
    """Plus the value of a head and a distance, (nheads, distances), of which 0 is in the middle."""
    middle = table.shape[1] // 2

    def plus_value(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        place = kv_idx[0] - q_idx[0] + middle
        return score + utils.scalar_to_ssa(aux_tensors[0][h[0], place], cutlass.Float32)

    return {"score_mod": cute.jit(plus_value), "aux_tensors": [table]}


def documents(ids: torch.Tensor) -> dict[str, Any]:
    """Keys of the query's own document, (seqlen,) int32."""

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        mine = utils.scalar_to_ssa(aux_tensors[0][q_idx[0]], cutlass.Int32)
        return mine == utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)

    return {"mask_mod": cute.jit(same), "aux_tensors": [_with_room(ids)]}


def causal_documents(ids: torch.Tensor) -> dict[str, Any]:
    """Those of them that are not behind the query."""

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        mine = utils.scalar_to_ssa(aux_tensors[0][q_idx[0]], cutlass.Int32)
        theirs = utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)
        return (mine == theirs) & (q_idx >= kv_idx)

    return {"mask_mod": cute.jit(same), "aux_tensors": [_with_room(ids)]}


def prefix_lm(prefix: torch.Tensor) -> dict[str, Any]:
    """Keys of a sequence's prefix, (batch,) int32, and those that are not behind the query."""

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return (q_idx >= kv_idx) | (kv_idx < utils.scalar_to_ssa(aux_tensors[0][b[0]], cutlass.Int32))

    return {"mask_mod": cute.jit(seen), "aux_tensors": [prefix]}


def _with_room(ids: torch.Tensor) -> torch.Tensor:
    """With entries behind the last row, which the last tile of rows may read."""
    return torch.nn.functional.pad(ids, (0, ROOM), value=-1)


def _paired(function: Any) -> Any:
    compiled = cute.jit(function)
    compiled.__vec_size__ = PAIRS
    return compiled


def _has_pairs(values: torch.Tensor) -> bool:
    """Whether every row is a whole number of aligned words."""
    even = all(stride % PAIRS == 0 for stride in values.stride()[:-1])
    return even and values.shape[-1] % PAIRS == 0 and values.storage_offset() % PAIRS == 0
