"""The clock of a card during a search, from what the reference kernel took in each evaluation.

Clocks change while a search runs, so times of different evaluations do not compare; what the reference kernel took
meanwhile tells how. But one of its times says little: on an H200 they scatter by 4% from one evaluation to the next,
and hardly any of that is a trend (autocorrelation 0.06; 33 searches). So the level of an evaluation is the median over
those around it.

Against sustained races of the same configs (112 pairs that lie more than 2% apart, 15 searches of 6 s) the ratio to the
reference of the same evaluation had 83 pairs in the right order, that to the median over 11 has 95. The best of those
that it lets into the finals was 0.8% behind the best of all, and is 0.04%.
The width was chosen on the same data; medians over 7 to 21 have 87 to 93.
"""

from __future__ import annotations

import statistics

WINDOW = 11
"""Evaluations of which the median is taken, half of them before and half behind."""

UNSETTLED = WINDOW // 2 + 1
"""The last evaluations, whose levels the next one may still change."""


class Levels:
    """The reference times of a search, in the order of its evaluations."""

    def __init__(self) -> None:
        self._sessions: list[list[float]] = [[]]

    def resume(self) -> None:
        """What follows was measured at another time, perhaps on a card that others heat: windows end here."""
        if self._sessions[-1]:
            self._sessions.append([])

    def add(self, reference_ms: float) -> tuple[int, int]:
        """Note what the reference kernel took in an evaluation; the result is the place of that evaluation."""
        self._sessions[-1].append(reference_ms)
        return len(self._sessions) - 1, len(self._sessions[-1]) - 1

    def factor(self, place: tuple[int, int]) -> float:
        """By what a time of the evaluation at `place` is multiplied to compare with times of all others.

        It changes a little as evaluations follow, until half a window of them has.
        """
        return self._level((0, 0)) / self._level(place)

    def _level(self, place: tuple[int, int]) -> float:
        session, number = self._sessions[place[0]], place[1]
        half = WINDOW // 2
        return statistics.median(session[max(0, number - half) : number + half + 1])
