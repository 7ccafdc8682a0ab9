"""Finals: who is measured again, how long that takes, and who wins.

Short windows rank by temperature on a power-capped card, so everything within `near_share` of the best is timed again,
interleaved, and those that are still within `last_share` meet the default and the incumbent in long windows in balanced
order, unless these are far behind. Every second place is for the best of another tile, also where that is further
behind (`near_best`): tiles draw different power, which short windows do not see. Both races are on normal and on hard
data, and the geometric mean of both times counts. Each begins with load that nobody measures, and the first has no
other kernels beside the configs. The last race has as many rounds as it needs to be sure (`measure.sequential`): a
config takes the place of the one in use only if it beats that, in at most one of twenty races of equally fast ones.
Where none is in use, the simplest stays of those that are about as fast. A short budget has fewer configs and shorter
windows (`Finals.within`).

The search itself sees normal data alone, which decides who is near the best: since references of exponentials follow
the row sums, a config's time on hard data is a few per cent from that on normal data, and `near_share` is more.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from flashgen.core.checks import check_fields
from flashgen.core.config import Config, KnobValue
from flashgen.core.errors import TuningError
from flashgen.core.history import MAX_RUNNERS_UP, RunnerUp
from flashgen.core.record import Measurement
from flashgen.measure import sequential
from flashgen.measure.protocol import LEAST_SETTLE_S, SETTLE_S, check_window
from flashgen.measure.scores import compared
from flashgen.measure.sequential import ANCHOR_ROUNDS, LEAST_ROUNDS, LIKELY, Times, beats, gains, odds_faster

C = TypeVar("C")

KINDS_OF_DATA = 2
"""Windows of a config in each round: on normal data and on hard data."""

ROWS_AND_KEYS = ("warpgroups", "block_m", "block_n")
"""Knobs of all families that say how many queries and keys a tile has."""

ANCHORS = 3
"""SDPA backends that are timed behind the last race; one of them is its reference kernel."""


USUAL_ROUNDS = 4
"""Of all configs of a last race, in whose time it usually ends: those that fall behind have fewer, and others more."""


SMALLER = (
    *((5, 12, 1.0), (5, 12, 2 / 3), (4, 9, 2 / 3), (3, 7, 2 / 3), (3, 7, 1 / 2), (2, 5, 1 / 2), (2, 5, 1 / 3)),
    *((3, 3, 1 / 3), (2, 2, 1 / 3)),
)
"""Finals of short budgets, one after the other until they fit: configs of the last and of the first race, and the share
of a window of the last one. The least have no first race, and windows of 0.1 s, as where records are timed again."""

LEAST_WINDOW_S = 0.1
"""No budget makes windows of the last race shorter than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """How the finals are run: seconds of one window, unmeasured seconds before it, and rounds, for both races.

    Attributes:
        rounds: the most that the last race has; it ends before where it is sure.
        limit_s: seconds that the last race may take, a few windows more or less, and overtime beside them
            (`sequential.OVERTIME`).
        last: configs of the last race, the default and the incumbent not counted.
        near_share: how far behind the best of the search a config may be to take part in the first race.
        tile_share: the same of the best config of each tile, of which the first ones are in place of others.
        near_most: configs of the first race.
        settle_s: seconds of load before the first window of the last race.
        near_settle_s: the same of the first race: what a slump of the clock still does to a few of its windows, the
            median of three rounds leaves out.
        last_share: how far behind the best of the first race a config may be to take part in the last one.
        guard_share: how far behind the best of the search the default and the incumbent may be to be raced again.
    """

    window_s: float = 0.3
    warm_s: float = 0.1
    rounds: int = 40
    limit_s: float = 60.0
    last: int = 5
    near_share: float = 0.1
    tile_share: float = 0.15
    near_most: int = 12
    near_window_s: float = 0.03
    near_warm_s: float = 0.01
    near_rounds: int = 3
    settle_s: float = SETTLE_S
    near_settle_s: float = LEAST_SETTLE_S
    last_share: float = 0.03
    guard_share: float = 0.25

    def __post_init__(self) -> None:
        check_fields(self, TuningError)
        for window_s, warm_s in (
            (self.window_s, self.warm_s),
            (self.near_window_s, self.near_warm_s),
            (self.window_s, self.settle_s),
            (self.near_window_s, self.near_settle_s),
        ):
            check_window(window_s, warm_s, TuningError)
        if not 0 < self.limit_s < math.inf:
            raise TuningError(f"finals last a finite time above 0 s, got {self.limit_s}")
        if min(self.rounds, self.near_rounds, self.last, self.near_most) < 1:
            raise TuningError(f"finals have at least one round and one config, got {self}")

    def near_s(self, configs: int, kinds: int = KINDS_OF_DATA) -> float:
        """Expected seconds of the first race, on so many kinds of data."""
        windows = self.near_rounds * kinds * configs
        return self.near_settle_s + windows * (self.near_warm_s + self.near_window_s)

    def last_s(self, configs: int, kinds: int = KINDS_OF_DATA) -> float:
        """Expected seconds of the last race, with its baselines: as many rounds of all configs as it usually has."""
        return min(self._rounds_s(USUAL_ROUNDS, configs, kinds), self.limit_s) + self.anchors_s

    @property
    def anchors_s(self) -> float:
        """Expected seconds of torch's backends behind the last race."""
        return ANCHORS * min(self.rounds, ANCHOR_ROUNDS) * (self.warm_s + self.window_s)

    def needed_s(self, near: int, guards: int, kinds: int = KINDS_OF_DATA, ready_s: float = 0.0) -> float:
        """Expected seconds of both races with `near` configs close to the best: no first race where these are few.

        In each of them a config is built and verified again, which takes `ready_s`.
        """
        near, last = min(near, self.near_most), min(near, self.last) + guards
        first = self.near_s(near, kinds) + near * ready_s if near > self.last else 0.0
        return first + self.last_s(last, kinds) + last * ready_s

    def least_s(self, configs: int, kinds: int = KINDS_OF_DATA) -> float:
        """Seconds of the fewest rounds of the last race that can be sure."""
        return self._rounds_s(LEAST_ROUNDS, configs, kinds)

    def _rounds_s(self, rounds: int, configs: int, kinds: int) -> float:
        """Seconds of a last race of so many rounds; it has no more than `self.rounds`."""
        round_s = kinds * configs * (self.warm_s + self.window_s)
        return self.settle_s + min(self.rounds, rounds) * round_s

    def within(
        self, seconds: float, near: int, guards: int, kinds: int = KINDS_OF_DATA, ready_s: float = 0.0
    ) -> Finals:
        """Those that take about `seconds`: themselves, or with fewer configs and shorter windows (`SMALLER`).

        What counts is a last race of LEAST_ROUNDS rounds, before which nobody is sure; one that has the time goes on.
        The smallest ones are run whatever they take. The other arguments are those of `needed_s`.
        """
        found = self
        for last, near_most, share in SMALLER:
            shorter_s = min(self.window_s, max(LEAST_WINDOW_S, share * self.window_s))
            found = replace(
                self,
                last=min(self.last, last),
                near_most=min(self.near_most, near_most),
                window_s=shorter_s,
                warm_s=self.warm_s * shorter_s / self.window_s,
                settle_s=self.settle_s if share >= 0.5 else min(self.settle_s, LEAST_SETTLE_S),
            )
            sound = replace(found, rounds=min(self.rounds, LEAST_ROUNDS))
            if sound.needed_s(near, guards, kinds, ready_s) <= seconds:
                break
        return found

    @property
    def expected_s(self) -> float:
        """Expected seconds of both races at their usual size: the last ones with the default and the incumbent."""
        return self.needed_s(self.near_most, 2)


