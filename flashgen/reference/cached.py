"""`attention_decode` in plain torch."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import Literal, overload

import torch

from flashgen.core.checks import instance
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import Features, Window
from flashgen.reference.attend import attend
from flashgen.reference.dense import rule_of
from flashgen.reference.stand_ins import lse_dtype, stand_in, stand_ins
from flashgen.runtime.argument_types import check_types, refuse_names
from flashgen.runtime.decode.call import CheckedDecode, DecodeCall, check_decode_tensors
from flashgen.runtime.decode.contents import check_contents
from flashgen.runtime.decode.plans import decode_workload
from flashgen.runtime.decode.prefix import Prefix
from flashgen.runtime.decode.shared_keys import SharedKeys, check_shared
from flashgen.runtime.ops import recording
from flashgen.runtime.ops.generated import packed
from flashgen.runtime.ops.outputs import empty_output

Tensor = torch.Tensor


@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    leftpad: torch.Tensor | None = ...,
    batch_idx: torch.Tensor | None = ...,
    fixed_split_size: int | None = ...,
    prefix: Prefix | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    leftpad: torch.Tensor | None = ...,
    batch_idx: torch.Tensor | None = ...,
    fixed_split_size: int | None = ...,
    prefix: Prefix | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    leftpad: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    fixed_split_size: int | None = None,
    prefix: Prefix | None = None,
    return_lse: bool = False,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashgen.attention_decode` in plain torch on any device: the keys of each sequence are gathered, then attended.

    Lengths and page ids are read by the host, and always checked as the kernels' call checks them under
    `FLASHGEN_CHECKS=1`. Only visible keys are gathered: pages that no query sees may be anything.

    Args:
        q: queries as in `flashgen.attention_decode`, float32 and float64 as well, on any device.
        k_cache: keys.
        v_cache: values.
        seqlens: and all others as there.
        block_table: as there.
        causal: as there.
        window: as there.
        softmax_scale: as there.
        softcap: as there.
        alibi_slopes: as there.
        sinks: as there.
        leftpad: as there.
        batch_idx: as there.
        fixed_split_size: checked, and without effect.
        prefix: as there.
        return_lse: as there; float32, and float64 for queries in float64.
        unknown: none, as there.

    Returns:
        The output, (batch, seqlen_q, nheads, head_dim_v), in the dtype of q; with `return_lse`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes, arguments, lengths or page ids break a rule.
        UnsupportedError: a gradient is asked for, as kernels have none.
        TypeError: there is no such argument.
    """
    refuse_names("attention_decode", unknown)
    check_types(locals())
    slopes, sinks = (None if one is None else packed(one) for one in (alibi_slopes, sinks))
    features = Features(window=window, softcap=softcap, alibi_slopes=slopes, sinks=sinks)
    call = DecodeCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        seqlens=seqlens,
        block_table=block_table,
        causal=causal,
        softmax_scale=softmax_scale,
        features=features,
        leftpad=leftpad,
        batch_idx=batch_idx,
        fixed_split_size=fixed_split_size,
        return_lse=return_lse,
    )
    shared = _checked_prefix(call, prefix)
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=lse_dtype(q))
    for b in range(len(q)):
        found, found_lse = _sequence(call, shared, b)
        out[b], lse[b] = found.transpose(0, 1).to(out.dtype), found_lse.to(lse.dtype)
    return (out, lse) if return_lse else out


def _checked_prefix(call: DecodeCall, prefix: Prefix | None) -> SharedKeys | None:
    """The shared keys of a call whose rules all hold."""
    if prefix is not None:
        instance("prefix", prefix, Prefix)
    tensors = (call.q, call.k_cache, call.v_cache)
    others = call.features.alibi_slopes, call.features.sinks, *(() if prefix is None else (prefix.k, prefix.v))
    asked = (tensor for tensor in (*tensors, *others) if tensor is not None)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in asked):
        raise UnsupportedError("attention_decode has no backward pass: call it under torch.no_grad()")
    q, k, v = (stand_in(tensor, torch.float16) for tensor in tensors)
    small = replace(call, q=q, k_cache=k, v_cache=v, features=stand_ins(call.features))
    check_decode_tensors(small)
    checked = CheckedDecode.of(small, empty_output(q, v, bshd=True))
    check_contents(call)
    recording.computed_by_reference(lambda: decode_workload(checked.spec, checked.shape))
    if prefix is None:
        return None
    if call.leftpad is not None:
        raise WorkloadError("keys behind a prefix begin at their first slot: a call with a prefix has no leftpad")
    shared = prefix.shared_keys(call.k_cache, call.v_cache)
    check_shared(small, replace(shared, k=stand_in(shared.k, torch.float16), v=stand_in(shared.v, torch.float16)))
    return shared


def _sequence(call: DecodeCall, shared: SharedKeys | None, b: int) -> tuple[Tensor, Tensor]:
    """Output (nheads, seqlen_q, head_dim_v) and LSE (nheads, seqlen_q) of a sequence."""
    own = int(call.seqlens[b])
    group = 0 if shared is None else _group(shared, b, len(call.q))
    front = 0 if shared is None else int(shared.seqlens[group])
    left, place = call.features.window[0], front + own - call.q.shape[1]
    first = max(0 if left is None else place - left, 0 if call.leftpad is None else int(call.leftpad[b]), 0)
    first = min(first, front + own)
    pieces = []
    for cache, of_prefix in ((call.k_cache, 0), (call.v_cache, 1)):
        row = b if call.batch_idx is None else int(call.batch_idx[b])
        found = [_keys(cache, call.block_table, b, row, range(max(first - front, 0), own))]
        if shared is not None and first < front:
            there = (shared.k, shared.v)[of_prefix]
            found.insert(0, _keys(there, shared.block_table, group, group, range(first, front)))
        pieces.append(torch.cat(found).transpose(0, 1)[None])
    q, slopes = call.q[b].transpose(0, 1)[None], call.features.alibi_slopes
    features = call.features
    if slopes is not None and slopes.dim() == 2:
        features = replace(features, alibi_slopes=slopes[b])
    rule = rule_of(q, pieces[0], features, causal=call.causal, q_offset=place - first, softmax_scale=call.softmax_scale)
    out, lse = attend(q, pieces[0], pieces[1], rule)
    return out[0], lse[0]


def _group(shared: SharedKeys, b: int, batch: int) -> int:
    """The group of a sequence; groups without starts are of equal size."""
    if shared.starts:
        return bisect.bisect_right(shared.starts, b) - 1
    return b // (batch // len(shared.seqlens))


def _keys(cache: Tensor, table: Tensor | None, b: int, row: int, keys: range) -> Tensor:
    """Some of the keys of a sequence, (keys, nheads_k, columns): of a row, or of the pages of row `b` of a table."""
    places = torch.arange(keys.start, max(keys.start, keys.stop), device=cache.device)
    if table is None:
        return cache[row, places]
    return cache[table[b][places // cache.shape[1]].long(), places % cache.shape[1]]
