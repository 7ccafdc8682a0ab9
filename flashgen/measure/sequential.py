"""Whether one config is faster than another, asked after every round of a race: a test that may end at any of them.

What is tested are the log ratios of the two configs' times in the same round, in which a drift of the card cancels. The
noise that is left differs a hundredfold between workloads and is not known before, so the test is a mixture sequential
probability ratio test (Robbins, Annals of Mathematical Statistics 41, 1970; Johari, Koomen, Pekelis and Walsh,
Operations Research 70, 2022): the likelihood of the ratios under "faster", averaged over gains, divided by that under
"equally fast", both averaged over scales of noise. While the second holds, the quotient exceeds 1/p in at most a share
p of all races, however often it is looked at (Ville's inequality). Noise is Student's, whose tails one odd window does
not convince (Lange, Little and Taylor, Journal of the American Statistical Association 84, 1989).

Both rates are held by simulation with noise as it was measured (docs/decisions/sequential-finals.md).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.core.errors import MeasureError

GAIN = 0.02
"""What a race is to find: a config that takes so much less time than the champion."""

ERROR = 0.05
"""Of races in which all are equally fast, the share in which the champion may lose its place."""

MISS = 0.04
"""Of configs that are faster by GAIN, the share that may be given up."""

LEAST_ROUNDS = 3
"""Before these nobody leaves a race, nor does its limit end it: two rounds that agree say little about the noise."""

LIKELY = 1.0
"""Odds at which a config rather is faster than another one than not."""

OVERTIME = 2.0
"""Of the limit of a race, how much longer it may go on while the champion likely is to lose its place: three rounds of
five configs find a gain of 4% in 4 of 10 races, and with overtime of those that are ahead in 9 of 10."""

ANCHOR_ROUNDS = 3
"""Windows that the reference kernel and backends of torch have behind a race: their times decide nothing in it."""

_FREEDOM = 5.0
_SCALES = tuple(0.003 * math.exp(step / 7 * math.log(0.04 / 0.003)) for step in range(8))
"""Of the noise of a round: from that of the quietest workloads on an H200 to that of the loudest."""

# no less than 1%: a smaller gain does not survive a change of clock, and below half of that the other side is likelier
_FASTER = (0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.09, 0.14, 0.2, 0.3)
_SLOWER = (0.0, -0.005, -0.01, -0.02, -0.03, -0.05, -0.08, -0.14, -0.25)

Windows = Sequence[Sequence[Any]]
"""What a race has measured so far: of each subject of a round its windows, in order."""

Times = Sequence[float]
"""One for each round, in ms, in order; who left a race has fewer."""


def gains(one: Times, other: Times) -> tuple[float, ...]:
    """By how much `one` is faster in each round that both have, as logarithms; above 0 means faster."""
    return tuple(math.log(b / a) for a, b in zip(one, other, strict=False))


def odds_faster(ratios: Sequence[float]) -> float:
    """How many times as likely these gains are of a faster config as of one that is equally fast."""
    return _quotient(ratios, _FASTER, (0.0,))


def odds_no_gain(ratios: Sequence[float]) -> float:
    """How many times as likely these gains are of a config that is not faster as of one that is by GAIN."""
    return _quotient(ratios, _SLOWER, (GAIN,))


def beats(one: Times, other: Times, *, rivals: int = 1) -> bool:
    """Whether `one`, among so many `rivals` of `other`, may take its place."""
    return odds_faster(gains(one, other)) >= rivals / ERROR


def confidence(winner: Times, others: Collection[Times]) -> float:
    """How sure it is, from 0 to 1, that none of `others` is faster than the winner by GAIN or more.

    A doubt is how many times as likely a rival's times are of one that is faster by GAIN as of one that is not faster.
    Many small doubts, as of equals after three rounds, and one large one sum up to 0: the race could not tell.
    """
    doubt = sum(1 / odds_no_gain(gains(other, winner)) for other in others)
    return max(0.0, 1.0 - doubt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a race ends: as soon as it is sure that nobody is faster by GAIN than who leads it.

    Attributes:
        champion: the position of the config that keeps its place unless it is beaten; None where nobody has one, and
            the fastest leads from the start.
        limit_s: seconds for all windows but those of overtime; LEAST_ROUNDS rounds are run whatever they take. None is
            no limit.
    """

    champion: int | None = None
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.limit_s is not None and not self.limit_s >= 0:
            raise MeasureError(f"the limit of a race is at least 0 s, got {self.limit_s}")

    @property
    def most_s(self) -> float:
        """Seconds for all windows, with overtime."""
        if self.limit_s is None:
            return math.inf
        return self.limit_s * (1.0 if self.champion is None else 1.0 + OVERTIME)

    def without(self, index: int) -> Rule:
        """The rule for a race that the config at `index` cannot take part in."""
        if self.champion is None or self.champion < index:
            return self
        moved = None if self.champion == index else self.champion - 1
        return Rule(champion=moved, limit_s=self.limit_s)

    def going_on(self, times: Sequence[Times], racing: Collection[int]) -> frozenset[int]:
        """Who of `racing` has another round, by the times of all so far; none when the race is over."""
        leader = self.leader(times, racing)
        rivals = (index for index in racing if index != leader)
        still = {index for index in rivals if odds_no_gain(gains(times[index], times[leader])) < 1 / MISS}
        if not still:
            return frozenset()
        return frozenset({*still, leader, *(index for index in racing if index == self.champion)})

    def in_overtime(self, times: Sequence[Times], racing: Collection[int]) -> frozenset[int]:
        """Who of `racing` has another round behind the limit: the champion and those who likely are faster.

        None where nobody is, or one of them beat it already.
        """
        first = self.champion
        if first is None or self.leader(times, racing) != first:
            return frozenset()
        ahead = {each for each in racing if each != first and odds_faster(gains(times[each], times[first])) >= LIKELY}
        return frozenset({first, *ahead}) if ahead else frozenset()

    def leader(self, times: Sequence[Times], racing: Collection[int]) -> int:
        """The champion while nobody beats it, else the fastest of those who do."""
        first = self.champion if self.champion in racing else min(racing)
        assert first is not None
        ahead = {index: statistics.fmean(gains(times[index], times[first])) for index in racing}
        if first == self.champion:
            rivals = len(times) - 1
            ahead = {index: gain for index, gain in ahead.items() if beats(times[index], times[first], rivals=rivals)}
        return max(ahead, key=lambda index: ahead[index], default=first)