def near_best(
    measured: Mapping[Config, Measurement], *, share: float, most: int, tile_share: float = 0.0
) -> tuple[Config, ...]:
    """The configs within `share` of the best median, `most` at the most, any number of the first of which may be taken.

    They are in turn the best of those that are left, and the best of a tile that has none yet, which may also be within
    `tile_share`: what short windows say of configs holds within a tile, and less between tiles, which draw different
    power. Where times on hard data are known, they count as in `choose`.
    """
    medians = {config: measurement.median_ms for config, measurement in compared(measured).items()}
    limit = min(medians.values(), default=0.0)
    ranked = sorted(medians, key=lambda config: medians[config])
    near = [config for config in ranked if medians[config] <= (1 + share) * limit]
    tiles: dict[tuple[KnobValue, ...], Config] = {}
    for config in ranked:
        tiles.setdefault(rows_and_keys(config), config)
    firsts = [config for config in tiles.values() if medians[config] <= (1 + max(share, tile_share)) * limit]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(near, firsts[1:]))
    return tuple(dict.fromkeys(config for config in in_turn if config is not None))[:most]


def with_guards(configs: Iterable[Config], *guards: Config | None) -> tuple[Config, ...]:
    """`configs` and after them the guards that are not among them (the default, the incumbent), each once."""
    return tuple(dict.fromkeys([*configs, *(guard for guard in guards if guard is not None)]))


