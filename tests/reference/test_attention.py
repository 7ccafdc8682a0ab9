"""`flashgen.reference.attention`: every rule against torch's own attention or written down by hand, and gradients."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

import flashgen
from flashgen import reference
from flashgen.core.errors import FlashgenError, UnsupportedError, WorkloadError
from flashgen.core.features.values import BlockMask
from tests.interpreter import dense

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 16, 8
Tensor = torch.Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, H, SQ, D), (B, HK, SK, D), (B, HK, SK, DV))
    q, k, v = (randn(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize("name", reference.__all__)
def test_signatures_are_those_of_the_kernels_calls(name: str) -> None:
    mine, theirs = (inspect.signature(getattr(module, name)) for module in (reference, flashgen))
    found, expected = (
        [
            (one.name, one.kind, one.default, str(one.annotation).replace("torch.", ""))
            for one in each.parameters.values()
        ]
        for each in (mine, theirs)
    )
    assert found == expected
    assert str(mine.return_annotation).replace("torch.", "") == str(theirs.return_annotation).replace("torch.", "")


@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "float"}], ids=str)
def test_it_is_torchs_attention(given: dict[str, Any]) -> None:
    q, k, v = qkv()
    mine: dict[str, Any] = {"causal": True, "q_offset": 0} if "is_causal" in given else {}
    if given.get("attn_mask") == "bool":
        mask = randn(B, 1, SQ, SK, seed=5) > -0.5
        given, mine = {"attn_mask": mask}, {"mask": mask}
    elif given.get("attn_mask") == "float":
        bias = randn(1, H, SQ, SK, seed=5)
        given, mine = {"attn_mask": bias}, {"bias": bias}
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3, **given)
    torch.testing.assert_close(reference.attention(q, k, v, softmax_scale=0.3, **mine), expected)


RULES: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "q_offset": -2},
    {"causal": True, "q_offset": torch.tensor([1, -9], dtype=torch.int32)},
    {"window": (2, 1), "softcap": 1.5},
    {"window": (None, 0), "q_offset": 3},
    {"window": (3, None), "causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": (0, 0), "q_offset": 6},
    {"alibi_slopes": torch.rand(B, H, generator=torch.Generator().manual_seed(1)), "mask": torch.eye(SQ, SK).bool()},
]


@pytest.mark.parametrize("rules", RULES, ids=" ".join)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_it_is_what_the_interpreters_tests_write_down(rules: dict[str, Any], layout: str) -> None:
    q, k, v = qkv()
    if "mask" not in rules:
        hidden = dense.unseen_keys(q, k, dense.Rules(**rules))
        k, v = (x.masked_fill(hidden, math.nan) for x in (k, v))  # what no query sees may hold anything
    given = [x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v)]
    out, lse = reference.attention(*given, **rules, layout=layout, return_lse=True)
    expected, sums = dense.attention(q, k, v, dense.Rules(**rules))
    torch.testing.assert_close(out.transpose(1, 2) if layout == "bshd" else out, expected)
    torch.testing.assert_close(lse, sums)


def test_half_precision_is_rounded_once() -> None:
    exact = reference.attention(*qkv(torch.bfloat16), causal=True, return_lse=True)
    wide = reference.attention(*(x.double() for x in qkv(torch.bfloat16)), causal=True, return_lse=True)
    assert [x.dtype for x in exact] == [torch.bfloat16, torch.float32]
    assert torch.equal(exact[0], wide[0].bfloat16())
    assert torch.equal(exact[1], wide[1].float())


def test_every_gradient_is_that_of_differences() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor, slopes: Tensor) -> Any:
        given = {"sinks": sinks, "bias": bias, "alibi_slopes": slopes}
        return reference.attention(q, k, v, window=(2, 1), q_offset=4, softcap=2.0, return_lse=True, **given)

    leaves = (*(x[:1, :, :3] for x in qkv()), randn(H), randn(3, 3), randn(H).abs())
    assert torch.autograd.gradcheck(call, [leaf.clone().requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transforms_of_torch_func_see_through_it(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    bias = randn(1, H, SQ, SK, seed=5, dtype=dtype)

    def loss(q: Tensor, bias: Tensor) -> Tensor:
        return reference.attention(q, k, v, causal=True, bias=bias).square().sum()

    leaves = [each.clone().requires_grad_() for each in (q, bias)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(q, bias), expected)
    both = torch.func.vmap(loss, in_dims=(0, None))(torch.stack([q, 2 * q]), bias)
    torch.testing.assert_close(both, torch.stack([loss(q, bias), loss(2 * q, bias)]))


def test_a_row_that_sees_no_key_is_zero_and_has_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse = reference.attention(q, k, v, causal=True, q_offset=-3, return_lse=True)
    assert not out[:, :, :3].any()
    assert (lse[:, :, :3] == -math.inf).all()
    out.sum().backward()
    assert q.grad is not None
    assert not q.grad[:, :, :3].any()
    assert torch.isfinite(q.grad).all()
    empty = reference.attention(q, k[:, :, :0], v[:, :, :0])
    assert empty.shape == (B, H, SQ, DV)
    assert not empty.any()


def score(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    shift = tl.load(table + k_idx, mask=k_idx < 6, other=-1.0)
    shift //= 1
    if h == 1:
        score = score * 2
    return tl.where((q_idx - k_idx) % 3 == -2 or not (b < 1), score + shift, score)


def visible(b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return (tl.maximum(q_idx, 2) >= k_idx - b) & ((q_idx - k_idx) // 2 > -2)


def test_functions_mean_what_they_mean_in_a_kernel() -> None:
    q, k, v = qkv()
    table = randn(SK, dtype=torch.float32)
    found = reference.attention(q, k, v, score_mod=score, mask_mod=visible, aux=(table,))
    b, h, i, j = (
        torch.arange(size).view([-1 if axis == n else 1 for axis in range(4)]) for n, size in enumerate((B, H, SQ, SK))
    )
    s = q @ k.repeat_interleave(H // HK, 1).mT * D**-0.5
    s = torch.where(h == 1, 2 * s, s)
    shift = torch.where(torch.arange(SK) < 6, table.trunc(), -1.0)
    s = torch.where((torch.fmod(i - j, 3) == -2) | (b != 0), s + shift, s)
    seen = (i.clamp(min=2) >= j - b) & (torch.div(i - j, 2, rounding_mode="trunc") > -2)
    expected = s.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num() @ v.repeat_interleave(H // HK, 1)
    torch.testing.assert_close(found, expected)


def everything(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return k_idx >= 0


def special(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return tl.dot(score, score)


def beyond(b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return tl.load(table + k_idx) > 0


def test_functions_that_torch_cannot_evaluate_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"got tl\.dot"):
        reference.attention(*qkv(), score_mod=special)
    with pytest.raises(WorkloadError, match="a place beyond"):
        reference.attention(*qkv(), mask_mod=beyond, aux=(torch.ones(3),))


def test_blocks_that_a_block_mask_does_not_list_are_hidden() -> None:
    q, k, v = (randn(1, 1, 200, 16, seed=seed) for seed in range(3))
    counts, indices = torch.tensor([[[1, 0]]]).int(), torch.tensor([[[1, 0], [0, 1]]])[None].int()
    full = torch.tensor([[[0, 1]]]).int()
    blocks = BlockMask(
        partial_counts=counts,
        partial_indices=indices,
        full_counts=full,
        full_indices=indices,
        seqlen_q=200,
        seqlen_k=200,
    )
    mask = torch.zeros(200, 200, dtype=torch.bool)
    mask[:128, 128:] = mask[128:, :128] = True
    found = reference.attention(q, k, v, mask_mod=everything, block_mask=blocks)
    torch.testing.assert_close(found, reference.attention(q, k, v, mask=mask))


WRONG: list[dict[str, Any]] = [
    {"layout": "sbhd"},
    {"softmax_scale": 0.0},
    {"window": (-1, -1)},
    {"window": 3},
    {"q_offset": 1},
    {"sinks": torch.zeros(3)},
    {"bias": torch.zeros(SQ, SK + 1)},
    {"mask": torch.zeros(SQ, SK)},
    {"alibi_slopes": torch.zeros(H, dtype=torch.float16)},
    {"aux": (torch.zeros(3),)},
    {"mask_mod": len},
    {"softcap": "x"},
    {"k": torch.zeros(B, 3, SK, D)},
    {"v": torch.zeros(B, HK, SK, D, dtype=torch.float16)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(next(iter(wrong))))
def test_what_the_kernels_call_refuses_is_refused_in_its_words(wrong: dict[str, Any]) -> None:
    given = {**dict(zip("qkv", qkv(torch.float32), strict=True)), **wrong}
    said = []
    for call in (reference.attention, flashgen.attention):
        with pytest.raises(FlashgenError) as refused:
            call(**given)
        said.append((refused.type, str(refused.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_an_empty_batch_has_gradients(layout: str) -> None:
    q, k, v = (torch.randn(0, 2, 2, 16, requires_grad=True) for _ in range(3))
    out, lse = reference.attention(q, k, v, layout=layout, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    for one in (out, lse):
        gradients = torch.autograd.grad(one.sum(), (q, k, v), retain_graph=True)
        assert [gradient.shape for gradient in gradients] == [q.shape] * 3
