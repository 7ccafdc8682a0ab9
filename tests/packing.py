"""Packed sequences for the interpreter and the GPU: poison where nothing is read; the oracle, one sequence a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashgen.core.features.dropout import keep_scale
from flashgen.core.features.values import Features
from flashgen.reference.philox import kept
from flashgen.runtime.ops.calls import Call, CheckedCall
from flashgen.runtime.ops.mods import handle_for, resolve
from flashgen.runtime.varlen.arguments import one_batch_element, packed_features

SCORES = ("window", "softcap", "alibi_slopes", "sinks", "dropout_p", "rng_state")
Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of `flashgen.attention_varlen` at random values.

    `keys` are the lengths of keys where they are not those of queries; `used_q` and `used_k` how many of these count,
    `spare` the rows behind the last sequence. `poison` names sequences whose rows are all NaN.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...] = ()
    used_q: tuple[int, ...] = ()
    used_k: tuple[int, ...] = ()
    nheads: int = 4
    nheads_k: int = 2
    head_dim: int = 32
    head_dim_v: int = 0
    dtype: torch.dtype = torch.float16
    layout: str = "packed"
    spare: int = 0
    poison: tuple[int, ...] = ()
    sinks: bool = False
    alibi: str = ""
    mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The tensors of a call, and its arguments by name."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    named: dict[str, Any]

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """Of each sequence its number, and the rows of its queries and keys that count."""
        case, q, k = self.case, 0, 0
        keys = case.keys or case.queries
        for b, (rows, columns) in enumerate(zip(case.queries, keys, strict=True)):
            used = (case.used_q[b] if case.used_q else rows, case.used_k[b] if case.used_k else columns)
            yield b, slice(q, q + used[0]), slice(k, k + used[1])
            q, k = q + rows, k + columns


def make(case: Case, device: str = "cpu", seed: int = 0) -> Packed:
    """The call; rows that do not count hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    keys, wide = case.keys or case.queries, case.head_dim_v or case.head_dim
    rows, columns = sum(case.queries) + case.spare, sum(keys) + case.spare
    shapes = [(rows, case.nheads, case.head_dim), (columns, case.nheads_k, case.head_dim)]
    values = [torch.randn(shape, generator=generator) for shape in (*shapes, (columns, case.nheads_k, wide))]
    q, k, v = (_laid_out(value.to(case.dtype), case.layout) for value in values)
    named: dict[str, Any] = dict(case.options)
    named["cu_seqlens_q"] = _ends(case.queries, device)
    if case.keys:
        named["cu_seqlens_k"] = _ends(case.keys, device)
    for name, used in (("seqused_q", case.used_q), ("seqused_k", case.used_k)):
        if used:
            named[name] = torch.tensor(used, dtype=torch.int32, device=device)
    named |= {"max_seqlen_q": max((*case.queries, 0)), "max_seqlen_k": max((*keys, 0))}
    if case.sinks:
        named["sinks"] = torch.randn(case.nheads, generator=generator).to(device)
    if case.alibi:
        shape = (case.nheads,) if case.alibi == "shared" else (len(case.queries), case.nheads)
        named["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    if case.mod is not None:
        named["mask_mod"] = case.mod
    if case.score_mod is not None:
        named["score_mod"] = case.score_mod
    packed = Packed(case=case, q=q, k=k, v=v, named=named)
    _poison(packed)
    return Packed(case=case, q=q.to(device), k=k.to(device), v=v.to(device), named=named)


def _ends(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _laid_out(value: Tensor, layout: str) -> Tensor:
    if layout == "heads":
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "odd":
        return torch.nn.functional.pad(value, (0, 1))[..., :-1]
    return value


def _poison(packed: Packed) -> None:
    counts_q, counts_k = (torch.zeros(len(one), dtype=torch.bool) for one in (packed.q, packed.k))
    for b, queries, keys in packed.sequences():
        counts_q[queries] = b not in packed.case.poison
        counts_k[keys] = b not in packed.case.poison
    packed.q[~counts_q] = math.nan
    packed.k[~counts_k] = math.nan
    packed.v[~counts_k] = math.nan


def checked(packed: Packed) -> CheckedCall:
    """The call, its rules checked."""
    named = {name: packed.named.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")}
    scores: dict[str, Any] = {name: packed.named[name] for name in SCORES if name in packed.named}
    functions = (packed.named.get("score_mod"), packed.named.get("mask_mod"))
    aux = packed.named.get("aux", ())
    mods = 0 if functions == (None, None) else handle_for(*functions, tuple(one.dtype for one in aux))
    bounds = packed.named["max_seqlen_q"], packed.named["max_seqlen_k"]
    features = packed_features(Features(**scores, mods=mods, aux=aux), *named.values(), *bounds)
    q, k, v = one_batch_element(packed.q, packed.k, packed.v)
    causal = packed.named.get("causal", False)
    resolved = resolve(mods) if mods else None
    return Call(q=q, k=k, v=v, causal=causal, bshd=True, with_lse=True, features=features, mods=resolved).checked()


def oracle(packed: Packed) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64; 0 and -inf in rows that do not count."""
    q, v, named = packed.q, packed.v, packed.named
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    group = q.shape[1] // packed.k.shape[1]
    for b, queries, keys in packed.sequences():
        one, two, three = (x.double() for x in (q[queries], packed.k[keys], v[keys]))
        given = {name: _of_sequence(name, value, b) for name, value in named.items()}
        with q.device:
            found = reference(one, two.repeat_interleave(group, 1), three.repeat_interleave(group, 1), b, given)
        out[queries], lse[:, queries] = (each.cpu() for each in found)
    return out, lse


def _of_sequence(name: str, value: Any, b: int) -> Any:
    if not isinstance(value, Tensor) or name not in ("sinks", "alibi_slopes"):
        return value
    value = value.double()
    return value[b] if value.dim() == 2 else value


def reference(q: Tensor, k: Tensor, v: Tensor, b: int, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Output and LSE of one sequence: q (rows, nheads, head_dim), k and v likewise, in float64 with gradients."""
    rows, columns = len(q), len(k)
    heads = torch.arange(q.shape[1])[:, None, None]
    scale = named.get("softmax_scale") or q.shape[2] ** -0.5
    place = torch.arange(rows)[:, None] + columns - rows
    key = torch.arange(columns)[None, :]
    left, right = named.get("window", (None, None))
    right = 0 if named.get("causal") else right
    seen = torch.ones(rows, columns, dtype=torch.bool)
    seen = seen & (key >= place - left) if left is not None else seen
    seen = seen & (key <= place + right) if right is not None else seen
    if named.get("mask_mod") is not None:
        seen = seen & named["mask_mod"](b, heads, torch.arange(rows)[:, None], key)
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    if named.get("softcap"):
        s = named["softcap"] * torch.tanh(s / named["softcap"])
    if named.get("alibi_slopes") is not None:
        s = s - named["alibi_slopes"][:, None, None] * (place - key).abs()
    if named.get("score_mod") is not None:
        s = named["score_mod"](s, b, heads, torch.arange(rows)[:, None], key)
    s = s.masked_fill(~seen, -math.inf)
    if named.get("sinks") is not None:
        s = torch.cat([s, named["sinks"][:, None, None].expand(-1, rows, 1)], -1)
    if s.shape[-1] == 0:
        return q.new_zeros(rows, q.shape[1], v.shape[2]), torch.full((q.shape[1], rows), -math.inf, dtype=q.dtype)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., :columns]
    if named.get("dropout_p"):
        nheads, dropout_p = q.shape[1], named["dropout_p"]
        every = torch.arange(b * nheads, (b + 1) * nheads)
        p = p * kept(named["rng_state"].to(q.device), dropout_p, every, rows, columns) * keep_scale(dropout_p)
    return torch.einsum("hqk,khd->qhd", p, v), lse


def assert_right(packed: Packed, out: Tensor, lse: Tensor) -> None:
    """Compare with the oracle: an error of few roundings of the dtype; sequences of NaN are left out."""
    right, right_lse = oracle(packed)
    wrong = torch.zeros(len(out), dtype=torch.bool)
    for b, queries, _ in packed.sequences():
        wrong[queries] = b in packed.case.poison
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[out.dtype]
    found, found_lse = out.double().cpu(), lse.double().cpu()
    torch.testing.assert_close(found[~wrong], right[~wrong], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found_lse[:, ~wrong], right_lse[:, ~wrong], atol=2e-3, rtol=2e-3)


def gradients(packed: Packed, dout: Tensor, dlse: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of q, k, v and sinks in float64; 0 in rows that do not count."""
    found = {name: torch.zeros(getattr(packed, name).shape, dtype=torch.float64) for name in "qkv"}
    group = packed.q.shape[1] // packed.k.shape[1]
    sinks = packed.named.get("sinks")
    if sinks is not None:
        found["sinks"] = torch.zeros(len(sinks), dtype=torch.float64)
    for b, queries, keys in packed.sequences():
        rows = {"q": queries, "k": keys, "v": keys}
        given = {name: getattr(packed, name)[rows[name]].detach().double().requires_grad_() for name in "qkv"}
        named = {name: _of_sequence(name, value, b) for name, value in packed.named.items()}
        if sinks is not None:
            given["sinks"] = named["sinks"] = named["sinks"].clone().requires_grad_()
        k, v = (given[name].repeat_interleave(group, 1) for name in "kv")
        with packed.q.device:
            out, lse = reference(given["q"], k, v, b, named)
        total = (out * dout[queries].double()).sum()
        if dlse is not None:
            total = total + (torch.where(lse.isinf(), 0.0, lse) * dlse[:, queries].double()).sum()
        if total.requires_grad and b not in packed.case.poison:
            for name, part in zip(
                given, torch.autograd.grad(total, tuple(given.values()), allow_unused=True), strict=True
            ):
                if part is not None and name == "sinks":
                    found[name] += part.cpu()
                elif part is not None:
                    found[name][rows[name]] += part.nan_to_num().cpu()
    return found


def assert_gradients(
    packed: Packed, found: dict[str, Tensor], right: dict[str, Tensor], *, whole: bool = False
) -> None:
    """Compare gradients by their largest: an error of few roundings; sequences of NaN are left out.

    `whole`: with their rows that do not count, which are 0 by some kernels and NaN by others.
    """
    every = replace(packed, case=replace(packed.case, used_q=(), used_k=())) if whole else packed
    for name, expected in right.items():
        wrong = torch.zeros(len(expected), dtype=torch.bool)
        for b, queries, keys in every.sequences():
            if name != "sinks" and b in packed.case.poison:
                wrong[queries if name == "q" else keys] = True
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[packed.q.dtype]
        scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1.0)
        one = found[name].double().cpu()[~wrong]
        torch.testing.assert_close(one, expected[~wrong], atol=2 * tolerance * scale, rtol=tolerance)
