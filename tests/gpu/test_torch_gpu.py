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


def assert_as_exact(found: Sequence[Tensor], plain: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Within twice the error of the same arithmetic of torch's in half precision."""
    for mine, low, exact in zip(found, plain, right, strict=True):
        allowed = 2 * (low.double() - exact.double()).abs().max() + 1e-5
        assert (mine.double() - exact.double()).abs().max() <= allowed


def assert_torchs(inputs: tuple[Tensor, ...], **given: Any) -> None:
    found = F.scaled_dot_product_attention(*inputs, **given)
    weights = randn(*found.shape, seed=2, grad=False)
    mine = torch.autograd.grad(found, inputs, weights)

    def by_torch(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = torch._C._nn.scaled_dot_product_attention(*leaves, **given)
            return (out, *torch.autograd.grad(out, leaves, weights.to(dtype)))

    assert_as_exact((found, *mine), by_torch(torch.bfloat16), by_torch(torch.float64))


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
    calls = door.enable(strict=True)
    try:
        calls.clear()
        assert_torchs(inputs, **given)
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
    door.register_flash_impl()
    torch.nn.attention.activate_flash_attention_impl("flashgen")
    try:
        torch.manual_seed(5)
        drawn = torch.randint(2**63 - 1, (2,), device="cuda")
        torch.manual_seed(5)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            found = F.scaled_dot_product_attention(*inputs, dropout_p=0.3, is_causal=True)
        mine = torch.autograd.grad(found.float().square().sum(), inputs)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    q, k, _ = inputs
    every_key = torch.eye(80, dtype=torch.float64, device="cuda").expand(2, 4, 80, 80)
    drawn_weights = reference.attention(q.double(), k.double(), every_key, causal=True, dropout_p=0.3, rng_state=drawn)
    is_kept = drawn_weights.detach() != 0
    dout = 2 * found.detach()

    def plain(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        above = torch.ones(80, 80, dtype=torch.bool, device="cuda").triu(1)
        weights = ((q @ k.mT) * 64**-0.5).masked_fill(above, -torch.inf).softmax(-1)
        out = (weights * is_kept / 0.7) @ v
        return (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))

    assert_as_exact((found, *mine), plain(torch.bfloat16), plain(torch.float64))
