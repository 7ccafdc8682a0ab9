"""Races end when they are sure: few false winners, few gains missed, and no round more than that takes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from flashgen.core.errors import MeasureError
from flashgen.core.record import Measurement
from flashgen.measure.sequential import (
    LEAST_ROUNDS,
    Rule,
    beats,
    confidence,
    gains,
    odds_faster,
    odds_no_gain,
)
from tests.measure.noisy_races import Noise, measured_noise, odd_windows, race
from tests.tiers import first

RACES = 60


def replaced(true_gains: Sequence[float], noise: Noise, limit: int | None = None) -> float:
    """The share of races in which somebody takes the champion's place."""
    chance, count = random.Random(3), 0
    for _ in range(RACES):
        times = race(true_gains, noise, chance, limit=limit)
        count += any(beats(each, times[0], rivals=len(times) - 1) for each in times[1:])
    return count / RACES


@pytest.mark.parametrize("noise", first(1, [measured_noise, odd_windows]))
@pytest.mark.parametrize("rivals", first(1, [5, 1]))
def test_an_equal_champion_keeps_its_place(noise: Noise, rivals: int) -> None:
    assert replaced([0.0] * (1 + rivals), noise) <= 0.05


@pytest.mark.parametrize("noise", first(1, [measured_noise, odd_windows]))
@pytest.mark.parametrize("others", [(), (-0.01, -0.02, -0.03, -0.03)])
def test_a_gain_of_two_per_cent_is_found_in_nine_of_ten(noise: Noise, others: tuple[float, ...]) -> None:
    assert replaced([0.0, 0.02, *others], noise) >= 0.9


def test_a_race_ends_early_where_the_difference_is_large() -> None:
    chance = random.Random(1)
    lengths = [max(map(len, race([0.0, *[-0.05] * 5], measured_noise, chance))) for _ in range(20)]
    assert sorted(lengths)[10] <= LEAST_ROUNDS + 1
    many = [race([0.0, 0.001, -0.06], measured_noise, chance) for _ in range(20)]
    assert sum(len(each[2]) for each in many) < 0.7 * sum(len(each[1]) for each in many), "who is behind leaves"


def test_odds_follow_the_rounds_and_one_odd_window_convinces_nobody() -> None:
    steady = (0.02, 0.021, 0.019, 0.022, 0.018)
    odds = [odds_faster(steady[:n]) for n in range(1, 6)]
    assert odds == sorted(odds)
    assert odds[0] < 20 < odds[-1]
    assert odds_no_gain(steady) < 1 < odds_no_gain(tuple(-each for each in steady))
    assert odds_faster((0.09, 0.0, -0.002, 0.001)) < 3
    assert odds_faster((1e9,)) < float("inf")


def test_a_difference_that_no_change_of_clock_survives_does_not_count() -> None:
    slow = (1.0, 1.1, 0.95, 1.2) * 6
    assert not beats([0.997 * t for t in slow], slow)
    assert beats([0.98 * t for t in slow], slow)


def test_more_rivals_need_more_certainty() -> None:
    one, other = (0.985, 0.984, 0.986), (1.0, 1.0, 1.0)
    most = odds_faster(gains(one, other)) * 0.05
    assert beats(one, other, rivals=int(most))
    assert not beats(one, other, rivals=int(most) + 1)


def test_confidence_is_about_all_others() -> None:
    winner, far, near = (1.0,) * 4, (1.2, 1.21, 1.2, 1.19), (1.004, 0.996, 1.001, 1.003)
    assert confidence(winner, []) == 1.0
    assert confidence(winner, [far]) > 0.99
    assert 0.0 < confidence(winner, [far, near]) < confidence(winner, [far])
    assert confidence(winner, [(0.9,) * 4] * 3) == 0.0


