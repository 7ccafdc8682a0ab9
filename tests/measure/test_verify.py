from __future__ import annotations

import functools
import math

import pytest
import torch

from flashgen.codegen.hopper_forward.resources import SETTLING_HEADROOM_BITS
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.inputs import make_inputs
from flashgen.measure.odd_shapes import EARLY_KEYS, ODD_SHAPES, check_odd, odd_problem, odd_problems
from flashgen.measure.verification_case import VerificationCase
from flashgen.measure.verify import Errors, check, oracle_of, ulp_of
from tests.fakes.attention import Emulated
from tests.tiers import first, only


def problem(workload: Workload, layout: str = "bhsd") -> VerificationCase:
    inputs = make_inputs(workload, copies=1, seed=3, device="cpu", layout=layout)
    offset, scale = workload.seqlen_k - workload.seqlen_q, workload.head_dim**-0.5
    q, k, v = inputs.q[0], inputs.k[0], inputs.v[0]
    expected = oracle_of(q, k, v, causal=workload.causal, q_offset=offset, softmax_scale=scale)
    return VerificationCase(inputs=inputs, expected=expected, softmax_scale=scale, q_offset=offset)


ODD_SHAPES_OF = functools.cache(lambda spec: odd_problems(spec, "cpu"))
ODD = pytest.mark.xdist_group("odd shapes")
"""Of tests with the odd shapes of one specialization: one process computes the right answers, once."""

PLAIN = Workload.parse("fwd-bf16-b2-h4-hk2-s512-d64")
CAUSAL = Workload.parse("fwd-bf16-b1-h2-s512-d64-causal")
LONG = Workload.parse("fwd-bf16-b1-h2-sq64-sk4096-d64-causal")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "shape", first(2, ["b2-h4-hk2-s512-d64", "b1-h2-s300-d128", "b1-h2-sq64-sk4096-d64", "b2-h2-s1-d64"])
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_correct_kernel_passes(dtype: str, shape: str, causal: bool) -> None:
    workload = Workload.parse(f"{dtype}-{shape}{'-causal' if causal else ''}")
    verdict = problem(workload).run(Emulated(causal=causal).factory)
    assert isinstance(verdict, Errors), verdict
    assert 0 <= verdict.mean_error <= verdict.max_error


@pytest.mark.parametrize("workload", only([PLAIN, CAUSAL, LONG], CAUSAL, LONG), ids=lambda w: w.key)
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"drop_last_key": True}, "off by"),
        ({"scale_error": 1.01}, "off by"),
        ({"forget_last_row": True}, "unwritten, first in row (batch 0, head 0"),
        ({"forget_lse": True}, "unwritten"),
        ({"statistics": torch.bfloat16}, "off by|mean error"),
        ({"base2_lse": True}, "LSE is off"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_slightly_wrong_kernel_is_rejected(workload: Workload, mistake: dict[str, object], said: str) -> None:
    verdict = problem(workload).run(Emulated(causal=workload.causal, **mistake).factory)  # type: ignore[arg-type]
    assert isinstance(verdict, Failure)
    assert verdict.stage == "verify"
    assert any(part in verdict.reason for part in said.split("|")), verdict.reason


def test_an_accumulator_in_bf16_is_rejected() -> None:
    workload = Workload.parse("bf16-b1-h2-sq64-sk4096-d64")
    verdict = problem(workload).run(Emulated(causal=False, accumulator=torch.bfloat16, block_n=32).factory)
    assert isinstance(verdict, Failure)


@ODD
def test_the_wrong_corner_of_the_causal_mask_is_rejected() -> None:
    """Top left instead of bottom right, where the sequences differ."""
    found = ODD_SHAPES_OF(LONG.specialization)
    verdict = check_odd(Emulated(causal=True, ignore_offset=True).factory, found)
    assert isinstance(verdict, Failure)
    assert "q_offset" in verdict.reason


@ODD
@pytest.mark.parametrize(
    ("dtype", "causal"), first(1, [("bf16", True), ("fp16", False), ("bf16", False), ("fp16", True)])
)
def test_a_correct_kernel_passes_all_odd_shapes(dtype: str, causal: bool) -> None:
    spec = Workload.parse(f"{dtype}-b1-h1-s1-d64{'-causal' if causal else ''}").specialization
    assert check_odd(Emulated(causal=causal, block_n=128).factory, ODD_SHAPES_OF(spec)) is None


@ODD
@pytest.mark.parametrize(
    "mistake",
    [
        {"drop_last_key": True},
        {"scale_error": 1.01},
        {"forget_last_row": True},
        {"use_keys_behind_end": True},
        {"write_behind_end": True},
        {"mask_value": -1e6},
    ],
    ids=lambda value: next(iter(value)),
)
def test_the_odd_shapes_reject(mistake: dict[str, object]) -> None:
    kernel = Emulated(causal=True, **mistake)  # type: ignore[arg-type]
    verdict = check_odd(kernel.factory, ODD_SHAPES_OF(CAUSAL.specialization))
    assert isinstance(verdict, Failure)
    assert verdict.reason.startswith("at ")


def test_the_odd_shapes_cover_what_they_must() -> None:
    sizes = {(shape.seqlen_q, shape.seqlen_k) for shape in ODD_SHAPES}
    assert {(1, 1), (113, 203), (1023, 1023)} <= sizes
    assert any(q > k for q, k in sizes)
    assert {shape.layout for shape in ODD_SHAPES} == {"bhsd", "bshd"}
    assert any(shape.nheads > shape.nheads_k > 1 for shape in ODD_SHAPES)


def expected_and_right() -> tuple[VerificationCase, torch.Tensor, torch.Tensor]:
    made = problem(Workload.parse("bf16-b1-h2-sq5-sk3-d64-causal"))
    right = made.expected.out.bfloat16()
    return made, right, made.expected.lse.float()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_rejected_always(value: float) -> None:
    made, out, lse = expected_and_right()
    assert isinstance(check(out, lse, made.expected), Errors)
    assert isinstance(check(out, None, made.expected), Errors)
    spoiled = out.clone()
    spoiled[0, 1, 4, 7] = value
    verdict = check(spoiled, lse, made.expected)
    assert isinstance(verdict, Failure)
    assert "first in row (batch 0, head 1, query 4)" in verdict.reason
    spoiled_lse = lse.clone()
    spoiled_lse[0, 0, 4] = value
    assert isinstance(check(out, spoiled_lse, made.expected), Failure)


def test_a_row_without_a_key_is_exactly_zero_and_its_lse_minus_infinity() -> None:
    made, out, lse = expected_and_right()
    assert (lse[0, :, :2] == float("-inf")).all()
    spoiled = out.clone()
    spoiled[0, 0, 1, 0] = 1e-6
    assert isinstance(check(spoiled, lse, made.expected), Failure)
    spoiled_lse = lse.clone()
    spoiled_lse[0, 0, 1] = -1e6
    assert isinstance(check(out, spoiled_lse, made.expected), Failure)


def test_a_late_row_of_a_causal_problem_is_judged_by_its_own_size() -> None:
    """The first row of this problem is ten times larger than the last, and its rounding would hide the error."""
    made = problem(CAUSAL)
    out, lse = made.expected.out.bfloat16(), made.expected.lse.float()
    out[0, 0, -1] += 0.02
    verdict = check(out, lse, made.expected)
    assert isinstance(verdict, Failure)
    assert "query 511" in verdict.reason


def test_a_wrong_shape_is_said() -> None:
    made, out, lse = expected_and_right()
    verdict = check(out[:, :1], lse, made.expected)
    assert isinstance(verdict, Failure)
    assert "shape" in verdict.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 1.99, 2.0, 3.1, 1000.0, 0.01, 0.5], dtype=dtype)
    above = torch.nextafter(values, torch.full_like(values, float("inf")))
    assert torch.equal(ulp_of(values.double(), dtype), (above.double() - values.double()))
    assert ulp_of(torch.zeros(1, dtype=torch.float64), dtype).item() == 0


