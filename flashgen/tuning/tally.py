"""`Tally`: what the trials of one search found so far, in times that compare, and what failed why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flashgen.core.config import Config
from flashgen.core.quoting import plural
from flashgen.core.record import Failure, Measurement
from flashgen.measure.protocol import Outcome
from flashgen.measure.scores import compared, least
from flashgen.tuning.levels import Levels


class Tally:
    """The outcomes of a search for one workload.

    Args:
        has_profiles: whether the workload is timed on several profiles of lengths.

    Attributes:
        measured: the configs that were timed, with the least of their windows, as it compares with all others.
        failures: how many candidates failed, by stage.
    """

    def __init__(self, *, has_profiles: bool) -> None:
        self.measured: dict[Config, Measurement] = {}
        self.failures: Counter[str] = Counter()
        self._has_profiles = has_profiles
        self._reasons: dict[str, str] = {}
        self._levels = Levels()
        self._session: dict[Config, tuple[Measurement, tuple[int, int]]] = {}

    def resume(self) -> None:
        """What follows was measured at another time than what was counted so far."""
        self._levels.resume()
        self._session.clear()

    def count(self, config: Config, outcome: Outcome) -> None:
        """Take an outcome into account; that of a config that was measured before takes its place."""
        self._session.pop(config, None)
        if isinstance(outcome, Failure):
            self.measured.pop(config, None)
            self.failures[outcome.stage] += 1
            self._reasons.setdefault(outcome.stage, outcome.reason)
            return
        self.measured[config] = least(outcome)
        if outcome.reference_ms is not None:
            self._session[config] = (self.measured[config], self._levels.add(outcome.reference_ms))
            for each, (measurement, place) in self._session.items():  # their level may be another one now
                self.measured[each] = measurement.times(self._levels.factor(place))

    def levelled(self, config: Config, outcome: Outcome) -> Outcome:
        """An outcome that was counted as a search is told it, with a time that compares."""
        return outcome if isinstance(outcome, Failure) else self.times()[config]

    @property
    def tried(self) -> int:
        """Candidates that were timed or failed."""
        return len(self.measured) + sum(self.failures.values())

    def times(self) -> dict[Config, Measurement]:
        """What was measured with one time for each round."""
        return compared(self.measured) if self._has_profiles else self.measured

    def best(self) -> Config | None:
        """The fastest config."""
        times = self.times()
        return min(times, key=lambda config: times[config].median_ms, default=None)

    @property
    def best_ms(self) -> float | None:
        """Its time, as configs are compared."""
        best = self.best()
        return None if best is None else self.times()[best].median_ms

    def within(self, configs: tuple[Config, ...], share: float) -> tuple[Config, ...]:
        """Those of `configs` that were measured and are no more than `share` behind the best."""
        times, best_ms = self.times(), self.best_ms
        return tuple(c for c in configs if best_ms and c in times and times[c].median_ms <= (1 + share) * best_ms)

    def why_failed(self, earlier: int = 0) -> str:
        """Why there is no valid candidate, where so many trials are of earlier runs."""
        if not self.failures:
            return "no candidate was tried within the budget"
        return why_none(self.failures, self._reasons, earlier)


def why_none(failures: Mapping[str, int], reasons: Mapping[str, str], earlier: int) -> str:
    """That no candidate is valid: how many failed in each stage, the first reason of each, and who has to try again."""
    counted = ", ".join(f"{count} x {stage} ({reasons[stage]})" for stage, count in failures.items())
    again = f"; {plural(earlier, 'trial')} of earlier runs, made again with --retune" if earlier else ""
    return f"no candidate is valid: {counted}{again}"