def test_equals_that_three_rounds_cannot_tell_apart_are_no_confidence_and_no_defeat() -> None:
    """Their doubts add up; more rounds of the same decide."""
    winner = [1.0, 1.04, 0.97]
    rivals = [[1.03, 0.99, 1.0], [0.98, 1.03, 1.01], [1.01, 1.02, 0.98]]
    few, many = confidence(winner, rivals), confidence(winner * 8, [rival * 8 for rival in rivals])
    assert not any(beats(rival, winner, rivals=3) for rival in rivals)
    said = [Measurement(times_ms=(1.0,) * rounds, confidence=sure) for rounds, sure in ((3, few), (24, many))]
    assert [(each.is_decided, each.verdict) for each in said] == [(False, "undecided, 3 rounds"), (True, f"{many:.1%}")]
    assert (Measurement(times_ms=(1.0,)).is_decided, Measurement(times_ms=(1.0,)).verdict) == (None, None)


def test_the_fastest_leads_where_nobody_has_a_place_to_defend() -> None:
    times = [(1.0,) * 4, (0.9,) * 4, (1.1,) * 4]
    assert Rule().leader(times, {0, 1, 2}) == 1
    assert Rule(champion=2).leader(times, {0, 1, 2}) == 1
    level = [(1.0, 1.0, 1.0), (0.999, 1.001, 1.0), (1.1,) * 3]
    assert Rule(champion=0).leader(level, {0, 1, 2}) == 0
    assert Rule(champion=0).going_on(level, {0, 1, 2}) <= {0, 1}


def test_a_rule_follows_its_champion_when_a_config_drops_out() -> None:
    assert Rule(champion=2).without(0) == Rule(champion=1)
    assert Rule(champion=2, limit_s=3.0).without(2) == Rule(limit_s=3.0)
    assert Rule(champion=0).without(1) == Rule(champion=0)
    with pytest.raises(MeasureError, match="limit"):
        Rule(limit_s=-1.0)


def to_and_fro(*true_gains: float, limit: int, champion: int | None = 0) -> list[int]:
    """The rounds that each config has where every second one is 4% better for the champion than the other ones."""
    logs = [[0.02 * (-1) ** (number + config) for number in range(40)] for config in (0, 1, 1)]
    times = race(true_gains, lambda *_: logs[: len(true_gains)], random.Random(0), champion=champion, limit=limit)
    return list(map(len, times))


@pytest.mark.parametrize(("limit", "rounds"), [(1, LEAST_ROUNDS), (6, LEAST_ROUNDS), (12, 6), (13, 6)])
def test_a_limit_ends_a_race_after_three_rounds_at_least(limit: int, rounds: int) -> None:
    assert to_and_fro(0.0, -0.015, limit=limit) == [rounds] * 2


def test_who_is_ahead_of_the_champion_has_overtime() -> None:
    """Until that is sure; who is not ahead has none, and nor has a race without a champion."""
    unlimited = to_and_fro(0.0, 0.05, limit=1000)
    assert to_and_fro(0.0, 0.05, limit=6) == unlimited
    assert unlimited[0] > LEAST_ROUNDS
    *ahead, behind = to_and_fro(0.0, 0.05, -0.015, limit=1000)
    assert to_and_fro(0.0, 0.05, -0.015, limit=9) == [*ahead, LEAST_ROUNDS]
    assert behind > LEAST_ROUNDS
    assert to_and_fro(0.0, 0.05, limit=6, champion=None) == [LEAST_ROUNDS] * 2


def test_overtime_ends_where_a_gain_stays_likely_and_never_is_sure() -> None:
    assert to_and_fro(0.0, 0.03, limit=6) == [Rule(champion=0, limit_s=6).most_s / 2] * 2


def test_a_short_limit_hides_no_gain_and_believes_in_none() -> None:
    """Three rounds of five configs are what a search of 16 s has time for."""
    assert replaced([0.0, 0.04, 0.03, 0.01, -0.01], measured_noise, limit=15) >= 0.85
    assert replaced([0.0] * 5, measured_noise, limit=15) <= 0.05
