"""Attention computed slowly and surely: the float64 oracle, and the same mathematics in the test dtype.

Both walk over blocks of query rows, so that memory grows with rows * seqlen_k of one block and never with the square of
the sequence. K and V are never repeated for grouped heads: the query heads of a group become rows of one product. A
value that no query of a block sees takes no part in its product, so NaN in it stays there.

The yardstick of a kernel is how far plain eager attention in the same dtype is from the oracle (the rule of the
flash-attention test-suites), not an absolute tolerance: outputs shrink as 1/sqrt(seqlen_k). For fp32 data in TF32
products, the eager products drop the 13 low bits of their inputs, as tensor cores do with fp32 data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from flashgen.core.features.values import Features
from flashgen.measure.score_rule import Block, ScoreRule, check_shapes

BLOCK_BYTES_GPU = 2**29
BLOCK_BYTES_CPU = 2**26
"""Bytes of one block of float64 scores with its keys and values; about four such blocks are alive at once."""

ROWS_PER_BLOCK = 1024
"""With a causal mask or a window, shorter blocks skip more invisible keys."""

TF32_MASK = -(1 << 13)
"""Keeps the sign, the exponent and 10 of the 23 bits of an fp32 mantissa."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What attention gives for one set of inputs.

    Attributes:
        out: (batch, nheads, seqlen_q, head_dim_v); 0 in a row that sees no key.
        lse: natural logarithm of the row sums with the sink's share, (batch, nheads, seqlen_q); -inf in a row that sees
            no key and has no sink.
        score_size: the magnitude of each score's parts (`ScoreRule.modify`), averaged over the keys of a row with the
            softmax's own weights, in the shape of `lse`: to first order, relative errors of eps in every part of every
            score move the LSE by at most eps times this. A product of q and k counts as at least |q| |k| head_dim^-1/2,
            the usual size of its sum on the way: what cancels at its end is rounded before.
    """

    out: torch.Tensor
    lse: torch.Tensor
    score_size: torch.Tensor


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    features: Features | None = None,
    block_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 on the device of the tensors.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), any strides and dtype.
        k: (batch, nheads_k, seqlen_k, head_dim); nheads is a multiple of nheads_k.
        v: (batch, nheads_k, seqlen_k, head_dim_v).
        causal: hide key j from query i unless j <= i + q_offset.
        q_offset: integer or integer tensor (batch,); None is seqlen_k - seqlen_q (bottom right).
        softmax_scale: None is head_dim ** -0.5.
        features: window, softcap, ALiBi slopes, sinks, bias and mask.
        block_bytes: bytes of one block of scores; None is chosen by the device.

    Returns:
        `Answer.out` and `Answer.lse`, both float64.

    Raises:
        WorkloadError: the shapes do not fit together.
    """
    rule = ScoreRule.of(q, k, causal=causal, q_offset=q_offset, softmax_scale=softmax_scale, features=features)
    answer = exact(q, k, v, rule, block_bytes=block_bytes)
    return answer.out, answer.lse


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    *,
    dtype: torch.dtype = torch.float64,
    block_bytes: int | None = None,
) -> Answer:
    """The oracle's answer under a rule; in float32 it is no oracle, but costs less and is right to some 1e-6."""
    return _blockwise(partial(_exact, dtype=dtype), q, k, v, rule=rule, dtype=dtype, block_bytes=block_bytes)


def rounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: ScoreRule,
    *,
    tf32: bool = False,
    block_bytes: int | None = None,
) -> Answer:
    """Eager attention's answer under a rule: every step on a score, probabilities and output are rounded to q's dtype.

    The scale is folded into k, as the flash-attention test-suites do. `tf32` says that products of fp32 data may be
    TF32's; `Answer.lse` is there for it alone, else 0.
    """
    return _blockwise(partial(_rounded, tf32=tf32), q, k, v, rule=rule, dtype=q.dtype, block_bytes=block_bytes)


_Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ScoreRule, Block], Answer]
"""(q (units, group, rows, d), k, v (units, keys, d), rule, block) to the answer of (units, group, rows)."""


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule, block: Block, *, dtype: torch.dtype
) -> Answer:
    q, k = q.to(dtype) * rule.softmax_scale, k.to(dtype)
    scores = scores_of(q, k)
    magnitude = torch.maximum(scores.abs(), lengths_of(q, k).mul_(q.shape[-1] ** -0.5))
    scores = rule.modify(scores, block, magnitude)
    hidden, sink = rule.hidden(block), rule.sink(block, dtype)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    top = top if sink is None else torch.maximum(top, sink)
    top = torch.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    total = total if sink is None else total + (sink - top).exp()
    safe = torch.where(total == 0, 1.0, total)
    out = _values(weights, v.to(dtype)).div_(safe)
    size = magnitude.mul_(weights).nan_to_num_(0.0).sum(-1, keepdim=True).div_(safe)  # an invisible part may be NaN
    return Answer(out=out, lse=(top + total.log()).squeeze(-1), score_size=size.squeeze(-1))


def _rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule, block: Block, *, tf32: bool) -> Answer:
    product = tf32_of if tf32 else as_it_is
    scores = scores_of(product(q), product(k * rule.softmax_scale))
    weights, scores = softmax_of(rule.modify(scores, block), rule, block)
    lse = torch.logsumexp(scores, -1) if tf32 else torch.zeros(q.shape[:-1], dtype=q.dtype, device=q.device)
    return Answer(out=_values(product(weights), product(v)), lse=lse, score_size=torch.zeros_like(lse))


