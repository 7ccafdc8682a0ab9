"""Times of a search compare though clocks drift, and though a single time of the reference kernel is noisy."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from flashgen.tuning.levels import WINDOW, Levels


def levelled(times: list[float], references: list[float]) -> list[float]:
    levels = Levels()
    places = [levels.add(reference) for reference in references]
    return [time * levels.factor(place) for time, place in zip(times, places, strict=True)]


def test_an_even_clock_changes_nothing() -> None:
    assert levelled([1.0, 2.0, 3.0], [0.7, 0.7, 0.7]) == pytest.approx([1.0, 2.0, 3.0])


def test_a_slow_drift_is_taken_out() -> None:
    clocks = [1 + 0.2 * number / 100 for number in range(100)]
    found = levelled([5.0 * clock for clock in clocks], [0.3 * clock for clock in clocks])
    assert max(found[WINDOW:-WINDOW]) / min(found[WINDOW:-WINDOW]) < 1.001
    assert max(found) / min(found) < 1.02


def test_a_jump_of_the_clock_is_taken_out_where_it_happens() -> None:
    clocks = [1.0] * 40 + [1.3] * 40
    found = levelled(clocks, [0.3 * clock for clock in clocks])
    assert found == pytest.approx([1.0] * 80)


def test_a_noisy_reference_spoils_fewer_pairs_than_its_own_times_would() -> None:
    noise = random.Random(0)
    true = [1.0 + 0.01 * number for number in range(12)] * 4
    clocks = [1 + 0.05 * math.sin(number / 20) for number in range(len(true))]
    references = [clock * math.exp(noise.gauss(0, 0.04)) for clock in clocks]
    times = [time * clock for time, clock in zip(true, clocks, strict=True)]
    alone = [time / reference for time, reference in zip(times, references, strict=True)]

    def wrong(found: list[float]) -> int:
        pairs = itertools.combinations(range(len(true)), 2)
        return sum((true[a] - true[b]) * (found[a] - found[b]) < 0 for a, b in pairs)

    assert wrong(levelled(times, references)) < 0.5 * wrong(alone)


def test_what_was_measured_before_a_pause_has_levels_of_its_own() -> None:
    """After a pause the card may run at another clock: what came before says nothing about what follows."""
    levels = Levels()
    before = [levels.add(0.5) for _ in range(4)]
    levels.resume()
    levels.resume()
    after = [levels.add(1.0) for _ in range(4)]
    assert [levels.factor(place) for place in before] == pytest.approx([1.0] * 4)
    assert [levels.factor(place) for place in after] == pytest.approx([0.5] * 4)


def test_a_level_settles_when_half_a_window_has_followed() -> None:
    levels = Levels()
    levels.add(1.0)
    early = levels.add(2.0)
    for number in range(WINDOW):
        levels.add(1.0 + 0.1 * number)
    settled = levels.factor(early)
    levels.add(50.0)
    assert levels.factor(early) == settled
