"""The gate on backward passes: right ones pass at every odd shape, and each of the usual mistakes is found."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from flashgen.core.errors import UnsupportedError
from flashgen.core.record import Failure
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.backward_inputs import written
from flashgen.measure.backward_verification_case import (
    BackwardVerificationCase,
    backward_odd_problem,
    backward_odd_problems,
    backward_problem,
)
from flashgen.measure.backward_verify import MOST_UNITS, check_backward
from flashgen.measure.odd_shapes import ODD_SHAPES, OddShape, check_odd, odd_shapes
from flashgen.measure.verify import Errors
from tests.fakes.attention import Emulated
from tests.fakes.attention_backward import EmulatedBackward
from tests.tiers import every, only

EVERYTHING = "softcap-alibi-bias-mask-window-dbias"

LARGE = 300_000

workload_of = functools.cache(lambda key: backward_problem(Workload.parse(key), 1, 3, torch.device("cpu")))

LATE = "bwd-bf16-b1-h2-s256-d32-causal"


def spec_of(features: str, dtype: str = "bf16") -> Specialization:
    return Specialization.parse(f"bwd-{dtype}-d16" + (f"-{features}" if features else ""))


@functools.cache
def problems_of(spec: Specialization) -> tuple[tuple[OddShape, BackwardVerificationCase], ...]:
    """The odd shapes but for the largest, which take most of the time; one specialization has them all."""
    if spec == spec_of(""):
        return backward_odd_problems(spec, "cpu")
    small = [shape for shape in odd_shapes(spec) if shape.seqlen_q * shape.seqlen_k < LARGE]
    sinks_and_dlse = [(n % 2 == 1, n // 2 % 2 == 1) for n in range(len(small))]
    return tuple(
        (shape, backward_odd_problem(spec, shape, "cpu", sink=sink, dlse=dlse))
        for shape, (sink, dlse) in zip(small, sinks_and_dlse, strict=True)
    )


def emulated(spec: Specialization | Workload, **mistakes: object) -> EmulatedBackward:
    """Mistakes that a backward pass cannot make by itself are the forward kernel's."""
    mine = EmulatedBackward.__dataclass_fields__
    of_scores = {name: mistakes.pop(name) for name in list(mistakes) if name not in mine}
    scores = Emulated(causal=spec.causal, tf32=spec.dtype == "tf32", **of_scores)  # type: ignore[arg-type]
    return EmulatedBackward(scores=scores, **mistakes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "features"),
    only(
        [
            ("bf16", ""),
            ("bf16", EVERYTHING),
            ("bf16", f"{EVERYTHING}-causal-offset"),
            ("bf16", "keybias-keymask-window-scattered-dbias"),
            ("fp16", "bias-causal-dbias-bias_fp32"),
            ("fp32", EVERYTHING),
            ("tf32", "causal-mask"),
        ],
        ("bf16", f"{EVERYTHING}-causal-offset"),
        ("bf16", "keybias-keymask-window-scattered-dbias"),
        ("fp32", EVERYTHING),
        ("fp16", "bias-causal-dbias-bias_fp32"),
    ),
)
def test_a_right_kernel_passes(dtype: str, features: str) -> None:
    spec = spec_of(features, dtype)
    assert check_odd(emulated(spec).factory, problems_of(spec), repeats=1) is None


MISTAKES: list[tuple[str, dict[str, object]]] = [
    ("", {"drop_key": 3}),
    ("", {"drop_key": -1}),
    ("", {"scale_error": 1.01}),
    ("", {"forget_scale": True}),
    ("", {"forget_delta": True}),
    ("", {"forget_dlse": True}),
    ("", {"delta_in_dtype": True}),
    ("", {"wrong_row": 0.25}),
    ("", {"forget_group": True}),
    ("", {"unwritten": "dq"}),
    ("", {"unwritten": "dk"}),
    ("", {"unwritten": "dv"}),
    ("", {"double_block": True}),
    ("", {"write_behind_end": "dq"}),
    ("", {"write_behind_end": "dk"}),
    ("", {"write_behind_end": "dv"}),
    ("window", {"window_error": (1, 0)}),
    ("window", {"window_error": (0, -1)}),
    ("window", {"leak_hidden": True}),
    ("window", {"ignore_offset": True}),
    (EVERYTHING, {"forget_slope": True}),
    (EVERYTHING, {"forget": "alibi"}),
    (EVERYTHING, {"bias_head_error": 1}),
    (EVERYTHING, {"forget": "mask"}),
    (EVERYTHING, {"bias_of_first_batch": True}),
    (EVERYTHING, {"leak_hidden": True}),
    (EVERYTHING, {"drop_key": 3}),
    (EVERYTHING, {"forget_delta": True}),
    ("keybias-keymask-window-scattered-dbias", {"bias_is_scaled": True}),
]


@pytest.mark.parametrize(("features", "mistake"), every(2, MISTAKES), ids=str)
def test_a_mistake_is_found(features: str, mistake: dict[str, object]) -> None:
    spec = spec_of(features)
    verdict = check_odd(emulated(spec, **mistake).factory, problems_of(spec))
    assert isinstance(verdict, Failure)
    assert verdict.reason.startswith("at ")


@pytest.mark.parametrize(
    "mistake",
    [{"drop_key": 200}, {"scale_error": 1.02}, {"forget_delta": True}, {"wrong_row": 0.25}, {"double_block": True}],
    ids=str,
)
def test_a_mistake_is_found_on_the_workload_itself(mistake: dict[str, object]) -> None:
    """Late rows of a causal problem are far smaller than the first ones."""
    assert isinstance(workload_of(LATE).run(emulated(Workload.parse(LATE)).factory), Errors)
    assert isinstance(workload_of(LATE).run(emulated(Workload.parse(LATE), **mistake).factory), Failure)


