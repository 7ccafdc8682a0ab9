"""A search that ends by itself: neither at once nor at the end, and about where going on saves less than was asked."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest

from flashgen.core.errors import TuningError
from flashgen.core.record import Measurement
from flashgen.db.store import Store
from flashgen.measure.protocol import EvaluateJob, Outcome
from flashgen.tuning.budget import Budget, parse_share
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, TrialFinished
from flashgen.tuning.expected import LEAST_TRIALS, Outlook, expected_gain
from tests.tuning.fakes import REFERENCE_MS, FakeExecutor
from tests.tuning.runs import run, willing
from tests.tuning.spaces import space

Search = Callable[[random.Random], Callable[[], float]]
"""Makes what draws the time of the next trial, in units of the best there is."""

TRIALS = 400


def by_chance(chance: random.Random) -> Callable[[], float]:
    return lambda: math.exp(chance.gammavariate(2, 0.2))


def learning(chance: random.Random) -> Callable[[], float]:
    """Most trials are near the best so far and come nearer, in the noise of a short window."""
    best = 1.5

    def draw() -> float:
        nonlocal best
        near = 1 + (best - 1) * math.exp(chance.gauss(-0.1, 0.3))
        true = near if chance.random() < 0.7 else 1 + chance.gammavariate(3, 0.15)
        best = min(best, true)
        return true * math.exp(chance.gauss(0, 0.006))

    return draw


def plateau(chance: random.Random) -> Callable[[], float]:
    """A third of all configs are as good as can be."""
    return lambda: math.exp(abs(chance.gauss(0, 0.006)) if chance.random() < 0.3 else chance.gammavariate(3, 0.1))


def stopped(search: Search, until: float, seed: int) -> tuple[int, float]:
    """After how many trials it ends, and what as many again would have saved."""
    draw = search(random.Random(seed))
    times = [draw() for _ in range(TRIALS)]
    bests = list(itertools.accumulate(times, min))
    for count in range(1, TRIALS):
        gain = expected_gain(times[:count], bests[count - 1], min(count, TRIALS - count))
        if gain is not None and gain < until:
            return count, 1 - bests[min(2 * count, TRIALS) - 1] / bests[count - 1]
    return TRIALS, 0.0


@pytest.mark.parametrize(("search", "usual"), [(by_chance, (40, 390)), (learning, (30, 150)), (plateau, (24, 60))])
def test_it_stops_in_between_and_misses_about_what_was_asked(search: Search, usual: tuple[int, int]) -> None:
    found = [stopped(search, 0.01, seed) for seed in range(30)]
    counts = sorted(count for count, _ in found)
    assert counts[0] >= LEAST_TRIALS
    assert usual[0] <= counts[15] <= usual[1]
    assert counts[15] < TRIALS
    assert statistics.fmean(missed for _, missed in found) < 0.012
    eager = [stopped(search, 0.05, seed)[0] for seed in range(30)]
    assert statistics.fmean(eager) <= statistics.fmean(counts)


def test_too_few_trials_tell_nothing_and_failures_none() -> None:
    assert expected_gain([1.0] * (LEAST_TRIALS - 1), 1.0, 10) is None
    assert expected_gain([None] * 100, 1.0, 10) is None
    assert expected_gain([1.0] * LEAST_TRIALS, 1.0, 10) == 0.0
    chance = random.Random(0)
    times: list[float | None] = [math.exp(chance.gammavariate(2, 0.2)) for _ in range(60)]
    best = min(each for each in times if each is not None)
    whole = expected_gain(times, best, 60)
    assert whole is not None
    assert 0 < whole < 0.5
    assert (expected_gain(times, best, 5) or 0.0) < whole
    assert expected_gain(times, best, 0) == 0.0
    assert (expected_gain(times, 0.5 * best, 60) or 0.0) < 0.2 * whole, "a list's winner is far ahead"


def test_trials_of_an_earlier_run_do_not_make_a_resumed_one_faster() -> None:
    chance = random.Random(0)
    configs = space().configs[:100]
    times = {config: Measurement(times_ms=(math.exp(chance.gammavariate(2, 0.2)),)) for config in configs}

    def gain(earlier: int) -> float:
        outlook = Outlook()
        for number, config in enumerate(times):
            outlook.add("random", config, is_earlier=number < earlier)
        found = outlook.gain(times, candidates=1000, trials=math.inf, seconds=10.0, spent_s=100.0 - earlier)
        assert found is not None
        return found

    assert gain(0) == gain(90) > 0, "a trial a second, and 10 s are left"


def test_a_search_ends_by_itself_and_tells_what_it_expected(store: Store) -> None:
    def trials(until: float | None) -> list[TrialFinished]:
        events: list[Event] = []
        options = {"until": until, "families": ("portable_forward",), "retune": True}
        run(store, executor=FakeExecutor(), budget=Budget(trials=150), events=events, **options)
        return [event for event in events if isinstance(event, TrialFinished)]

    told = trials(0.1)
    assert LEAST_TRIALS < len(told) < 150
    assert told[0].expected_gain is None
    assert told[-1].expected_gain is not None
    assert told[-1].expected_gain < 0.1
    assert all(event.expected_gain is None or event.expected_gain >= 0.1 for event in told[:-1])


def test_a_clock_that_changes_is_no_gain_to_come(store: Store) -> None:
    """Times of before are moved to the level of today, and those of the search's own trials with them."""

    class Throttled(FakeExecutor):
        def evaluate(self, job: EvaluateJob) -> Outcome:
            found = super().evaluate(job)
            if not isinstance(found, Measurement) or found.reference_ms is None:
                return found
            reference_ms = REFERENCE_MS * (1.5 if len(self.evaluated) > 30 else 1.0)
            times = found.times(reference_ms / found.reference_ms)
            return dataclasses.replace(times, reference_ms=reference_ms)

    events: list[Event] = []
    run(store, executor=Throttled(), compiler=willing(), budget=Budget(trials=70), events=events)
    gains = [event.expected_gain for event in events if isinstance(event, TrialFinished) and event.expected_gain]
    assert len(gains) > 20
    assert max(gains) < 0.3


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5%", 0.005), ("0.02", 0.02)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "1", "100%", "0", "0%", "-1%", "1%%", "a few"])
def test_bad_shares_are_refused(text: str) -> None:
    with pytest.raises(TuningError, match="share"):
        parse_share(text)
    with pytest.raises(TuningError, match="between 0 and 1"):
        Options(until=1.0)
