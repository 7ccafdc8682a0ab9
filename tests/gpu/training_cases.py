"""Inputs of training calls and their gradients: every feature, and a judge that compares with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashgen
from tests.runtime.dense_attention import dense

B, H, HK, SQ, SK, D = 2, 4, 2, 203, 331, 64
FEW_KEYS = 16

Tensors = list[torch.Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def qkv(
    batch: int = B,
    nheads: int = H,
    nheads_k: int = HK,
    seqlen_q: int = SQ,
    seqlen_k: int = SK,
    head_dim: int = D,
    head_dim_v: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    bshd: bool = False,
) -> Tensors:
    sizes = [(nheads, seqlen_q, head_dim), (nheads_k, seqlen_k, head_dim), (nheads_k, seqlen_k, head_dim_v or head_dim)]
    return [leaf(batch, s, h, d, dtype=dtype) if bshd else leaf(batch, h, s, d, dtype=dtype) for h, s, d in sizes]


def leaves_of(inputs: Tensors, arguments: dict[str, Any]) -> Tensors:
    return [x for x in (*inputs, *arguments.values()) if isinstance(x, torch.Tensor) and x.requires_grad]


def copied(value: Any, dtype: torch.dtype) -> Any:
    """A leaf of its own in another dtype, of floating-point tensors."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


def dense_gradients(
    inputs: Tensors, arguments: dict[str, Any], dout: torch.Tensor, dlse: torch.Tensor | None, dtype: torch.dtype
) -> Tensors:
    """What torch finds in a dtype through a matrix of all scores."""
    inputs = [copied(x, dtype) for x in inputs]
    arguments = {name: copied(value, dtype) for name, value in arguments.items()}
    out, lse = dense(*inputs, **arguments)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * dlse.to(dtype)).sum()
    return list(torch.autograd.grad(loss, leaves_of(inputs, arguments)))


def assert_gradients(
    inputs: Tensors, arguments: dict[str, Any], *, lse: bool = False, call: Callable[..., Any] | None = None
) -> Tensors:
    """Every gradient is at most three times as far from float64 as torch's own in the same dtype; returns them."""
    leaves, dtype = leaves_of(inputs, arguments), inputs[0].dtype
    for tensor in leaves:
        tensor.grad = None
    out, sums = (call or flashgen.attention)(*inputs, **arguments, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(sums) if lse else None
    if dlse is None:
        out.backward(dout)
    else:
        dlse = torch.where(sums.isfinite(), dlse, 0.0)
        torch.autograd.backward((out, sums), (dout, dlse))
    truth = dense_gradients(inputs, arguments, dout, dlse, torch.float64)
    eager = dense_gradients(inputs, arguments, dout, dlse, dtype)
    for tensor, expected, plain in zip(leaves, truth, eager, strict=True):
        found = tensor.grad
        assert found is not None
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert found.isfinite().all()
        error, allowed = (found.double() - expected).abs(), (plain.double() - expected).abs()
        ulp = 2 * torch.finfo(found.dtype).eps * expected.abs().max()
        assert error.max() <= 3 * allowed.max() + ulp
        # beside few keys all cancels: eager's softmax is exact there, and a kernel starts from a rounded output
        floor = ulp / 64 if inputs[1].shape[2] > FEW_KEYS else 2 * ulp
        assert error.mean() <= 1.5 * allowed.mean() + floor
    return [x.grad for x in leaves if x.grad is not None]


def bias(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {"bias": leaf(*shape, dtype=dtype)}


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") < 0.7


def slopes() -> torch.Tensor:
    return torch.linspace(0.05, 0.5, H, device="cuda")


FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"softmax_scale": 0.3},
    "causal": lambda: {"causal": True},
    "offset": lambda: {"causal": True, "q_offset": -40},
    "offset tensor": lambda: {"causal": True, "q_offset": torch.tensor([20, -30], device="cuda", dtype=torch.int32)},
    "window": lambda: {"window": (50, 10)},
    "causal window": lambda: {"causal": True, "window": (70, None)},
    "softcap": lambda: {"softcap": 2.0},
    "alibi": lambda: {"alibi_slopes": slopes()},
    "sinks": lambda: {"sinks": leaf(H, dtype=torch.float32)},
    "sinks in bf16": lambda: {"sinks": leaf(H), "causal": True, "q_offset": -40},
    "bias": lambda: bias(B, H, SQ, SK),
    "bias of heads": lambda: bias(H, SQ, SK),
    "bias of a batch in fp32": lambda: bias(B, 1, SQ, SK, dtype=torch.float32),
    "bias of keys": lambda: bias(B, 1, 1, SK),
    "bias of rows": lambda: {**bias(SQ, 1), "sinks": leaf(H, dtype=torch.float32)},
    "expanded bias": lambda: {"bias": leaf(H, 1, 336).detach()[..., :SK].expand(B, H, SQ, SK).requires_grad_()},
    "constant bias": lambda: {"bias": leaf(H, SQ, SK).detach()},
    "mask": lambda: {"mask": mask(B, 1, SQ, SK)},
    "mask of keys": lambda: {"mask": mask(B, 1, 1, SK), "causal": True},
    "rows without a key": lambda: {"mask": mask(B, H, SQ, 1), **bias(H, SQ, SK)},
    "everything": lambda: {
        "causal": True,
        "q_offset": 150,
        "window": (190, None),
        "softmax_scale": 0.2,
        "softcap": 10.0,
        "alibi_slopes": slopes(),
        "sinks": leaf(H, dtype=torch.float32),
        "mask": mask(H, SQ, SK),
        **bias(B, 1, SQ, SK),
    },
}
