"""Backward kernels in Gluon, whole, on a modelled machine: gradients against float64, no deadlock."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.codegen.common_order import ALL_HEADS
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.hopper_backward.family import HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
from flashgen.core.config import KnobValue
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.runtime.ops.gradients import sink_gradient
from tests.codegen.backward_machine import launched
from tests.packing import Case, Packed, assert_gradients, checked, gradients, make, oracle, reference
from tests.tiers import every

FUSED, SPLIT = HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT


def differentiated(packed: Packed, row: KernelFamily, changes: dict[str, KnobValue]) -> None:
    """Compare the gradients of packed sequences with float64; rows that do not count hold NaN."""
    problem = checked(packed)
    out, lse = oracle(packed)
    draw = torch.Generator().manual_seed(9)
    dout = torch.randn(out.shape, generator=draw)
    dlse = torch.randn(lse.shape, generator=draw)
    counts = torch.zeros(len(out), dtype=torch.bool)
    for b, queries, _ in packed.sequences():
        counts[queries] = b not in packed.case.poison
        if b in packed.case.poison:
            out[queries], lse[:, queries] = math.nan, math.nan
    dout[~counts], dlse[:, ~counts] = math.nan, math.nan
    right = gradients(packed, dout.to(packed.q.dtype), dlse)
    rows = {"q": packed.q, "k": packed.k, "v": packed.v, "o": out.to(packed.q.dtype), "do": dout.to(packed.q.dtype)}
    tensors = {name: x.transpose(0, 1)[None] for name, x in rows.items()}
    tensors |= {"lse": lse.float()[None].contiguous(), "dlse": dlse[None]}
    spec = replace(problem.spec, direction="backward", sink=False)
    assert problem.features is not None
    found = launched(row, spec, changes, tensors, problem.features)
    neg_delta = found.pop("neg_delta")
    found = {name: x[0].transpose(0, 1) for name, x in found.items()}
    if problem.spec.sink:
        found["sinks"] = sink_gradient(packed.named["sinks"], tensors["lse"], neg_delta)
    neg_delta = neg_delta[0]
    assert_gradients(packed, found, right)
    expected = (dlse - (out * dout.to(packed.q.dtype).double()).sum(-1).T).float()
    torch.testing.assert_close(neg_delta[:, counts], expected[:, counts], atol=0.05, rtol=0.02)
    unused = torch.ones(len(out), dtype=torch.bool)
    for _, queries, _ in packed.sequences():
        unused[queries] = False
    assert not neg_delta[:, unused].any()


def every_third(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    """A mask that differs by sequence and head."""
    return (q_idx + k_idx + b + h) % 3 != 0


def bent(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    """A score that is no multiple of itself."""
    return score * score * 0.2 - 0.01 * (q_idx - k_idx) * (h + b)


TOGETHER: dict[str, KnobValue] = {"stagger_warpgroups": False}
AHEAD: dict[str, KnobValue] = {"qk_prefetch": True, "accumulator_init": "interleaved"}
ONE_EACH: dict[str, KnobValue] = {"persistent": False}
HEADS: dict[str, Any] = {"nheads": 2, "nheads_k": 1, "head_dim": 64, "dtype": torch.bfloat16}

TILES: dict[str, KnobValue] = {"dq_conversion": "tiles", "block_m": 128}
SOME_HEADS: dict[str, KnobValue] = {"heads_per_tile": 2}
ALL_KEYS: dict[str, KnobValue] = {"dq_conversion": "none"}
WHOLE: dict[str, KnobValue] = {"split_d": False}
Dense = tuple[KernelFamily, str, tuple[int, int], dict[str, KnobValue]]

DENSE: dict[str, Dense] = {
    "fused, tiles convert": (FUSED, "bf16-d64", (130, 300), TILES),
    "fused, tiles convert behind those of all heads": (
        FUSED,
        "bf16-d64-causal",
        (130, 300),
        TILES | {"heads_per_group": ALL_HEADS},
    ),
    "split, all heads in one group": (SPLIT, "bf16-d96-causal", (300, 200), {"heads_per_group": ALL_HEADS}),
    "fused": (FUSED, "bf16-d64-window", (130, 200), TOGETHER | ONE_EACH),
    "split": (SPLIT, "bf16-d64-causal", (130, 160), {}),
    "fused, some heads a tile": (FUSED, "bf16-d64-causal", (70, 200), SOME_HEADS),
    "fused, shared queries": (FUSED, "bf16-d64-causal", (200, 300), {"query_shares": 2, "block_m": 64}),
    "fused, shared queries of some heads": (FUSED, "bf16-d64", (330, 130), {"query_shares": 4, "heads_per_tile": 2}),
    "fused, more shares than blocks": (FUSED, "bf16-d128-causal", (70, 200), {"query_shares": 4, "persistent": False}),
    "fused, one head a tile": (FUSED, "bf16-d64", (70, 130), {"heads_per_tile": 1, "persistent": False}),
    "fused, all keys in a tile": (FUSED, "bf16-d64", (200, 77), ALL_KEYS),
    "fused, all keys and queries of a head without one": (
        FUSED,
        "bf16-d64-causal",
        (300, 100),
        ALL_KEYS | {"block_m": 64},
    ),
    "fused, all keys in step": (FUSED, "bf16-d128-causal", (70, 128), ALL_KEYS | TOGETHER | ONE_EACH),
    "fused, all keys of scores ahead": (FUSED, "bf16-d40", (260, 5), ALL_KEYS | AHEAD),
    "fused, all keys and shared queries of some heads": (
        FUSED,
        "bf16-d64",
        (330, 100),
        ALL_KEYS | SOME_HEADS | {"query_shares": 4},
    ),
    "fused, all keys and more shares than blocks": (
        FUSED,
        "bf16-d96-causal",
        (70, 128),
        ALL_KEYS | {"query_shares": 4},
    ),
    "split, some heads a tile": (SPLIT, "bf16-d64-window", (70, 130), SOME_HEADS),
    "wide, some heads a tile": (SPLIT, "bf16-d192-dv256-causal", (70, 70), SOME_HEADS | WHOLE),
    "split, shared queries": (SPLIT, "bf16-d64-causal", (300, 200), {"query_shares": 2}),
    "split, more shares than blocks": (SPLIT, "bf16-d128", (130, 130), {"query_shares": 4, "persistent": False}),
    "wide, shared queries": (SPLIT, "bf16-d256-causal", (130, 130), {"query_shares": 2}),
    "wide, shared queries of some heads": (SPLIT, "bf16-d192", (70, 70), SOME_HEADS | WHOLE | {"query_shares": 2}),
    "wide, more shares than blocks": (SPLIT, "bf16-d256-causal", (70, 130), {"query_shares": 4}),
    "wide, in parts": (SPLIT, "bf16-d192-causal", (130, 200), {}),
    "wide, heads of values in parts": (SPLIT, "bf16-d256-dv136-window", (70, 130), ONE_EACH),
    "wide, other heads in parts": (SPLIT, "bf16-d160-dv128", (70, 130), {}),
    "wide, whole": (SPLIT, "bf16-d192-causal", (130, 200), WHOLE),
}


@pytest.mark.parametrize("name", every(3, DENSE))
def test_dense_gradients_are_right(name: str) -> None:
    row, key, (queries, keys), changes = DENSE[name]
    spec = Specialization.parse(f"bwd-{key}")
    draw = torch.Generator().manual_seed(1)
    # where a tile has two heads of a group, the last one of the group has one
    heads, heads_k = (6, 2) if changes.get("heads_per_tile") else (2, 1)
    shapes = {"q": (2, heads, queries), "k": (2, heads_k, keys), "v": (2, heads_k, keys), "do": (2, heads, queries)}
    columns = {"v": spec.head_dim_v, "do": spec.head_dim_v}
    tensors = {
        name: torch.randn((*shape, columns.get(name, spec.head_dim)), generator=draw).bfloat16()
        for name, shape in shapes.items()
    }
    named: dict[str, Any] = {"causal": spec.causal} | ({"window": (100, 30)} if spec.window else {})
    given = {name: tensors[name].double().requires_grad_() for name in "qkv"}
    whole = {name: x if name == "q" else x.repeat_interleave(heads // heads_k, 1) for name, x in given.items()}
    answers = [reference(*(whole[name][b].transpose(0, 1) for name in "qkv"), b, named) for b in range(2)]
    out, lse = (torch.stack([answer[i] for answer in answers]) for i in range(2))
    dlse = torch.randn(lse.shape, generator=draw).where(lse > -math.inf, torch.zeros(()))
    total = (out.transpose(1, 2) * tensors["do"].double()).sum() + (lse.where(lse > -math.inf, 0.0) * dlse).sum()
    right = dict(zip("qkv", torch.autograd.grad(total, list(given.values())), strict=True))
    tensors |= {"o": out.detach().transpose(1, 2).bfloat16(), "lse": lse.detach().float(), "dlse": dlse.float()}
    features = Features(window=(100, 30)) if spec.window else Features()
    found = launched(row, spec, changes, tensors, features)
    for gradient, expected in right.items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(found[gradient].double(), expected, atol=0.02 * scale, rtol=0.02)


PACKED: dict[str, tuple[KernelFamily, Case, dict[str, KnobValue]]] = {
    "full": (FUSED, Case(queries=(130, 0, 7, 128), spare=130, poison=(2,), **HEADS), AHEAD),
    "causal": (
        FUSED,
        Case(queries=(70, 200, 1, 0), keys=(300, 5, 129, 9), options={"causal": True}, **HEADS),
        {"heads_per_group": 2, "block_m": 64},
    ),
    "used": (
        FUSED,
        Case(queries=(200, 3, 90), used_q=(130, 0, 90), used_k=(64, 3, 65), spare=1, sinks=True, **HEADS),
        {"heads_per_group": 2, "block_m": 64, **TOGETHER},
    ),
    "window": (
        FUSED,
        Case(queries=(260, 9), keys=(300, 40), options={"window": (100, 30)}, poison=(1,), **HEADS),
        {"heads_per_group": 4},
    ),
    "split": (
        SPLIT,
        Case(
            queries=(140, 0, 60, 260),
            keys=(40, 90, 130, 300),
            used_q=(140, 0, 60, 120),
            spare=140,
            poison=(2,),
            options={"causal": True},
            **HEADS,
        ),
        {"heads_per_group": 2},
    ),
    "fused, some heads a tile": (
        FUSED,
        Case(
            queries=(70, 200, 1, 0),
            keys=(130, 5, 129, 9),
            used_k=(130, 5, 60, 0),
            spare=20,
            options={"causal": True},
            **HEADS | {"nheads": 6, "nheads_k": 2},
        ),
        SOME_HEADS,
    ),
    "split, one head a tile": (
        SPLIT,
        Case(queries=(70, 3), keys=(40, 190), options={"window": (60, 10)}, poison=(1,), **HEADS),
        {"heads_per_tile": 1},
    ),
    "wide, one head a tile": (
        SPLIT,
        Case(queries=(70, 30), keys=(20, 65), **HEADS | {"head_dim": 192, "head_dim_v": 256}),
        {"heads_per_tile": 1} | WHOLE,
    ),
    "wide": (SPLIT, Case(queries=(70, 30), keys=(20, 65), **HEADS | {"head_dim": 192, "head_dim_v": 256}), {}),
    "wide, in parts": (
        SPLIT,
        Case(queries=(70, 30), keys=(20, 65), options={"causal": True}, **HEADS | {"head_dim": 192}),
        {},
    ),
    "softcap and slopes": (
        FUSED,
        Case(
            queries=(70, 200, 1, 0),
            keys=(130, 5, 129, 9),
            spare=130,  # a tile of keys that no sequence has, and so no slope
            poison=(1,),
            alibi="own",
            options={"causal": True, "softcap": 2.0},
            **HEADS,
        ),
        {"heads_per_group": 2},
    ),
    "split, slopes and functions": (
        SPLIT,
        Case(
            queries=(70, 0, 140),
            used_k=(60, 0, 131),
            spare=130,
            alibi="own",
            mod=every_third,
            score_mod=bent,
            **HEADS,
        ),
        {"block_m": 64},
    ),
    "functions": (
        FUSED,
        Case(queries=(130, 0, 7, 128), spare=130, poison=(2,), mod=every_third, score_mod=bent, **HEADS),
        {},
    ),
}


@pytest.mark.parametrize(
    "name",
    every(2, PACKED),
)
def test_gradients_of_packed_sequences_are_right(name: str) -> None:
    row, case, changes = PACKED[name]
    differentiated(make(case), row, changes)
