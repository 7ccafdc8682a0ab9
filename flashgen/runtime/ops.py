"""The torch.library ops of forward passes.

Workload, memo and look-up live inside the ops, because torch.compile cannot trace them; the fakes say no more than
shapes and strides. Calls without an LSE have ops of their own, so that none is allocated, and so have calls without
features, whose key is short. Arguments that equal their default cost nothing in the dispatcher, so the front passes
only the others. A user's score functions come as a number that `flashgen.runtime.mods` knows. None of these ops has a
gradient, which would cost 6 us a call even where nobody asks for one: `flashgen.runtime.training_ops` has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashgen.core.features.values import Features
from flashgen.runtime import mods as user_mods
from flashgen.runtime import serve
from flashgen.runtime.calls import Call
from flashgen.runtime.keys import (
    BIAS_GRAD,
    BSHD,
    CAUSAL,
    DETERMINISTIC,
    EXPLICIT_OFFSET,
    FLOAT32,
    OFFSET_TENSOR,
    TF32,
    TRAINS,
    WITH_LSE,
    allows_tf32,
    layout,
)
from flashgen.runtime.op_arguments import features_of
from flashgen.runtime.runs import Run, empty_lse, empty_output

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None, bool bshd=False, "
    "int? q_offset=None, Tensor? q_offset_tensor=None"
)
PLAIN_FEATURES = (
    "int? window_left=None, int? window_right=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? bias=None, Tensor? mask=None"
)
_FEATURES = (
    f"{PLAIN_FEATURES}, int mods=0, Tensor[]? aux=None, Tensor[]? block_mask=None, int[] block_sizes=[], "
    "str block_mask_mod=''"
)
LIBRARY = torch.library.Library("flashgen", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention({SCHEMA}) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_lse({SCHEMA}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_features({SCHEMA}, {_FEATURES}) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define(f"attention_features_lse({SCHEMA}, {_FEATURES}) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]

FEATURES_WITHOUT_MODS = 7
"""The feature arguments before `mods`."""

_remembered = serve.MEMO.get


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
    asked: int = 0,
) -> Any:
    # the key is written out here: every call of a function costs as much as two of its parts
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | asked
    if causal:
        flags |= CAUSAL
    if bshd:
        flags |= BSHD
    offset: int | torch.Tensor | None = None
    if q_offset is not None:
        offset = q_offset
        flags |= EXPLICIT_OFFSET
    elif q_offset_tensor is not None:
        offset = q_offset_tensor
        flags |= OFFSET_TENSOR
    dtype = q.dtype
    if dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    key = (
        flags,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
    )
    run: Run | None = _remembered(key)
    if run is None:
        run = _prepared(key, q, k, v, flags)
    return run(q, k, v, softmax_scale, offset)


def _attention_features(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mods: int = 0,
    aux: Sequence[torch.Tensor] | None = None,
    block_mask: Sequence[torch.Tensor] | None = None,
    block_sizes: Sequence[int] = (),
    block_mask_mod: str = "",
    asked: int = 0,
) -> Any:
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | asked
    flags |= CAUSAL * causal | BSHD * bshd
    flags |= EXPLICIT_OFFSET * (q_offset is not None) | OFFSET_TENSOR * (q_offset_tensor is not None)
    if q.dtype is FLOAT32 and allows_tf32():
        flags |= TF32
    features = features_of(
        window_left,
        window_right,
        softcap,
        alibi_slopes,
        sinks,
        bias,
        mask,
        aux,
        block_mask,
        block_sizes,
        block_mask_mod,
    )
    tensors = (features.alibi_slopes, features.sinks, bias, mask, *features.aux, *(block_mask or ()))
    key = (
        flags,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        window_left,
        window_right,
        softcap > 0,
        mods,
        len(features.aux),
        tuple(block_sizes),
        block_mask_mod,
        *(None if tensor is None else layout(tensor) for tensor in tensors),
    )
    run = _remembered(key)
    if run is None:
        run = _prepared(key, q, k, v, flags, features, mods)
    offset = q_offset if q_offset is not None else q_offset_tensor
    return run(q, k, v, softmax_scale, offset, features)


def _prepared(
    key: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    flags: int,
    features: Features | None = None,
    mods: int = 0,
) -> Any:
    call = Call(
        q=q,
        k=k,
        v=v,
        causal=bool(flags & CAUSAL),
        bshd=bool(flags & BSHD),
        with_lse=bool(flags & WITH_LSE),
        explicit_offset=bool(flags & EXPLICIT_OFFSET),
        offset_tensor=bool(flags & OFFSET_TENSOR),
        tf32=bool(flags & TF32),
        features=features,
        mods=user_mods.resolve(mods) if mods else None,
    )
    if flags & TRAINS:
        return _prepared_to_train(key, call, flags)
    run = serve.prepare(call)
    serve.remember(key, run)
    return run


def _prepared_to_train(key: tuple[Any, ...], call: Call, flags: int) -> Any:
    """The plan of the same call with an LSE, once it is known that the backward pass will have a kernel.

    Without one the forward pass fails, which the traceback of the user's own line shows, and not `loss.backward()`.
    """
    from flashgen.runtime.backward_serve import check_support

    alone = (flags & ~(TRAINS | DETERMINISTIC | BIAS_GRAD), *key[1:])
    run = _remembered(alone)
    if run is None:
        run = serve.prepare(call)
        serve.remember(alone, run)
    check_support(call, deterministic=bool(flags & DETERMINISTIC), bias_grad=bool(flags & BIAS_GRAD))
    serve.remember(key, run)
    return run


def _attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
) -> Any:
    return _attention(q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor, WITH_LSE)


_ASKS_LSE: Any = {"asked": WITH_LSE}


def _attention_features_lse(*arguments: Any) -> Any:
    return _attention_features(*arguments, **_ASKS_LSE)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    *others: Any,
    **named: Any,
) -> torch.Tensor:
    return empty_output(q, v, bshd=bshd)


def _fake_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, v, bshd=bshd), empty_lse(q, bshd=bshd)


_IMPLEMENTATIONS = {
    "attention": (_attention, _fake),
    "attention_lse": (_attention_lse, _fake_lse),
    "attention_features": (_attention_features, _fake),
    "attention_features_lse": (_attention_features_lse, _fake_lse),
}
attention_kernel, attention_lse_kernel = _attention, _attention_lse
attention_features_kernel, attention_features_lse_kernel = _attention_features, _attention_features_lse
"""What the ops do, without the dispatcher: for calls that `can_bypass_dispatcher` allows."""

for _name, (_kernel, _shapes) in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):  # the CPU's raises the error that lists every family
        LIBRARY.impl(_name, _kernel, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flashgen::{_name}", _shapes, lib=LIBRARY)

attention_op = torch.ops.flashgen.attention.default
attention_lse_op = torch.ops.flashgen.attention_lse.default
attention_features_op = torch.ops.flashgen.attention_features.default
attention_features_lse_op = torch.ops.flashgen.attention_features_lse.default
