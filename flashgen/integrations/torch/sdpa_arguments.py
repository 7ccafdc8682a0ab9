"""The arguments of `scaled_dot_product_attention` as those of `flashgen.attention`, or why that cannot be.

Nothing here looks at data, and torch.compile traces all of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from flashgen.runtime.ops.calls import DTYPES

Tensor = torch.Tensor

DEVICES = ("cuda",)
"""Types of devices, in torch's words, that kernels run on; ROCm's is called so, too."""


CLASSES: set[type] = {Tensor, torch.nn.Parameter}
"""Of tensors that are taken, beside those that torch traces programs with; others need not know flashgen's ops."""

_OF_TRACES = "torch._subclasses."


def why_not(  # noqa: C901, PLR0912 - one condition a line
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    on_any_device: bool = False,
) -> str | None:
    """Why `flashgen.attention` does not take a call of SDPA, as far as its arguments tell; None where they do not.

    What torch refuses itself goes to torch, too, whose error is the one that a program expects. `on_any_device` is set
    for the reference.
    """
    inputs = (query, key, value)
    if not all(isinstance(tensor, Tensor) for tensor in inputs):
        return "query, key and value are tensors"
    for tensor in inputs:
        if type(tensor) not in CLASSES and not type(tensor).__module__.startswith(_OF_TRACES):
            return f"tensors are of no class that flashgen does not know, got {type(tensor).__name__}"
        if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
            return "tensors are dense, not nested, sparse or quantized"
        if not on_any_device and tensor.device.type not in DEVICES:
            return f"kernels run on a GPU, got a tensor on {tensor.device.type}"
        if tensor.dtype not in DTYPES:
            return f"dtype is bfloat16, float16 or float32, got {tensor.dtype}"
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            return "query, key and value share a dtype"
        if tensor.dim() != query.dim() or tensor.dim() < 2:
            return "query, key and value have the same dimensions, at least two"
        if tensor.shape[:-3] != query.shape[:-3]:
            return "query, key and value share a batch, without broadcasting"
        if not tensor.shape[-1] or (tensor.dim() > 2 and not tensor.shape[-3]):
            return "there is at least one head, and a head_dim"
    if key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
        return "shapes fit together, and keys have the heads of values"
    heads, heads_k = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key))
    if heads % heads_k or (heads_k not in (1, heads) and not enable_gqa):
        return "query has the heads of key, or a multiple of them with enable_gqa"
    if not 0 <= dropout_p < 1:
        return "dropout_p is at least 0 and below 1"
    if scale is not None and not 0 < scale < math.inf:
        return "scale is finite and above 0"
    if attn_mask is not None:
        return _why_no_mask(query, key, attn_mask, is_causal)
    return None


def _why_no_mask(query: Tensor, key: Tensor, attn_mask: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "attn_mask and is_causal exclude each other"
    full = (*query.shape[:-1], key.shape[-2])
    if isinstance(attn_mask, CausalBias):
        fits = (attn_mask.seq_len_q, attn_mask.seq_len_kv) == full[-2:]
        return None if fits else "a causal bias is made for the lengths of query and key"
    if attn_mask.is_nested or attn_mask.layout != torch.strided:
        return "attn_mask is a dense tensor"
    if attn_mask.device != query.device:
        return "attn_mask is on the device of query"
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"attn_mask is bool, float32 or as query, {query.dtype}, got {attn_mask.dtype}"
    if attn_mask.dim() > len(full):
        return "attn_mask has at most the dimensions of query"
    sizes = full[len(full) - attn_mask.dim() :]
    if any(size not in (1, whole) for size, whole in zip(attn_mask.shape, sizes, strict=True)):
        return "attn_mask broadcasts over (..., nheads, seqlen_q, seqlen_k)"
    return None


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """The arguments of `flashgen.attention` for a call that `why_not` has nothing against.

    Strides are taken as they are; only a tensor whose last dimension is not contiguous is copied, and one of five or
    more dimensions whose batch is no view in one dimension.
    """
    found: dict[str, Any] = {"softmax_scale": None if scale is None else float(scale)}
    if dropout_p:
        found["dropout_p"] = float(dropout_p)
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        one = four_dimensions(tensor)
        found[name] = one if one.stride(-1) == 1 or one.shape[-1] == 1 else one.contiguous()
    if isinstance(attn_mask, CausalBias):
        found |= _causal(query, key, from_the_end=attn_mask.variant == CausalVariant.LOWER_RIGHT)
    elif attn_mask is not None:
        name = "mask" if attn_mask.dtype == torch.bool else "bias"
        found[name] = _mask(attn_mask, query)
    elif is_causal:
        found |= _causal(query, key, from_the_end=False)
    return found


def four_dimensions(tensor: Tensor) -> Tensor:
    """A tensor as (batch, nheads, seqlen, head_dim): missing dimensions are 1, and a batch of several becomes one."""
    missing = 4 - tensor.dim()
    if missing > 0:
        return tensor[(None,) * missing]
    return tensor.flatten(0, -4) if missing else tensor


def shaped_like(out: Tensor, query: Tensor) -> Tensor:
    """An output of `flashgen.attention` in the dimensions that the query of a call had."""
    return out if query.dim() == 4 else out.reshape(*query.shape[:-1], out.shape[-1])


def _causal(query: Tensor, key: Tensor, *, from_the_end: bool) -> dict[str, Any]:
    """A causal mask: from the first key on, as torch has it, or so that the last query sees the last key."""
    if from_the_end or query.shape[-2] == key.shape[-2]:
        return {"causal": True}
    return {"causal": True, "q_offset": 0}


def _mask(mask: Tensor, query: Tensor) -> Tensor:
    """A mask in at most four dimensions; a batch of several is expanded where it must be, and copied."""
    if mask.dim() < 4 or query.dim() == 4:
        return mask
    if any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*query.shape[:-3], *mask.shape[-3:])
    return mask.flatten(0, -4)
