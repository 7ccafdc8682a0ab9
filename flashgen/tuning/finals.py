"""Finals: who is measured again, how long that takes, and who wins.

Short windows rank by temperature on a power-capped card, so everything within `near_share` of the best is timed again,
interleaved, and those that are still within `last_share` meet the default and the incumbent in long windows in balanced
order, unless these are far behind. Both races are on normal and on hard data, and the geometric mean of both times
counts. A difference counts only if it is larger than the noise of the paired rounds; else the config that is in use, or
the simpler one, stays.

The search itself sees normal data alone. There, configs whose time depends on the data are the fastest, by 3 to 7%, and
would take every place of the first race: so half of the places are for those whose time does not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.core.checks import check_fields
from flashgen.core.config import Config
from flashgen.core.errors import TuningError
from flashgen.core.history import MAX_RUNNERS_UP, RunnerUp
from flashgen.core.record import Measurement
from flashgen.tuning.scores import compared

MIN_NOISE = 0.005
"""No difference below half a per cent counts, however well the rounds agree: it does not survive a change of clock."""

SINGLE_ROUND_NOISE = 0.02
"""What a single round can tell apart, having no second one to compare with."""

STANDARD_ERRORS = 2.0
KINDS_OF_DATA = 2
"""Windows of a config in each round: on normal data and on hard data."""

ANCHORS = 3
"""SDPA backends that take turns in the last race; the first of them is its reference kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """How the finals are run: seconds of one window, unmeasured seconds before it, and rounds, for both races.

    Attributes:
        last: configs of the last race, the default and the incumbent not counted.
        near_share: how far behind the best of the search a config may be to take part in the first race.
        near_most: configs of the first race.
        last_share: how far behind the best of the first race a config may be to take part in the last one.
        guard_share: how far behind the best of the search the default and the incumbent may be to be raced again.
    """

    window_s: float = 0.3
    warm_s: float = 0.1
    rounds: int = 4
    last: int = 5
    near_share: float = 0.1
    near_most: int = 12
    near_window_s: float = 0.03
    near_warm_s: float = 0.01
    near_rounds: int = 3
    last_share: float = 0.03
    guard_share: float = 0.25

    def __post_init__(self) -> None:
        check_fields(self, TuningError)
        if not all(map(math.isfinite, (self.window_s, self.near_window_s, self.warm_s, self.near_warm_s))):
            raise TuningError(f"windows of finals last a finite time, got {self}")
        if min(self.window_s, self.near_window_s) <= 0 or min(self.warm_s, self.near_warm_s) < 0:
            raise TuningError(f"windows of finals last more than 0 s, got {self}")
        if min(self.rounds, self.near_rounds, self.last, self.near_most) < 1:
            raise TuningError(f"finals have at least one round and one config, got {self}")

    def near_s(self, configs: int, kinds: int = KINDS_OF_DATA) -> float:
        """Expected seconds of the first race, with its reference kernel, on so many kinds of data."""
        return self.near_rounds * (kinds * configs + 1) * (self.near_warm_s + self.near_window_s)

    def last_s(self, configs: int, kinds: int = KINDS_OF_DATA) -> float:
        """Expected seconds of the last race, with its baselines."""
        return self.rounds * (kinds * configs + ANCHORS) * (self.warm_s + self.window_s)

    def needed_s(self, near: int, guards: int, kinds: int = KINDS_OF_DATA) -> float:
        """Expected seconds of both races with `near` configs close to the best: no first race where these are few."""
        first = self.near_s(near, kinds) if near > self.last else 0.0
        return first + self.last_s(min(near, self.last) + guards, kinds)

    @property
    def expected_s(self) -> float:
        """Expected seconds of both races at their usual size: the last ones with the default and the incumbent."""
        return self.needed_s(self.near_most, 2)


def near_best(measured: Mapping[Config, Measurement], *, share: float, most: int) -> tuple[Config, ...]:
    """The configs within `share` of the best median, best first, `most` at the most.

    Where times on hard data are known, they count as in `choose`.
    """
    medians = {config: measurement.median_ms for config, measurement in compared(measured).items()}
    limit = (1 + share) * min(medians.values(), default=0.0)
    found = sorted((config for config in medians if medians[config] <= limit), key=lambda config: medians[config])
    return tuple(found[:most])


def with_guards(configs: Iterable[Config], *guards: Config | None) -> tuple[Config, ...]:
    """`configs` and after them the guards that are not among them (the default, the incumbent), each once."""
    return tuple(dict.fromkeys([*configs, *(guard for guard in guards if guard is not None)]))


def beats(one: Measurement, other: Measurement) -> bool:
    """Whether `one` is faster than `other` by more than the noise, by the paired windows of their rounds.

    Where both have times on hard data, a round counts with the geometric mean of its two windows; where they have times
    on profiles of lengths, it counts as `scores.compared` says.
    """
    if one.hard_times_ms and other.hard_times_ms:
        one, other = one.balanced, other.balanced
    if one.profile_times_ms or other.profile_times_ms:
        one, other = compared({0: one, 1: other}).values()
    if len(one.times_ms) == len(other.times_ms) > 1:
        gains = [math.log(b / a) for a, b in zip(one.times_ms, other.times_ms, strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        return statistics.mean(gains) > max(MIN_NOISE, STANDARD_ERRORS * error)
    noise = max(SINGLE_ROUND_NOISE, (one.spread + other.spread) / 2)
    return math.log(other.median_ms / one.median_ms) > noise


def choose(results: Mapping[Config, Measurement], *, default: Config, incumbent: Config | None) -> Config:
    """The winner: the incumbent unless it was beaten, else the simplest of those that the fastest does not beat.

    Simpler is, in this order: the default; fewer knobs that differ from the default; fewer stages; fewer warps; smaller
    tiles; the smaller JSON text (so that the choice is fixed).

    Raises:
        TuningError: there are no results.
    """
    if not results:
        raise TuningError("a winner needs at least one measured config, got none")
    times = compared(results)
    fastest = min(times, key=lambda config: times[config].median_ms)
    tied = [config for config in results if config == fastest or not beats(times[fastest], times[config])]
    if incumbent in tied:
        return incumbent
    return min(tied, key=lambda config: complexity(config, default))


def runners_up(results: Mapping[Config, Measurement], winner: Config) -> tuple[RunnerUp, ...]:
    """The other configs of a race with their times, the fastest first."""
    times = compared(results)
    others = sorted((config for config in results if config != winner), key=lambda each: times[each].median_ms)
    return tuple(
        RunnerUp(config=each, times_ms=results[each].times_ms, hard_times_ms=results[each].hard_times_ms)
        for each in others[:MAX_RUNNERS_UP]
    )


def complexity(config: Config, default: Config) -> tuple[object, ...]:
    """A sort key: the order of simplicity that `choose` documents."""
    knobs, usual = dict(config.knobs), dict(default.knobs)
    differing = len(set(config.knobs) - set(default.knobs)) if config.family == default.family else len(usual) + 1
    sizes = tuple(int(knobs.get(name, 0)) for name in ("num_stages", "num_warps", "block_m", "block_n"))
    return (config != default, differing, *sizes, config.to_json())
