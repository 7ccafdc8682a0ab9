"""What the ops of training do: output and LSE of a forward pass, gradients of a backward pass, by plans of the memo."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.runtime import serve
from flashgen.runtime.backward_calls import BackwardCall
from flashgen.runtime.calls import Call
from flashgen.runtime.keys import (
    BACKWARD,
    BIAS_GRAD,
    BSHD,
    CAUSAL,
    DETERMINISTIC,
    DOUT_SHIFT,
    EXPLICIT_OFFSET,
    FLOAT32,
    OFFSET_TENSOR,
    SINK_GRAD,
    TF32,
    TRAINS,
    WITH_LSE,
    allows_tf32,
    layout,
)
from flashgen.runtime.op_arguments import features_of
from flashgen.runtime.ops import attention_features_kernel, attention_kernel

Tensor = torch.Tensor

_TRAINS = WITH_LSE | TRAINS
_TRAINS_THE_SAME_BITS = _TRAINS | DETERMINISTIC
_remembered = serve.MEMO.get
_is_deterministic = torch._C._get_deterministic_algorithms
"""`torch.are_deterministic_algorithms_enabled` without a call around it."""


def attention_train_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and LSE by the plan of a call that returns both; it fails where there is no backward pass."""
    plain = (q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor)
    flat_features = (window_left, window_right, softcap, alibi_slopes, sinks, bias, mask)
    asked = asked_of(deterministic)
    found: tuple[Tensor, Tensor]
    if _are_absent(*flat_features):
        found = attention_kernel(*plain, asked)
        return found
    if bias is not None and bias.requires_grad:
        asked |= BIAS_GRAD
    found = attention_features_kernel(*plain, *flat_features, asked=asked)
    return found


def asked_of(deterministic: bool) -> int:
    """The flags of a forward pass whose gradients will be asked for."""
    return _TRAINS_THE_SAME_BITS if deterministic or _is_deterministic() else _TRAINS


def attention_backward_kernel(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
    needs_bias_grad: bool = False,
    needs_sink_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, bias and sinks, the last two None where they were not asked for."""
    plain = (dout, dlse, q, k, v, out, lse, causal, softmax_scale, bshd, q_offset, q_offset_tensor, deterministic)
    if _are_absent(window_left, window_right, softcap, alibi_slopes, sinks, bias, mask):
        return plain_backward_kernel(*plain)
    features = features_of(window_left, window_right, softcap, alibi_slopes, sinks, bias, mask)
    tensors = (features.alibi_slopes, features.sinks, bias, mask)
    layouts = (None if tensor is None else layout(tensor) for tensor in tensors)
    asked = BIAS_GRAD * needs_bias_grad | SINK_GRAD * needs_sink_grad
    return plain_backward_kernel(*plain, features, asked, (window_left, window_right, softcap > 0, *layouts))


def plain_backward_kernel(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float | None,
    bshd: bool,
    q_offset: int | None,
    q_offset_tensor: Tensor | None,
    deterministic: bool,
    features: Features | None = None,
    asked: int = 0,
    flat_features: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The same by fewer arguments; `features` come with flags of what is asked of them, and their part of a key."""
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15 | BACKWARD | asked
    flags |= (dout.data_ptr() & 15) << DOUT_SHIFT
    if causal:
        flags |= CAUSAL
    if bshd:
        flags |= BSHD
    offset: int | Tensor | None = None
    if q_offset is not None:
        offset = q_offset
        flags |= EXPLICIT_OFFSET
    elif q_offset_tensor is not None:
        offset = q_offset_tensor
        flags |= OFFSET_TENSOR
    if deterministic or _is_deterministic():
        flags |= DETERMINISTIC
    dtype = q.dtype
    if dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    key: tuple[Any, ...] = (
        flags,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        dout.shape,
        dout.stride(),
        dtype,
        k.dtype,
        v.dtype,
        dout.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        *flat_features,
    )
    run = _remembered(key)
    if run is None:
        run = _prepared(key, (q, k, v), out, dout, flags, features)
    found: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    found = run(dout, dlse, q, k, v, out, lse, softmax_scale, offset, features)
    return found


def _prepared(
    key: tuple[Any, ...],
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    dout: Tensor,
    flags: int,
    features: Features | None,
) -> Any:
    from flashgen.runtime.backward_serve import prepare_backward

    q, k, v = inputs
    forward = Call(
        q=q,
        k=k,
        v=v,
        causal=bool(flags & CAUSAL),
        bshd=bool(flags & BSHD),
        with_lse=True,
        explicit_offset=bool(flags & EXPLICIT_OFFSET),
        offset_tensor=bool(flags & OFFSET_TENSOR),
        tf32=bool(flags & TF32),
        features=features,
    )
    call = BackwardCall(
        forward=forward,
        out=out,
        dout=dout,
        deterministic=bool(flags & DETERMINISTIC),
        bias_grad=bool(flags & BIAS_GRAD),
    )
    run = prepare_backward(call, sink_grad=bool(flags & SINK_GRAD))
    serve.remember(key, run)
    return run


def _are_absent(
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
) -> bool:
    return (
        window_left is None
        and window_right is None
        and not softcap
        and alibi_slopes is None
        and sinks is None
        and bias is None
        and mask is None
    )
