"""What programs import of FlashAttention beside its functions: passes without autograd, and rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashgen import flash_attn
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from flashgen.flash_attn.layers import rotary
from tests.integrations.flash_attn_calls import DV, HK, SK, SQ, WIDE, B, D, H, Tensor, assert_same, ends, randn
from tests.integrations.ops_on_cpu import ops_on_cpu
from tests.rotary import rotated

SCALE = 0.3
GIVEN: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False, "window_size": (2, 1), "softcap": 2.0},
    {"causal": True, "dropout_p": 0.25},
]
PACKED_GIVEN = [GIVEN[0], {"causal": False, "window_size": (2, 1)}, GIVEN[2]]


@pytest.fixture
def on_cpu(on_reference: None) -> Iterator[None]:
    with ops_on_cpu():
        yield


def options(given: dict[str, Any]) -> tuple[Any, ...]:
    """In the order of the passes, from dropout_p to alibi_slopes."""
    left, right = given.get("window_size", (-1, -1))
    return given.get("dropout_p", 0.0), SCALE, given["causal"], left, right, given.get("softcap", 0.0), None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_passes_are_the_parts_of_the_function(given: dict[str, Any]) -> None:
    """In which the first row sees no key, where it is causal."""
    q, k, v = (
        randn(B, n, heads, width, grad=True) for n, heads, width in ((SK, H, D), (SK - 1, HK, D), (SK - 1, HK, DV))
    )
    torch.manual_seed(0)
    expected = flash_attn.flash_attn_func(q, k, v, softmax_scale=SCALE, return_attn_probs=True, **given)
    torch.manual_seed(0)
    out, lse, weights, state = _flash_attn_forward(q, k, v, *options(given), return_softmax=True)
    assert not out.requires_grad
    assert_same((out, lse, weights), tuple(x.detach() for x in expected))
    assert (state.dtype, tuple(state.shape)) == (torch.int64, (2,))
    dout = randn(*out.shape, seed=5)
    gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
    sums = _flash_attn_backward(dout, q, k, v, out, lse, *gradients, *options(given), False, state)
    assert_same(gradients, list(torch.autograd.grad(expected[0], (q, k, v), dout)))
    torch.testing.assert_close(sums, (dout * out).sum(-1).transpose(1, 2).float(), atol=1e-5, rtol=1e-5)
    some = torch.full_like(k, math.nan)
    _flash_attn_backward(dout, q, k, v, out, lse, None, some, None, *options(given), True, state)
    assert_same(some, gradients[1])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("given", PACKED_GIVEN, ids=str)
def test_passes_of_packed_sequences(given: dict[str, Any]) -> None:
    q, k, v = (randn(n, heads, D, grad=True) for n, heads in ((9, H), (11, HK), (11, HK)))
    places = (ends((3, 2, 4)), ends((5, 2, 4)), 4, 5)
    torch.manual_seed(0)
    expected = flash_attn.flash_attn_varlen_func(q, k, v, *places, softmax_scale=SCALE, return_attn_probs=True, **given)
    torch.manual_seed(0)
    out, lse, weights, state = _flash_attn_varlen_forward(q, k, v, *places, *options(given), return_softmax=True)
    assert_same((out, lse, weights), tuple(x.detach() for x in expected))
    dout = randn(*out.shape, seed=5)
    gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
    sums = _flash_attn_varlen_backward(dout, q, k, v, out, lse, *gradients, *places, *options(given), False, state)
    assert_same(gradients, list(torch.autograd.grad(expected[0], (q, k, v), dout)))
    assert sums.shape == lse.shape


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_keys_that_are_not_used_are_zero(causal: bool) -> None:
    """As without them: a causal mask ends at the last key that is used."""
    q, k, v = randn(9, H, D), randn(11, HK, D), randn(11, HK, D, seed=1)
    used, rows = (3, 2, 1), [0, 1, 2, 5, 6, 7]
    given, found = options({"causal": causal, "dropout_p": 0.25}), []
    for keys, lengths, more in (
        (slice(None), (5, 2, 4), {"seqused_k": torch.tensor(used, dtype=torch.int32)}),
        (rows, used, {}),
    ):
        torch.manual_seed(0)
        places = (ends((3, 2, 4)), ends(lengths), 4, 5)
        found.append(_flash_attn_varlen_forward(q, k[keys], v[keys], *places, *given, return_softmax=True, **more)[:3])
    assert_same(*found)
    weights = found[0][2]
    assert not weights[0, :, :, 3:].any()
    assert weights[0, :, 2, :3].all()


@pytest.mark.usefixtures("on_cpu")
def test_a_part_of_the_keys_has_its_part_of_the_gradient() -> None:
    """As ring attention calls it: the output and the LSE are those over all keys."""
    q, k, v = randn(B, SQ, H, D), randn(B, SK, HK, D), randn(B, SK, HK, D)
    given = options({"causal": False})
    out, lse, *_ = _flash_attn_forward(q, k, v, *given, return_softmax=False)
    dout, whole = randn(*out.shape, seed=5), [torch.zeros_like(x) for x in (q, k, v)]
    _flash_attn_backward(dout, q, k, v, out, lse, *whole, *given, False)
    sums = torch.zeros_like(q)
    for part in (slice(0, 3), slice(3, None)):
        own = [torch.empty_like(x) for x in (q, k[:, part], v[:, part])]
        _flash_attn_backward(dout, q, k[:, part], v[:, part], out, lse, *own, *given, False)
        sums += own[0]
        assert_same(own[1:], [x[:, part] for x in whole[1:]])
    assert_same(sums, whole[0])


@pytest.mark.usefixtures("on_reference")
def test_a_forward_pass_over_pages_takes_lengths_and_one_split() -> None:
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    k, v = randn(4, 8, HK, D), randn(4, 8, HK, D, seed=1)
    q, used = randn(5, H, D), torch.tensor([9, 16], dtype=torch.int32)
    places, given = (ends((2, 3)), ends((9, 16)), 3, 16), options({"causal": True})
    wrong = (places[0], ends((1, 1)), *places[2:])
    found = [
        _flash_attn_varlen_forward(q, k, v, *ends_and_most, *given, block_table=table, **more)[0]
        for ends_and_most, more in ((places, {}), (wrong, {"seqused_k": used, "num_splits": 0}))
    ]
    assert_same(*found)
    assert_same(found[0], flash_attn.flash_attn_varlen_func(q, k, v, *places, 0.0, SCALE, True, block_table=table))
    for more, words in (
        ({"num_splits": 2}, "num_splits > 1 is not supported.*, got 2"),
        ({"leftpad_k": used}, "leftpad_k, got a tensor"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            _flash_attn_varlen_forward(q, k, v, *places, *given, block_table=table, **more)


ANGLE = randn(9, D // 4)
COS, SIN = ANGLE.cos(), ANGLE.sin()


def turned(x: Tensor, first: int, interleaved: bool) -> Tensor:
    """(rows, heads, columns) one row after the other; a row behind the table stays."""
    rows = [
        rotated(row, COS, SIN, first + i, interleaved=interleaved) if first + i < len(COS) else row
        for i, row in enumerate(x)
    ]
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_embeddings(interleaved: bool, inplace: bool) -> None:
    given = {"interleaved": interleaved, "inplace": inplace}
    for offsets in (0, 2, torch.tensor([4, 1], dtype=torch.int32)):
        x = randn(B, 6, H, D)
        first = [int(n) for n in offsets] if isinstance(offsets, Tensor) else [offsets] * B
        expected = torch.stack([turned(rows, n, interleaved) for rows, n in zip(x, first, strict=True)])
        leaf = x.clone().requires_grad_()
        found = rotary.apply_rotary_emb(leaf, COS, SIN, seqlen_offsets=offsets, **given)
        assert_same(found, expected)
        assert (found.data_ptr() == leaf.data_ptr()) == inplace
        dout = randn(*x.shape, seed=3)
        (gradient,) = torch.autograd.grad(found, leaf, dout)  # of a rotation: by the opposite angle
        assert_same(rotary.apply_rotary_emb(gradient, COS, SIN, interleaved, seqlen_offsets=offsets), dout)
    lengths = (3, 0, 4)
    x = randn(7, H, D)
    expected = torch.cat([turned(rows, 0, interleaved) for rows in x.split(lengths)])
    assert_same(rotary.apply_rotary_emb(x.clone(), COS, SIN, cu_seqlens=ends(lengths), max_seqlen=4, **given), expected)
    shifted = torch.cat([turned(rows, n, interleaved) for rows, n in zip(x.split(lengths), (1, 5, 2), strict=True)])
    offsets = torch.tensor([1, 5, 2], dtype=torch.int32)
    assert_same(
        rotary.apply_rotary_emb(x, COS, SIN, cu_seqlens=ends(lengths), seqlen_offsets=offsets, **given), shifted
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embeddings_of_packed_tensors(interleaved: bool) -> None:
    other = SIN.flip(0), COS.flip(0)
    qkv, wide, kv = randn(B, 6, 3, H, D), randn(B, 6, H + 2 * HK, D), randn(B, 6, 2, HK, D)
    q, k, v = (x.clone() for x in qkv.unbind(2))
    q, k = (rotary.apply_rotary_emb(x, *turn, interleaved) for x, turn in ((q, (COS, SIN)), (k, other)))
    assert_same(rotary.apply_rotary_emb_qkv_(qkv, COS, SIN, *other, interleaved), torch.stack([q, k, v], 2))
    q, k, v = (x.clone() for x in wide.split([H, HK, HK], 2))
    q, k = (rotary.apply_rotary_emb(x, COS, SIN, interleaved) for x in (q, k))
    leaf = wide.clone().requires_grad_()
    found = rotary.apply_rotary_emb_qkv_(leaf, COS, SIN, interleaved=interleaved, num_heads_q=H)
    assert_same(found, torch.cat([q, k, v], 2))
    (gradient,) = torch.autograd.grad(found, leaf, found.detach())
    assert_same(gradient, wide)
    k = rotary.apply_rotary_emb(kv[:, :, 0], COS, SIN, interleaved, seqlen_offsets=2)
    expected = torch.stack([k, kv[:, :, 1]], 2)
    assert_same(rotary.apply_rotary_emb_kv_(kv, COS, SIN, interleaved, 2), expected)
    x = randn(B, 6, H, D)
    assert_same(
        rotary.apply_rotary_emb_torch(x, COS[:6], SIN[:6], interleaved),
        rotary.apply_rotary_emb(x, COS, SIN, interleaved),
    )


def test_rotary_embeddings_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 2, 1, 4, dtype=WIDE)
    for call, words in (
        (lambda: rotary.apply_rotary_emb(x, COS[:, :3], SIN[:, :3]), "rotary_dim is at most head_dim, 4"),
        (lambda: rotary.apply_rotary_emb(x, COS[:, :2], SIN), "cos and sin are"),
        (lambda: rotary.apply_rotary_emb(x[0], COS, SIN), r"x is \(batch, seqlen"),
        (lambda: rotary.apply_rotary_emb(x, COS, SIN, cu_seqlens=ends((2,))), r"x is \(total"),
        (lambda: rotary.apply_rotary_emb_qkv_(x, COS, SIN), "qkv is"),
        (lambda: rotary.apply_rotary_emb_kv_(x, COS, SIN), "kv is"),
    ):
        with pytest.raises(WorkloadError, match=words):
            call()
