"""`Spending`: what a search has spent of a budget in seconds, and what is left of it for the finals."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from flashgen.tuning.budget import Budget
from flashgen.tuning.finals import Finals

GRACE = 3.0
"""A search without any valid candidate goes on for so many times its share of a budget in seconds."""


class Spending:
    """The clock of a search for one workload. Of a budget in trials nothing is ever spent."""

    def __init__(self, budget: Budget, finals: Finals, clock: Callable[[], float], kinds: int) -> None:
        """Start at the first candidate, which waits for inputs and a compiler and is free.

        Args:
            budget: of the workload.
            finals: those of the run, which a budget in seconds may have no time for.
            clock: seconds.
            kinds: windows of a config in each round of a race.
        """
        self._budget, self._usual, self._clock, self._kinds = budget, finals, clock, kinds
        self._ready: float | None = None
        self._beside_windows: list[float] = []

    def measured_one(self) -> None:
        """Note that a candidate has been measured."""
        if self._ready is None:
            self._ready = self._clock()

    def evaluated(self, evaluate_s: float, windows_s: float) -> None:
        """Note what an evaluation took, and its windows of that."""
        self._beside_windows.append(max(0.0, evaluate_s - windows_s))

    @property
    def spent_s(self) -> float:
        """Seconds of the budget."""
        return 0.0 if self._ready is None else self._clock() - self._ready

    @property
    def ready_s(self) -> float:
        """Seconds until a config is built and verified: what evaluations took beside their windows, at the median."""
        return statistics.median(self._beside_windows) if self._beside_windows else 0.0

    def is_over(self, near: int, guards: int, *, has_times: bool, has_failures: bool) -> bool:
        """Whether what is left is needed for the finals of so many configs near the best, and guards."""
        seconds = self._budget.search_seconds(
            self.finals(near, guards).needed_s(near, guards, self._kinds, self.ready_s)
        )
        if seconds is None:
            return False
        if has_times:
            return self.spent_s >= seconds
        return has_failures and self.spent_s >= GRACE * seconds

    def finals(self, near: int, guards: int) -> Finals:
        """Those of the run, as far as there is time for them."""
        most_s = self._budget.finals_seconds
        return self._usual if most_s is None else self._usual.within(most_s, near, guards, self._kinds, self.ready_s)

    def last_limit_s(self, finals: Finals, configs: int) -> float:
        """Seconds of the last race: what is left, and no less than it needs to be sure."""
        seconds = self._budget.seconds
        if seconds is None:
            return finals.limit_s
        left_s = seconds - self.spent_s - configs * self.ready_s - finals.anchors_s
        return min(finals.limit_s, max(left_s, finals.least_s(configs, self._kinds)))
