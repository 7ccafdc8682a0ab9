"""What a search may still gain: the expected improvement over its best if it goes on, from the times of its own trials.

The best of many trials is a matter of their lower tail. Excesses below a low threshold are about exponential, whatever
the distribution (the peaks-over-threshold method: Pickands, Annals of Statistics 3, 1975; of tails that end somewhere,
as times do, the exponential is the pessimist: it expects rather too much). Let `k` of the last `n` trials lie below a
threshold, by `s` in the mean. Then a trial improves on the best with probability q = k/n exp(-(threshold - best)/s), by
`s` in the mean, and `m` trials together by s times the sum over j from 1 to m of (1 - (1 - q)^j)/j.

Only what the search itself proposed counts, of late: lists and neighbours come first and say nothing about what is to
come, and a sampler learns. Failures count as trials that gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.core.config import Config
from flashgen.core.record import Measurement

LEAST_TRIALS = 24
"""Of the search's own: before these nothing is expected, and nobody stops."""

LEAST_BELOW = 6
"""Trials below the threshold; of n there are about sqrt(n), so that it falls as the search goes on."""

OWN = frozenset({"learned", "sampler", "random", "local"})
"""Sources of trials that the search itself proposed."""


@dataclass(slots=True)
class Outlook:
    """The trials of one search, and what it is expected to gain by going on."""

    tried: int = 0
    _earlier: int = 0
    _own: list[Config] = field(default_factory=list)

    def add(self, source: str, config: Config, *, is_earlier: bool = False) -> None:
        """Take a trial into account; one of an earlier run took none of this one's seconds (`is_earlier`)."""
        self.tried += 1
        self._earlier += is_earlier
        if source in OWN:
            self._own.append(config)

    def gain(
        self,
        times: Mapping[Config, Measurement],
        *,
        candidates: int,
        trials: float,
        seconds: float,
        spent_s: float,
    ) -> float | None:
        """The share of the best time that going on for as long again is expected to save, as far as there is more.

        Args:
            times: of all that was measured, as it compares now: a change of clock moves times of before, too.
            candidates: those that were never tried.
            trials: what is left of a budget in trials.
            seconds: what is left of one in seconds.
            spent_s: what the trials of this run took.
        """
        if not times or not self.tried:
            return None
        medians = {config: found.median_ms for config, found in times.items()}
        own_ms = [medians.get(config) for config in self._own]
        now = self.tried - self._earlier
        in_time = max(seconds, 0.0) * now / spent_s if spent_s > 0 and now else math.inf
        ahead = int(min(self.tried, candidates, max(trials, 0), in_time))
        return expected_gain(own_ms, min(medians.values()), ahead)


def expected_gain(times_ms: Sequence[float | None], best_ms: float, ahead: int) -> float | None:
    """The share of the best time that so many more trials are expected to save.

    Args:
        times_ms: of the search's own trials in their order; None for one that failed.
        best_ms: the best of all trials.
        ahead: how many more.

    Returns:
        From 0 to 1; None while too few trials tell.
    """
    late = times_ms[-max(LEAST_TRIALS, len(times_ms) // 2) :]
    logs = sorted(math.log(ms / best_ms) for ms in late if ms is not None)
    below = max(LEAST_BELOW, round(math.sqrt(len(late))))
    if len(late) < LEAST_TRIALS or len(logs) <= below:
        return None
    threshold = logs[below]
    scale = sum(threshold - each for each in logs[:below]) / below
    if scale <= 0:
        return 1 - math.exp(-_trend(times_ms, ahead))
    chance = below / len(late) * math.exp(-threshold / scale)
    gain = scale * sum((1 - (1 - chance) ** trial) / trial for trial in range(1, ahead + 1))
    return 1 - math.exp(-max(gain, _trend(times_ms, ahead)))


def _trend(times_ms: Sequence[float | None], ahead: int) -> float:
    """What the second half of the trials gained over the first one, as a logarithm, as far as `ahead` is as many."""
    half = len(times_ms) // 2
    before, late = ([ms for ms in each if ms is not None] for each in (times_ms[:half], times_ms[half:]))
    if not before or not late:
        return 0.0
    return max(0.0, math.log(min(before) / min(late))) * min(1.0, ahead / (len(times_ms) - half))
