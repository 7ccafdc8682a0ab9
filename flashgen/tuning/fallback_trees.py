"""The decision trees of `flashgen.tuning.learned_fallback`: how they grow, and how deep one is best.

A tree asks for sizes and names, in each leaf, the config with which the workloads there lose least, where losses above
`WITHIN` count `DEAR` times.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.core.config import Config
from flashgen.runtime.lookup.rules import QUESTIONS, Answers, Expected, Leaf, Node, Split

if TYPE_CHECKING:
    from flashgen.tuning.learned_fallback import Case

LEAST_GAIN = 0.01
"""What a question has to save of the losses of all workloads together, as they are felt."""

LEAST_LEAF = 2
"""Workloads of a leaf."""

DEPTHS = (0, 1, 2)
"""Of trees that are tried: without a question, which is the config that suits the class best, up to two."""

NOTHING_EXPECTED = Expected(mean=1.0, worst=1.0, workloads=0, timed=0)
"""Of a leaf that nothing was tried with yet."""

WITHIN, DEAR = 0.03, 4.0
"""Losses above this share count so many times more: the worst cases are the point."""

Losses = Mapping[Config, Sequence[float]]
"""For each config its loss on each workload of a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The workloads that a tree is made from, and what each config of their records costs on each of them."""

    cases: Sequence[Case]
    losses: Losses
    wins: Mapping[Config, int]

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Rows:
        """Those of a class."""
        wins = Counter(case.known.served for case in cases if case.known.served is not None)
        losses = {config: [_felt(case.loss_by(config)) for case in cases] for config in sorted(wins, key=text_of)}
        return cls(cases=cases, losses=losses, wins=wins)

    def best(self, numbers: Sequence[int]) -> tuple[float, Config]:
        """The config that loses least on some workloads, and what it loses."""
        sums = {config: math.fsum(row[number] for number in numbers) for config, row in self.losses.items()}
        found = min(sums, key=lambda config: (round(sums[config], 9), -self.wins[config]))
        return sums[found], found

    def without(self, number: int) -> Rows:
        """The same as if nothing were known of one workload."""
        losses = {config: [*row[:number], *row[number + 1 :]] for config, row in self.losses.items()}
        own = self.cases[number].known.served
        if own is not None and self.wins[own] == 1:
            del losses[own]
        wins = {config: count - (config == own) for config, count in self.wins.items()}
        return Rows(cases=[*self.cases[:number], *self.cases[number + 1 :]], losses=losses, wins=wins)


def _felt(loss: float) -> float:
    return loss + (DEAR - 1) * max(0.0, loss - WITHIN)


def best_depth(rows: Rows) -> int:
    """How many questions deep a tree is best on a workload that it was not made from."""
    felt = dict.fromkeys(DEPTHS, 0.0)
    for number, case in enumerate(rows.cases):
        others = rows.without(number)
        if others.losses:
            for depth, config in enumerate(_grown(others, range(len(others.cases))).path(case.answers)):
                felt[depth] += rows.losses[config][number]
    return min(DEPTHS, key=lambda depth: (round(felt[depth], 9), depth))


def tree_of(rows: Rows, depth: int) -> Node:
    """The tree with so many questions at most."""
    return _grown(rows, range(len(rows.cases))).cut(depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grown:
    """A tree as deep as it may be: the best config without any further question, and the question with both ways."""

    config: Config
    place: int = 0
    most: int = 0
    ways: tuple[_Grown, _Grown] | None = None

    def path(self, asked: Answers) -> list[Config]:
        """What serves after each number of questions."""
        found, node = [self.config], self
        for _ in DEPTHS[1:]:
            node = node if node.ways is None else node.ways[asked[node.place] > node.most]
            found.append(node.config)
        return found

    def cut(self, depth: int) -> Node:
        """The tree with so many questions at most, and none whose answer makes no difference."""
        leaf = Leaf(config=self.config, expected=NOTHING_EXPECTED)
        if self.ways is None or not depth:
            return leaf
        below, above = (way.cut(depth - 1) for way in self.ways)
        if below == above:
            return below
        return Split(question=QUESTIONS[self.place], most=self.most, below=below, above=above)


def _grown(rows: Rows, numbers: Sequence[int], depth: int = max(DEPTHS)) -> _Grown:
    loss, config = rows.best(numbers)
    found = min(_splits(rows, numbers), default=None) if depth and loss > 0 else None
    if found is None or found[0] > loss - LEAST_GAIN:
        return _Grown(config=config)
    _, place, most = found
    sides: tuple[list[int], list[int]] = ([], [])
    for number in numbers:
        sides[rows.cases[number].answers[place] > most].append(number)
    below, above = (_grown(rows, side, depth - 1) for side in sides)
    return _Grown(config=config, place=place, most=most, ways=(below, above))


def _splits(rows: Rows, numbers: Sequence[int]) -> Iterator[tuple[float, int, int]]:
    """What both sides of each split lose with one config each; its question, and the largest answer below.

    A limit lies in the middle of two answers, in factors.
    """
    for place in range(len(QUESTIONS)):
        ordered = sorted(numbers, key=lambda number: rows.cases[number].answers[place])
        values = [rows.cases[number].answers[place] for number in ordered]
        least_below, least_above = ([math.inf] * (len(ordered) + 1) for _ in "ba")
        for row in rows.losses.values():
            below = list(itertools.accumulate((row[number] for number in ordered), initial=0.0))
            for count, total in enumerate(below):
                least_below[count] = min(least_below[count], total)
                least_above[count] = min(least_above[count], below[-1] - total)
        for count in range(LEAST_LEAF, len(ordered) - LEAST_LEAF + 1):
            low, high = values[count - 1], values[count]
            if low < high:
                yield round(least_below[count] + least_above[count], 9), place, max(low, math.isqrt(low * high))


def text_of(config: Config) -> str:
    """What configs are put in order by."""
    return f"{config.family} {config.to_json()}"
