"""User score functions and block masks on a CPU, through Triton's interpreter, against the formula in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from flashgen.codegen.generated import load_module
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.codegen.render import render_standalone
from flashgen.core.device import find_device
from flashgen.core.errors import BuildError
from flashgen.core.features.values import BlockMask
from flashgen.core.workload import Specialization
from flashgen.runtime.block_mask import block_mask
from flashgen.runtime.ops.mods import score_mods
from tests.interpreter.mods import (
    Formula,
    built,
    causal,
    document,
    indices,
    integers,
    mask_cases,
    of_keys,
    of_query,
    relative,
    tensors,
)
from tests.tiers import EXHAUSTIVE, every, first

SHAPES = [  # batch, nheads, nheads_k, seqlen_q, seqlen_k
    (2, 4, 2, 77, 203),
    (1, 2, 1, 203, 77),
    (1, 2, 2, 256, 300),
    (1, 1, 1, 1, 1),
]
LOADS = ["pointer", "descriptor"]


def aligned_causal(b, h, q_idx, k_idx, offset):
    return k_idx <= q_idx + tl.load(offset)


def alibi(score, b, h, q_idx, k_idx, slopes):
    return score - tl.load(slopes + h) * tl.abs(q_idx - k_idx)


def windowed_alibi(score, b, h, q_idx, k_idx, slopes):
    near = (q_idx - k_idx <= 20) & (k_idx - q_idx <= 9)
    return tl.where(near, score - tl.load(slopes + h) * tl.abs(q_idx - k_idx), float("-inf"))


def numbers(score, b, h, q_idx, k_idx):
    return q_idx - k_idx


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Formula | None = None, mask: Formula | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    keys, values = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q.double() @ keys.mT * q.shape[-1] ** -0.5
    if score is not None:
        scores = score(scores, *indices(q, k)).double().expand_as(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask(*indices(q, k)), -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights @ values, torch.logsumexp(scores, -1)


def run(
    qkv: tuple[torch.Tensor, ...],
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[torch.Tensor, ...] = (),
    blocks: BlockMask | None = None,
    *,
    loads: str = "pointer",
    block_n: int = 32,
    features: dict[str, Any] | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = {torch.float16: "fp16", torch.float32: "fp32"}[qkv[0].dtype]
    spec = Specialization(direction="forward", dtype=dtype, head_dim=16, head_dim_v=16, **(features or {}))
    if score_mod is not None or mask_mod is not None:
        mods = score_mods(score_mod, mask_mod, tuple(tensor.dtype for tensor in aux), blocks is not None)
        spec = replace(spec, mods=mods)
    small = {"block_m": 32, "block_n": block_n, "num_warps": 2, "num_stages": 2, "loads": loads, "products": "ieee"}
    source = render_standalone(spec, PORTABLE_FORWARD.default(spec, find_device("h200")).replace(**small))
    if aux:
        arguments["aux"] = aux
    if blocks is not None:
        arguments["block_mask"] = blocks
    result: tuple[torch.Tensor, torch.Tensor] = getattr(load_module(source), f"{source.entry}_call")(*qkv, **arguments)
    return result


def compare(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    tolerance = {torch.float16: 2e-3, torch.float32: 5e-6}[got[0].dtype]
    torch.testing.assert_close(got[0].double(), expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1].double(), expected[1], atol=1e-3, rtol=1e-5)


MASKS = list(mask_cases(1, 1))
OBLONG = ("causal", "prefix_lm", "by_head")
"""Masks for the first two shapes, whose edges differ, and the first of which has several batch elements.

The others have the last two, with keys behind 250; each half has both kinds of loads.
"""


def in_turn(*others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every mask with its half of the shapes, and what belongs to these."""
    rows = list(zip(SHAPES, *others, strict=True))
    return [(name, *row) for name in MASKS for row in (rows[:2] if name in OBLONG else rows[2:])]


@pytest.mark.parametrize(("name", "shape", "loads"), every(3, in_turn(LOADS * 2)))
def test_a_mask_hides_keys(name: str, shape: tuple[int, ...], loads: str) -> None:
    qkv = tensors(shape)
    mask_mod, aux, formula, _ = mask_cases(*shape[3:])[name]
    got = run(qkv, mask_mod=mask_mod, aux=aux, loads=loads)
    compare(got, dense(*qkv, mask=formula))
    empty = ~formula(*indices(*qkv[:2])).any(-1).expand(got[1].shape)
    assert torch.all(got[1][empty] == -math.inf)
    assert torch.all(got[0][empty] == 0)


