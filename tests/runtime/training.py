"""Small calls to train with: their tensors, every feature, and the gradients that torch finds in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashgen
from tests.runtime.dense_attention import dense

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 10, 13, 16, 24


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def qkv(bshd: bool = False, dtype: torch.dtype = torch.float32, head_dim_v: int = DV) -> list[torch.Tensor]:
    shapes = [(B, H, SQ, D), (B, HK, SK, D), (B, HK, SK, head_dim_v)]
    if bshd:
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    return [leaf(*shape, dtype=dtype, seed=number) for number, shape in enumerate(shapes)]


def double(value: Any) -> Any:
    """A leaf of its own in float64, with the same strides."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def assert_gradients(
    inputs: list[torch.Tensor], arguments: dict[str, Any], *, lse: bool = False, call: Callable[..., Any] | None = None
) -> None:
    """The output, the LSE and every gradient are those that torch finds in float64."""
    given = [*inputs, *arguments.values()]
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    truth_inputs, truth_arguments = [double(x) for x in inputs], {n: double(x) for n, x in arguments.items()}
    truth_leaves = [
        x for x in [*truth_inputs, *truth_arguments.values()] if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    out, sums = (call or flashgen.attention)(*inputs, **arguments, return_lse=True)
    true_out, true_sums = dense(*truth_inputs, **truth_arguments)
    torch.testing.assert_close(out.double(), true_out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sums.double(), true_sums, atol=1e-5, rtol=1e-4)
    dout, dsums = torch.randn_like(out), torch.randn_like(sums)
    finite = torch.where(true_sums.isfinite(), true_sums, 0.0)
    losses = [(out * dout).sum(), (true_out * dout.double()).sum()]
    if lse:
        losses[0] = losses[0] + (torch.where(true_sums.isfinite(), sums, 0.0) * dsums).sum()
        losses[1] = losses[1] + (finite * dsums.double()).sum()
    holders = [x if x.is_leaf else x.retain_grad() or x for x in leaves]  # type: ignore[func-returns-value]
    losses[0].backward()
    found = [x.grad for x in holders]
    expected = torch.autograd.grad(losses[1], truth_leaves)
    for tensor, one, other in zip(leaves, found, expected, strict=True):
        assert (one.shape, one.dtype) == (tensor.shape, tensor.dtype)
        rtol = 1e-4 if one.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=rtol)
    for tensor in leaves:
        tensor.grad = None


def bias(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"bias": leaf(*shape, dtype=dtype)}


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7


FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"softmax_scale": 0.3},
    "causal": lambda: {"causal": True},
    "offset": lambda: {"causal": True, "q_offset": -4},
    "offset tensor": lambda: {"causal": True, "q_offset": torch.tensor([2, -3], dtype=torch.int32)},
    "window": lambda: {"window": (3, 1)},
    "causal window": lambda: {"causal": True, "window": (2, None)},
    "softcap": lambda: {"softcap": 0.7},
    "alibi": lambda: {"alibi_slopes": torch.linspace(0.1, 1, H)},
    "alibi of sequences": lambda: {"alibi_slopes": torch.linspace(0.1, 1, B * H).view(B, H), "q_offset": 3},
    "sinks": lambda: {"sinks": leaf(H)},
    "sinks alone": lambda: {"sinks": leaf(H), "causal": True, "q_offset": -4},
    "strided sinks": lambda: {"sinks": leaf(2 * H)[::2]},
    "bias": lambda: bias(B, H, SQ, SK),
    "bias of heads": lambda: bias(H, SQ, SK),
    "bias of scores": lambda: bias(SQ, SK),
    "bias of a batch": lambda: bias(B, 1, SQ, SK),
    "bias of keys": lambda: bias(SK),
    "bias of sequences' keys": lambda: bias(B, 1, 1, SK),
    "bias of rows": lambda: bias(SQ, 1),
    "bias of heads' rows, with sinks": lambda: {**bias(H, SQ, 1), "sinks": leaf(H), "causal": True, "q_offset": -4},
    "bias of one": lambda: {**bias(1), "sinks": leaf(H)},
    "bias of nothing": bias,
    "expanded bias": lambda: {"bias": leaf(H, 1, SK).expand(B, H, SQ, SK)},
    "bias expanded along keys": lambda: {"bias": leaf(SQ, 1).expand(H, SQ, SK)},
    "transposed bias": lambda: {"bias": leaf(SK, SQ).mT},
    "bias in bf16": lambda: bias(H, SQ, SK, dtype=torch.bfloat16),
    "bias of keys in fp16": lambda: bias(B, 1, 1, SK, dtype=torch.float16),
    "constant bias": lambda: {"bias": leaf(H, SQ, SK).detach(), "sinks": leaf(H)},
    "softcap and bias": lambda: {"softcap": 0.5, **bias(H, SQ, SK), "causal": True},
    "mask": lambda: {"mask": mask(B, 1, SQ, SK)},
    "mask of keys": lambda: {"mask": mask(B, 1, 1, SK)},
    "rows without a key": lambda: {"mask": mask(B, H, SQ, 1), **bias(H, SQ, SK)},
    "everything": lambda: {
        "causal": True,
        "q_offset": 4,
        "window": (9, None),
        "softmax_scale": 0.4,
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 1, H),
        "sinks": leaf(H),
        "mask": mask(H, SQ, SK),
        **bias(B, 1, SQ, SK),
    },
}
