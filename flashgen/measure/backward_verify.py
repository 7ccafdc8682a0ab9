"""The gate of backward passes: are these the gradients of attention, as exactly as their dtype allows?

The rule (after the test-suites of flash-attention), for each of dq, dk, dv and dbias, with E the largest absolute error
against the float64 oracle, `eager` the gradients of standard attention in the same dtype, and `noise` the size of what
cancels in a row (`measure.backward_reference`):

1. `E <= 3 E(eager) + 2 ulp`, an ulp taken at the largest element; and the same for every row, with its errors in units
   of its noise and the ulp at its own largest element. Units of the row itself, as in the forward gate, would ask for
   the impossible: a query that sees one key has a gradient of 0, and a kernel finds the rounding of what cancels.
   Conversely, large rows cannot hide errors of small ones. Of dbias every element is a row.
2. the mean absolute error is at most 1.5 times that of eager.
3. Both limits stay between bounds in units, a unit being the largest relative error of one rounding times the noise:
   eager is taken to be no better than `LEAST_UNITS`, because its softmax is exact where a row sees one key, while a
   kernel starts from an output that was rounded; and no more than `MOST_UNITS` are allowed, because eager rounds its
   scores, and a kernel does not: where scores are large or capped, eager is a hundred times less exact than a kernel.
   Right kernels are at 1 to 3 units in their worst row and at 0.2 in the mean.
   TF32 products make inexact scores beside an LSE that is exact: there the noise grows with the scores, and so it does
   where scores are large for fp32 (`TF32_SCORE_SIZE`, `USUAL_SCORE_SIZE`). A little is added for fp32 statistics.
4. NaN and infinity are rejected always, and what nothing flows to is exactly 0: the noise is 0 there.
5. `neg_delta` is what fp32 sums of the given output and its gradient are (`DELTA_ULPS` of the sum of magnitudes).
   The caller's gradient of sinks is a sum over it with the given LSE, so it is right if this is.

Outputs are poisoned with NaN first, so that an unwritten one is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashgen.core.features.values import Features
from flashgen.core.quoting import plural
from flashgen.core.record import Failure
from flashgen.launch.backward import BackwardTensors
from flashgen.measure.backward_inputs import dbias_shape, written
from flashgen.measure.backward_reference import ExactGradients, Gradients, exact_gradients, rounded_gradients
from flashgen.measure.score_rule import ScoreRule
from flashgen.measure.verify import (
    FP32_MEAN_ULPS,
    FP32_ROW_ULPS,
    MEAN_FACTOR,
    ORACLE_BYTES,
    USUAL_SCORE_SIZE,
    Errors,
    Offset,
    pieces,
    row_max,
    ulp_of,
)

MAX_FACTOR = 3.0
MAX_ULPS = 2.0
LEAST_UNITS, MOST_UNITS = 1.0, 16.0
LEAST_MEAN_UNITS, MOST_MEAN_UNITS = 0.25, 1.0
DELTA_ULPS = 32.0

TF32_LEAST_MEAN_UNITS = 0.5
"""Eager attention normalises its weights by sums of the same inexact scores; a kernel starts from an exact LSE."""

FLUSHED = 4.0
"""A weight below fp32's smallest normal number counts as 0, and so does what a few factors make of it."""

FP32_ULP = torch.finfo(torch.float32).eps
TF32_UNIT = 2.0**-10
"""Tensor cores drop bits of fp32 data instead of rounding: a whole unit of the last of 10 bits."""

TF32_SCORE_SIZE = 8.0
"""A score of this size (or from vectors of such lengths) is off by about a unit in TF32; a larger one by more."""

ROW_AXES = {"dq": ("query",), "dk": ("key",), "dv": ("key",), "neg_delta": ("query",)}
"""What the rows of a tensor are; those of a dbias are keys, or pairs of a query and a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The right values of one gradient (batch, heads, ..., width); what errors of rows and their mean may be."""

    values: torch.Tensor
    row_tolerance: torch.Tensor
    mean_tolerance: float

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.values, self.row_tolerance))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOracle:
    """The right answer for one set of inputs, by the name of the gradient; `neg_delta` has rows of width 1.

    `unread` (batch, nheads, seqlen_q) are the rows whose `neg_delta` nobody reads, so that it may hold anything.
    """

    gradients: dict[str, Expected]
    neg_delta: Expected
    unread: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        mask_bytes = 0 if self.unread is None else self.unread.numel()
        return sum(each.nbytes for each in (*self.gradients.values(), self.neg_delta)) + mask_bytes


