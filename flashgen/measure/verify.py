"""The gate before every timing: is this output attention, as exactly as its dtype allows?

The rule (after the test-suites of flash-attention and FlexAttention), with E the largest absolute error against the
float64 oracle and `eager` standard attention in the same dtype:

1. `E(out) <= 2 E(eager) + 2 ulp`, an ulp taken at the largest element of the output; and the same with every error
   in units of the largest element of its row, because in a causal problem the first rows are a hundred times larger
   than the last ones and would hide any error there.
2. the mean absolute error of the whole tensor is at most 1.5 times that of eager.
   To both limits a little is added for fp32 statistics, which every kernel has (`FP32_ROW_ULPS`, `FP32_MEAN_ULPS`):
   it matters for fp32 tensors, and for shapes so small that eager is exact.
3. NaN and infinity are rejected always. A row that sees no key is exactly 0, and its LSE -inf, or the sink's score.
4. `|lse - oracle| <= LSE_ATOL + LSE_RTOL size`: an LSE comes from fp32 sums whatever the dtype, exact to some 1e-6,
   and one key that is left out of 10000 moves it by 1e-4. It sees what the rounding of a 16-bit output hides.
   The size is that of the numbers that fp32 rounds on the way: the LSE itself, or the parts of a score (scale * q.k,
   the cap, the ALiBi term, the bias) where they are larger and cancel; a q.k counts as its sum on the way, which tensor
   cores round at every 16 of its products, toward zero. The derivative of the LSE by a score is that
   score's weight, so the parts count with their weights: `Answer.score_size`. Keys without weight allow nothing.
   TF32 products are exact to 10 bits only: there twice the largest LSE error of eager attention is allowed besides.

Outputs are poisoned with NaN first, so that an unwritten one is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flashgen.core.features.values import Features
from flashgen.core.quoting import plural
from flashgen.core.record import Failure
from flashgen.measure.reference import Answer, exact, rounded
from flashgen.measure.score_rule import ScoreRule

MAX_FACTOR = 2.0
MAX_ULPS = 2.0
MEAN_FACTOR = 1.5
FP32_ROW_ULPS = 32.0
FP32_MEAN_ULPS = 8.0
USUAL_SCORE_SIZE = 10.0
"""A score of size 10 is known to 2^-20 in fp32, and its weight to the same relative error; a larger one to less."""

LSE_ATOL = 5e-5
LSE_RTOL = 2e-6

ORACLE_BYTES = 2**31
"""A float64 oracle output larger than this is kept in float32 (2^-25 relative, far below what is judged)."""

PIECE_ELEMENTS = 2**25
"""Elements compared at once: bounds the float64 temporaries to a few times 256 MB."""

Offset = int | torch.Tensor
LaunchFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, Offset, Features], None
]
"""Runs on (q, k, v, out, lse, softmax_scale, q_offset, features) and writes out, and lse unless that is None."""

KernelFactory = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Features], LaunchFunction]
"""Makes the kernel for the shapes and strides of (q, k, v, out, features)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far an accepted output is from the oracle: its largest and its mean absolute error."""

    max_error: float
    mean_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """The right answer for one set of inputs, and what an error may be.

    `out` (batch, nheads, seqlen_q, head_dim_v) and `lse` (batch, nheads, seqlen_q) are the oracle's; `row_tolerance`
    and `lse_tolerance` have the shape of `lse`; `mean_tolerance` is for the mean absolute error.
    """

    out: torch.Tensor
    lse: torch.Tensor
    row_tolerance: torch.Tensor
    lse_tolerance: torch.Tensor
    mean_tolerance: float

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.out, self.lse, self.row_tolerance, self.lse_tolerance))


def oracle_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    q_offset: int | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    features: Features | None = None,
    tf32: bool = False,
) -> Oracle:
    """The oracle's answer and the tolerances from eager attention.

    The arguments are those of `reference.oracle`; `tf32` says that products of fp32 data may be TF32's.
    """
    rule = ScoreRule.of(q, k, causal=causal, q_offset=q_offset, softmax_scale=softmax_scale, features=features)
    return judged(exact(q, k, v, rule), rounded(q, k, v, rule, tf32=tf32), q.dtype, tf32=tf32)


def judged(right: Answer, usual: Answer, dtype: torch.dtype, *, tf32: bool) -> Oracle:
    """The tolerances that follow from the oracle's answer and eager attention's in this dtype."""
    blind = right.lse == float("-inf")
    score_size = torch.where(blind, 0.0, torch.maximum(right.lse.abs(), right.score_size))
    larger = (score_size / USUAL_SCORE_SIZE).clamp_min_(1.0)
    row_error, row_size = torch.zeros_like(right.lse), torch.zeros_like(right.lse)
    sums = torch.zeros(2, dtype=torch.float64, device=right.out.device)
    for piece in pieces(right.out):
        # where eager attention overflows, it allows nothing
        error = (usual.out[piece].double() - right.out[piece]).abs_().nan_to_num_(0.0, posinf=0.0)
        size = right.out[piece].abs()
        row_error[piece], row_size[piece] = row_max(error), row_max(size)
        sums += torch.stack([error.sum(), (size.sum(-1) * larger[piece]).sum()])
    fp32_ulp = torch.finfo(torch.float32).eps
    mean_error, mean_size = (sums / max(1, right.out.numel())).tolist()
    return Oracle(
        out=right.out if right.out.numel() * 8 <= ORACLE_BYTES else right.out.float(),
        lse=right.lse,
        row_tolerance=_row_tolerance(row_error, row_size, dtype) + FP32_ROW_ULPS * fp32_ulp * larger * row_size,
        lse_tolerance=_lse_tolerance(right.lse, score_size, usual.lse if tf32 else None),
        mean_tolerance=MEAN_FACTOR * mean_error + FP32_MEAN_ULPS * fp32_ulp * mean_size,
    )


def _lse_tolerance(lse: torch.Tensor, score_size: torch.Tensor, usual: torch.Tensor | None) -> torch.Tensor:
    """Rule 4; `usual` is eager attention's LSE where its error counts."""
    blind = lse == float("-inf")
    allowed = torch.where(blind, 0.0, LSE_ATOL + LSE_RTOL * score_size)
    if usual is None or not lse.numel():
        return allowed
    error = torch.where(blind, 0.0, (usual.double() - lse).abs()).nan_to_num_(0.0, posinf=0.0)
    relative = torch.where(score_size > 0, error / score_size, 0.0).max()
    return torch.where(blind, 0.0, allowed + MAX_FACTOR * torch.minimum(error.max(), relative * score_size))


