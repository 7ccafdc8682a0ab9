"""Backward passes by plans of the memo; `flashgen.runtime.autograd` knows when they are asked for."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.runtime.ops import mods as user_mods
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.backward_calls import BackwardCall
from flashgen.runtime.ops.calls import Call, check_lse
from flashgen.runtime.ops.keys import (
    AUX_GRADIENT_SHIFT,
    BACKWARD,
    BSHD,
    CAUSAL,
    DETERMINISTIC,
    DOUT_SHIFT,
    EXPLICIT_OFFSET,
    FLOAT32,
    GRADIENT_BITS,
    OFFSET_TENSOR,
    TF32,
    allows_tf32,
    asked_gradients,
    feature_key,
)
from flashgen.runtime.ops.open_packed import packed_open_key
from flashgen.runtime.ops.recent import NOTHING, RECENT, remember

Tensor = torch.Tensor

_remembered = serve.MEMO.get
_recent = RECENT.get
_SHARED = slice(10, 17)
"""The parts of a key that sizes leave as they are."""

is_deterministic = torch._C._get_deterministic_algorithms
"""`torch.are_deterministic_algorithms_enabled` without a call around it."""


def attention_backward_kernel(  # noqa: C901, PLR0912 - in one piece, as `attention_kernel`
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
    needs: tuple[bool, ...] = (),
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and v, and those of features in the order of the table, None where `needs` does not ask.

    Where `needs` goes on behind them, those of aux tensors are last.
    """
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & 15 | BACKWARD
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
    if deterministic or is_deterministic():
        flags |= DETERMINISTIC
    dtype = q.dtype
    if dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    part: tuple[Any, ...] = ()
    if features is not None:
        part = feature_key(features)
        for bit, needed in zip(GRADIENT_BITS.values(), needs, strict=False):
            flags |= bit * needed
        for number, needed in enumerate(needs[len(GRADIENT_BITS) :]):
            flags |= needed << AUX_GRADIENT_SHIFT + number
    else:
        for fits, run in _recent(flags, NOTHING):
            if fits(q, k, v, out, dout):
                gradients: tuple[Tensor | None, ...] = run(dout, dlse, q, k, v, out, lse, softmax_scale, offset, None)
                return gradients
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
        *part,
    )
    run = _remembered(key)
    if run is None:
        run = prepared(key, (q, k, v), out, dout, (lse, dlse), flags, features)
    elif features is None:
        remember(key, (q, k, v, out, dout), run)
    found: tuple[Tensor | None, ...] = run(dout, dlse, q, k, v, out, lse, softmax_scale, offset, features)
    return found


def prepared(
    key: tuple[Any, ...],
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    dout: Tensor,
    sums: tuple[Tensor, Tensor | None],
    flags: int,
    features: Features | None,
) -> Any:
    """The slow path of a key, whose first parts are those of the key above, for tensors of four dimensions."""
    q, k, v = inputs
    part = () if features is None else packed_open_key(features)
    # a gradient of the output at an odd address is copied, which calls that are open to sizes do not do
    is_copied = flags >> DOUT_SHIFT & 15
    open_key = None if part is None or is_copied else serve.open_key(key, flags, _SHARED, part)
    others = () if features is None else (features,)
    run = None if open_key is None else serve.prepare_open(open_key, key, inputs, out, dout, *others)
    if run is not None:
        return run
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
        mods=user_mods.resolve(features.mods) if features is not None and features.mods else None,
        open_key=open_key,
    )
    call = BackwardCall(
        forward=forward,
        out=out,
        dout=dout,
        deterministic=bool(flags & DETERMINISTIC),
        gradients=asked_gradients(flags),
    )
    with serve.LOCK:  # as in the forward pass
        run = serve.prepare(call)
        for name, tensor in zip(("lse", "dlse"), sums, strict=True):
            if tensor is not None:
                check_lse(name, tensor, q, bshd=forward.bshd)
        serve.remember(key, run)
    return run
