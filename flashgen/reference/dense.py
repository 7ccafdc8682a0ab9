"""`attention` in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, overload

import torch

from flashgen.core.features.values import BlockMask, Features, Window
from flashgen.measure.score_rule import ScoreRule
from flashgen.reference.attend import attend
from flashgen.reference.functions import ScoreFunctions
from flashgen.reference.philox import Dropout
from flashgen.reference.stand_ins import check_as_kernels_do, lse_dtype, stand_in, stand_ins
from flashgen.runtime.argument_types import check_types, refuse_names
from flashgen.runtime.arguments import (
    CallArguments,
    check_layout,
    check_scale,
    drawn_state,
    features_of,
    in_autocast,
    split_offset,
)
from flashgen.runtime.ops.calls import Call
from flashgen.runtime.ops.mods import UserCallable, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = torch.Tensor

FARTHEST = 2**61
"""Offsets and edges of windows beyond this hide and show the same keys; their sums stay within 64 bits."""


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **arguments: Unpack[CallArguments]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Unpack[CallArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **arguments: Unpack[CallArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhsd",
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    score_mod: UserCallable | None = None,
    mask_mod: UserCallable | None = None,
    aux: tuple[torch.Tensor, ...] = (),
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashgen.attention` in plain torch on any device: exact, slow, and with a matrix of all scores in memory.

    A score of query i and key j is `softmax_scale * q_i . k_j`, then `softcap`, ALiBi, `bias`, `score_mod`, in this
    order; it counts where `causal`, `window`, `mask`, `mask_mod` and `block_mask` all leave it visible. A sink is one
    more column of the softmax, without a value. A row that sees no key has output 0 and LSE -inf (or its sink). Keys
    and values that no row sees may hold anything.

    Functions are evaluated with torch's operations in place of Triton's, one head at a time, on scores in float64 and
    on indices of 32 bits; those of `tl` that torch has are known.

    Args:
        q: queries as in `flashgen.attention`, float64 as well, on any device.
        k: keys.
        v: values.
        layout: and all others as there.
        causal: as there.
        q_offset: as there.
        window: as there.
        softmax_scale: as there.
        softcap: as there.
        alibi_slopes: as there; they get a gradient here.
        sinks: as there.
        bias: as there.
        mask: as there.
        score_mod: as there; gradients flow through it here.
        mask_mod: as there.
        aux: as there.
        block_mask: as there: blocks that it does not list are hidden, and in those that it lists as full every key is
            visible.
        dropout_p: as there.
        rng_state: as there: with the same one the same weights are dropped on any device.
        deterministic: without effect.
        return_lse: as there; float32, and float64 for queries in float64.
        others: none, as there.

    Returns:
        The output in the dtype of q; with `return_lse`, the output and the LSE.

    Raises:
        WorkloadError: shapes, dtypes or arguments break a rule of `flashgen.attention`.
        UnsupportedError: a function uses what torch does not have.
        TypeError: there is no such argument.
    """
    refuse_names("attention", others)
    check_types(locals())
    check_layout(layout)
    check_scale(softmax_scale)
    q, k, v, sinks = in_autocast(q, k, v, sinks)
    features = features_of(
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        bias=bias,
        mask=mask,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux=tuple(aux),
        block_mask=block_mask,
        dropout_p=dropout_p,
        rng_state=drawn_state(dropout_p, rng_state, q),
        is_traced=False,
    )
    bshd, is_shifted = layout == "bshd", causal or window != (None, None) or alibi_slopes is not None
    number, tensor = split_offset(q, q_offset, is_shifted=is_shifted)
    _check(q, k, v, features, causal=causal, bshd=bshd, offset_tensor=tensor is not None)
    q_offset = number if tensor is None else tensor
    one, two, three = (x.transpose(1, 2) if bshd else x for x in (q, k, v))
    rule = rule_of(one, two, features, causal=causal, q_offset=q_offset, softmax_scale=softmax_scale)
    out, lse = attend(one, two, three, rule, ScoreFunctions.of(features, q.device), Dropout.of(features))
    out = (out.transpose(1, 2) if bshd else out).to(q.dtype).contiguous()
    return (out, lse.to(lse_dtype(q))) if return_lse else out


def rule_of(
    q: Tensor,
    k: Tensor,
    features: Features,
    *,
    causal: bool,
    q_offset: int | Tensor | None,
    softmax_scale: float | None,
) -> ScoreRule:
    """What happens to scores but for the caller's functions, for tensors in bhsd order."""
    left, right = (edge if edge is None else min(edge, FARTHEST) for edge in features.window)
    plain = replace(features, window=(left, right), mods=0, aux=(), block_mask=None, dropout_p=0.0, rng_state=None)
    if isinstance(q_offset, int):
        q_offset = max(-FARTHEST, min(q_offset, FARTHEST))
    return ScoreRule.of(q, k, causal=causal, q_offset=q_offset, softmax_scale=softmax_scale, features=plain)


def _check(
    q: Tensor, k: Tensor, v: Tensor, features: Features, *, causal: bool, bshd: bool, offset_tensor: bool
) -> None:
    """The rules of the kernels' call, which see float64 as float32."""

    def call() -> Call:
        one, two, three = (stand_in(x, torch.float32) for x in (q, k, v))
        return Call(
            q=one,
            k=two,
            v=three,
            causal=causal,
            bshd=bshd,
            offset_tensor=offset_tensor,
            with_lse=True,
            features=stand_ins(features),
            mods=resolve(features.mods) if features.mods else None,
        )

    check_as_kernels_do(call)
