"""What a search has spent of a budget in seconds, and what its finals may take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.tuning.budget import SEARCH_SHARE, Budget
from flashgen.tuning.finals import Finals
from flashgen.tuning.spending import GRACE, Spending
from tests.tuning.fakes import Clock


def spending(budget: Budget, finals: Finals | None = None) -> tuple[Spending, Clock]:
    clock = Clock()
    return Spending(budget, finals or Finals(), clock, kinds=2), clock


def test_nothing_is_spent_before_the_first_candidate_is_measured() -> None:
    found, clock = spending(Budget(seconds=20.0))
    clock.now += 100.0
    assert found.spent_s == 0.0
    assert not found.is_over(0, 1, has_times=False, has_failures=True)
    found.measured_one()
    clock.now += 3.0
    found.measured_one()
    assert found.spent_s == pytest.approx(3.0)


def test_time_is_up_where_the_finals_need_what_is_left_and_later_without_a_time() -> None:
    found, clock = spending(Budget(seconds=20.0))
    found.measured_one()
    for spent_s, expected in ((SEARCH_SHARE * 20 - 0.1, False), (20.0, True)):
        clock.now = found._ready + spent_s  # type: ignore[operator]
        assert found.is_over(3, 2, has_times=True, has_failures=False) is expected
    assert not found.is_over(3, 2, has_times=False, has_failures=True)
    clock.now += GRACE * 20
    assert found.is_over(3, 2, has_times=False, has_failures=True)
    assert not found.is_over(3, 2, has_times=False, has_failures=False), "nothing has been measured at all"


def test_a_budget_in_trials_never_runs_out_of_time() -> None:
    usual = Finals()
    found, clock = spending(Budget(trials=5), usual)
    found.measured_one()
    clock.now += 1e6
    assert not found.is_over(3, 2, has_times=True, has_failures=True)
    assert found.finals(9, 2) is usual
    assert found.last_limit_s(usual, 4) == usual.limit_s


def test_what_evaluations_take_beside_their_windows_shortens_the_finals() -> None:
    found, clock = spending(Budget(seconds=30.0))
    assert found.ready_s == 0.0
    for evaluate_s in (0.5, 3.0, 2.0, 0.1):
        found.evaluated(evaluate_s, 0.5)
    assert found.ready_s == pytest.approx(0.75)  # 0, 2.5, 1.5 and 0 at the median
    found.measured_one()
    usual = replace(Finals(), limit_s=100.0)
    left = found.last_limit_s(usual, 4)
    clock.now += 10.0
    assert found.last_limit_s(usual, 4) == pytest.approx(max(left - 10.0, usual.least_s(4, 2)))
    clock.now += 1000.0
    assert found.last_limit_s(usual, 4) == pytest.approx(usual.least_s(4, 2)), "no less than makes it sure"
