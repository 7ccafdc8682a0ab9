"""Finals: only a difference above the noise counts, and ties go to what is in use or simpler."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from flashgen.core.config import Config
from flashgen.core.errors import TuningError
from flashgen.core.record import Measurement
from flashgen.measure.protocol import LEAST_SETTLE_S, SETTLE_S, RaceJob
from flashgen.tuning.budget import Budget
from flashgen.tuning.finals import Finals, choose, confidence, near_best, runners_up, with_guards
from tests.tuning.runs import CAUSAL


def config(**knobs: int) -> Config:
    return Config.of("f", {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3, **knobs})


def times(*values: float, hard: tuple[float, ...] = ()) -> Measurement:
    return Measurement(times_ms=values, hard_times_ms=hard)


DEFAULT = config()
FAST, OTHER = config(num_stages=2), config(num_warps=4, num_stages=4)


def beaten(one: Measurement, other: Measurement) -> bool:
    """Whether `one` takes the place of `other` by the rounds that both had."""
    return choose({FAST: one, OTHER: other}, default=DEFAULT, incumbent=OTHER) == FAST


def test_paired_rounds_see_a_small_gain_through_a_common_drift() -> None:
    drift = (1.0, 1.1, 0.95, 1.2)
    slow = times(*drift)
    assert beaten(times(*(0.98 * t for t in drift)), slow)
    assert not beaten(times(*(0.997 * t for t in drift)), slow)
    assert not beaten(times(0.80, 1.30, 0.75, 1.25), slow)


def test_who_left_the_race_early_is_compared_in_the_rounds_that_it_had() -> None:
    """The card became 20% slower after it left: its median is the best, and it is 5% behind."""
    results = {FAST: times(1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2), OTHER: times(1.05, 1.05, 1.05)}
    assert choose(results, default=DEFAULT, incumbent=None) == FAST
    third = config(num_stages=5)
    rivals = {**results, third: times(1.01, 1.01, 1.01, 1.21, 1.21, 1.21)}
    assert [each.config for each in runners_up(rivals, FAST)] == [third, OTHER]
    assert confidence(rivals, FAST) > 0.9


def test_the_incumbent_stays_within_the_noise_and_goes_beyond_it() -> None:
    results = {FAST: times(0.996, 1.0), OTHER: times(1.0, 1.002), DEFAULT: times(1.5, 1.5)}
    assert choose(results, default=DEFAULT, incumbent=OTHER) == OTHER
    results = {FAST: times(0.95, 0.951, 0.95), OTHER: times(1.0, 1.002, 1.0), DEFAULT: times(1.5, 1.5)}
    assert choose(results, default=DEFAULT, incumbent=OTHER) == FAST


def test_ties_go_to_the_default_then_to_fewer_changes_then_to_fewer_stages() -> None:
    tied = times(1.0, 1.0)
    assert choose({OTHER: tied, FAST: tied, DEFAULT: tied}, default=DEFAULT, incumbent=None) == DEFAULT
    assert choose({OTHER: tied, FAST: tied}, default=DEFAULT, incumbent=None) == FAST
    deep = config(num_stages=4)
    assert choose({deep: tied, FAST: tied}, default=DEFAULT, incumbent=None) == FAST
    assert choose({FAST: tied, deep: tied}, default=DEFAULT, incumbent=None) == FAST


def test_choice_does_not_depend_on_the_order_of_results() -> None:
    rng = random.Random(0)
    entries = [(config(num_stages=n, num_warps=w), times(1 + rng.random() / 100)) for n in (1, 2, 3) for w in (2, 4)]
    winners = set()
    for _ in range(10):
        rng.shuffle(entries)
        winners.add(choose(dict(entries), default=DEFAULT, incumbent=None))
    assert len(winners) == 1


def test_near_best_and_guards() -> None:
    measured = {FAST: times(1.0), OTHER: times(1.05), DEFAULT: times(1.07)}
    assert near_best(measured, share=0.06, most=9) == (FAST, OTHER)
    assert near_best(measured, share=0.1, most=2) == (FAST, OTHER)
    assert near_best({}, share=0.1, most=2) == ()
    assert with_guards((FAST,), DEFAULT, None, FAST) == (FAST, DEFAULT)


def test_other_tiles_have_a_place_beside_variants_of_the_fastest_one() -> None:
    variants = [config(num_stages=stages, num_warps=warps) for stages in (1, 2, 3) for warps in (2, 4)]
    measured = {each: times(1 + place / 100) for place, each in enumerate(variants)}
    wide, tall, slow = config(block_n=16), config(block_m=16), config(block_m=16, block_n=16)
    measured |= {wide: times(1.08), tall: times(1.12), slow: times(1.3), wide.replace(num_stages=4): times(1.09)}
    found = near_best(measured, share=0.1, most=12, tile_share=0.15)
    assert found == (variants[0], wide, variants[1], tall, *variants[2:], wide.replace(num_stages=4))
    assert near_best(measured, share=0.1, most=3, tile_share=0.15) == found[:3]
    assert near_best(measured, share=0.1, most=3) == found[:3], "within the share of all"
    assert tall not in near_best(measured, share=0.1, most=12)
    assert near_best(measured, share=0.02, most=12) == tuple(variants[:3])


def test_what_wins_on_normal_data_and_loses_on_hard_data_loses() -> None:
    uneven, even = times(0.97, 0.97, 0.98, hard=(1.9, 2.0, 1.9)), times(1.0, 1.0, 1.01, hard=(1.0, 1.02, 1.0))
    assert beaten(even, uneven)
    assert not beaten(uneven, even)
    assert (
        choose({FAST: uneven, OTHER: even, DEFAULT: times(9, 9, 9, hard=(9, 9, 9))}, default=DEFAULT, incumbent=FAST)
        == OTHER
    )
    alone = {config: times(*each.times_ms) for config, each in ((FAST, uneven), (OTHER, even))}
    assert choose(alone, default=DEFAULT, incumbent=None) == FAST


def test_rounds_are_paired_on_both_kinds_of_data() -> None:
    """A drift from round to round that both windows of a round share hides no gain of 2%."""
    drift, hard = (1.0, 1.1, 0.95, 1.2), (1.3, 1.1, 1.2, 1.0)
    slow = times(*drift, hard=hard)
    assert beaten(times(*(0.98 * t for t in drift), hard=tuple(0.98 * t for t in hard)), slow)
    assert not beaten(times(*(0.98 * t for t in drift), hard=tuple(1.02 * t for t in hard)), slow)


def test_what_was_timed_on_hard_data_is_judged_by_it() -> None:
    measured = {FAST: times(0.97, hard=(1.9,)), OTHER: times(1.0, hard=(1.0,)), DEFAULT: times(1.01, hard=(1.0,))}
    assert near_best(measured, share=0.03, most=5) == (OTHER, DEFAULT)


def test_expected_time_counts_every_window() -> None:
    finals = Finals(window_s=0.3, warm_s=0.1, rounds=4)
    assert finals.last_s(7) == pytest.approx(SETTLE_S + (4 * 2 * 7 + 3 * 3) * 0.4)  # each config on two kinds of data
    assert finals.near_s(7) == pytest.approx(LEAST_SETTLE_S + 3 * 2 * 7 * 0.04)


@pytest.mark.parametrize(
    "name", ["window_s", "near_window_s", "warm_s", "near_warm_s", "settle_s", "near_settle_s", "limit_s"]
)
@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_times_of_finals_are_finite(name: str, seconds: float) -> None:
    with pytest.raises(TuningError, match=r"finals last|a window lasts"):
        Finals(**{name: seconds})  # type: ignore[arg-type]


def test_windows_of_finals_are_such_as_an_executor_takes() -> None:
    """Else a run of hours would end in an error at its first race."""
    longest = Finals(window_s=59.0)
    RaceJob(workload=CAUSAL, configs=(FAST,), window_s=longest.window_s)
    for window_s in (0.0, 60.0):
        with pytest.raises(TuningError, match="a window lasts"):
            Finals(window_s=window_s)


def test_finals_of_few_configs_need_less_time() -> None:
    finals = Finals(rounds=2)
    assert finals.expected_s == finals.needed_s(finals.near_most, 2)
    assert finals.needed_s(1, 0) == pytest.approx(SETTLE_S + 2 * (2 + 3) * 0.4)  # backends have no more rounds
    assert finals.needed_s(5, 2) == finals.last_s(7)
    assert finals.needed_s(9, 2) == finals.last_s(7) + finals.near_s(9)
    costs = [finals.needed_s(near, 1) for near in range(1, 13)]
    assert costs == sorted(costs)


def test_finals_get_smaller_until_they_fit_and_no_smaller() -> None:
    usual = Finals()
    assert usual.within(1000.0, 12, 2) == usual
    assert usual.within(37.0, 12, 2, 3) == usual, "three rounds of seven configs on three profiles"
    found = [usual.within(seconds, 12, 2, 3, 0.2) for seconds in range(40, 0, -1)]
    sizes = [(each.last, each.near_most, each.window_s) for each in found]
    assert sizes[0] == (5, 12, 0.3)
    assert sizes[-1] == (2, 2, pytest.approx(0.1))
    assert len(set(sizes)) > 4
    settled = [each.settle_s for each in found]
    assert settled == sorted(settled, reverse=True)
    assert {settled[0], settled[-1]} == {SETTLE_S, LEAST_SETTLE_S}, "a short budget has windows rather than load"
    sound = [replace(each, rounds=3).needed_s(12, 2, 3, 0.2) for each in found]
    assert sound == sorted(sound, reverse=True)
    assert all(needed <= seconds for needed, seconds in zip(sound, range(40, 7, -1), strict=False))
    assert {each.rounds for each in found} == {usual.rounds}, "a race that has the time goes on until it is sure"
    short = Finals(window_s=0.05, warm_s=0.0, last=1)
    assert (short.within(1.0, 12, 2).window_s, short.within(1.0, 12, 2).last) == (0.05, 1), "as it was asked for"


def test_no_results_is_an_error() -> None:
    with pytest.raises(TuningError, match="at least one"):
        choose({}, default=DEFAULT, incumbent=None)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20s", Budget(seconds=20)),
        ("2m", Budget(seconds=120)),
        ("1.5m", Budget(seconds=90)),
        ("40", Budget(trials=40)),
        ("1H", Budget(seconds=3600)),
    ],
)
def test_budget_texts(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "20 parsecs", "-1", "0", "0s", "1.5", "s"])
def test_bad_budgets_are_refused(text: str) -> None:
    with pytest.raises(TuningError, match="budget"):
        Budget.parse(text)


def test_the_search_keeps_a_share_however_long_the_finals_are() -> None:
    assert Budget(seconds=20).search_seconds(5) == 15
    assert Budget(seconds=10).search_seconds(50) == 4
    assert Budget(trials=3).search_seconds(5) is None