class Referee:
    """Ends one race by its rule: is asked after every round which windows there are in the next one.

    Args:
        rule: of this race.
        subjects: whose each window of a round is, as a position among the racers.
        times: of each racer, from all windows so far.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        rule: Rule,
        subjects: Sequence[int],
        times: Callable[[Windows], Sequence[Times]],
        clock: Callable[[], float],
    ) -> None:
        self._rule = rule
        self._subjects = subjects
        self._times = times
        self._clock = clock
        self._racing = frozenset(subjects)
        self._rounds = 0
        self._started = self._round_started = clock()

    def __call__(self, windows: Windows) -> list[int]:
        """The numbers of the windows of the next round; none when the race is over."""
        self._rounds += 1
        now = self._clock()
        round_s, self._round_started = now - self._round_started, now
        if self._rounds >= LEAST_ROUNDS:
            times, ends_s = self._times(windows), now - self._started + round_s
            self._racing = self._rule.going_on(times, self._racing)
            if self._rule.limit_s is not None and ends_s > self._rule.limit_s and self._racing:
                self._racing = self._rule.in_overtime(times, self._racing)
            if ends_s > self._rule.most_s:
                return []
        return [number for number, subject in enumerate(self._subjects) if subject in self._racing]


def _quotient(ratios: Sequence[float], one: tuple[float, ...], other: tuple[float, ...]) -> float:
    difference = _log_likelihood(ratios, one) - _log_likelihood(ratios, other)
    return math.exp(max(-700.0, min(700.0, difference)))


def _log_likelihood(ratios: Sequence[float], means: tuple[float, ...]) -> float:
    """Of gains around one of `means` in noise of one of the scales, all of them equally likely before."""
    logs = [sum(each) for each in zip(*(_densities(ratio, means) for ratio in ratios), strict=True)]
    most: float = max(logs)
    return most + math.log(sum(math.exp(each - most) for each in logs) / len(logs))


@functools.lru_cache(maxsize=4096)
def _densities(ratio: float, means: tuple[float, ...]) -> tuple[float, ...]:
    """The logarithms of Student's density at one gain, but for a constant, for each scale and mean."""
    power = (_FREEDOM + 1) / 2
    return tuple(
        -math.log(scale) - power * math.log1p((ratio - mean) ** 2 / (_FREEDOM * scale**2))
        for scale in _SCALES
        for mean in means
    )
