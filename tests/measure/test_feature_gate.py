"""The gate on kernels with features: right ones pass, and each of the usual mistakes is found."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.record import Failure
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization
from flashgen.measure.odd_shapes import HARD_SHAPES, OddShape, check_odd, odd_problem, odd_problems, odd_shapes
from flashgen.measure.verification_case import VerificationCase
from flashgen.measure.verify import LSE_ATOL, check, oracle_of
from tests.fakes.attention import Emulated
from tests.tiers import every, first

FEATURES = ("window", "softcap", "alibi", "sink", "bias", "keybias", "mask", "keymask")
EVERYTHING = "softcap-alibi-sink-bias-mask-window"


# one group: the oracle of each specialization takes longer than all tests of it, and is computed once
pytestmark = pytest.mark.xdist_group("feature gate")

LARGE = 300_000


@functools.cache
def problems_of(spec: Specialization) -> tuple[tuple[OddShape, VerificationCase], ...]:
    """The odd shapes but for the largest, which take most of the time; those with every feature have them all."""
    shapes = odd_shapes(spec)
    if not (spec.window and spec.bias and spec.mask):
        shapes = tuple(shape for shape in shapes if shape.seqlen_q * shape.seqlen_k < LARGE)
    return tuple((shape, odd_problem(spec, shape, "cpu")) for shape in shapes)


def spec_of(features: str, dtype: str = "bf16") -> Specialization:
    return Specialization.parse(f"fwd-{dtype}-d32" + (f"-{features}" if features else ""))


@pytest.mark.parametrize(
    ("dtype", "features"),
    first(
        5,
        [
            ("bf16", f"{EVERYTHING}-causal-offset"),
            ("fp16", "keybias-keymask-causal-scattered"),
            ("fp32", EVERYTHING),
            ("fp32", "sink-sink_bf16"),
            ("tf32", "causal-window"),
            *(("bf16", feature) for feature in FEATURES),
            *((dtype, EVERYTHING) for dtype in ("fp16", "bf16", "tf32")),
            ("fp16", "bias-mask-scattered-bias_fp32"),
            ("fp32", "softcap"),
            ("tf32", ""),
        ],
    ),
)
def test_a_right_kernel_passes(dtype: str, features: str) -> None:
    spec = spec_of(features, dtype)
    kernel = Emulated(causal=spec.causal, tf32=dtype == "tf32")
    assert check_odd(kernel.factory, problems_of(spec)) is None


@pytest.mark.parametrize(
    ("features", "mistake"),
    every(
        2,
        [
            ("causal-offset", {"ignore_offset": True}),
            ("window", {"window_error": (1, 0)}),
            ("window", {"window_error": (-1, 0)}),
            ("window", {"window_error": (0, 1)}),
            ("window", {"window_error": (0, -1)}),
            ("window-causal", {"window_error": (1, 0)}),
            ("window", {"ignore_offset": True}),
            ("window", {"leak_hidden": True}),
            ("causal", {"leak_hidden": True}),
            ("softcap", {"forget": "softcap"}),
            ("softcap-bias", {"bias_before_softcap": True}),
            ("alibi", {"forget": "alibi"}),
            ("alibi", {"alibi_without_offset": True}),
            ("alibi", {"alibi_is_signed": True}),
            ("sink", {"forget": "sinks"}),
            ("sink", {"sink_is_a_key": True}),
            ("sink", {"sink_out_of_lse": True}),
            ("bias", {"forget": "bias"}),
            ("bias", {"bias_head_error": 1}),
            ("keybias", {"bias_is_scaled": True}),
            ("mask", {"invert_mask": True}),
            ("mask", {"forget": "mask"}),
            ("mask", {"leak_hidden": True}),
            ("mask", {"mask_value": -1e6}),
            ("keymask", {"mask_first_batch": True}),
            ("keymask", {"leak_hidden": True}),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("dtype", first(1, ["bf16", "tf32"]))
def test_a_mistake_is_found(features: str, mistake: dict[str, object], dtype: str) -> None:
    spec = spec_of(features, dtype)
    kernel = Emulated(causal=spec.causal, tf32=dtype == "tf32", **mistake)  # type: ignore[arg-type]
    assert isinstance(check_odd(kernel.factory, problems_of(spec)), Failure)


def test_an_imprecise_kernel_is_rejected_for_fp32_where_tf32_is_not_allowed() -> None:
    kernel = Emulated(causal=False, tf32=True)
    assert check_odd(kernel.factory, problems_of(spec_of("", "tf32"))) is None
    assert isinstance(check_odd(kernel.factory, problems_of(spec_of("", "fp32"))), Failure)


def test_the_lse_of_exact_products_is_judged_as_strictly_as_ever() -> None:
    """Twice 5e-5 is a key of 10000; only scores whose parts are large may be less exact."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 64, generator=generator).bfloat16() for _ in range(3))
    expected = oracle_of(q, k, v)
    assert float(expected.lse_tolerance.max()) < 1.5 * LSE_ATOL
    wrong = expected.lse.float()
    wrong[0, 1, 7] += 1e-4
    assert isinstance(check(expected.out.bfloat16(), wrong, expected), Failure)
    larger = oracle_of(30 * q, k, v)
    assert float(larger.lse_tolerance.max()) > 2 * LSE_ATOL


def test_where_eager_attention_overflows_it_allows_nothing() -> None:
    q = torch.full((1, 1, 4, 16), 64.0).half()
    k = torch.full((1, 1, 3, 16), 70.0).half()
    v = torch.randn(1, 1, 3, 16, generator=torch.Generator().manual_seed(1)).half()
    expected = oracle_of(q, k, v, softmax_scale=1.0)
    assert torch.isfinite(expected.row_tolerance).all()
    assert expected.row_tolerance.max() < 0.05  # what fp32 knows of scores of 70000


def test_odd_shapes_cover_the_forms_of_features() -> None:
    shapes = odd_shapes(replace(spec_of(EVERYTHING), aligned_scores=False))
    assert len(shapes) <= 15 + len(HARD_SHAPES)
    windows = {shape.window for shape in shapes}
    assert {(0, 0), (1, 1), (20, None), (None, 30), (None, None)} <= windows
    forms = [shape.form for shape in shapes]
    assert {form.scattered for form in forms} == {"odd", "transposed"}
    assert {form.bias_axes for form in forms} == {None, (False, False), (True, True), (True, False)}
    assert {form.alibi_batch for form in forms} == {form.blind for form in forms} == {True, False}
    assert {form.softcap for form in forms} == {30.0, 50.0, 400.0}
    assert all(shape.window == (None, None) for shape in odd_shapes(spec_of("mask")))
    assert all(shape.window[1] is None for shape in odd_shapes(spec_of("window-causal")))


def test_odd_shapes_hold_nan_in_what_no_query_sees() -> None:
    hidden = 0
    for _, problem in odd_problems(spec_of("mask"), "cpu"):
        for tensor in (problem.inputs.k[0], problem.inputs.v[0]):
            rows = torch.isnan(tensor).any(-1)
            assert torch.equal(rows, torch.isnan(tensor).all(-1))
            hidden += int(rows.sum())
    assert hidden > 100


def test_user_defined_scores_have_no_oracle() -> None:
    mods = ScoreMods(score_mod=UserFunction(name="twice", source="def twice(s, b, h, i, j):\n    return 2 * s\n"))
    with pytest.raises(UnsupportedError, match="user-defined"):
        odd_problems(replace(spec_of(""), mods=mods), "cpu")
