"""Backward passes whose scores features and functions change, and their gradients in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashgen.codegen.family import KernelFamily
from flashgen.codegen.hopper_backward.family import HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
from flashgen.core.config import KnobValue
from flashgen.core.features.values import BlockMask, Features
from flashgen.core.score_mods import MASK_BLOCK, ScoreMods, UserFunction
from flashgen.core.workload import Specialization
from flashgen.runtime.block_mask import _listed

FUSED, SPLIT = HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
Tensor = torch.Tensor


def function(source: str) -> UserFunction:
    return UserFunction(name=source[4 : source.index("(")], source=source)


DOCUMENTS = function(
    "def documents(b, h, q_idx, k_idx, ids):\n"
    "    return (tl.load(ids + q_idx) == tl.load(ids + k_idx)) & (k_idx <= q_idx + 40)\n"
)
BY_HEAD = function("def by_head(b, h, q_idx, k_idx):\n    return (q_idx >= k_idx + 150 * h) & (b < 1)\n")
SQUARED = function(
    "def squared(score, b, h, q_idx, k_idx, ids):\n"
    "    near = tl.abs(q_idx - k_idx) + tl.load(ids + k_idx) + h\n"
    "    return tl.where(k_idx == 3, float('-inf'), score * score * 0.2 - 0.05 * near)\n"
)
RAISED, LOWERED = (
    function(f"def shifted(score, b, h, q_idx, k_idx, ids):\n    return score + {shift:.1f}\n") for shift in (200, -200)
)
"""Weights of products of 0, as those beyond the ends are, overflow: beside no LSE, and beside one of -200."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call, and what of it is compiled in."""

    key: str
    row: KernelFamily = FUSED
    sizes: tuple[int, int] = (130, 200)
    heads: tuple[int, int] = (2, 1)
    changes: dict[str, KnobValue] = field(default_factory=dict)
    softcap: float | None = None
    alibi: bool = False
    hides_keys: str = ""
    mods: ScoreMods | None = None
    blocks: str = ""
    raised: int = 0
    """What score_mod, then `RAISED` or `LOWERED`, adds to all scores, which changes the LSE alone."""


def ids_of(keys: int) -> Tensor:
    return torch.arange(keys, dtype=torch.int32) // 60


def shown(case: Case, queries: int, keys: int) -> Tensor:
    """Which scores functions leave visible, by batch and head."""
    q, k = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    found = torch.ones(2, case.heads[0], queries, keys, dtype=torch.bool)
    if case.mods and case.mods.mask_mod == DOCUMENTS:
        ids = ids_of(max(queries, keys))
        found &= (ids[q] == ids[k]) & (k <= q + 40)
    if case.mods and case.mods.mask_mod == BY_HEAD:
        found &= torch.stack([q >= k + 150 * h for h in range(case.heads[0])])
        found[1] = False
    if case.mods and case.mods.score_mod == SQUARED:
        found[..., 3] = False
    return found


def scored(case: Case, s: Tensor) -> Tensor:
    if not (case.mods and case.mods.score_mod):
        return s
    if case.raised:
        return s + case.raised
    q, k, h = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])[None, :], torch.arange(s.shape[1])
    return s * s * 0.2 - 0.05 * ((q - k).abs() + ids_of(max(s.shape[2:]))[k] + h[:, None, None])


