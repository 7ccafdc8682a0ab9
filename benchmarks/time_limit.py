"""When a benchmark that is measured in parts stops, so that the next run goes on."""

from __future__ import annotations

from collections.abc import Callable


class TimeLimit:
    """No part starts if one that takes as long as the longest so far would end after the limit.

    Args:
        limit_s: from now on; may be infinite.
        clock: in seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._started = self._begun = clock()
        self._longest = 0.0

    @property
    def elapsed_s(self) -> float:
        """How long it had been when the last part was asked for."""
        return self._begun - self._started

    def has_room(self) -> bool:
        """Whether another part may start, now."""
        self._begun = self._clock()
        return self.elapsed_s + self._longest <= self._limit_s

    def part_ended(self) -> None:
        """Count the part that was asked for last."""
        self._longest = max(self._longest, self._clock() - self._begun)
