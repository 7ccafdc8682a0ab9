"""The torch.library ops that every call goes through.

Workload, memo and look-up live inside the ops, because torch.compile cannot trace them; the fakes say no more than
shapes and strides. There are two ops, so that a call without LSE allocates none. Arguments that
equal their default cost nothing in the dispatcher, so the front passes only the others.
"""

from __future__ import annotations

import torch

from flashgen.runtime.runs import Run, empty_lse, empty_output
from flashgen.runtime.serve import Call, lookup, prepare, remember

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal=False, bool bshd=False, "
    "int? q_offset=None, Tensor? q_offset_tensor=None)"
)
_LIBRARY = torch.library.Library("flashgen", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention{_SCHEMA} -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention_lse{_SCHEMA} -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    bshd: bool,
    with_lse: bool,
    explicit_offset: bool,
    offset_tensor: bool,
) -> Run:
    """What serves these arguments: from the memo, or prepared now and remembered."""
    flags = causal | bshd << 1 | with_lse << 2 | explicit_offset << 3 | offset_tensor << 4
    alignment = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    devices = (q.get_device(), k.get_device(), v.get_device())
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
        devices,
        flags << 4 | alignment,
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
            explicit_offset=explicit_offset,
            offset_tensor=offset_tensor,
        )
        run = prepare(call)
        remember(key, run)
    return run


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool = False,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
) -> torch.Tensor:
    run = _run(q, k, v, causal, bshd, False, q_offset is not None, q_offset_tensor is not None)
    return run(q, k, v, softmax_scale, q_offset if q_offset_tensor is None else q_offset_tensor)[0]


def _attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool = False,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    run = _run(q, k, v, causal, bshd, True, q_offset is not None, q_offset_tensor is not None)
    out, lse = run(q, k, v, softmax_scale, q_offset if q_offset_tensor is None else q_offset_tensor)
    assert lse is not None
    return out, lse


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool = False,
    bshd: bool = False,
    q_offset: int | None = None,
    q_offset_tensor: torch.Tensor | None = None,
) -> torch.Tensor:
    return empty_output(q, v, bshd=bshd)


def _fake_attention_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal: bool = False,
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