def round_times(results: Mapping[C, Measurement]) -> dict[C, tuple[float, ...]]:
    """What each config of a race is judged by: one time for each of its rounds (`scores.compared`)."""
    return {config: found.times_ms for config, found in compared(results).items()}


def choose(results: Mapping[Config, Measurement], *, default: Config, incumbent: Config | None) -> Config:
    """The winner: the incumbent unless it was beaten, else the simplest of the fastest.

    Of configs that beat the incumbent, or of all where there is none, those count as the fastest that no other one is
    likely to be faster than. Simpler is, in this order: the default; fewer knobs that differ from the default; fewer
    stages; fewer warps; smaller tiles; the smaller JSON text (so that the choice is fixed).

    Raises:
        TuningError: there are no results.
    """
    if not results:
        raise TuningError("a winner needs at least one measured config, got none")
    times = round_times(results)
    able = list(results)
    if incumbent is not None and incumbent in results:
        rivals = len(results) - 1
        able = [each for each in results if beats(times[each], times[incumbent], rivals=rivals)]
        if not able:
            return incumbent
    fastest = min(able, key=lambda config: _behind(times[config], times[able[0]]))
    tied = [each for each in able if each == fastest or not _is_likely_faster(times[fastest], times[each])]
    return min(tied, key=lambda config: complexity(config, default))


def _is_likely_faster(one: Times, other: Times) -> bool:
    """Whether it is by even odds, which are enough where no config is in use.

    Nothing is lost by an error, which is one of fifteen pairs of equals in three rounds, and the better guess is as
    good as any.
    """
    return odds_faster(gains(one, other)) >= LIKELY


def _behind(one: Times, other: Times) -> float:
    """By how much one is slower in the rounds that both have, as a logarithm."""
    return -statistics.fmean(gains(one, other))


def confidence(results: Mapping[Config, Measurement], winner: Config) -> float:
    """How sure it is, from 0 to 1, that no other config of a race is faster than the winner by 2% or more."""
    times = round_times(results)
    return sequential.confidence(times[winner], [times[each] for each in results if each != winner])


def runners_up(results: Mapping[Config, Measurement], winner: Config) -> tuple[RunnerUp, ...]:
    """The other configs of a race with their times, the fastest first."""
    times = round_times(results)
    others = sorted((each for each in results if each != winner), key=lambda each: _behind(times[each], times[winner]))
    return tuple(RunnerUp.of(each, results[each]) for each in others[:MAX_RUNNERS_UP])


def rows_and_keys(config: Config) -> tuple[KnobValue, ...]:
    """How many queries and keys a tile has, and of which family it is."""
    return config.family, *(config.get(name, 0) for name in ROWS_AND_KEYS)


def complexity(config: Config, default: Config) -> tuple[object, ...]:
    """A sort key: the order of simplicity that `choose` documents."""
    knobs, usual = dict(config.knobs), dict(default.knobs)
    differing = len(set(config.knobs) - set(default.knobs)) if config.family == default.family else len(usual) + 1
    sizes = tuple(int(knobs.get(name, 0)) for name in ("num_stages", "num_warps", "block_m", "block_n"))
    return (config != default, differing, *sizes, config.to_json())
