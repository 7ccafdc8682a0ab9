"""Gradients of attention computed slowly and surely: the float64 oracle, and eager attention's in the test dtype.

With P the weights, dP = dout v^T and neg_delta = dlse - sum(dout out), the formulas of FlashAttention-2 (Dao 2023,
arXiv 2307.08691, section 3.1), extended by the features:

    dS = P (dP + neg_delta)    dbias = dS    dS' = dS (1 - tanh^2) under a softcap
    dq = scale dS' k    dk = scale dS'^T q    dv = P^T dout    dsink = sum of exp(sink - lse) neg_delta

Both walk over the blocks of `measure.reference` and hold no matrix of all scores, unless the gradient of a bias is one.

The oracle also says how large the numbers are that cancel in each gradient: `noise`. An element of dS is a difference,
and a gradient a sum of many of them with either sign, so a relative error of eps in each P, dP and in neg_delta moves
a row of the gradient by about eps times the root of the sum of squares of P (|dP| + size of neg_delta), each times the
largest element of its key (or query, or dout). The row itself may be far smaller: where a query sees one key only, dS
is 0 and what a kernel finds is rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashgen.core.features.score_tensors import Shape4
from flashgen.measure.reference import (
    Answer,
    Units,
    as_it_is,
    default_block_bytes,
    exact,
    lengths_of,
    scores_of,
    seen,
    softmax_of,
    tf32_of,
)
from flashgen.measure.score_rule import Block, ScoreRule

Gradients = dict[str, torch.Tensor]
"""`dq`, `dk`, `dv` in the shapes of q, k and v, and `dbias` in the shape that was asked for, if one was."""

BLOCK_SHARE = 0.5
"""About twice as many blocks are alive as in a forward pass."""

Slices = tuple[slice, slice, slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactGradients:
    """The oracle's answer, all float64.

    `forward` is that of the forward pass, `neg_delta` (batch, nheads, seqlen_q) is the same in every row of scores,
    `noise` has a number for each row of dq, dk and dv, and for each element of dbias: 0 exactly where nothing flows.
    """

    forward: Answer
    neg_delta: torch.Tensor
    gradients: Gradients
    noise: Gradients


def exact_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rule: ScoreRule,
    *,
    dlse: torch.Tensor | None = None,
    bias_shape: Shape4 | None = None,
    least: float = 0.0,
    usual_score: float = math.inf,
    block_bytes: int | None = None,
) -> ExactGradients:
    """Gradients in float64 on the device of the tensors.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), any strides and dtype.
        k: (batch, nheads_k, seqlen_k, head_dim); nheads is a multiple of nheads_k.
        v: (batch, nheads_k, seqlen_k, head_dim_v).
        dout: gradient of the output, (batch, nheads, seqlen_q, head_dim_v).
        rule: what happens to a score.
        dlse: gradient of the LSE, (batch, nheads, seqlen_q); None is 0.
        bias_shape: four sizes, each 1 or the full one, to which dS is summed as `dbias`; None leaves it out.
        least: for the noise: numbers below this one count as much, because their rounding errors shrink no more.
        usual_score: for the noise: where the parts of a score and its LSE are larger, its weight counts so many times
            as much, and a dP that is small because parts cancel counts as this part of the lengths of its vectors. It
            is for dtypes whose rounding is not far above that of the scores.
        block_bytes: bytes of one block of scores; None is chosen by the device.
    """
    forward = exact(q, k, v, rule, block_bytes=block_bytes)
    products = dout.double() * forward.out
    neg_delta = -products.sum(-1) if dlse is None else dlse.double() - products.sum(-1)
    units = Units.of(q, k, v)
    sums = _Sums(units, q.shape[3], v.shape[3], bias_shape, torch.float64)
    squares = _Sums(units, 1, 1, bias_shape, torch.float64)
    lse4, delta4 = units.queries(forward.lse)[..., None], units.queries(neg_delta)[..., None]
    size4 = delta4.abs() + units.queries(products.norm(dim=-1))[..., None]
    q4, k3, v3, dout4 = units.queries(q), units.keys(k), units.keys(v), units.queries(dout)
    for at, block in units.blocks(rule, block_bytes or int(BLOCK_SHARE * default_block_bytes(q))):
        u, r, c = at
        qs, ks, vs, douts = q4[u, :, r].double(), k3[u, c].double(), v3[u, c].double(), dout4[u, :, r].double()
        weights, slope, score_size = _exact_weights(
            qs, ks, lse4[u, :, r], rule, block, with_size=usual_score < math.inf
        )
        ks, vs = seen(weights, ks) * rule.softmax_scale, seen(weights, vs)
        dp = scores_of(douts, vs)
        noisy, dp_size = weights, dp.abs().add_(size4[u, :, r])
        if score_size is not None:
            noisy = weights * (score_size / usual_score).clamp_min_(1.0)
            dp_size.add_(lengths_of(douts, vs), alpha=1 / usual_score)
        parts = _square_noise(dp_size.mul_(noisy), weights, least)
        ds = dp.add_(delta4[u, :, r]).mul_(weights)
        sums.add_bias(at, block, ds)
        ds = ds if slope is None else ds.mul_(slope)
        sums.add(at, dq=_to_queries(ds, ks), dk=_to_keys(ds, qs * rule.softmax_scale), dv=_to_keys(weights, douts))
        squares.add_bias(at, block, parts)
        squares.add(
            at,
            dq=_to_queries(parts, _square_size(ks)),
            dk=_to_keys(parts, _square_size(qs * rule.softmax_scale)),
            dv=_to_keys(_square_noise(noisy, weights, least), _square_size(douts)),
        )
    noise = {name: sums.sqrt() for name, sums in squares.gradients(q, k).items()}
    noise |= {name: noise[name].squeeze(-1) for name in ("dq", "dk", "dv")}
    return ExactGradients(forward=forward, neg_delta=neg_delta, gradients=sums.gradients(q, k), noise=noise)


def rounded_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    rule: ScoreRule,
    *,
    dlse: torch.Tensor | None = None,
    bias_shape: Shape4 | None = None,
    tf32: bool = False,
    block_bytes: int | None = None,
) -> Gradients:
    """The gradients that torch's autograd finds for standard attention in the dtype of `q`.

    S, P, dP and dS are each rounded to it, like every step between them; softmax's backward pass works in fp32 inside,
    as torch's does. Sums over queries (dk, dv, and over the heads of a group and for dbias) are made in fp32 and
    rounded once, as one matrix product over all queries would, although torch rounds the gradients of repeated heads
    before it adds them: that rounding is no kernel's. A dbias stays fp32. The scale is folded into k. Arguments are
    those of `exact_gradients`; `tf32` says that products of fp32 data may be TF32's.
    """
    product = tf32_of if tf32 else as_it_is
    units, wide = Units.of(q, k, v), torch.promote_types(q.dtype, torch.float32)
    sums = _Sums(units, q.shape[3], v.shape[3], bias_shape, wide)
    q4, k3, v3, dout4 = units.queries(q), units.keys(k), units.keys(v), units.queries(dout)
    dlse4 = None if dlse is None else units.queries(dlse)[..., None].to(wide)
    for at, block in units.blocks(rule, block_bytes or int(BLOCK_SHARE * default_block_bytes(q))):
        u, r, c = at
        qs, ks, douts = product(q4[u, :, r]), k3[u, c] * rule.softmax_scale, product(dout4[u, :, r])
        scores = scores_of(qs, product(ks))
        bent = (scores / rule.softcap).tanh_() if rule.softcap else None
        weights, _ = softmax_of(rule.modify(scores, block), rule, block)
        ks, vs = product(seen(weights, ks)), product(seen(weights, v3[u, c]))
        ds = _softmax_backward(scores_of(douts, vs), weights, None if dlse4 is None else dlse4[u, :, r])
        sums.add_bias(at, block, ds)
        if bent is not None:
            bent.masked_fill_(weights == 0, 0.0)  # keys that nobody sees may be NaN
            ds = (ds * rule.softcap * (1 - bent.to(wide).square()).to(wide)).to(q.dtype) / rule.softcap
        ds, weights = product(ds), product(weights)
        dk, dv = _to_keys(ds.to(wide), qs.to(wide)), _to_keys(weights.to(wide), douts.to(wide))
        sums.add(at, dq=_to_queries(ds, ks), dk=dk, dv=dv)
    found = sums.gradients(q, k)
    found |= {name: found[name].to(q.dtype) for name in ("dq", "dk", "dv")}
    return found | {"dk": found["dk"] * rule.softmax_scale}


class _Sums:
    """Gradients of all units, to which blocks are added."""

    def __init__(self, units: Units, width: int, width_v: int, bias_shape: Shape4 | None, dtype: torch.dtype) -> None:
        device = units.heads.device
        self._dq = torch.zeros((units.count, units.group, units.seqlen_q, width), dtype=dtype, device=device)
        self._dk = torch.zeros((units.count, units.seqlen_k, width), dtype=dtype, device=device)
        self._dv = torch.zeros((units.count, units.seqlen_k, width_v), dtype=dtype, device=device)
        self._dbias = None if bias_shape is None else torch.zeros(bias_shape, dtype=dtype, device=device)

    def add(self, at: Slices, *, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Every row of queries is in one block for each unit; keys are in many."""
        u, r, c = at
        self._dq[u, :, r] = dq
        self._dk[u, c] += dk
        self._dv[u, c] += dv

    def add_bias(self, at: Slices, block: Block, ds: torch.Tensor) -> None:
        """Add `ds` (units, group, rows, keys) to the elements of the bias that these scores share."""
        if self._dbias is None:
            return
        batch, heads, rows, keys = self._dbias.shape
        ds = ds if rows > 1 else ds.sum(2, keepdim=True)
        ds = ds if keys > 1 else ds.sum(3, keepdim=True)
        part = self._dbias.view(batch * heads, rows, keys)
        part = part[:, at[1] if rows > 1 else slice(1), at[2] if keys > 1 else slice(1)]
        index = (block.batches % batch)[:, None] * heads + block.heads % heads  # 0 where one serves all
        part.index_add_(0, index.flatten(), ds.flatten(0, 1).to(part.dtype))

    def gradients(self, q: torch.Tensor, k: torch.Tensor) -> Gradients:
        """In the shapes of the caller's tensors."""
        found = {"dq": self._dq.view(*q.shape[:3], -1)}
        found |= {"dk": self._dk.view(*k.shape[:3], -1), "dv": self._dv.view(*k.shape[:3], -1)}
        return found if self._dbias is None else found | {"dbias": self._dbias}


