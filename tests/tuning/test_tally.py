"""What trials of a search found: one time of each config, which compares with those of all others."""

from __future__ import annotations

import pytest

from flashgen.core.config import Config
from flashgen.core.record import Failure, Measurement
from flashgen.tuning.levels import WINDOW
from flashgen.tuning.tally import Tally


def config(number: int) -> Config:
    return Config.of("portable_forward", {"number": number})


def timed(*times_ms: float, reference_ms: float | None = 1.0) -> Measurement:
    return Measurement(times_ms=times_ms, reference_ms=reference_ms)


def test_the_least_window_of_a_config_counts() -> None:
    """Behind other load, windows are slower by what that was."""
    tally = Tally(has_profiles=False)
    tally.count(config(1), timed(2.0, 2.2, 2.3))
    tally.count(config(2), timed(2.1, 2.1, 2.1))
    assert tally.best() == config(1)
    assert tally.best_ms == 2.0
    assert tally.measured[config(2)].times_ms == (2.1,)


def test_the_least_window_counts_on_each_profile_of_lengths() -> None:
    tally = Tally(has_profiles=True)
    for number, (first, second) in enumerate([((1.0, 1.5), (4.0, 3.0)), ((1.2, 1.1), (3.2, 3.3))]):
        tally.count(config(number), Measurement(times_ms=first, profile_times_ms=(("ramp", second),)))
    assert [tally.measured[config(n)].profile_times_ms for n in (0, 1)] == [(("ramp", (3.0,)),), (("ramp", (3.2,)),)]
    assert tally.best() == config(0)


def test_a_config_that_failed_later_does_not_come_back() -> None:
    tally = Tally(has_profiles=False)
    tally.count(config(1), timed(1.0))
    tally.count(config(1), Failure(stage="verify", reason="right before the timing and wrong after it"))
    tally.count(config(2), timed(2.0))
    assert set(tally.measured) == {config(2)}
    assert tally.tried == 2


def test_a_config_that_was_measured_again_has_its_last_time() -> None:
    tally = Tally(has_profiles=False)
    tally.count(config(1), timed(1.0))
    tally.count(config(1), timed(3.0, reference_ms=None))
    tally.count(config(2), timed(2.0))
    assert tally.measured[config(1)].times_ms == (3.0,)


def test_a_session_on_another_clock_compares_with_the_one_before() -> None:
    tally = Tally(has_profiles=False)
    for number in range(3):
        tally.count(config(number), timed(1.0 + number, reference_ms=0.5))
    tally.resume()
    for number in range(3, 6):
        tally.count(config(number), timed(3.0, reference_ms=1.0))
    assert [tally.measured[config(number)].median_ms for number in range(6)] == pytest.approx([1, 2, 3, 1.5, 1.5, 1.5])


def test_times_follow_when_the_clock_turns_out_to_have_been_another_one() -> None:
    """The first evaluations on the other clock are taken for noise until enough have followed."""
    tally = Tally(has_profiles=False)
    for number in range(4 * WINDOW):
        clock = 1.0 if number < 2 * WINDOW else 1.5
        tally.count(config(number), timed(2.0 * clock, reference_ms=clock))
    times = [each.median_ms for each in tally.measured.values()]
    assert max(times) == pytest.approx(min(times))
