"""How a record came about, and what it took the place of: `Origin`, `RunnerUp`, `Replaced`.

Neither is needed to serve a call, so a look-up reads none of it: `TuningRecord` has no field for them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from flashgen.core.config import Config
from flashgen.core.errors import MeasureError
from flashgen.core.record import TuningRecord

REASONS = ("search", "import", "merge", "retime")
"""Why a record took the place of another one; `retime` is a race of records that were there already."""

MAX_RUNNERS_UP = 16
"""Of one race, whose last one has at most seven configs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A config that the winner of a search met in its last race, with the times of its windows there, in ms."""

    config: Config
    times_ms: tuple[float, ...]
    hard_times_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.times_ms or any(not 0 < time < float("inf") for time in (*self.times_ms, *self.hard_times_ms)):
            raise MeasureError(f"times of a runner-up are finite and above 0 ms, got {self.times_ms}")

    @property
    def median_ms(self) -> float:
        """The median over all windows on normal data."""
        return statistics.median(self.times_ms)


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
