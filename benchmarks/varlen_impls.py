"""The implementations that run packed sequences, each called as its users call it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from benchmarks import fa4
from benchmarks.flex import flex_module, forget_compiled
from benchmarks.impls import FA3_MODULE, Call, fa3_version, torch_version
from benchmarks.varlen_cases import Pack, PackTensors, padded, unpadded

TORCH_MODULE = "torch.nn.attention.varlen"

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _as_it_is(out: Tensor) -> Tensor:
    return out


@dataclass(frozen=True, kw_only=True)
class Ready:
    """An implementation on the tensors of a batch.

    Attributes:
        call: a forward pass of copy n, or both passes, which return (dq, dk, dv, out).
        rows: the output as (rows, heads, head_dim), None where it is that of another batch.
        share: the visible pairs of the batch over those that it computes on a batch of its own.
    """

    call: Call
    rows: Callable[[Tensor], Tensor] | None = _as_it_is
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenImpl:
    """An implementation: why it cannot run a batch, or None, and what runs it."""

    name: str
    version: Callable[[], str]
    unsupported: Callable[[Pack], str | None]
    prepare: Callable[[Pack, PackTensors], Ready]


def _call(
    pack: Pack, found: tuple[list[Tensor], list[Tensor], list[Tensor]], dout: list[Tensor], attend: Attend
) -> Call:
    """`attend` on the n-th tensors, with its backward pass where the batch trains."""
    q, k, v = found
    if not pack.trains:
        return Call(run=lambda n: attend(q[n], k[n], v[n]))

    def both(n: int) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = attend(q[n], k[n], v[n])
        return (*torch.autograd.grad(out, (q[n], k[n], v[n]), dout[n]), out)

    return Call(run=both)


def _packed(pack: Pack, found: PackTensors, attend: Attend) -> Ready:
    return Ready(call=_call(pack, (found.q, found.k, found.v), found.dout, attend))


def _flashgen(pack: Pack, found: PackTensors) -> Ready:
    w = pack.workload
    keys = None if pack.is_self_attention else found.ends_k
    bounds = {"max_seqlen_q": w.seqlen_q, "max_seqlen_k": w.seqlen_k}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashgen.attention_varlen(q, k, v, found.ends_q, keys, causal=w.causal, **bounds)  # type: ignore[no-any-return, call-overload]

    return _packed(pack, found, attend)


def _dense(pack: Pack, found: PackTensors) -> Ready:
    dense = pack.dense
    rows = dense.batch * dense.seqlen_q

    def grown(tensors: list[Tensor]) -> list[Tensor]:
        again = [torch.cat([one.detach()] * (1 + rows // len(one)))[:rows] for one in tensors]
        parts = [one.view(dense.batch, dense.seqlen_q, *one.shape[1:]).contiguous() for one in again]
        return [one.requires_grad_(pack.trains) for one in parts]

    tensors = grown(found.q), grown(found.k), grown(found.v)
    dout = [one.detach() for one in grown(found.dout)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flashgen.attention(q, k, v, causal=dense.causal, layout="bshd")
        assert isinstance(out, Tensor)
        return out

    share = pack.workload.all_pairs / dense.all_pairs
    return Ready(call=_call(pack, tensors, dout, attend), rows=None, share=share)


def _why_not_dense(pack: Pack) -> str | None:
    return None if pack.is_self_attention else "it computes sequences with as many keys as queries"


def _why_not_torch(pack: Pack) -> str | None:
    if importlib.util.find_spec(TORCH_MODULE) is None:
        return f"this torch has no {TORCH_MODULE}"
    names = _torch_parameters()
    if pack.workload.nheads != pack.workload.nheads_k and "enable_gqa" not in names:
        return "this torch's varlen_attn has as many heads of keys as of queries"
    if not pack.is_self_attention and "window_size" not in names:
        return "this torch's varlen_attn has no causal mask for other keys than queries"
    return None


def _torch_parameters() -> frozenset[str]:
    return frozenset(inspect.signature(importlib.import_module(TORCH_MODULE).varlen_attn).parameters)


def _torch(pack: Pack, found: PackTensors) -> Ready:
    w, names = pack.workload, _torch_parameters()
    function = importlib.import_module(TORCH_MODULE).varlen_attn
    options: dict[str, Any] = {"enable_gqa": True} if w.nheads != w.nheads_k else {}
    if w.causal:
        options |= {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = function(q, k, v, found.ends_q, found.ends_k, w.seqlen_q, w.seqlen_k, **options)
        return out

    return _packed(pack, found, attend)


def _why_not_flex(pack: Pack) -> str | None:
    return None if pack.is_self_attention else "documents in one sequence have as many keys as queries"


def _flex(pack: Pack, found: PackTensors) -> Ready:
    forget_compiled()
    module, w, device = flex_module(), pack.workload, found.q[0].device
    rows = found.q[0].shape[0]
    lengths = torch.tensor(pack.queries, device=device)
    document = torch.repeat_interleave(torch.arange(len(pack.queries), device=device), lengths)

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        visible = document[i] == document[j]
        return visible & (i >= j) if w.causal else visible

    mask = module.create_block_mask(same, None, None, rows, rows, device=device)
    compiled = torch.compile(module.flex_attention, dynamic=False)
    gqa = w.nheads != w.nheads_k

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (one.transpose(0, 1)[None] for one in (q, k, v))
        out: Tensor = compiled(*heads, block_mask=mask, enable_gqa=gqa)
        return out[0].transpose(0, 1)

    return _packed(pack, found, attend)


def _why_not_padded(pack: Pack) -> str | None:
    return None if pack.is_self_attention else "scaled_dot_product_attention has no causal mask for each length"


def _padded(pack: Pack, found: PackTensors) -> Ready:
    w, lengths = pack.workload, pack.queries
    tensors = tuple(
        [padded(t, lengths).requires_grad_(pack.trains) for t in one] for one in (found.q, found.k, found.v)
    )
    dout = [padded(one, lengths) for one in found.dout]
    mask = None
    if not w.causal:  # queries before the padding see no key of it
        places = torch.arange(max(lengths), device=found.q[0].device)
        mask = (places < torch.tensor(lengths, device=places.device)[:, None])[:, None, None, :]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": w.causal, "enable_gqa": w.nheads != w.nheads_k}
    call = _call(pack, tensors, dout, lambda q, k, v: scaled_dot_product_attention(q, k, v, **options))
    return Ready(call=call, rows=lambda out: unpadded(out, lengths))


def _why_not_fa3(pack: Pack) -> str | None:
    if importlib.util.find_spec(FA3_MODULE) is None:
        return f"{FA3_MODULE} is not installed"
    if not hasattr(importlib.import_module(FA3_MODULE), "flash_attn_varlen_func"):
        return "this build has no packed sequences"
    return "this build has no backward pass" if pack.trains else None


def _why_not_fa4(pack: Pack) -> str | None:
    reason = fa4.limits(pack.workload)
    if reason is None and not hasattr(importlib.import_module(fa4.MODULE), "flash_attn_varlen_func"):
        return "this version has no packed sequences"
    return reason


def _flash_attention(module: str) -> Callable[[Pack, PackTensors], Ready]:
    def prepare(pack: Pack, found: PackTensors) -> Ready:
        function, w = importlib.import_module(module).flash_attn_varlen_func, pack.workload
        names = inspect.signature(function).parameters
        given = {"cu_seqlens_q": found.ends_q, "cu_seqlens_k": found.ends_k, "causal": w.causal}
        given |= {"max_seqlen_q": w.seqlen_q, "max_seqlen_k": w.seqlen_k}
        options = {name: value for name, value in given.items() if name in names}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(q, k, v, **options)
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first

        return _packed(pack, found, attend)

    return prepare


def _everything(pack: Pack) -> str | None:
    return None


IMPLS: tuple[VarlenImpl, ...] = (
    VarlenImpl(name="flashgen", version=lambda: flashgen.__version__, unsupported=_everything, prepare=_flashgen),
    VarlenImpl(name="flashgen-dense", version=lambda: flashgen.__version__, unsupported=_why_not_dense, prepare=_dense),
    VarlenImpl(name="torch-varlen", version=torch_version, unsupported=_why_not_torch, prepare=_torch),
    VarlenImpl(name="flex", version=torch_version, unsupported=_why_not_flex, prepare=_flex),
    VarlenImpl(name="sdpa-padded", version=torch_version, unsupported=_why_not_padded, prepare=_padded),
    VarlenImpl(name="fa3", version=fa3_version, unsupported=_why_not_fa3, prepare=_flash_attention(FA3_MODULE)),
    VarlenImpl(name="fa4", version=fa4.version, unsupported=_why_not_fa4, prepare=_flash_attention(fa4.MODULE)),
)

no_grad_of = {True: contextlib.nullcontext, False: torch.no_grad}
"""Around the calls of a batch, by whether it trains."""
