"""Decode calls for the interpreter and the GPU: caches in every layout, poison where nothing is read; the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

import flashgen
from flashgen.codegen.families import default_config, usual
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.features.values import Features
from flashgen.core.workload import Specialization
from flashgen.launch.feature_arguments import NO_FEATURES
from flashgen.runtime.decode.call import DecodeCall

SCORES = ("window", "softcap", "alibi_slopes", "sinks")
STALE = (-1, 2**31 - 1, 0)
"""What entries of a table behind the length of a sequence may hold."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decode call at random values; `layout` is that of the caches."""

    lens: tuple[int, ...]
    nheads: int = 4
    nheads_k: int = 2
    head_dim: int = 32
    head_dim_v: int = 0
    seqlen_q: int = 1
    page: int | None = None
    layout: str = "nhd"
    dtype: torch.dtype = torch.float16
    room: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    leftpad: tuple[int, ...] = ()
    batch_idx: tuple[int, ...] = ()
    sinks: bool = False
    alibi: bool = False


def decode_config(spec: Specialization, sizes: Sizes, device: Device) -> Config:
    """The config that serves a step of decoding without any record."""
    return usual(default_config(spec, device), spec, sizes, device)


def make(case: Case, device: str = "cpu", seed: int = 0, order: int = 0) -> DecodeCall:
    """The call; `order` permutes the pages. Values follow from the seed, the sequence and the place alone."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    batch, wide = len(case.lens), case.head_dim_v or case.head_dim
    room = case.room or max(*case.lens, 1)
    q = normal(batch, case.seqlen_q, case.nheads, case.head_dim)
    k, v = normal(batch, room, case.nheads_k, case.head_dim), normal(batch, room, case.nheads_k, wide)
    for b, length in enumerate(case.lens):
        first = first_visible(case, b)
        for cache in (k, v):
            cache[b, length:] = math.nan
            cache[b, :first] = math.nan
    given = {name: value for name, value in case.options.items() if name not in SCORES}
    scores = {name: value for name, value in case.options.items() if name in SCORES}
    if case.sinks:
        scores["sinks"] = torch.randn(case.nheads, generator=generator).to(device)
    if case.alibi:
        scores["alibi_slopes"] = torch.rand(case.nheads, generator=generator).to(device)
    given["features"] = Features(**scores) if scores else NO_FEATURES
    if case.leftpad:
        given["leftpad"] = torch.tensor(case.leftpad, dtype=torch.int32, device=device)
    if case.page is not None:
        k, v, table = _paged(k, v, case, order)
        given["block_table"] = table.to(device)
    elif case.batch_idx:
        rows = torch.tensor(case.batch_idx)
        k, v = (_spread(cache, rows) for cache in (k, v))
        given["batch_idx"] = rows.to(torch.int32).to(device)
    k, v = _laid_out(k.to(device), v.to(device), case.layout)
    lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    return DecodeCall(q=q.to(device), k_cache=k, v_cache=v, seqlens=lens, **given)


def first_visible(case: Case, b: int) -> int:
    """The first key of a sequence that any of its queries sees."""
    left = case.options.get("window", (None, None))[0]
    first = 0 if left is None else case.lens[b] - case.seqlen_q - left
    return max(first, case.leftpad[b] if case.leftpad else 0, 0)


def _paged(k: torch.Tensor, v: torch.Tensor, case: Case, order: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches of pages in random order among others full of NaN; table entries that nobody may read are stale."""
    page, (batch, room, *_) = case.page or 1, k.shape
    columns = -(-room // page) + 1
    total = sum(-(-n // page) for n in case.lens) + 3
    ids = torch.randperm(total, generator=torch.Generator().manual_seed(order)).tolist()
    table = torch.tensor([STALE[i % 3] for i in range(batch * columns)], dtype=torch.int32).view(batch, columns)
    pages = [torch.full((total, page, *cache.shape[2:]), math.nan, dtype=cache.dtype) for cache in (k, v)]
    for b, length in enumerate(case.lens):
        if not length:
            table[b, 0] = STALE[1]  # read, and not believed: nothing of the page is
        for column in range(-(-length // page)):
            here, keys = ids.pop(), slice(column * page, min((column + 1) * page, length))
            if keys.stop > first_visible(case, b):
                table[b, column] = here
            for cache, paged in zip((k, v), pages, strict=True):
                paged[here, : keys.stop - keys.start] = cache[b, keys]
    return pages[0], pages[1], table


def _spread(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    whole = torch.full((int(rows.max()) + 2, *cache.shape[1:]), math.nan, dtype=cache.dtype)
    whole[rows] = cache
    return whole


def _laid_out(k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "hnd":
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # type: ignore[return-value]
    if layout == "halves":
        return torch.stack([k, v], 1).unbind(1)  # type: ignore[return-value]
    if layout == "interleaved":
        whole = torch.cat([k, v], -1)
        return whole[..., : k.shape[-1]], whole[..., k.shape[-1] :]
    return k, v


def oracle(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float64, one sequence at a time, from the visible keys alone."""
    (batch, rows, nheads, _), wide = call.q.shape, call.v_cache.shape[3]
    out = torch.zeros(batch, rows, nheads, wide, dtype=torch.float64)
    lse = torch.full((batch, nheads, rows), -math.inf, dtype=torch.float64)
    for b in range(batch):
        out[b], lse[b] = _one(call, b)
    return out, lse


def _one(call: DecodeCall, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    (_, rows, nheads, dim), length = call.q.shape, int(call.seqlens[b])
    places = torch.arange(rows)[:, None] + length - rows
    left, right = call.features.window
    right = 0 if call.causal else right
    keys = torch.arange(length)
    seen = (keys >= (0 if call.leftpad is None else int(call.leftpad[b]))).expand(rows, length)
    seen = seen & (keys >= places - left) if left is not None else seen
    seen = seen & (keys <= places + right) if right is not None else seen
    used = seen.any(0)
    keys, seen = keys[used], seen[:, used]
    group = nheads // call.k_cache.shape[2]
    k, v = (_rows(call, cache, b, keys).repeat_interleave(group, 1) for cache in (call.k_cache, call.v_cache))
    scale = dim**-0.5 if call.softmax_scale is None else call.softmax_scale
    s = torch.einsum("qhd,khd->hqk", call.q[b].double().cpu(), k) * scale
    if call.features.softcap:
        s = call.features.softcap * torch.tanh(s / call.features.softcap)
    if call.features.alibi_slopes is not None:
        s = s - call.features.alibi_slopes.double().cpu()[:, None, None] * (places - keys).abs()
    s = s.masked_fill(~seen, -math.inf)
    if call.features.sinks is not None:
        s = torch.cat([s, call.features.sinks.double().cpu()[:, None, None].expand(-1, rows, 1)], -1)
    if s.shape[-1] == 0:
        return torch.zeros(rows, nheads, v.shape[-1], dtype=torch.float64), torch.full((nheads, rows), -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", p, v), lse


def _rows(call: DecodeCall, cache: torch.Tensor, b: int, keys: torch.Tensor) -> torch.Tensor:
    if call.block_table is not None:
        page = cache.shape[1]
        found = cache[call.block_table[b].cpu()[keys // page].long(), keys % page]
    else:
        found = cache[b if call.batch_idx is None else int(call.batch_idx[b]), keys]
    return found.double().cpu()


def assert_right(call: DecodeCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Compare with the oracle: an error of few roundings of the dtype."""
    right, right_lse = oracle(call)
    tolerance = 2e-2 if call.q.dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(out.double().cpu(), right, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), right_lse.double(), atol=2e-3, rtol=2e-3)


def arguments(call: DecodeCall) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Those of `flashgen.attention_decode`, by place and by name."""
    given = {field.name: getattr(call, field.name) for field in fields(call) if field.name != "features"}
    tensors = [given.pop(name) for name in ("q", "k_cache", "v_cache", "seqlens")]
    return tensors, {**given, **{name: getattr(call.features, name) for name in SCORES}}


def run(call: DecodeCall, **changes: Any) -> Any:
    """The public call with a call's arguments."""
    tensors, named = arguments(replace(call, **changes))
    return flashgen.attention_decode(*tensors, **named)


def only(call: DecodeCall, rows: list[int]) -> DecodeCall:
    """The call for some of its sequences, whose caches have pages."""
    assert call.block_table is not None
    return replace(call, q=call.q[rows], seqlens=call.seqlens[rows], block_table=call.block_table[rows].contiguous())