@pytest.mark.parametrize(
    ("name", "shape", "loads", "block_n"), every(3, in_turn(["descriptor", "pointer"] * 2, [64, 128, 128, 32]))
)
def test_a_block_mask_changes_nothing(name: str, shape: tuple[int, ...], loads: str, block_n: int) -> None:
    qkv = tensors(shape)
    mask_mod, aux, formula, differ = mask_cases(*shape[3:])[name]
    blocks = built(mask_mod, aux, qkv, differ)
    got = run(qkv, mask_mod=mask_mod, aux=aux, blocks=blocks, loads=loads, block_n=block_n)
    compare(got, dense(*qkv, mask=formula))


@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_the_dense_mask(name: str) -> None:
    shape = (2, 3, 1, 300, 700)
    q, k, v = tensors(shape)
    mask_mod, aux, formula, differ = mask_cases(*shape[3:])[name]
    blocks = built(mask_mod, aux, (q, k, v), differ)
    visible = formula(*indices(q, k)).expand(2, 3, 300, 700)[: 2 if differ else 1, : 3 if differ else 1]
    for place in itertools.product(*(range(size) for size in blocks.full_counts.shape)):
        expected: dict[str, list[int]] = {"full": [], "partial": []}
        for column in range(6):
            block = visible[place[0], place[1], place[2] * 128 :, column * 128 :][:128, :128]
            if block.any():
                expected["full" if block.all() and (column + 1) * 128 <= 700 else "partial"].append(column)
        for kind, listed in expected.items():
            count = int(getattr(blocks, f"{kind}_counts")[place])
            assert getattr(blocks, f"{kind}_indices")[place][:count].tolist() == listed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loads", every(2, LOADS))
def test_a_bias_from_a_table(shape: tuple[int, ...], loads: str) -> None:
    qkv = tensors(shape)
    table = torch.randn(4, 1024, generator=torch.Generator().manual_seed(1))
    wide = table.double()
    expected = dense(*qkv, lambda s, b, h, i, j: s + wide[h, j - i + 512])
    compare(run(qkv, relative, aux=(table,), loads=loads), expected)


@pytest.mark.parametrize(
    ("function", "formula"),
    first(1, [(of_query, lambda s, b, h, i, j: i * 0.01), (numbers, lambda s, b, h, i, j: (i - j).double())]),
)
def test_a_score_of_any_type_and_shape(function: Any, formula: Formula) -> None:
    qkv = tensors(SHAPES[0])
    compare(run(qkv, function), dense(*qkv, formula))


@EXHAUSTIVE
def test_functions_do_what_the_built_in_features_do() -> None:
    shape = SHAPES[0]
    qkv = tensors(shape)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    options = {"alibi_slopes": slopes, "q_offset": 0}
    compare(
        run(qkv, alibi, aux=(slopes,)),
        tuple(one.double() for one in run(qkv, features={"alibi": True}, **options)),  # type: ignore[arg-type]
    )
    window = run(qkv, features={"alibi": True, "window": True}, window=(20, 9), **options)
    compare(run(qkv, windowed_alibi, aux=(slopes,)), tuple(one.double() for one in window))  # type: ignore[arg-type]
    offset = integers(shape[4] - shape[3])
    built_in = run(qkv, features={"causal": True})
    got = run(qkv, mask_mod=aligned_causal, aux=(offset,))
    compare(got, tuple(one.double() for one in built_in))  # type: ignore[arg-type]


