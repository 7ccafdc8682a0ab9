"""The torch.library ops that every call goes through.

Workload, memo and look-up live inside the ops, because torch.compile cannot trace them; the fakes say no more than shapes
and strides. There are two ops, so that a call without LSE allocates none.
"""

from __future__ import annotations

import torch

from flashgen.runtime.runs import Result, empty_lse, empty_output
from flashgen.runtime.serve import Call, lookup, prepare, remember

_SCHEMA = "(Tensor q, Tensor k, Tensor v, bool causal, float softmax_scale, bool bshd, int? q_offset, Tensor? q_offset_tensor)"
_LIBRARY = torch.library.Library("flashgen", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention{_SCHEMA} -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention_lse{_SCHEMA} -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]


def _serve(
    with_lse: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bshd: bool,
    q_offset: int | None,
    q_offset_tensor: torch.Tensor | None,
) -> Result:
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        (causal, bshd, with_lse, q_offset is None, q_offset_tensor is None),
    )
    run = lookup(key)
    if run is None:
        call = Call(
            q=q,
            k=k,
            v=v,
            causal=causal,
            bshd=bshd,
            with_lse=with_lse,
            explicit_offset=q_offset is not None,
            offset_tensor=q_offset_tensor is not None,
        )
        run = prepare(call)
        remember(key, run)
    return run(q, k, v, softmax_scale, q_offset if q_offset_tensor is None else q_offset_tensor)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bshd: bool,
    q_offset: int | None,
    q_offset_tensor: torch.Tensor | None,
) -> torch.Tensor:
    return _serve(False, q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor)[0]


def _attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bshd: bool,
    q_offset: int | None,
    q_offset_tensor: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _serve(True, q, k, v, causal, softmax_scale, bshd, q_offset, q_offset_tensor)
    assert lse is not None
    return out, lse


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bshd: bool,
    q_offset: int | None,
    q_offset_tensor: torch.Tensor | None,
) -> torch.Tensor:
    return empty_output(q, v, bshd=bshd)


def _fake_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bshd: bool,
    q_offset: int | None,
    q_offset_tensor: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, v, bshd=bshd), empty_lse(q, bshd=bshd)


for _key in ("CPU", "CUDA"):  # the CPU's raises the error that lists every family
    _LIBRARY.impl("attention", _attention, _key)  # type: ignore[no-untyped-call]
    _LIBRARY.impl("attention_lse", _attention_lse, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("flashgen::attention", _fake_attention, lib=_LIBRARY)
torch.library.register_fake("flashgen::attention_lse", _fake_attention_lse, lib=_LIBRARY)

attention_op = torch.ops.flashgen.attention.default
attention_lse_op = torch.ops.flashgen.attention_lse.default
