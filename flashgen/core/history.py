"""How a record came about, and what it took the place of: `Origin`, `RunnerUp`, `Replaced`.

Neither is needed to serve a call, so a look-up reads none of it: `TuningRecord` has no field for them.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from flashgen.core.checks import TIMES, are_times
from flashgen.core.config import Config
from flashgen.core.errors import MeasureError
from flashgen.core.lengths import ALL_PROFILES
from flashgen.core.quoting import shown
from flashgen.core.record import Measurement, TuningRecord

REASONS = ("search", "import", "merge", "retime")
"""Why a record took the place of another one; `retime` is a race of records that were there already."""

MAX_RUNNERS_UP = 16
"""Of one race, whose last one has at most seven configs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A config that the winner of a search met in its last race, with the times of its windows there, in ms.

    The times are those of a `Measurement`: of one place all are of the same round, and the winner's are of that, too.
    Of decoding and of packed sequences, rows from before profiles were stored here have the first profile alone.
    """

    config: Config
    times_ms: tuple[float, ...]
    hard_times_ms: tuple[float, ...] = ()
    profile_times_ms: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        every = (self.times_ms, self.hard_times_ms, *(times_ms for _, times_ms in self.profile_times_ms))
        if not self.times_ms or not all(map(are_times, every)):
            raise MeasureError(f"a runner-up has at least one time, and {TIMES}, got {every}")
        others = every[1:] if self.hard_times_ms else every[2:]
        if any(len(times_ms) != len(self.times_ms) for times_ms in others):
            raise MeasureError(f"times of a runner-up are of the same rounds as {self.times_ms}, got {others}")
        if unknown := [name for name, _ in self.profile_times_ms if name not in ALL_PROFILES]:
            raise MeasureError(f"a profile of lengths is one of {', '.join(ALL_PROFILES)}, got {shown(unknown[0])}")

    @classmethod
    def of(cls, config: Config, measured: Measurement) -> RunnerUp:
        """What a race measured of a config that did not win it."""
        return cls(
            config=config,
            times_ms=measured.times_ms,
            hard_times_ms=measured.hard_times_ms,
            profile_times_ms=measured.profile_times_ms,
        )

    @property
    def median_ms(self) -> float:
        """The median over all windows on normal data, or on the first profile of lengths."""
        return statistics.median(self.times_ms)

    def over(self, winner: Measurement) -> float | None:
        """Its time over the winner's as the race was decided: the geometric mean over the rounds that both had.

        None where it is not known on all the data that the winner was timed on.
        """
        if bool(self.hard_times_ms) != bool(winner.hard_times_ms):
            return None
        if dict(self.profile_times_ms).keys() != dict(winner.profile_times_ms).keys():
            return None
        rounds = zip(_rounds(self), _rounds(winner), strict=False)
        return math.exp(statistics.fmean(math.log(mine / best) for mine, best in rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who made a record; a part that is not known is empty or None, as all of a record from before schema 0006.

    Attributes:
        run: the id of the run, which all records of one `flashgen tune` share.
        host: the name of the machine that measured, or that predicted.
        seed: of the search.
        budget: of the search for one workload, such as `20 s` or `40 trials`.
        runners_up: the other configs of the last race, the fastest first.
    """

    run: str = ""
    host: str = ""
    seed: int | None = None
    budget: str = ""
    runners_up: tuple[RunnerUp, ...] = ()

    def __post_init__(self) -> None:
        if len(self.runners_up) > MAX_RUNNERS_UP:
            raise MeasureError(f"a record has at most {MAX_RUNNERS_UP} runners-up, got {len(self.runners_up)}")


def _rounds(timed: RunnerUp | Measurement) -> list[float]:
    """One number for each round, as `measure.scores` has it but for a unit that two configs of a race share."""
    if timed.profile_times_ms:
        profiles = (times_ms for _, times_ms in timed.profile_times_ms)
        return [sum(times) for times in zip(timed.times_ms, *profiles, strict=True)]
    if timed.hard_times_ms:
        return [math.sqrt(usual * hard) for usual, hard in zip(timed.times_ms, timed.hard_times_ms, strict=True)]
    return list(timed.times_ms)


UNKNOWN = Origin()
"""Of a record whose maker nobody wrote down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A record that another one took the place of.

    Its config is what it was then: knobs and families of today need not have it, and nothing serves it.

    Attributes:
        record: what was stored.
        origin: who made it.
        moment: when it was replaced, ISO 8601, UTC.
        reason: one of `REASONS`.
        source: where the record that replaced it came from: a run, the name of a file without its folders, a race.
    """

    record: TuningRecord
    origin: Origin = UNKNOWN
    moment: str
    reason: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise MeasureError(f"a record is replaced for one of {', '.join(REASONS)}, got {self.reason!r}")
