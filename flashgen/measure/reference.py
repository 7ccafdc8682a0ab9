"""Attention computed slowly and surely: the float64 oracle, and the same mathematics in the test dtype.

Both walk over blocks of query rows, so that memory grows with rows * seqlen_k of one block and never with the square of
the sequence. K and V are never repeated for grouped heads: the query heads of a group become rows of one product.

The yardstick of a kernel is how far plain eager attention in the same dtype is from the oracle (the rule of the
flash-attention test-suites), not an absolute tolerance: outputs shrink as 1/sqrt(seqlen_k).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flashgen.core.errors import WorkloadError

BLOCK_BYTES_GPU = 2**29
BLOCK_BYTES_CPU = 2**26
"""Bytes of one block of float64 scores; about three such blocks are alive at once."""

ROWS_PER_BLOCK = 1024
"""With a causal mask or a window, shorter blocks skip more invisible keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """What happens to a score before the softmax: scale and visibility.

    Key j is visible to query i iff `i + offset - window_left <= j <= i + offset + window_right`; causal is a right
    width of 0. `offset` is one integer, or an integer tensor of shape (batch,).
    """

    softmax_scale: float
    offset: int | torch.Tensor
    left: int | None = None
    right: int | None = None

    @classmethod
    def of(  # the public call's arguments, resolved
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        causal: bool,
        q_offset: int | torch.Tensor | None,
        window: tuple[int | None, int | None],
        softmax_scale: float | None,
    ) -> ScoreRule:
        """Resolve the defaults of the public call for `q` and `k`, both (batch, heads, seqlen, head_dim)."""
        left, right = window
        if causal:
            right = 0 if right is None else min(0, right)
        return cls(
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            offset=k.shape[2] - q.shape[2] if q_offset is None else q_offset,
            left=left,
            right=right,
        )

    @property
    def hides(self) -> bool:
        """Whether any key can be invisible."""
        return self.left is not None or self.right is not None

    def key_range(self, rows: range, seqlen_k: int) -> range:
        """Keys that at least one of `rows` may see."""
        if not isinstance(self.offset, int):
            return range(seqlen_k)
        first = 0 if self.left is None else rows.start + self.offset - self.left
        last = seqlen_k if self.right is None else rows.stop + self.offset + self.right
        return range(min(max(first, 0), seqlen_k), min(max(last, 0), seqlen_k))

    def hidden(self, rows: range, keys: range, batches: torch.Tensor) -> torch.Tensor | None:
        """True where a key is invisible, (units or 1, 1, rows, keys); `batches` is the batch index of each unit."""
        if not self.hides:
            return None
        device = batches.device
        offset = self.offset
        if not isinstance(offset, int):
            offset = offset.to(device=device, dtype=torch.int64)[batches].view(-1, 1, 1, 1)
        row = torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1) + offset
        key = torch.arange(keys.start, keys.stop, device=device)
        hidden = torch.zeros((), dtype=torch.bool, device=device)
        if self.right is not None:
            hidden = hidden | (key > row + self.right)
        if self.left is not None:
            hidden = hidden | (key < row - self.left)
        return hidden


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    block_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 on the device of the tensors.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), any strides and dtype.
        k: (batch, nheads_k, seqlen_k, head_dim); nheads is a multiple of nheads_k.
        v: (batch, nheads_k, seqlen_k, head_dim_v).
        causal: hide key j from query i unless j <= i + q_offset.
        q_offset: integer or integer tensor (batch,); None is seqlen_k - seqlen_q (bottom right).
        window: (left, right), inclusive, None unlimited, on the same offset.
        softmax_scale: None is head_dim ** -0.5.
        block_bytes: bytes of one block of scores; None is chosen by the device.

    Returns:
        out (batch, nheads, seqlen_q, head_dim_v) and the natural-log LSE (batch, nheads, seqlen_q), both float64;
        a row that sees no key has 0 and -inf.

    Raises:
        WorkloadError: the shapes do not fit together.
    """
    rule = ScoreRule.of(q, k, causal=causal, q_offset=q_offset, window=window, softmax_scale=softmax_scale)
    return _blockwise(_exact, q, k, v, rule=rule, dtype=torch.float64, block_bytes=block_bytes)


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    block_bytes: int | None = None,
) -> torch.Tensor:
    """Standard attention in the dtype of `q`: scores, probabilities and output are each rounded to it.

    The arguments are those of `oracle`. The scale is folded into k, as the flash-attention test-suites do.

    Returns:
        out (batch, nheads, seqlen_q, head_dim_v) in the dtype of `q`.
    """
    rule = ScoreRule.of(q, k, causal=causal, q_offset=q_offset, window=window, softmax_scale=softmax_scale)
    return _blockwise(_rounded, q, k, v, rule=rule, dtype=q.dtype, block_bytes=block_bytes)[0]


_Step = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], tuple[torch.Tensor, torch.Tensor]
]
"""(q (units, group, rows, d), k, v (units, keys, d), hidden, scale) -> out (units, group, rows, dv) and lse."""


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q.double() * scale, k.double())
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _values(weights, v.double()).div_(torch.where(total == 0, 1.0, total))
    return out, (top + total.log()).squeeze(-1)


def _rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k * scale)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    blind = scores.amax(-1, keepdim=True) == float("-inf")
    weights = torch.softmax(scores, dim=-1).masked_fill_(blind, 0.0)
    return _values(weights, v), torch.zeros(q.shape[:-1], dtype=q.dtype, device=q.device)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    units, group, rows, width = q.shape
    return torch.bmm(q.reshape(units, group * rows, width), k.mT).view(units, group, rows, k.shape[1])


def _values(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    units, group, rows, keys = weights.shape
    return torch.bmm(weights.view(units, group * rows, keys), v).view(units, group, rows, v.shape[2])


def _blockwise(
    step: _Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rule: ScoreRule,
    dtype: torch.dtype,
    block_bytes: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `step` over blocks of units (a unit is one KV head of one batch element) and query rows."""
    _check_shapes(q, k, v)
    batch, nheads, seqlen_q, width = q.shape
    nheads_k, seqlen_k, width_v = k.shape[1], k.shape[2], v.shape[3]
    units, group = batch * nheads_k, nheads // nheads_k
    q4 = q.reshape(units, group, seqlen_q, width)
    k3, v3 = k.reshape(units, seqlen_k, width), v.reshape(units, seqlen_k, width_v)
    out = torch.zeros((units, group, seqlen_q, width_v), dtype=dtype, device=q.device)
    lse = torch.full((units, group, seqlen_q), float("-inf"), dtype=dtype, device=q.device)
    batches = torch.arange(units, device=q.device) // nheads_k
    limit = block_bytes or (BLOCK_BYTES_GPU if q.is_cuda else BLOCK_BYTES_CPU)
    for some, rows in _blocks(units, seqlen_q, group * seqlen_k, rule.hides, limit):
        keys = rule.key_range(rows, seqlen_k)
        if not keys:
            continue
        u, r, c = slice(some.start, some.stop), slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        hidden = rule.hidden(rows, keys, batches[u])
        out[u, :, r], lse[u, :, r] = step(q4[u, :, r], k3[u, c], v3[u, c], hidden, rule.softmax_scale)
    shape = (batch, nheads, seqlen_q)
    return out.view(*shape, width_v), lse.view(*shape)


def _blocks(units: int, rows: int, scores_per_row: int, hides: bool, limit: int) -> Iterator[tuple[range, range]]:
    """Ranges of units and rows whose float64 scores fit in `limit` bytes (at least one row of one unit)."""
    fitting = max(1, limit // max(1, 8 * scores_per_row))
    height = max(1, min(rows, fitting, ROWS_PER_BLOCK if hides else rows))
    some = max(1, fitting // height)
    for first in range(0, units, some):
        for top in range(0, rows, height):
            yield range(first, min(first + some, units)), range(top, min(top + height, rows))


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise WorkloadError(f"q, k and v have four dimensions, got {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise WorkloadError(
            f"q, k and v agree in batch, q and k in head_dim, k and v in heads and seqlen, got {shapes}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise WorkloadError(f"nheads must be a multiple of nheads_k, got {shapes}")