def _row_tolerance(error: torch.Tensor, size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rule 1 from eager attention's largest error and the largest element of each row."""
    if not error.numel():
        return error
    absolute = MAX_FACTOR * error.max() + MAX_ULPS * ulp_of(size.max(), dtype)
    relative = torch.where(size > 0, error / size, 0.0).max()
    return torch.minimum(absolute, MAX_FACTOR * relative * size + MAX_ULPS * ulp_of(size, dtype))


def ulp_of(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Spacing of `dtype` at magnitudes `size` >= 0 (0 where the size is 0), in the dtype of `size`."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(size).exponent - 1
    spacing = torch.ldexp(torch.full_like(size, info.eps), exponent)
    return torch.where(size == 0, 0.0, spacing.clamp_min(info.smallest_normal * info.eps))


def check(out: torch.Tensor, lse: torch.Tensor | None, expected: Oracle) -> Errors | Failure:
    """Judge one output by the rule of this module; costs one synchronization.

    Args:
        out: (batch, nheads, seqlen_q, head_dim_v), any strides.
        lse: (batch, nheads, seqlen_q) fp32, or None if the call did not ask for it.
        expected: the right answer.

    Returns:
        The errors of an accepted output, or a `Failure` of stage `verify` that says what is wrong and where.
    """
    if tuple(out.shape) != tuple(expected.out.shape):
        return _wrong(f"the output has shape {tuple(out.shape)}, it should be {tuple(expected.out.shape)}")
    if not out.numel():
        return Errors(max_error=0.0, mean_error=0.0)
    unwritten, excess, largest, total, lse_excess, lse_largest = _statistics(out, lse, expected)
    if unwritten:
        return _wrong(f"{plural(unwritten, 'element')} of out or lse is NaN, infinite or unwritten{_where(out)}")
    if excess > 0:
        return _wrong(_worst_row(out, expected))
    if lse_excess > 0:
        return _wrong(
            f"the LSE is off by up to {lse_largest:.3g}, allowed is {float(expected.lse_tolerance.max()):.3g} or less "
            f"({LSE_ATOL} + {LSE_RTOL} of the scores' size; -inf exactly where a row sees no key)"
        )
    mean = total / out.numel()
    if mean > expected.mean_tolerance:
        return _wrong(
            f"the mean error is {mean:.3g}, allowed is {MEAN_FACTOR} times eager attention's: "
            f"{expected.mean_tolerance:.3g}"
        )
    return Errors(max_error=largest, mean_error=mean)


def _statistics(out: torch.Tensor, lse: torch.Tensor | None, expected: Oracle) -> list[float]:
    """Illegal elements, excess over the row rule, largest and summed error, excess over the LSE rule and its error."""
    zero = torch.zeros((), dtype=torch.float64, device=out.device)
    unwritten, total = zero.clone(), zero.clone()
    excess, largest = zero - 1, zero.clone()
    for piece in pieces(out):
        error = (out[piece].double() - expected.out[piece]).abs_()
        unwritten += (~torch.isfinite(error)).sum()
        row = row_max(error)
        excess = torch.maximum(excess, (row - expected.row_tolerance[piece]).max())
        largest = torch.maximum(largest, row.max())
        total += error.sum()
    lse_excess, lse_largest = zero - 1, zero.clone()
    if lse is not None:
        blind = expected.lse == float("-inf")
        unwritten += (~torch.isfinite(lse) & ~(blind & (lse == float("-inf")))).sum()
        error = torch.where(blind & (lse == float("-inf")), 0.0, (lse.double() - expected.lse).abs())
        lse_excess, lse_largest = (error - expected.lse_tolerance).max(), error.max()
    stacked = torch.stack([unwritten, excess, largest, total, lse_excess, lse_largest])
    values: list[float] = stacked.tolist()
    return values


def _worst_row(out: torch.Tensor, expected: Oracle) -> str:
    """Names the row that breaks the row rule most (computed only for a failure)."""
    worst = (0.0, 0.0, 0.0, (0, 0, 0))
    for piece in pieces(out):
        row = row_max((out[piece].double() - expected.out[piece]).abs_())
        ratio = row / expected.row_tolerance[piece].clamp_min(1e-30)
        at = int(ratio.argmax())
        if float(ratio.flatten()[at]) > worst[0]:
            b, h, i = (int(x) for x in torch.unravel_index(torch.tensor(at), row.shape))
            index = (b + (piece[0].start or 0), h + (piece[1].start or 0), i)
            error, allowed = float(row.flatten()[at]), float(expected.row_tolerance[piece].flatten()[at])
            worst = (float(ratio.flatten()[at]), error, allowed, index)
    _, error, allowed, (b, h, i) = worst
    return f"row (batch {b}, head {h}, query {i}) is off by {error:.3g}, allowed is {allowed:.3g}"


def _where(out: torch.Tensor) -> str:
    bad = (~torch.isfinite(out)).any(-1)
    if not bool(bad.any()):
        return ""
    b, h, i = (int(x) for x in torch.nonzero(bad)[0])
    return f", first in row (batch {b}, head {h}, query {i})"


def row_max(error: torch.Tensor) -> torch.Tensor:
    """The largest element of each row (the last dimension)."""
    return error.amax(-1) if error.shape[-1] else error.sum(-1)


def _wrong(reason: str) -> Failure:
    return Failure(stage="verify", reason=reason)


def pieces(tensor: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads with at most `PIECE_ELEMENTS` elements (at least one head)."""
    batch, heads, *rest = tensor.shape
    per_head = max(1, math.prod(rest))
    some_heads = max(1, min(heads, PIECE_ELEMENTS // per_head))
    some_batches = max(1, PIECE_ELEMENTS // (per_head * heads)) if some_heads == heads else 1
    for b in range(0, batch, some_batches):
        for h in range(0, heads, some_heads):
            yield slice(b, b + some_batches), slice(h, h + some_heads)
