"""Gradients through the caller's functions on a CPU, through Triton's interpreter, against autograd in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton.language as tl

from flashgen.codegen.family import KernelFamily
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.core.features.values import BlockMask
from flashgen.core.workload import Specialization
from flashgen.runtime.ops.mods import score_mods
from tests.interpreter.backward import TOLERANCE, compare, run
from tests.interpreter.dense import Rules
from tests.interpreter.mods import Formula, built, document, indices, mask_cases, of_keys, of_query, relative, tensors
from tests.tiers import EXHAUSTIVE, every, first, only

FAMILIES = [PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED]
FAMILY = pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.id[18:])
ONE_FAMILY = pytest.mark.parametrize("row", first(1, FAMILIES), ids=lambda row: row.id[18:])
PLAIN = Rules()
ROOM = {"block_m": 16, "block_n": 64, "dq_block_m": 64, "dq_block_n": 16}


def oracle(
    qkv: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    score: Formula | None = None,
    mask: Formula | None = None,
    rules: Rules = PLAIN,
) -> dict[str, torch.Tensor]:
    """out, lse and gradients by autograd of the formula, in float64; keys that no query sees are 0 in it."""
    q, k, v = (one.double() for one in qkv)
    group = q.shape[1] // k.shape[1]
    b, h, i, j = indices(q, k)
    visible = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)
    if mask is not None:
        visible = visible & mask(b, h, i, j)
    distance = i - j + (k.shape[2] - q.shape[2] if rules.q_offset is None else rules.q_offset)
    left, right = rules.window or (None, None)
    right = 0 if rules.causal else right
    visible = visible if left is None else visible & (distance <= left)
    visible = visible if right is None else visible & (distance >= -right)
    visible = visible if rules.mask is None else visible & rules.mask
    unseen = ~visible.any(2).unflatten(1, (k.shape[1], group)).any(2)[..., None]
    bias = None if rules.bias is None else rules.bias.double().requires_grad_()
    leaves = [q.requires_grad_(), *(x.masked_fill(unseen, 0.0).requires_grad_() for x in (k, v))]
    leaves += [bias] if bias is not None else []
    scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if rules.softcap:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.alibi_slopes is not None:
        scores = scores - rules.alibi_slopes.double()[h] * distance.abs()
    scores = scores if bias is None else scores + bias
    scores = scores if score is None else score(scores, b, h, i, j).double().expand_as(scores)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    if rules.sinks is not None:
        lse = torch.logaddexp(lse, rules.sinks.double().view(1, -1, 1))
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    out = weights @ leaves[2].repeat_interleave(group, 1)
    total = (out * dout.double()).sum()
    if dlse is not None:
        total = total + (torch.where(lse == -math.inf, 0.0, lse) * dlse.double()).sum()
    found = torch.autograd.grad(total, leaves)
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv", "dbias"), found, strict=False))


def check(
    row: KernelFamily,
    qkv: tuple[torch.Tensor, ...],
    functions: tuple[Any, Any] = (None, None),
    aux: tuple[torch.Tensor, ...] = (),
    blocks: BlockMask | None = None,
    *,
    score: Formula | None = None,
    mask: Formula | None = None,
    rules: Rules = PLAIN,
    given: tuple[torch.Tensor, ...] | None = None,
    features: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
    **knobs: int | str | bool,
) -> dict[str, torch.Tensor]:
    """Compare every gradient; `given` are the tensors of the kernels where those of the formula are others."""
    dtype, batch = qkv[0].dtype, qkv[0].shape[:3]
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(*batch, 16, generator=generator).to(dtype)
    dlse = torch.randn(batch, generator=generator)
    expected = oracle(qkv, dout, dlse, score, mask, rules)
    name = "fp16" if dtype == torch.float16 else "fp32"
    mods = score_mods(*functions, tuple(one.dtype for one in aux), blocks is not None)
    spec = Specialization(direction="backward", dtype=name, head_dim=16, head_dim_v=16, mods=mods, **(features or {}))
    options: dict[str, Any] = dict(host or {})
    options |= {"aux": aux} if aux else {}
    options |= {"block_mask": blocks} if blocks is not None else {}
    out, lse = expected["out"].to(dtype), expected["lse"].float()
    names = ("dq", "dk", "dv", "neg_delta", "dbias")
    small = {name: value for name, value in ROOM.items() if not (row is PORTABLE_BACKWARD_FUSED and "dq" in name)}
    found = run(row, spec, {**small, **knobs}, *(given or qkv), out, lse, dout, dlse=dlse, **options)
    got = dict(zip(names, found, strict=False))
    compare(got, expected, TOLERANCE[dtype])
    return got


@FAMILY
@pytest.mark.parametrize(
    ("name", "shape", "with_blocks"),
    every(
        2,
        [
            ("document", (1, 2, 1, 77, 203), False),
            ("prefix_lm", (2, 2, 2, 50, 40), False),
            ("by_head", (2, 4, 2, 40, 50), False),
            ("document", (1, 2, 1, 140, 203), True),
            ("by_head", (2, 2, 1, 40, 150), True),
            ("late", (1, 1, 1, 20, 300), True),
            ("causal", (1, 1, 1, 300, 150), True),
        ],
    ),
)
def test_a_mask_hides_keys_from_gradients(
    name: str, shape: tuple[int, ...], with_blocks: bool, row: KernelFamily
) -> None:
    qkv = tensors(shape)
    mask_mod, aux, formula, differ = mask_cases(*shape[3:])[name]
    blocks = built(mask_mod, aux, qkv, differ) if with_blocks else None
    check(
        row, qkv, (None, mask_mod), aux, blocks, mask=formula, loads="descriptor" if name == "document" else "pointer"
    )


def staggered(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return (k_idx >= 128 * h) & (q_idx >= 128 * b)


@ONE_FAMILY
def test_each_sequence_and_head_has_lists_of_its_own(row: KernelFamily) -> None:
    qkv = tensors((2, 2, 1, 140, 300))
    formula: Formula = lambda b, h, i, j: (j >= 128 * h) & (i >= 128 * b)  # noqa: E731
    check(row, qkv, (None, staggered), blocks=built(staggered, (), qkv, True), mask=formula)


@FAMILY
@pytest.mark.parametrize("with_blocks", only([False, True], True))
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_hidden_keys_that_hold_nan_have_no_gradient(row: KernelFamily, with_blocks: bool) -> None:
    q, k, v = qkv = tensors((1, 2, 1, 40, 150))
    keep = torch.arange(150) % 3 == 0
    given = (q, k.masked_fill(~keep[:, None], math.nan), v.masked_fill(~keep[:, None], math.inf))
    blocks = built(of_keys, (keep,), qkv, False) if with_blocks else None
    mask: Formula = lambda b, h, i, j: keep[j]  # noqa: E731
    got = check(row, qkv, (None, of_keys), (keep,), blocks, mask=mask, given=given)
    assert torch.all(got["dk"][:, :, ~keep] == 0)
    assert torch.all(got["dv"][:, :, ~keep] == 0)


@ONE_FAMILY
@pytest.mark.parametrize("with_blocks", first(1, [True, False]))
def test_a_mask_function_goes_with_every_feature(row: KernelFamily, with_blocks: bool) -> None:
    """softcap, ALiBi and a bias under causal, window, mask and mask_mod together; a sink; a learned bias."""
    qkv = tensors((2, 4, 2, 50, 150))
    generator = torch.Generator().manual_seed(2)
    slopes, sinks = 0.02 * torch.rand(4, generator=generator), torch.randn(4, generator=generator)
    rows = 1 if with_blocks else 50  # a full bias has no gradient beside a block mask
    bias = torch.randn(1, 4, rows, 160, generator=generator)[..., :150]
    mask = torch.rand(2, 1, 1, 160, generator=generator)[..., :150] > 0.3
    doc = (torch.arange(150) // 60).to(torch.int32)
    blocks = built(document, (doc,), qkv, False) if with_blocks else None
    rules = Rules(
        causal=True, q_offset=70, window=(90, None), softcap=3.0, alibi_slopes=slopes, sinks=sinks, bias=bias, mask=mask
    )
    features = {"causal": True, "window": True, "softcap": True, "alibi": True, "mask": "keys", "bias_grad": True}
    features |= {"aligned_scores": False, "bias": "keys" if with_blocks else "full"}
    host = {"window": (90, None), "softcap": 3.0, "alibi_slopes": slopes, "bias": bias, "mask": mask}
    host |= {"q_offset": 70}
    formula: Formula = lambda b, h, i, j: doc[i] == doc[j]  # noqa: E731
    check(row, qkv, (None, document), (doc,), blocks, mask=formula, rules=rules, features=features, host=host)


def test_indices_of_backward_passes_are_those_of_rows_and_keys() -> None:
    def checked(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
        tl.device_assert((q_idx >= 0) & (q_idx < 37))
        tl.device_assert((k_idx >= 0) & (k_idx < 53))
        return k_idx >= 0

    for row in FAMILIES:
        check(row, tensors((1, 2, 2, 37, 53)), (None, checked))


@EXHAUSTIVE
def test_two_passes_have_the_same_bits_whatever_blocks_say() -> None:
    qkv = tensors((1, 2, 1, 140, 150))
    mask_mod, aux, formula, _ = mask_cases(140, 150)["document"]
    blocks = built(mask_mod, aux, qkv, False)
    found = [check(FAMILIES[0], qkv, (None, mask_mod), aux, blocks, mask=formula) for _ in range(2)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("dq", "dk", "dv"))


def saturating(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    capped = 4.0 * (2.0 * tl.sigmoid(score) - 1.0)
    capped -= capped / (2.0 + tl.abs(score))
    return tl.where((q_idx - k_idx) % 3 == 0, float("-inf"), capped)


def _saturating(s: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
    capped = 4.0 * torch.tanh(s / 2)
    return torch.where((i - j).fmod(3) == 0, -math.inf, capped - capped / (2.0 + s.abs()))


@FAMILY
@pytest.mark.parametrize("name", ["relative", "saturating", "constant"])
def test_gradients_flow_through_a_score_mod(name: str, row: KernelFamily) -> None:
    qkv = tensors((2, 4, 2, 33, 50))
    table = torch.randn(4, 1024, generator=torch.Generator().manual_seed(5))
    score_mod, aux, formula = {
        "relative": (relative, (table,), lambda s, b, h, i, j: s + table.double()[h, j - i + 512]),
        "saturating": (saturating, (), _saturating),
        "constant": (of_query, (), lambda s, b, h, i, j: 0.0 * s + 0.01 * i),
    }[name]
    check(row, qkv, (score_mod, None), aux, score=formula)


def squared(score, b, h, q_idx, k_idx, doc, slopes):  # type: ignore[no-untyped-def]
    return tl.minimum(score, 1.5) * tl.load(slopes + h) + 0.1 * score * score


def same_document(b, h, q_idx, k_idx, doc, slopes):  # type: ignore[no-untyped-def]
    return tl.load(doc + q_idx) == tl.load(doc + k_idx)


@ONE_FAMILY
@pytest.mark.parametrize("with_blocks", first(1, [True, False]))
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_score_mod_goes_with_masks_and_scores(row: KernelFamily, with_blocks: bool) -> None:
    """Behind a softcap and a learned bias, under causal and mask_mod, where keys of no document hold NaN."""
    q, k, v = qkv = tensors((1, 4, 2, 40, 150))
    generator = torch.Generator().manual_seed(2)
    doc, slopes = (torch.arange(150) // 20).to(torch.int32), torch.rand(4, generator=generator)
    bias = torch.randn(1, 4, 1 if with_blocks else 40, 160, generator=generator)[..., :150]
    unseen = (doc > 1)[:, None]  # the causal mask shows them to some
    given = (q, k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.inf))
    aux = (doc, slopes)
    blocks = built(same_document, aux, qkv, False) if with_blocks else None
    rules = Rules(causal=True, q_offset=20, softcap=3.0, bias=bias)
    features = {"causal": True, "softcap": True, "bias_grad": True, "aligned_scores": False}
    features |= {"bias": "keys" if with_blocks else "full"}
    host = {"softcap": 3.0, "bias": bias, "q_offset": 20}
    check(
        row,
        qkv,
        (squared, same_document),
        aux,
        blocks,
        score=lambda s, b, h, i, j: s.clamp(max=1.5) * slopes.double()[h] + 0.1 * s * s,
        mask=lambda b, h, i, j: doc[i] == doc[j],
        rules=rules,
        given=given,
        features=features,
        host=host,
    )