def test_other_bits_in_a_repeat_are_found() -> None:
    kernel = emulated(Workload.parse(LATE), jitter=2e-3)
    assert isinstance(workload_of(LATE).run(kernel.factory), Errors)
    verdict = workload_of(LATE).run(kernel.factory, repeats=2)
    assert isinstance(verdict, Failure)
    assert "other bits of dq in a repeat" in verdict.reason


def test_errors_are_the_largest_of_all_gradients() -> None:
    made = workload_of(LATE)
    verdict = made.run(emulated(Workload.parse(LATE)).factory)
    assert isinstance(verdict, Errors)
    errors = [
        (gradient.double() - made.expected.gradients[name].values).abs()
        for name, gradient in written(made.inputs.tensors[0]).items()
    ]
    assert verdict.max_error == pytest.approx(max(float(error.max()) for error in errors))
    assert verdict.mean_error == pytest.approx(max(float(error.mean()) for error in errors))


def solved(features: str = "mask", **shape: object) -> BackwardVerificationCase:
    """The blind form with the right answer in place of a kernel's."""
    spec = spec_of(features)
    made = backward_odd_problem(spec, replace(ODD_SHAPES[2], **shape), "cpu")  # type: ignore[arg-type]
    for name, tensor in written(made.inputs.tensors[0]).items():
        tensor.copy_(made.expected.gradients[name].values.view(tensor.shape))
    return made


def verdict_of(made: BackwardVerificationCase) -> Errors | Failure:
    delta = made.expected.neg_delta.values.squeeze(-1).float()
    return check_backward(made.inputs.tensors[0], delta, made.expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "axis"), [("dq", "query"), ("dk", "key"), ("dv", "key"), ("dbias", "query")])
def test_what_is_not_finite_is_rejected_always(name: str, axis: str, value: float) -> None:
    made = solved("bias-dbias")
    assert isinstance(verdict_of(made), Errors)
    written(made.inputs.tensors[0])[name][1, 0, 4, 7] = value
    verdict = verdict_of(made)
    assert isinstance(verdict, Failure)
    assert f"1 element of {name} is NaN, infinite or unwritten, first in batch 1, head 0, {axis} 4" in verdict.reason


def test_what_nothing_flows_to_is_exactly_zero() -> None:
    made = solved("mask-bias-dbias", form=replace(ODD_SHAPES[2].form, blind=True))
    tensors = made.inputs.tensors[0]
    unseen = torch.isnan(tensors.k).any(-1).nonzero()[0].tolist()
    blind = torch.isinf(tensors.lse).nonzero()[0].tolist()
    assert isinstance(verdict_of(made), Errors)
    for name, at in (("dq", blind), ("dk", unseen), ("dv", unseen), ("dbias", blind)):
        gradient = written(tensors)[name]
        gradient[(*at, 3)] = 1e-30
        verdict = verdict_of(made)
        assert isinstance(verdict, Failure), name
        assert f"{name} of batch {at[0]}, head {at[1]}" in verdict.reason
        gradient[(*at, 3)] = 0.0


def test_a_query_that_sees_one_key_may_be_off_by_rounding_and_no_more() -> None:
    """Its gradient is 0: the scores of the row move together."""
    made = backward_odd_problem(spec_of(""), OddShape(seqlen_q=5, seqlen_k=1), "cpu")
    dq = made.inputs.tensors[0].dq
    for name, tensor in written(made.inputs.tensors[0]).items():
        tensor.copy_(made.expected.gradients[name].values)
    assert float(made.expected.gradients["dq"].values.abs().max()) < 1e-12
    dq[0, 0, 2, 0] = 1e-4
    assert isinstance(verdict_of(made), Errors)
    dq[0, 0, 2, 0] = 0.2
    assert isinstance(verdict_of(made), Failure)


def test_large_scores_do_not_make_the_gate_blind() -> None:
    """Eager attention rounds scores of some hundreds to whole numbers; no kernel does."""
    made = next(problem for shape, problem in problems_of(spec_of("")) if shape.gain > 1)
    expected = made.expected.gradients["dv"]
    assert float((expected.row_tolerance / expected.values.abs().amax()).max()) < 2 * MOST_UNITS * 2**-8
    assert isinstance(made.run(emulated(spec_of(""), scale_error=1.003).factory), Failure)


def test_odd_shapes_have_what_no_specialization_says() -> None:
    found = problems_of(spec_of(""))
    tensors = [problem.inputs.tensors[0] for _, problem in found]
    assert {each.dlse is None for each in tensors} == {True, False}
    assert {problem.inputs.features[0].sinks is None for _, problem in found} == {True, False}
    for (shape, _), each in zip(found, tensors, strict=True):
        assert each.dout.stride() != each.out.stride() or shape.seqlen_q == 1
        assert each.dout.stride(3) == each.dk.stride(3) == 1
        assert not each.dq.is_contiguous()


def test_user_defined_scores_have_no_oracle() -> None:
    mods = ScoreMods(score_mod=UserFunction(name="twice", source="def twice(s, b, h, i, j):\n    return 2 * s\n"))
    with pytest.raises(UnsupportedError, match="user-defined"):
        backward_odd_problems(replace(spec_of(""), mods=mods), "cpu")


def test_tf32_products_are_rejected_for_fp32() -> None:
    spec = spec_of(EVERYTHING, "fp32")
    kernel = EmulatedBackward(scores=Emulated(causal=False, tf32=True))
    assert isinstance(check_odd(kernel.factory, problems_of(spec)), Failure)
