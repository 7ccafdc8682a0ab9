"""The gate judges no kernel whose features its references do not compute."""

from __future__ import annotations

import pytest
import torch

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features import table
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.measure import score_rule
from flashgen.measure.backward_verification_case import backward_odd_problems, backward_problem
from flashgen.measure.inputs import make_inputs
from flashgen.measure.odd_shapes import odd_problems
from flashgen.measure.reference import oracle
from flashgen.measure.verification_case import forward_problem
from tests.toy import declare_toy

FORWARD, BACKWARD = Workload.parse("fp32-b1-h1-s4-d16"), Workload.parse("bwd-fp32-b1-h1-s4-d16")
REFUSED = r"the references compute alibi, .*also asks for \['toy'\]"
NOT_MADE = r"inputs can be made for packed forward attention; .* has \['toy'\]"


def test_a_workload_with_an_unknown_feature_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    declare_toy(monkeypatch)
    with pytest.raises(UnsupportedError, match=NOT_MADE):
        forward_problem(FORWARD, 1, 0, "cpu")
    with pytest.raises(UnsupportedError, match=NOT_MADE):
        backward_problem(BACKWARD, 1, 0, "cpu")


def test_nor_a_specialization_judged_on_odd_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    declare_toy(monkeypatch)
    with pytest.raises(UnsupportedError, match=REFUSED):
        odd_problems(FORWARD.specialization, "cpu")
    with pytest.raises(UnsupportedError, match=REFUSED):
        backward_odd_problems(BACKWARD.specialization, "cpu")


def test_the_oracle_refuses_arguments_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 4, 16)
    oracle(x, x, x, features=Features(softcap=2.0))
    declare_toy(monkeypatch)  # which the same argument brings
    with pytest.raises(WorkloadError, match=r"got \['toy'\]"):
        oracle(x, x, x, features=Features(softcap=2.0))
    oracle(x, x, x, features=Features())


@pytest.mark.parametrize("features", [Features(mods=1), Features(aux=(torch.zeros(1),))])
def test_functions_of_the_caller_have_no_oracle(features: Features) -> None:
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(WorkloadError, match=r"got \['functions'\]"):
        oracle(x, x, x, features=features)


def test_a_feature_that_random_inputs_leave_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    declare_toy(monkeypatch)
    monkeypatch.setattr(score_rule, "COMPUTED", score_rule.COMPUTED | {"toy"})
    with pytest.raises(UnsupportedError, match=r"random inputs have \[\], and .* also asks for \['toy'\]"):
        make_inputs(FORWARD, copies=1, seed=0, device="cpu")


def test_what_the_references_compute_is_in_the_table() -> None:
    assert table.names() > score_rule.COMPUTED
