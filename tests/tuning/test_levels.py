"""Times of a search compare though the clock is another one for a while, and though the reference kernel is noisy."""

from __future__ import annotations

import math
import random

import pytest

from flashgen.tuning.levels import APART, WINDOW, Levels


def levelled(times: list[float], references: list[float]) -> list[float]:
    levels = Levels()
    places = [levels.add(reference) for reference in references]
    return [time * levels.factor(place) for time, place in zip(times, places, strict=True)]


def test_an_even_clock_changes_nothing() -> None:
    assert levelled([1.0, 2.0, 3.0], [0.7, 0.7, 0.7]) == pytest.approx([1.0, 2.0, 3.0])


def test_noise_of_the_reference_changes_no_time() -> None:
    """As much as was measured: by it alone, two configs that are 4% apart would change places."""
    noise = random.Random(0)
    times = [1.0 + 0.01 * (number % 12) for number in range(300)]
    references = [0.3 * math.exp(noise.gauss(0, 0.07)) for _ in times]
    assert levelled(times, references) == pytest.approx(times)


@pytest.mark.parametrize("jump", [1.2, 1.3, 2.0])
def test_a_jump_of_the_clock_is_taken_out_where_it_happens(jump: float) -> None:
    clocks = [1.0] * 40 + [jump] * 40
    found = levelled(clocks, [0.3 * clock for clock in clocks])
    assert max(found) == pytest.approx(min(found))


def test_a_slow_drift_leaves_what_noise_may_be_and_no_more() -> None:
    clocks = [1 + 0.6 * number / 200 for number in range(200)]
    found = levelled([5.0 * clock for clock in clocks], [0.3 * clock for clock in clocks])
    inner = found[WINDOW:-WINDOW]
    assert max(inner) / min(inner) < math.exp(2 * APART) * 1.001 < max(clocks) / min(clocks)


def test_what_was_measured_before_a_pause_has_levels_of_its_own() -> None:
    """After a pause the card may run at another clock: what came before says nothing about what follows."""
    levels = Levels()
    before = [levels.add(0.5) for _ in range(4)]
    levels.resume()
    levels.resume()
    after = [levels.add(1.0) for _ in range(4)]
    assert [levels.factor(place) for place in before] == pytest.approx([1.0] * 4)
    assert [levels.factor(place) for place in after] == pytest.approx([0.5] * 4)
