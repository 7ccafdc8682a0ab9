"""The torch.library ops that every call goes through.

Workload, memo and look-up live inside the ops, because torch.compile cannot trace them; the fakes say no more than
shapes and strides. There are two ops, so that a call without LSE allocates none. Arguments that
equal their default cost nothing in the dispatcher, so the front passes only the others.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.runtime import serve
from flashgen.runtime.runs import Run, empty_lse, empty_output

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None, bool bshd=False, "
    "int? q_offset=None, Tensor? q_offset_tensor=None)"
)
_LIBRARY = torch.library.Library("flashgen", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention{_SCHEMA} -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention_lse{_SCHEMA} -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]

WITH_LSE, EXPLICIT_OFFSET, OFFSET_TENSOR, BSHD, CAUSAL = 16, 32, 64, 128, 256
"""Bits of a key's flags, above the four of the pointers' alignment."""

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
    with_lse: int = 0,
) -> Any:
    # the key is written out here: every call of a function costs as much as two of its parts
    flags = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 | with_lse
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
    )
    run = _remembered(key)
    if run is None:
        run = _prepared(key, q, k, v, flags)
    return run(q, k, v, softmax_scale, offset)


def _prepared(key: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flags: int) -> Run:
    call = serve.Call(
        q=q,
        k=k,
        v=v,
        causal=bool(flags & CAUSAL),
        bshd=bool(flags & BSHD),
        with_lse=bool(flags & WITH_LSE),
        explicit_offset=bool(flags & EXPLICIT_OFFSET),
        offset_tensor=bool(flags & OFFSET_TENSOR),
    )
    run = serve.prepare(call)
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


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
) -> torch.Tensor:
    return empty_output(q, v, bshd=bshd)


def _fake_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, v, bshd=bshd), empty_lse(q, bshd=bshd)


for _key in ("CPU", "CUDA"):  # the CPU's raises the error that lists every family
    _LIBRARY.impl("attention", _attention, _key)  # type: ignore[no-untyped-call]
    _LIBRARY.impl("attention_lse", _attention_lse, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("flashgen::attention", _fake_attention, lib=_LIBRARY)
torch.library.register_fake("flashgen::attention_lse", _fake_attention_lse, lib=_LIBRARY)

attention_op = torch.ops.flashgen.attention.default
attention_lse_op = torch.ops.flashgen.attention_lse.default
