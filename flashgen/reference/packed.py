"""`attention_varlen` in plain torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Literal, overload

import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.features.pages import PAGES
from flashgen.core.features.values import Features, Window
from flashgen.reference.attend import attend
from flashgen.reference.dense import rule_of
from flashgen.reference.functions import ScoreFunctions
from flashgen.reference.philox import Dropout
from flashgen.reference.stand_ins import check_as_kernels_do, lse_dtype, stand_in, stand_ins
from flashgen.runtime.argument_types import check_types, refuse_names
from flashgen.runtime.arguments import check_scale, drawn_state, features_of, in_autocast
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.mods import UserCallable, resolve
from flashgen.runtime.varlen.arguments import one_batch_element, packed_features
from flashgen.runtime.varlen.contents import check_contents
from flashgen.runtime.varlen.mixed import check_decodes

Tensor = torch.Tensor


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = ...,
    seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ...,
    num_decodes: int = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    score_mod: UserCallable | None = ...,
    mask_mod: UserCallable | None = ...,
    aux: tuple[torch.Tensor, ...] = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = ...,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = ...,
    seqused_q: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ...,
    block_table: torch.Tensor | None = ...,
    num_decodes: int = ...,
    causal: bool = ...,
    window: Window = ...,
    softmax_scale: float | None = ...,
    softcap: float = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    score_mod: UserCallable | None = ...,
    mask_mod: UserCallable | None = ...,
    aux: tuple[torch.Tensor, ...] = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_decodes: int = 0,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: UserCallable | None = None,
    mask_mod: UserCallable | None = None,
    aux: tuple[torch.Tensor, ...] = (),
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **unknown: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashgen.attention_varlen` in plain torch on any device: a call of `reference.attention` for each sequence.

    Lengths are read by the host, and always checked as the kernels' call checks them under `FLASHGEN_CHECKS=1`.

    Args:
        q: queries as in `flashgen.attention_varlen`, float64 as well, on any device.
        k: keys.
        v: values.
        cu_seqlens_q: and all others as there.
        cu_seqlens_k: as there.
        max_seqlen_q: as there.
        max_seqlen_k: as there.
        seqused_q: as there.
        seqused_k: as there.
        block_table: as there; of the cache only keys that count are gathered.
        num_decodes: as there; without effect but that it is checked.
        causal: as there.
        window: as there.
        softmax_scale: as there.
        softcap: as there.
        alibi_slopes: as there; they get a gradient here.
        sinks: as there.
        score_mod: as there; gradients flow through it here.
        mask_mod: as there.
        aux: as there.
        dropout_p: as there.
        rng_state: as there: with the same one the same weights are dropped on any device.
        deterministic: without effect.
        return_lse: as there; float32, and float64 for queries in float64.
        unknown: none, as there.

    Returns:
        The output, (total_q, nheads, head_dim_v), in the dtype of q; with `return_lse`, the output and the LSE,
        (nheads, total_q). Rows that no sequence uses are 0 and -inf.

    Raises:
        WorkloadError: shapes, dtypes, arguments or lengths break a rule.
        UnsupportedError: a function uses what torch does not have, or a gradient through pages is asked for.
        TypeError: there is no such argument.
    """
    refuse_names("attention_varlen", unknown)
    check_types(locals())
    check_scale(softmax_scale)
    q, k, v, sinks = in_autocast(q, k, v, sinks)
    scores = features_of(
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        bias=None,
        mask=None,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux=tuple(aux),
        block_mask=None,
        dropout_p=dropout_p,
        rng_state=drawn_state(dropout_p, rng_state, q),
        is_traced=False,
    )
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    page_size = k.shape[1] if block_table is not None and k.dim() == 4 else 0
    features = packed_features(scores, *lengths, block_table=block_table, page_size=page_size)
    _check(q, k, v, features, causal=causal)
    if num_decodes:
        check_decodes(num_decodes, q[None], features)
    check_contents(q, k, features, num_decodes)
    used_q = used_rows(features, "q")
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=torch.float64)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    for b, rows in enumerate(used_q):
        one, two, three = (x.transpose(0, 1)[None] for x in (q[rows], *_keys(k, v, features, b)))
        rule = rule_of(one, two, _of_sequence(scores, b), causal=causal, q_offset=None, softmax_scale=softmax_scale)
        functions, dropout = ScoreFunctions.of(scores, q.device, b), Dropout.of(scores, b * q.shape[1])
        found, found_lse = attend(one, two, three, rule, functions, dropout)
        out[rows], lse[:, rows] = found[0].transpose(0, 1), found_lse[0]
    return (out.to(q.dtype), lse.to(lse_dtype(q))) if return_lse else out.to(q.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, features: Features, *, causal: bool) -> None:
    paged = features.block_table is not None
    if paged and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, features.sinks)):
        raise UnsupportedError(PAGES.no_gradient)
    mods = resolve(features.mods) if features.mods else None

    def call() -> Call:
        one, two, three = one_batch_element(*(stand_in(x, torch.float32) for x in (q, k, v)), paged=paged)
        small = stand_ins(features)
        return Call(q=one, k=two, v=three, causal=causal, bshd=True, with_lse=True, features=small, mods=mods)

    check_as_kernels_do(call)


def used_rows(features: Features, side: str) -> list[slice]:
    """The rows of each sequence that count."""
    ends, used = getattr(features, f"cu_seqlens_{side}").tolist(), getattr(features, f"seqused_{side}")
    lengths = [last - first for first, last in itertools.pairwise(ends)] if used is None else used.tolist()
    return [slice(first, first + length) for first, length in zip(ends[:-1], lengths, strict=True)]


def _keys(k: Tensor, v: Tensor, features: Features, b: int) -> tuple[Tensor, Tensor]:
    """The keys and values of sequence `b` that count, (keys, nheads_k, columns)."""
    table = features.block_table
    if table is None:
        keys = used_rows(features, "k")[b]
        return k[keys], v[keys]
    used, ends = features.seqused_k, features.cu_seqlens_k
    assert ends is not None
    places = torch.arange(int(ends[b + 1] - ends[b]) if used is None else int(used[b]), device=k.device)
    if not len(places):
        return k.flatten(0, 1)[:0], v.flatten(0, 1)[:0]
    pages = table[b, places // k.shape[1]].long().clamp(0, len(k) - 1)
    # before a window pages may be others', and hold anything
    rows, left = used_rows(features, "q")[b], features.window[0]
    hidden = places < (0 if left is None else len(places) - (rows.stop - rows.start) - left)
    one, two = (x[pages, places % k.shape[1]].masked_fill(hidden[:, None, None], 0.0) for x in (k, v))
    return one, two


def _of_sequence(scores: Features, b: int) -> Features:
    slopes = scores.alibi_slopes
    return replace(scores, alibi_slopes=slopes[b]) if slopes is not None and slopes.dim() == 2 else scores