def softmax_of(scores: torch.Tensor, rule: ScoreRule, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's softmax of modified scores: the weights of the keys, and the scores with -inf and the sink's column."""
    hidden, sink = rule.hidden(block), rule.sink(block, scores.dtype)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    blind = scores.amax(-1, keepdim=True) == float("-inf")
    keys = scores.shape[3]
    if sink is not None:
        scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, dim=-1).masked_fill_(blind, 0.0)[..., :keys], scores


def scores_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Products of (units, group, rows, d) and (units, keys, d): (units, group, rows, keys)."""
    units, group, rows, width = q.shape
    return torch.bmm(q.reshape(units, group * rows, width), k.mT).view(units, group, rows, k.shape[1])


def lengths_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Products of the lengths of queries and keys, in the shape of `scores_of`: no product of theirs is larger."""
    return scores_of(q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True))


def _values(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The weighted sums; a value without any weight takes no part, because 0 times NaN is NaN."""
    units, group, rows, keys = weights.shape
    v = seen(weights, v)
    return torch.bmm(weights.reshape(units, group * rows, keys), v).view(units, group, rows, v.shape[2])


def seen(weights: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Keys or values (units, keys, d), 0 where no row of the block has a weight for them."""
    return torch.where((weights.amax((1, 2)) == 0)[..., None], 0.0, tensor)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """An operand of a product whose inputs are not rounded."""
    return tensor


def tf32_of(tensor: torch.Tensor) -> torch.Tensor:
    """An fp32 tensor as tensor cores read it for a TF32 product."""
    return (tensor.contiguous().view(torch.int32) & TF32_MASK).view(torch.float32)


def _blockwise(
    step: _Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rule: ScoreRule,
    dtype: torch.dtype,
    block_bytes: int | None,
) -> Answer:
    """Run `step` over blocks of units and query rows."""
    check_shapes(q, k, v)
    units = Units.of(q, k, v)
    rows = (units.count, units.group, units.seqlen_q)
    out = torch.zeros((*rows, v.shape[3]), dtype=dtype, device=q.device)
    size = torch.zeros(rows, dtype=dtype, device=q.device)
    lse = torch.full_like(size, float("-inf"))
    if rule.sinks is not None:  # of the rows that no block below reaches
        lse = rule.sinks[units.heads].to(dtype)[..., None].repeat(1, 1, units.seqlen_q)
    q4, k3, v3 = units.queries(q), units.keys(k), units.keys(v)
    for (u, r, c), block in units.blocks(rule, block_bytes or default_block_bytes(q)):
        part = step(q4[u, :, r], k3[u, c], v3[u, c], rule, block)
        out[u, :, r], lse[u, :, r], size[u, :, r] = part.out, part.lse, part.score_size
    shape = q.shape[:3]
    return Answer(out=out.view(*shape, v.shape[3]), lse=lse.view(shape), score_size=size.view(shape))


def default_block_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one block on the device of `tensor`."""
    return BLOCK_BYTES_GPU if tensor.is_cuda else BLOCK_BYTES_CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """A problem taken apart: a unit is one KV head of one batch element with the query heads that read it.

    `heads` (count, group) holds the query heads of each unit; `width` is head_dim and head_dim_v together.
    """

    heads: torch.Tensor
    batch: int
    seqlen_q: int
    seqlen_k: int
    width: int

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Units:
        """The units of tensors in (batch, heads, seqlen, width) order."""
        (batch, nheads, seqlen_q, width), (_, nheads_k, seqlen_k, width_v) = q.shape, v.shape
        group = nheads // nheads_k
        unit = torch.arange(batch * nheads_k, device=q.device)
        heads = (unit % nheads_k)[:, None] * group + torch.arange(group, device=q.device)
        return cls(heads=heads, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, width=width + width_v)

    @property
    def count(self) -> int:
        """How many units there are."""
        return self.heads.shape[0]

    @property
    def group(self) -> int:
        """Query heads of a unit."""
        return self.heads.shape[1]

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, nheads, seqlen_q, ...) as (count, group, seqlen_q, ...)."""
        return tensor.reshape(self.count, self.group, *tensor.shape[2:])

    def keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, nheads_k, seqlen_k, ...) as (count, seqlen_k, ...)."""
        return tensor.reshape(self.count, *tensor.shape[2:])

    def blocks(self, rule: ScoreRule, limit: int) -> Iterator[tuple[tuple[slice, slice, slice], Block]]:
        """Slices of units, query rows and keys whose float64 scores, keys and values fit in `limit` bytes.

        A block has at least one row, and every key that its rows may see by their position; without any it is left out.
        """
        for some, rows in self._ranges(rule.hides, limit):
            keys = rule.key_range(rows, self.seqlen_k)
            if keys:
                at = slice(some.start, some.stop), slice(rows.start, rows.stop), slice(keys.start, keys.stop)
                batches = torch.arange(some.start, some.stop, device=self.heads.device) // (self.count // self.batch)
                yield at, Block(batches=batches, heads=self.heads[at[0]], rows=rows, keys=keys)

    def _ranges(self, hides: bool, limit: int) -> Iterator[tuple[range, range]]:
        rows, keys = self.seqlen_q, self.seqlen_k
        height = max(1, min(rows, limit // max(1, 8 * self.group * keys), ROWS_PER_BLOCK if hides else rows))
        some = max(1, limit // max(1, 8 * keys * (self.group * height + self.width)))
        for first in range(0, self.count, some):
            for top in range(0, rows, height):
                yield range(first, min(first + some, self.count)), range(top, min(top + height, rows))