def test_one_odd_shape_lets_scores_grow_too_far_for_a_reference_that_follows_the_sums() -> None:
    """The first keys, which are read last, are above the block that is read first: in most rows by too much."""
    (shape,) = [shape for shape in ODD_SHAPES if shape.early_keys != 1.0]
    spec = Specialization.parse("fwd-bf16-d64")
    inputs = odd_problem(spec, shape, "cpu").inputs
    k = inputs.k[0].float().repeat_interleave(shape.nheads // shape.nheads_k, 1)
    scores = inputs.q[0].float() @ k.transpose(-1, -2) * spec.head_dim**-0.5
    growth = scores[..., :EARLY_KEYS].amax(-1) - scores[..., -128:].amax(-1)
    allowed = (127 + SETTLING_HEADROOM_BITS[spec.dtype]) * math.log(2)
    assert (growth > allowed).float().mean() > 0.5
    assert (growth < allowed).float().mean() > 0.2


def test_scores_summed_by_tensor_cores_pass_where_their_sums_cancel() -> None:
    """Of a row whose largest score is small after sums of 100, fp32 has lost more than 2e-6 of what is left."""
    torch.manual_seed(37)
    rows, keys, head_dim = 48, 560, 512
    q, k, v = (torch.randn(1, 1, count, head_dim).bfloat16() for count in (rows, keys, keys))
    k[:, :, :EARLY_KEYS] *= 140.0
    expected = oracle_of(q, k, v, causal=True)
    scores = torch.zeros(1, 1, rows, keys, dtype=torch.float64)
    for start in range(0, head_dim, 16):
        part = slice(start, start + 16)
        exact_sum = scores + q[..., part].double() @ k[..., part].double().mT
        nearest = exact_sum.float()
        towards_zero = torch.nextafter(nearest, torch.zeros_like(nearest))
        scores = torch.where(nearest.double().abs() > exact_sum.abs(), towards_zero, nearest).double()
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
    scores = (scores * head_dim**-0.5).masked_fill(hidden, -math.inf)
    out, lse = (scores.softmax(-1) @ v.double()).bfloat16(), scores.logsumexp(-1).float()
    verdict = check(out, lse, expected)
    assert isinstance(verdict, Errors), verdict
    wrong = check(out, lse + 2e-3, expected)
    assert isinstance(wrong, Failure)