def backward_oracle_of(
    tensors: BackwardTensors,
    *,
    causal: bool = False,
    q_offset: Offset | None = None,
    softmax_scale: float | None = None,
    features: Features | None = None,
    tf32: bool = False,
) -> BackwardOracle:
    """The oracle's gradients and the tolerances from eager attention.

    It also writes what a backward pass is given: the oracle's output, rounded, to `tensors.out`, and its LSE to
    `tensors.lse`. A gradient of the bias is judged where `tensors.dbias` is there.
    """
    t, shape = tensors, dbias_shape(tensors)
    rule = ScoreRule.of(t.q, t.k, causal=causal, q_offset=q_offset, softmax_scale=softmax_scale, features=features)
    unit, usual_score, least = noise_of(t.q.dtype, tf32=tf32)
    right = exact_gradients(
        t.q, t.k, t.v, t.dout, rule, dlse=t.dlse, bias_shape=shape, least=least, usual_score=usual_score
    )
    usual = rounded_gradients(t.q, t.k, t.v, t.dout, rule, dlse=t.dlse, bias_shape=shape, tf32=tf32)
    return judged_gradients(t, right, usual, unit, tf32=tf32)


def judged_gradients(
    tensors: BackwardTensors,
    right: ExactGradients,
    usual: Gradients,
    unit: float,
    *,
    tf32: bool,
    unread: torch.Tensor | None = None,
) -> BackwardOracle:
    """The tolerances that follow from the oracle's gradients and eager attention's; it writes what a pass is given.

    The `neg_delta` of `unread` rows is not judged.
    """
    t = tensors
    t.out.copy_(right.forward.out)
    t.lse.copy_(right.forward.lse)
    found = {}
    for name, tensor in written(t).items():
        values = _rows_of(name, right.gradients[name].reshape(tensor.shape))
        eager = _rows_of(name, usual[name].reshape(tensor.shape).to(tensor.dtype))
        noise = right.noise[name].reshape(values.shape[:-1])
        found[name] = _expected(values, eager, noise, unit, TF32_LEAST_MEAN_UNITS if tf32 else LEAST_MEAN_UNITS)
    return BackwardOracle(gradients=found, neg_delta=_expected_delta(t, unread), unread=unread)


def noise_of(dtype: torch.dtype, *, tf32: bool) -> tuple[float, float, float]:
    """What one rounding is, and for the noise the usual size of a score and the smallest number.

    Below its smallest normal number, a GPU takes fp32 for 0; fp16 goes on down there, in steps that shrink no more.
    """
    info, smallest = torch.finfo(dtype), FLUSHED * torch.finfo(torch.float32).smallest_normal
    if tf32:
        return TF32_UNIT, TF32_SCORE_SIZE, smallest / TF32_UNIT
    unit = info.eps / 2
    usual_score = USUAL_SCORE_SIZE if dtype == torch.float32 else math.inf  # fp32 scores are exact beside 16 bits
    return unit, usual_score, info.smallest_normal if dtype == torch.float16 else smallest / unit


def check_backward(
    tensors: BackwardTensors, neg_delta: torch.Tensor | None, expected: BackwardOracle
) -> Errors | Failure:
    """Judge the gradients in `tensors` by the rule of this module; costs one synchronization.

    Args:
        tensors: what the pass was given and has written.
        neg_delta: (batch, nheads, seqlen_q) fp32, any strides, as a launch returns it; None leaves it out.
        expected: the right answer.

    Returns:
        The errors of accepted gradients, each the largest of all gradients, or a `Failure` of stage `verify` that says
        what is wrong and where.
    """
    given = {name: _rows_of(name, tensor) for name, tensor in written(tensors).items()}
    right = dict(expected.gradients)
    if neg_delta is not None:
        given["neg_delta"] = _read(neg_delta, expected.unread).unsqueeze(-1)
        right["neg_delta"] = expected.neg_delta
    for name, tensor in given.items():
        if tuple(tensor.shape) != tuple(right[name].values.shape):
            return _wrong(f"{name} has shape {tuple(tensor.shape)}, it should be {tuple(right[name].values.shape)}")
    statistics = torch.stack([_statistics(tensor, right[name]) for name, tensor in given.items()]).tolist()
    largest, mean = {}, {}
    for (name, tensor), (unwritten, excess, worst, total) in zip(given.items(), statistics, strict=True):
        if unwritten:
            return _wrong(
                f"{plural(unwritten, 'element')} of {name} is NaN, infinite or unwritten{_where(name, tensor)}"
            )
        if excess > 0:
            return _wrong(_worst_row(name, tensor, right[name]))
        largest[name], mean[name] = worst, total / max(1, tensor.numel())
        if mean[name] > right[name].mean_tolerance:
            return _wrong(
                f"the mean error of {name} is {mean[name]:.3g}, allowed is {MEAN_FACTOR} times eager attention's: "
                f"{right[name].mean_tolerance:.3g}"
            )
    for errors in (largest, mean):
        errors.pop("neg_delta", None)
    return Errors(max_error=max(largest.values()), mean_error=max(mean.values()))


