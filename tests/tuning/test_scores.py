"""Configs of decoding are compared by their times on all profiles together."""

from __future__ import annotations

import pytest

from flashgen.core.config import Config
from flashgen.core.record import Measurement
from flashgen.measure.scores import compared
from flashgen.tuning.finals import choose, near_best, runners_up


def config(**knobs: int) -> Config:
    return Config.of("portable_decode", knobs)


def on(same: float, ramp: float, tail: float | None = None) -> Measurement:
    """Three rounds that hardly differ."""
    profiles = {"ramp": ramp} | ({} if tail is None else {"tail": tail})
    rounds = (1.0, 1.001, 0.999)
    return Measurement(
        times_ms=tuple(same * each for each in rounds),
        profile_times_ms=tuple((name, tuple(ms * each for each in rounds)) for name, ms in profiles.items()),
    )


ONE_SIDED, EVEN, SLOW = config(block_n=32), config(block_n=64), config(block_n=128)
MEASURED = {ONE_SIDED: on(1.0, 0.8, 0.4), EVEN: on(1.05, 0.5, 0.42), SLOW: on(1.2, 0.6, 0.65)}


def test_all_profiles_count_together_in_units_of_the_first() -> None:
    times = {each: found.median_ms for each, found in compared(MEASURED).items()}
    assert times == pytest.approx({ONE_SIDED: 2.2 / 1.9, EVEN: 1.97 / 1.9, SLOW: 2.45 / 1.9})
    assert all(not found.profile_times_ms for found in compared(MEASURED).values())


def test_microseconds_count_and_not_shares_of_a_short_step() -> None:
    """As 16 x 1024 on an H200: programs for each sequence, and equal shares, which are ahead with one long sequence."""
    grid, shares = on(0.0195, 0.0150, 0.0143), on(0.0272, 0.0219, 0.0088)
    assert choose({ONE_SIDED: grid, EVEN: shares}, default=EVEN, incumbent=None) == ONE_SIDED


def test_what_was_dropped_early_counts_by_what_was_timed() -> None:
    dropped = {**MEASURED, config(block_n=16): Measurement(times_ms=(2.5,))}
    assert compared(dropped)[config(block_n=16)].median_ms == 2.5


def test_passes_are_compared_as_before() -> None:
    normal, hard = Measurement(times_ms=(2.0,)), Measurement(times_ms=(1.0,), hard_times_ms=(4.0,))
    assert compared({1: normal, 2: hard}) == {1: normal, 2: hard.balanced}
    assert compared({}) == {}


def test_a_config_that_is_good_on_all_profiles_wins() -> None:
    assert choose(MEASURED, default=SLOW, incumbent=None) == EVEN
    assert near_best(MEASURED, share=0.6, most=9) == (EVEN, ONE_SIDED, SLOW)
    assert choose({each: MEASURED[each] for each in (EVEN, SLOW)}, default=SLOW, incumbent=SLOW) == EVEN
    both = {each: MEASURED[each] for each in (ONE_SIDED, EVEN)}
    assert choose(both, default=SLOW, incumbent=EVEN) == EVEN, "0.3 behind with ramp, and 0.05 ahead without"
    rivals = runners_up(MEASURED, EVEN)
    assert [each.config for each in rivals] == [ONE_SIDED, SLOW]
    assert rivals[0].median_ms < MEASURED[EVEN].median_ms, "on the first profile"
    assert [each.over(MEASURED[EVEN]) for each in rivals] == pytest.approx([2.2 / 1.97, 2.45 / 1.97])
