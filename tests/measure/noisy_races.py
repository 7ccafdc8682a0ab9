"""Races of configs whose true times are known, in noise as it was measured on an H200.

Of the 205 shipped records with two or three rounds of windows on normal and on hard data, the noise of a window against
the other one of its round has a scale of 1.3% at the median, 0.2% at the first decile, 3.3% at the ninth and 4.8% at
the last hundredth; that of one workload is about normal (gaps of three rounds are those of normal numbers). What both
windows of a round share drifts by 2.5% (root mean square) a round. Windows of neighbouring rounds, whose orders are
reversed, differ more than those of every other one: a place in the order costs something.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from flashgen.measure.sequential import Referee, Rule

Noise = Callable[[random.Random, int, int], list[list[float]]]
"""Of so many configs in so many rounds: the logarithm of what each round's time is multiplied by."""


def measured_noise(chance: random.Random, configs: int, rounds: int) -> list[list[float]]:
    """As of a workload drawn from those of the module's docstring."""
    scale = min(0.05, max(0.002, 0.0124 * math.exp(chance.gauss(0, 0.8)))) / math.sqrt(2)
    drift, drifts = 0.0, []
    for _ in range(rounds):
        drift += chance.gauss(0, 0.025)
        drifts.append(drift)
    found = []
    for _ in range(configs):
        place = chance.gauss(0, 0.4 * scale)
        found.append([d + place * (-1) ** n + chance.gauss(0, 0.92 * scale) for n, d in enumerate(drifts)])
    return found


def odd_windows(chance: random.Random, configs: int, rounds: int) -> list[list[float]]:
    """Every workload alike, with tails: 1.2% between two rounds at the median, and more than 9% in two of a hundred."""

    def student() -> float:
        return chance.gauss(0, 1) / math.sqrt(chance.gammavariate(1.25, 0.8))

    return [[0.0085 * student() for _ in range(rounds)] for _ in range(configs)]


def sticky_noise(chance: random.Random, configs: int, rounds: int) -> list[list[float]]:
    """Worse than what was measured: a third of a config's noise lasts to its next round."""
    scale = min(0.05, max(0.002, 0.0124 * math.exp(chance.gauss(0, 0.8)))) / math.sqrt(2)
    found = []
    for _ in range(configs):
        each = [chance.gauss(0, scale)]
        while len(each) < rounds:
            each.append(0.3 * each[-1] + chance.gauss(0, 0.954 * scale))
        found.append(each)
    return found


def race(
    gains: Sequence[float],
    noise: Noise,
    chance: random.Random,
    *,
    champion: int | None = 0,
    rounds: int = 40,
    limit: int | None = None,
) -> list[tuple[float, ...]]:
    """The times of each config in the rounds that it had; `gains` say how much faster than 1 ms each really is.

    A window takes a second; `limit` is that of the race, in windows.
    """
    logs = noise(chance, len(gains), rounds)
    times: list[list[float]] = [[] for _ in gains]
    rule = Rule(champion=champion, limit_s=limit)
    referee = Referee(rule, range(len(gains)), lambda both: both, lambda: float(sum(map(len, times))))
    racing = list(range(len(gains)))
    for number in range(rounds):
        for index in racing:
            times[index].append(math.exp(logs[index][number] - gains[index]))
        racing = referee(times)
        if not racing:
            break
    return [tuple(each) for each in times]