def _expected(
    right: torch.Tensor, eager: torch.Tensor, noise: torch.Tensor, unit: float, least_mean: float
) -> Expected:
    """Rules 1 to 3 of one gradient: values (..., width), and noise of its rows."""
    error, size = torch.zeros_like(noise), torch.zeros_like(noise)
    total = torch.zeros((), dtype=torch.float64, device=right.device)
    for piece in pieces(right):
        # where eager attention overflows, it allows nothing
        distance = (eager[piece].double() - right[piece]).abs_().nan_to_num_(0.0, posinf=0.0)
        error[piece], size[piece] = row_max(distance), row_max(right[piece].abs())
        total += distance.sum()
    mean_noise = float(noise.mean()) if noise.numel() else 0.0
    mean = max(float(total) / max(1, right.numel()), least_mean * unit * mean_noise)
    mean = min(MEAN_FACTOR * mean, MOST_MEAN_UNITS * unit * mean_noise)
    tolerance = _row_tolerance(error, noise, size, unit, eager.dtype) + FP32_ROW_ULPS * FP32_ULP * noise
    is_large = right.numel() * right.element_size() > ORACLE_BYTES
    return Expected(
        values=right.float() if is_large else right,
        row_tolerance=tolerance.float() if is_large else tolerance,
        mean_tolerance=mean + FP32_MEAN_ULPS * FP32_ULP * mean_noise,
    )


def _row_tolerance(
    error: torch.Tensor, noise: torch.Tensor, size: torch.Tensor, unit: float, dtype: torch.dtype
) -> torch.Tensor:
    if not error.numel():
        return error
    relative = torch.where(noise > 0, error / noise, 0.0).max()
    by_row = (MAX_FACTOR * relative.clamp_min(LEAST_UNITS * unit)).clamp_max(MOST_UNITS * unit) * noise
    largest = noise.max()
    by_all = torch.maximum(error.max(), LEAST_UNITS * unit * largest) * MAX_FACTOR
    by_all = torch.minimum(by_all, MOST_UNITS * unit * largest) + MAX_ULPS * ulp_of(size.max(), dtype)
    return torch.minimum(by_all, by_row + MAX_ULPS * ulp_of(size, dtype))


def _expected_delta(t: BackwardTensors, unread: torch.Tensor | None) -> Expected:
    """Rule 5: the exact sums of what the pass is given."""
    products = t.dout.double() * t.out.double()
    dlse = torch.zeros_like(products[..., 0]) if t.dlse is None else t.dlse.double()
    right = _read(dlse - products.sum(-1), unread)
    tolerance = DELTA_ULPS * FP32_ULP * _read(dlse.abs() + products.abs().sum(-1), unread)
    mean = float(tolerance.mean()) if tolerance.numel() else 0.0
    return Expected(values=right.unsqueeze(-1), row_tolerance=tolerance, mean_tolerance=mean)


def _read(rows: torch.Tensor, unread: torch.Tensor | None) -> torch.Tensor:
    """Values of rows, with 0 where nobody reads them."""
    return rows if unread is None else rows.masked_fill(unread, 0.0)


def _rows_of(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """(batch, heads, ..., width): the elements of dbias are rows of their own."""
    return gradient.unsqueeze(-1) if name == "dbias" else gradient


def _statistics(given: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Illegal elements, excess over the row rule, largest and summed error."""
    unwritten, excess, largest, total = torch.zeros(4, dtype=torch.float64, device=given.device).unbind()
    excess = excess - 1
    for piece in pieces(given):
        error = (given[piece].double() - expected.values[piece]).abs_()
        unwritten = unwritten + (~torch.isfinite(error)).sum()
        row = row_max(error)
        if row.numel():
            excess = torch.maximum(excess, (row - expected.row_tolerance[piece]).max())
            largest = torch.maximum(largest, row.max())
        total = total + error.sum()
    return torch.stack([unwritten, excess, largest, total])


def _worst_row(name: str, given: torch.Tensor, expected: Expected) -> str:
    """Names the row that breaks the row rule most (computed only for a failure)."""
    index: tuple[int, ...] = ()
    worst, error, allowed = -1.0, 0.0, 0.0
    for piece in pieces(given):
        row = row_max((given[piece].double() - expected.values[piece]).abs_())
        tolerance = expected.row_tolerance[piece]
        ratio = row / tolerance.clamp_min(1e-300 if tolerance.dtype == torch.float64 else 1e-37)
        at = int(ratio.argmax())
        if float(ratio.flatten()[at]) > worst:
            worst, error, allowed = (float(each.flatten()[at]) for each in (ratio, row, tolerance))
            b, h, *rest = (int(x) for x in torch.unravel_index(torch.tensor(at), row.shape))
            index = (b + (piece[0].start or 0), h + (piece[1].start or 0), *rest)
    return f"{name} of {_position(name, index)} is off by {error:.3g}, allowed is {allowed:.3g}"


def _where(name: str, given: torch.Tensor) -> str:
    bad = torch.nonzero((~torch.isfinite(given)).any(-1))
    return f", first in {_position(name, tuple(bad[0].tolist()))}"


def _position(name: str, index: tuple[int, ...]) -> str:
    axes = ("batch", "head", *(("query", "key")[-len(index) + 2 :] if name == "dbias" else ROW_AXES[name]))
    return ", ".join(f"{axis} {number}" for axis, number in zip(axes, index, strict=True))


def _wrong(reason: str) -> Failure:
    return Failure(stage="verify", reason=reason)
