"""What the ops of training do: output and LSE of a forward pass, gradients of a backward pass, by plans of the memo."""

from __future__ import annotations

from typing import Any

import torch

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
from flashgen.runtime.op_arguments import extras_of
from flashgen.runtime.ops import attention_features_kernel, attention_kernel

Tensor = torch.Tensor

_remembered = serve.MEMO.get


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
    asked = WITH_LSE | TRAINS
    if deterministic or torch.are_deterministic_algorithms_enabled():
        asked |= DETERMINISTIC
    plain = (q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor)
    features = (window_left, window_right, softcap, alibi_slopes, sinks, bias, mask)
    found: tuple[Tensor, Tensor]
    if _are_absent(*features):
        found = attention_kernel(*plain, asked=asked)
        return found
    if bias is not None and bias.requires_grad:
        asked |= BIAS_GRAD
    found = attention_features_kernel(*plain, *features, asked=asked)
    return found


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
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15 | BACKWARD
    flags |= (dout.data_ptr() & 15) << DOUT_SHIFT
    if causal:
        flags |= CAUSAL
    if bshd:
        flags |= BSHD
    if q_offset is not None:
        flags |= EXPLICIT_OFFSET
    elif q_offset_tensor is not None:
        flags |= OFFSET_TENSOR
    if deterministic or torch.are_deterministic_algorithms_enabled():
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
    )
    extras = None
    if not _are_absent(window_left, window_right, softcap, alibi_slopes, sinks, bias, mask):
        flags |= BIAS_GRAD * needs_bias_grad | SINK_GRAD * needs_sink_grad
        extras = extras_of(window_left, window_right, softcap, alibi_slopes, sinks, bias, mask)
        tensors = (extras.alibi_slopes, extras.sinks, bias, mask)
        numbers = (window_left, window_right, softcap > 0)
        key = (flags, *key[1:], *numbers, *(None if tensor is None else layout(tensor) for tensor in tensors))
    run = _remembered(key)
    if run is None:
        from flashgen.runtime.backward_serve import prepare_backward

        forward = Call(
            q=q,
            k=k,
            v=v,
            causal=causal,
            bshd=bshd,
            with_lse=True,
            explicit_offset=q_offset is not None,
            offset_tensor=bool(flags & OFFSET_TENSOR),
            tf32=bool(flags & TF32),
            extras=extras,
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
    offset = q_offset if q_offset is not None else q_offset_tensor
    found: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    found = run(dout, dlse, q, k, v, out, lse, softmax_scale, offset, extras)
    return found


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
