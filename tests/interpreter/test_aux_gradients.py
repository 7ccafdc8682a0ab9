"""Gradients of the tensors that a caller's score_mod loads from, through Triton's interpreter, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from flashgen.codegen.family import KernelFamily
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.core.workload import Specialization
from flashgen.runtime.ops.mods import score_mods
from tests.interpreter.backward import run
from tests.interpreter.mods import built, indices, tensors
from tests.interpreter.packed import differentiated, gradient_of
from tests.packing import Case, make, reference
from tests.tiers import every

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of rows that do not count

Tensor = torch.Tensor
SPAN = 100
FAMILY = pytest.mark.parametrize("row", [PORTABLE_BACKWARD_SPLIT, PORTABLE_BACKWARD_FUSED], ids=lambda row: row.id[18:])


def relative(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score + tl.load(table + h * 200 + k_idx - q_idx + 100)


def relative_formula(s: Any, b: Any, h: Any, i: Any, j: Any, table: Tensor) -> Any:
    return s + table[h, j - i + SPAN]


def everything(score, b, h, q_idx, k_idx, slopes, ids, rows, keys):  # type: ignore[no-untyped-def]
    place = keys + 3 * tl.load(ids + k_idx)
    place += 1
    near = tl.load(place, mask=k_idx > q_idx, other=0.5)
    bent = tl.exp(0.5 * tl.load(slopes + h)) * score
    return tl.where(near > 0.4, bent + tl.load(rows + q_idx) * near, tl.maximum(bent, near.to(tl.float32)))


def everything_formula(
    s: Any, b: Any, h: Any, i: Any, j: Any, slopes: Tensor, ids: Tensor, rows: Tensor, keys: Tensor
) -> Any:
    near = torch.where(j > i, keys[3 * ids[j] + 1], 0.5)
    bent = torch.exp(0.5 * slopes[h]) * s
    return torch.where(near > 0.4, bent + rows[i] * near, torch.maximum(bent, near))


def gradients(
    qkv: tuple[Tensor, ...], dout: Tensor, formula: Any, aux: tuple[Tensor, ...], causal: bool, mask: Any = None
) -> list[Tensor]:
    """Of the tensors with a gradient, by autograd in float64."""
    q, k, v = (one.double() for one in qkv)
    group = q.shape[1] // k.shape[1]
    leaves = [one.double().requires_grad_() if one.is_floating_point() else one.long() for one in aux]
    b, h, i, j = indices(q, k)
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    s = formula(s, b, h, i, j, *leaves).expand_as(s)
    hidden = (j > i + k.shape[2] - q.shape[2]) & torch.tensor(causal)
    hidden = hidden if mask is None else hidden | ~mask(b, h, i, j)
    out = torch.softmax(s.masked_fill(hidden, -math.inf), -1).nan_to_num() @ v.repeat_interleave(group, 1)
    return list(torch.autograd.grad((out * dout.double()).sum(), [one for one in leaves if one.requires_grad]))


def aux_of(name: str, nheads: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if name == "relative":
        return relative, relative_formula, (random(nheads, 2 * SPAN),)
    ids = torch.arange(90, dtype=torch.int32) % 7
    return everything, everything_formula, (random(nheads), ids, random(90), random(24))


def forward(qkv: tuple[Tensor, ...], formula: Any, aux: tuple[Tensor, ...], causal: bool, mask: Any) -> Any:
    q, k, v = (one.double() for one in qkv)
    group = q.shape[1] // k.shape[1]
    b, h, i, j = indices(q, k)
    given = [one.double() if one.is_floating_point() else one.long() for one in aux]
    s = formula(q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5, b, h, i, j, *given)
    hidden = (j > i + k.shape[2] - q.shape[2]) & torch.tensor(causal)
    hidden = hidden if mask is None else hidden | ~mask(b, h, i, j)
    s = s.expand(*q.shape[:3], k.shape[2]).masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(s, -1)
    out = torch.softmax(s, -1).nan_to_num() @ v.repeat_interleave(group, 1)
    return out.to(qkv[0].dtype), lse.float()


@pytest.mark.parametrize(
    ("row", "name", "shape", "causal", "blocks"),
    [
        (PORTABLE_BACKWARD_SPLIT, "relative", (2, 4, 2, 37, 50), True, False),
        (PORTABLE_BACKWARD_FUSED, "relative", (2, 4, 2, 37, 50), True, False),
        (PORTABLE_BACKWARD_SPLIT, "everything", (1, 2, 1, 50, 77), False, False),
        (PORTABLE_BACKWARD_FUSED, "everything", (1, 2, 1, 50, 77), False, False),
        (PORTABLE_BACKWARD_FUSED, "relative", (1, 2, 1, 50, 77), False, True),
    ],
)
def test_what_is_loaded_gets_the_sum_of_its_scores(
    row: KernelFamily, name: str, shape: tuple[int, ...], causal: bool, blocks: bool
) -> None:
    qkv, (function, formula, aux) = tensors(shape), aux_of(name, shape[1])
    mask = (lambda b, h, i, j: (i // 20 == j // 20).expand(1, 1, *shape[3:])) if blocks else None
    mask_mod = nearby if blocks else None
    learned = tuple(n for n, one in enumerate(aux) if one.is_floating_point())
    dout = torch.randn(*qkv[0].shape, generator=torch.Generator().manual_seed(3))
    out, lse = forward(qkv, formula, aux, causal, mask)
    mods = replace(score_mods(function, mask_mod, tuple(one.dtype for one in aux), blocks), aux_grads=learned)
    spec = Specialization(direction="backward", dtype="fp32", head_dim=16, head_dim_v=16, causal=causal, mods=mods)
    knobs: dict[str, Any] = {"block_m": 16, "block_n": 32}
    options: dict[str, Any] = {"block_mask": built(nearby, aux, qkv, False)} if blocks else {}
    given = [one.clone() for one in qkv]
    for one in given[1:] if blocks else ():
        one[:, :, 60:] = math.nan  # keys that no query sees
    _, _, _, _, *found = run(row, spec, knobs, *given, out, lse, dout, aux=aux, **options)
    for right, got in zip(gradients(qkv, dout, formula, aux, causal, mask), found, strict=True):
        torch.testing.assert_close(got.double(), right, atol=2e-5 * max(1.0, float(right.abs().max())), rtol=0)


def nearby(b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return q_idx // 20 == k_idx // 20


@FAMILY
@pytest.mark.parametrize("loads", every(2, ["pointer", "descriptor"]))
def test_packed_sequences_add_to_one_sum_and_rows_that_do_not_count_add_nothing(row: KernelFamily, loads: str) -> None:
    table = torch.randn(4, 2 * SPAN, generator=torch.Generator().manual_seed(1))
    case = Case(queries=(20, 0, 33, 7), keys=(33, 4, 40, 0), used_q=(15, 0, 33, 7), used_k=(30, 4, 40, 0), spare=5)
    packed = make(replace(case, dtype=torch.float32, options={"causal": True}))
    packed.named.update(score_mod=relative, aux=(table,))
    sums = torch.zeros_like(table)
    differentiated(packed, row.id, sums=(sums,), loads=loads)
    leaf = table.double().requires_grad_()
    named = packed.named | {"score_mod": lambda s, b, h, i, j: relative_formula(s, b, h, i, j, leaf)}
    dout, total = gradient_of(packed, torch.empty(*packed.q.shape[:2], 32)), torch.zeros((), dtype=torch.float64)
    for b, queries, keys in packed.sequences():
        k, v = (one[keys].double().repeat_interleave(2, 1) for one in (packed.k, packed.v))
        out, _ = reference(packed.q[queries].double(), k, v, b, named)
        total = total + (out * dout[queries].double()).sum()
    (right,) = torch.autograd.grad(total, leaf)
    assert float(right.abs().max()) > 0.1
    torch.testing.assert_close(sums.double(), right, atol=2e-5 * float(right.abs().max()), rtol=0)