@pytest.mark.parametrize("with_blocks", first(1, [True, False]))
def test_functions_go_with_every_feature(with_blocks: bool) -> None:
    """softcap, ALiBi, bias, score_mod in this order; causal, window, mask and mask_mod together; a sink."""
    shape = (2, 4, 2, 150, 203)
    q, k, v = qkv = tensors(shape)
    generator = torch.Generator().manual_seed(2)
    slopes, sinks = 0.02 * torch.rand(4, generator=generator), torch.randn(4, generator=generator)
    bias = torch.randn(1, 4, 150, 208, generator=generator)[..., :203]
    mask = torch.rand(2, 1, 1, 208, generator=generator)[..., :203] > 0.3
    doc = (torch.arange(203) // 60).to(torch.int32)

    def squared(score, b, h, q_idx, k_idx, doc):
        return score * score * 0.1 + h

    blocks = built(document, (doc,), qkv, False) if with_blocks else None
    features = {"causal": True, "window": True, "softcap": True, "alibi": True, "sink": True}
    features |= {"bias": "full", "mask": "keys", "aligned_scores": False}
    given = {"window": (90, None), "softcap": 3.0, "alibi_slopes": slopes, "sinks": sinks, "bias": bias, "mask": mask}
    got = run(qkv, squared, document, (doc,), blocks, features=features, **given, q_offset=7)

    _, h, i, j = indices(q, k)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
    scores = 3 * torch.tanh(scores / 3) - slopes.double()[h] * (i + 7 - j).abs() + bias.double()
    scores = scores * scores * 0.1 + h
    visible = (j <= i + 7) & (j >= i + 7 - 90) & mask & (doc[i] == doc[j])
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(2, 4, 150, 1)], -1), -1)
    weights = torch.exp(scores - lse[..., None])
    compare(got, (weights @ v.double().repeat_interleave(2, 1), lse))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("with_blocks", [False, True])
@pytest.mark.parametrize("loads", first(1, LOADS))
def test_hidden_keys_that_hold_nan_stay_hidden(loads: str, with_blocks: bool) -> None:
    q, k, v = tensors((1, 2, 1, 40, 300))
    keep = torch.arange(300) % 3 == 0
    k[:, :, ~keep] = math.nan
    v[:, :, ~keep] = math.inf
    blocks = built(of_keys, (keep,), (q, k, v), False) if with_blocks else None
    got = run((q, k, v), mask_mod=of_keys, aux=(keep,), blocks=blocks, loads=loads)
    compare(got, dense(q, k[:, :, keep], v[:, :, keep]))


def test_scores_of_minus_infinity_are_hidden() -> None:
    qkv = tensors((1, 1, 1, 40, 100))

    def never(score, b, h, q_idx, k_idx):
        return tl.where((q_idx > 3) & (k_idx > q_idx), score, float("-inf"))

    out, lse = run(qkv, never)
    compare((out, lse), dense(*qkv, mask=lambda b, h, i, j: (i > 3) & (j > i)))
    assert torch.all(out[:, :, :4] == 0)
    assert torch.all(lse[:, :, :4] == -math.inf)


@pytest.mark.parametrize("with_blocks", [False, True])
def test_indices_are_those_of_rows_and_keys(with_blocks: bool) -> None:
    """Loads by index need no checks: past the ends the functions get the last row and key."""
    shape = (1, 2, 2, 77, 203)
    qkv = tensors(shape)

    def checked(b, h, q_idx, k_idx):
        tl.device_assert((q_idx >= 0) & (q_idx < 77))
        tl.device_assert((k_idx >= 0) & (k_idx < 203))
        return k_idx >= 0

    def scores(score, b, h, q_idx, k_idx):
        tl.device_assert((q_idx < 77) & (k_idx < 203))
        return score + h * 0.0

    blocks = built(checked, (), qkv, False) if with_blocks else None
    compare(run(qkv, scores, checked, blocks=blocks), dense(*qkv))


def test_lengths_of_zero_have_lists_of_zero() -> None:
    blocks = block_mask(causal, seqlen_q=0, seqlen_k=300, device="cpu")
    assert blocks.partial_counts.shape == (1, 1, 0)
    blocks = block_mask(causal, seqlen_q=300, seqlen_k=0, device="cpu")
    assert blocks.full_indices.shape == (1, 1, 3, 0)
    assert blocks.full_counts.tolist() == [[[0, 0, 0]]]
    assert blocks.sparsity() == 0.0


def test_a_mask_is_boolean() -> None:
    def wrong(b, h, q_idx, k_idx):
        return q_idx - k_idx

    with pytest.raises(BuildError, match=r"Triton cannot run mask_mod wrong: .*mask_mod returns booleans"):
        block_mask(wrong, seqlen_q=10, seqlen_k=10, device="cpu")
