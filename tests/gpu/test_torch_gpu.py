"""Torch's attention by flashgen's kernels: routed calls against torch's own in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from flashgen import reference
from flashgen.integrations import torch as door

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


def randn(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16).requires_grad_(grad)


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, kept: Tensor | float = 1.0) -> Tensor:
    """Attention by torch's products, each rounded to the dtype of the inputs; `kept` multiplies the weights."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = ((q @ k.mT) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) * kept).to(q.dtype) @ v


def assert_as_exact(
    found: Tensor, inputs: Sequence[Tensor], dout: Tensor, seen: Tensor, scale: float, kept: Tensor | float = 1.0
) -> None:
    """FlashAttention's rule: within twice the error of the same arithmetic in half precision, gradients within 3."""
    mine = (found, *torch.autograd.grad(found, inputs, dout))
    both = []
    for dtype in (inputs[0].dtype, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = plain(leaves[0], leaves[1], leaves[2], seen, scale, kept)
        both.append((out, *torch.autograd.grad(out, leaves, dout.to(dtype))))
    for times, one, rough, exact in zip((2, 3, 3, 3), mine, *both, strict=True):
        error, allowed = ((x.double() - exact).abs().max() for x in (one, rough))
        assert error <= times * allowed + 1e-4


CASES: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((4, 4, 96, 96), {"is_causal": True}),
    ((4, 2, 64, 100), {"is_causal": True, "enable_gqa": True}),
    ((4, 2, 100, 64), {"attn_mask": "keys", "enable_gqa": True}),
    ((4, 4, 64, 64), {"attn_mask": "bool", "scale": 0.2}),
]


@pytest.mark.parametrize(("sizes", "given"), CASES)
def test_routed_calls(sizes: tuple[int, int, int, int], given: dict[str, Any]) -> None:
    heads, heads_k, rows, keys = sizes
    inputs = (randn(2, heads, rows, 64), randn(2, heads_k, keys, 64), randn(2, heads_k, keys, 64, seed=1))
    masks = {"keys": (2, 1, 1, keys), "bool": (rows, keys)}
    if "attn_mask" in given:
        given = {**given, "attn_mask": randn(*masks[given["attn_mask"]], grad=False) > -0.5}
    seen = given.get("attn_mask", torch.ones(rows, keys, dtype=torch.bool, device="cuda"))
    calls = door.enable(strict=True)
    try:
        calls.clear()
        found = F.scaled_dot_product_attention(*inputs, **given)
        dout = randn(*found.shape, seed=2, grad=False)
        visible = seen.tril() if given.get("is_causal") else seen
        assert_as_exact(found, inputs, dout, visible, given.get("scale", 64**-0.5))
        assert calls.served == 1
    finally:
        door.disable()
    with door.route_sdpa(strict=True) as again:
        F.scaled_dot_product_attention(*inputs, **given)
    assert again.served == 1


def test_what_no_kernel_computes_is_torchs() -> None:
    q = randn(1, 2, 16, 1000)
    with door.route_sdpa() as calls:
        found = F.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q))
    assert (calls.served, calls.passed_on.total()) == (0, 1)


def test_torchs_flash_backend_and_varlen_attn() -> None:
    door.register_flash_impl()
    inputs = (randn(2, 4, 96, 64), randn(2, 4, 96, 64), randn(2, 4, 96, 64, seed=1))
    rows = tuple(x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in inputs)
    ends = torch.tensor([0, 32, 96], dtype=torch.int32, device="cuda")
    expected = varlen_attn(*rows, ends, ends, 64, 64, window_size=(-1, 0))
    weights = torch.randn_like(expected)
    grads = torch.autograd.grad((expected * weights).sum(), rows)
    torch.nn.attention.activate_flash_attention_impl("flashgen")
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            found = F.scaled_dot_product_attention(*inputs, is_causal=True)
        mine = torch.autograd.grad(found.float().square().sum(), inputs)
        packed = varlen_attn(*rows, ends, ends, 64, 64, window_size=(-1, 0))
        of_packed = torch.autograd.grad((packed * weights).sum(), rows)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    own = F.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(found, own, **TOLERANCE)
    torch.testing.assert_close(mine, torch.autograd.grad(own.float().square().sum(), inputs), **TOLERANCE)
    torch.testing.assert_close((packed, *of_packed), (expected, *grads), **TOLERANCE)


def test_dropout_of_torchs_flash_backend() -> None:
    """The weights are dropped that the state of torch's generator says, forward and backward."""
    inputs = tuple(randn(2, heads, 80, 64, seed=heads) for heads in (4, 4, 4))
    every_key = torch.eye(80, dtype=torch.float64, device="cuda").expand(2, 4, 80, 80)
    seen = torch.ones(80, 80, dtype=torch.bool, device="cuda").tril()
    door.register_flash_impl()
    torch.nn.attention.activate_flash_attention_impl("flashgen")
    try:
        torch.manual_seed(5)
        drawn = torch.randint(2**63 - 1, (2,), device="cuda")
        torch.manual_seed(5)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            found = F.scaled_dot_product_attention(*inputs, dropout_p=0.3, is_causal=True)
        one, two = (x.detach().double() for x in inputs[:2])
        weights = reference.attention(one, two, every_key, causal=True, dropout_p=0.3, rng_state=drawn)
        assert_as_exact(found, inputs, 2 * found.detach(), seen, 64**-0.5, (weights != 0) / 0.7)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
