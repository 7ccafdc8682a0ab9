"""The clock of a card during a search, from what the reference kernel took in each evaluation.

Clocks change while a search runs, so times of different evaluations may not compare; what the reference kernel took
meanwhile tells how. But its times say little of a few per cent: on cards at their power limit they scatter by 4 to 7%
from one evaluation to the next, with what ran before them, and hardly any of that is a trend. So all evaluations of a
search have one level, the median of all, except where the evaluations around one are apart from that by more than
noise: another process came, or a laptop got hot. A search that goes on later has a level for each of its parts.

How well such times agree with sustained races: docs/decisions/levels.md.
"""

from __future__ import annotations

import math
import statistics

WINDOW = 21
"""Evaluations around one whose median tells whether the clock was another one there, half of them before it."""

APART = 0.075
"""How far, as a logarithm, that median is from the one of all before it counts. In searches on cards whose clock did
not change by itself it was farther in 3 of 1019 evaluations."""


class Levels:
    """The reference times of a search, in the order of its evaluations."""

    def __init__(self) -> None:
        self._sessions: list[list[float]] = [[]]
        self._medians: dict[int, float] = {}

    def resume(self) -> None:
        """What follows was measured at another time, perhaps on a card that others heat: windows end here."""
        if self._sessions[-1]:
            self._sessions.append([])

    def add(self, reference_ms: float) -> tuple[int, int]:
        """Note what the reference kernel took in an evaluation; the result is the place of that evaluation."""
        number = len(self._sessions) - 1
        self._sessions[number].append(reference_ms)
        self._medians.pop(number, None)
        return number, len(self._sessions[number]) - 1

    def factor(self, place: tuple[int, int]) -> float:
        """By what a time of the evaluation at `place` is multiplied to compare with times of all others.

        It may change as evaluations of its session follow.
        """
        return self._median(0) / self._level(place)

    def _level(self, place: tuple[int, int]) -> float:
        session, number = self._sessions[place[0]], place[1]
        whole = self._median(place[0])
        half = WINDOW // 2
        around = statistics.median(session[max(0, number - half) : number + half + 1])
        return around if abs(math.log(around / whole)) > APART else whole

    def _median(self, session: int) -> float:
        if session not in self._medians:
            self._medians[session] = statistics.median(self._sessions[session])
        return self._medians[session]