def _exact_weights(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, rule: ScoreRule, block: Block, *, with_size: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The weights, 0 where a key is invisible, the derivative of the softcap, and the size of the scores' parts.

    A product of q and k counts as the product of their lengths: it may be small because parts cancel.
    """
    scores = scores_of(q * rule.softmax_scale, k)
    slope = 1.0 - (scores / rule.softcap).tanh_().square_() if rule.softcap else None
    size = scores.abs() if with_size else None
    scores = rule.modify(scores, block, size)
    hidden = rule.hidden(block)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
        slope = slope if slope is None else slope.masked_fill_(hidden, 0.0)  # keys that nobody sees may be NaN
    lse = lse.masked_fill(lse == float("-inf"), 0.0)  # -inf - -inf would be NaN
    if size is not None:
        products = lengths_of(q, k).mul_(abs(rule.softmax_scale))
        products = products if slope is None else products.mul_(slope)
        size = torch.maximum(torch.maximum(size, products), lse.abs())
    return scores.sub_(lse).exp_(), slope, size


def _softmax_backward(dp: torch.Tensor, weights: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    wide = torch.promote_types(dp.dtype, torch.float32)
    p, g = weights.to(wide), dp.to(wide)
    ds = (p * (g - (p * g).sum(-1, keepdim=True))).to(dp.dtype)
    return ds if dlse is None else ds + (p * dlse).to(dp.dtype)


def _to_queries(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(units, group, rows, keys) times (units, keys, d): (units, group, rows, d)."""
    units, group, rows, count = weights.shape
    return torch.bmm(weights.reshape(units, group * rows, count), keys).view(units, group, rows, keys.shape[2])


def _to_keys(weights: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Transposed (units, group, rows, keys) times (units, group, rows, d), summed over the group: (units, keys, d)."""
    return torch.bmm(weights.flatten(1, 2).mT, queries.flatten(1, 2))


def _square_noise(noise: torch.Tensor, weights: torch.Tensor, least: float) -> torch.Tensor:
    """At least `least`, but nothing where there is no weight; squared."""
    return noise.clamp_min(least).masked_fill_(weights == 0, 0.0).square_()


def _square_size(vectors: torch.Tensor) -> torch.Tensor:
    """The square of the largest element of each vector (..., d): (..., 1)."""
    return vectors.abs().amax(-1, keepdim=True).square_()