def listed(case: Case, visible: Tensor) -> BlockMask:
    """The lists of blocks of visible scores, with numbers of no block behind the end of each."""
    queries, keys = case.sizes
    rows, columns = -(-queries // MASK_BLOCK), -(-keys // MASK_BLOCK)
    padded = torch.zeros(*visible.shape[:2], rows * MASK_BLOCK, columns * MASK_BLOCK, dtype=torch.bool)
    padded[..., :queries, :keys] = visible
    seen = padded.view(*visible.shape[:2], rows, MASK_BLOCK, columns, MASK_BLOCK).sum((3, 5))
    if case.blocks == "shared":
        seen = seen[:1, :1]
    assert case.mods is not None
    found = _listed(seen.int(), queries, keys, case.mods)
    poisoned: dict[str, Tensor] = {}
    for name in ("partial", "full", "q_partial", "q_full"):
        counts, indices = getattr(found, f"{name}_counts"), getattr(found, f"{name}_indices")
        behind = torch.arange(indices.shape[-1]) >= counts[..., None]
        poisoned[f"{name}_indices"] = indices.masked_fill(behind, 1 << 20)
    return replace(found, **poisoned)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A case at random values: what of keys and values nobody sees is not finite."""

    spec: Specialization
    tensors: dict[str, Tensor]
    features: Features
    right: dict[str, Tensor]

    def assert_right(self, found: dict[str, Tensor]) -> None:
        """Compare gradients of q, k and v with those in float64, by their largest."""
        for name, expected in self.right.items():
            scale = float(expected.abs().max())
            torch.testing.assert_close(
                found[name].double().cpu(), expected.nan_to_num(), atol=0.02 * scale, rtol=0.02, msg=name
            )


def problem(case: Case) -> Problem:
    """The tensors of a call, on the CPU, and what is right."""
    (queries, keys), (heads, heads_k) = case.sizes, case.heads
    spec = replace(Specialization.parse(f"bwd-{case.key}"), mods=case.mods)
    draw = torch.Generator().manual_seed(1)
    dtype = torch.float16 if spec.dtype == "fp16" else torch.bfloat16
    shapes = {"q": (heads, queries), "k": (heads_k, keys), "v": (heads_k, keys), "do": (heads, queries)}
    columns = {"v": spec.head_dim_v, "do": spec.head_dim_v}
    tensors = {
        name: torch.randn((2, *shape, columns.get(name, spec.head_dim)), generator=draw).to(dtype)
        for name, shape in shapes.items()
    }
    slopes = torch.rand(2, heads, generator=draw) * 0.1 if case.alibi else None
    mask = torch.rand(2, heads if case.hides_keys == "heads" else 1, 1, keys, generator=draw) < 0.8
    mask[0, 0, :, 64:192] = False
    if not spec.aligned_scores:
        mask = mask.repeat_interleave(3, -1)[..., ::3]  # strided along the keys
    visible = shown(case, queries, keys)
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    seen = visible & mask if case.hides_keys else visible.clone()
    if spec.causal or spec.window:
        seen &= key <= place + (0 if spec.causal else 30)
    if spec.window:
        seen &= key >= place - 100
    given = {name: tensors[name].double().requires_grad_() for name in "qkv"}
    k, v = (given[name].repeat_interleave(heads // heads_k, 1) for name in "kv")
    s = given["q"] @ k.mT * spec.head_dim**-0.5
    s = case.softcap * torch.tanh(s / case.softcap) if case.softcap else s
    s = s - slopes.double()[..., None, None] * (place - key).abs() if slopes is not None else s
    s = scored(case, s).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.where(lse > -math.inf, 0.0)[..., None])
    out = p @ v
    dlse = torch.randn(lse.shape, generator=draw).where(lse > -math.inf, torch.zeros(()))
    total = (out * tensors["do"].double()).sum() + (lse.where(lse > -math.inf, 0.0) * dlse).sum()
    right = dict(zip("qkv", torch.autograd.grad(total, list(given.values())), strict=True))
    # what nobody sees may hold anything
    unseen = ~seen.view(2, heads_k, -1, queries, keys).any(2).any(2)
    tensors["k"][unseen], tensors["v"][unseen] = math.nan, math.inf
    tensors |= {"o": out.detach().to(dtype), "lse": lse.detach().float(), "dlse": dlse.float()}
    named: dict[str, Any] = {"window": (100, None if spec.causal else 30)} if spec.window else {}
    named |= {"mask": mask.expand(2, heads, queries, keys)} if case.hides_keys else {}
    named |= {"aux": (ids_of(max(queries, keys)),)} if case.mods and case.mods.aux else {}
    named |= {"block_mask": listed(case, visible)} if case.blocks else {}
    features = Features(softcap=case.softcap, alibi_slopes=slopes, **named)
    return Problem(spec=spec, tensors=tensors, features=features, right=right)
