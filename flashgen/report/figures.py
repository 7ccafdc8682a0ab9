"""The figures of a report: what the records, trials and failures of its contents amount to."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashgen.core.record import Measurement, TuningRecord
from flashgen.report.contents import Contents, Entry, Search

WITHIN = 1.02
"""A search has arrived once its best trial is as near as this to its best of all."""

DIGITS = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
"""Numbers in reasons, which make one reason look like many."""

MAX_REASON = 160

MAX_PLACES = 300
"""Of a line through all searches: as wide as a picture can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """How a group of records compares with torch's fastest backend: above 1 the generated kernel is faster."""

    group: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return statistics.geometric_mean(self.ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The best time of a search over its best of all, at each trial that was better than all before it.

    `values` has the numbers of these trials, and `seconds` when they were known, since the search began; the latter is
    empty where that was not stored.
    """

    search: Search
    values: tuple[tuple[float, float], ...]
    seconds: tuple[tuple[float, float], ...]

    @property
    def trials(self) -> int:
        """How many there were."""
        return len(self.search.trials)

    @property
    def arrived(self) -> int:
        """The trial from which on the best one is near the best of all."""
        return int(next(number for number, value in self.values if value <= WITHIN))

    @property
    def best_ms(self) -> float:
        """The time of the best trial."""
        best = min(self.search.measured, key=lambda each: each[1])[0].outcome
        return best.median_ms if isinstance(best, Measurement) else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why candidates failed: a stage, a family, a reason whose numbers are left out, and how often."""

    stage: str
    family: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The last race of a record's search: how many it met, and the next best one's time over its own.

    A `lead` below 1 is a rival that was faster there, but not surely. It is None where the times that decided were not
    stored: decoding and packed sequences were raced on all profiles of lengths, of which rows from before have one.
    """

    record: TuningRecord
    rivals: int
    lead: float | None
    rounds: int
    confidence: float | None
    verdict: str | None


def races(entries: Iterable[Entry]) -> tuple[Race, ...]:
    """Of each record whose rivals are stored, the closest race first and those without a lead behind."""
    found = []
    for entry in entries:
        measured, rivals = entry.record.measurement, entry.origin.runners_up
        if measured is not None and rivals:
            leads = [lead for rival in rivals if (lead := rival.over(measured)) is not None]
            race = Race(
                record=entry.record,
                rivals=len(rivals),
                lead=min(leads, default=None),
                rounds=len(measured.times_ms),
                confidence=measured.confidence,
                verdict=measured.verdict,
            )
            found.append(race)
    return tuple(sorted(found, key=lambda race: (race.lead or math.inf, race.record.workload.key)))


def ratio_of(record: TuningRecord) -> float | None:
    """The time of torch's fastest backend over that of a record, None where none was measured beside it."""
    best, measured = record.best_baseline, record.measurement
    return best.median_ms / measured.median_ms if best is not None and measured is not None else None


def ratios_to_torch(entries: Iterable[Entry]) -> tuple[Ratios, ...]:
    """The ratios of records in groups: pass, dtype, head dimension and causality."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for entry in entries:
        ratio = ratio_of(entry.record)
        if ratio is not None:
            groups[_group(entry.record)].append(ratio)
    return tuple(Ratios(group=name, ratios=tuple(sorted(groups[name]))) for name in sorted(groups))


def curves(searches: Iterable[Search]) -> tuple[Curve, ...]:
    """Of each search in which something was measured."""
    return tuple(_curve(search) for search in searches if search.measured)


def spread(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float]]:
    """Where lines change: the place, and there the median and the 90th percentile of those that have begun.

    Of many places every n-th is looked at, and the last one.
    """
    places = sorted({place for line in lines for place, _ in line})
    found = []
    for place in [*places[: -1 : -(-len(places) // MAX_PLACES)], *places[-1:]]:
        values = sorted(value for line in lines if (value := _at(line, place)) is not None)
        found.append((place, statistics.median(values), values[min(len(values) - 1, int(0.9 * len(values)))]))
    return found


def sources(searches: Iterable[Search]) -> list[tuple[str, int, int]]:
    """Who proposed candidates: the name of a source, how many trials, and of how many searches the best one."""
    tried: Counter[str] = Counter()
    won: Counter[str] = Counter()
    for search in searches:
        tried.update(trial.source for trial in search.trials)
        if search.measured:
            won[min(search.measured, key=lambda each: each[1])[0].source] += 1
    return [(name, count, won[name]) for name, count in tried.most_common()]


def failures(searches: Iterable[Search]) -> tuple[Reason, ...]:
    """The failures of trials by stage, family and reason, the most frequent first."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for trial, failure in itertools.chain.from_iterable(search.failed for search in searches):
        reason = DIGITS.sub("#", " ".join(failure.reason.split()))[:MAX_REASON]
        counted[failure.stage, trial.config.family, reason] += 1
    return tuple(
        Reason(stage=stage, family=family, reason=reason, count=count)
        for (stage, family, reason), count in sorted(counted.items(), key=lambda each: (-each[1], each[0]))
    )


def runs(contents: Contents) -> list[tuple[str, str, str, str, int, int]]:
    """Each run: its id, host, budget, first day, and the numbers of its records and trials.

    The first day is that of its earliest record or trial; one without a time says nothing of it.
    """
    made: dict[str, tuple[str, str]] = {}
    days: defaultdict[str, list[str]] = defaultdict(list)
    records: Counter[str] = Counter()
    trials: Counter[str] = Counter()
    for entry in contents.entries:
        origin = entry.origin
        made.setdefault(origin.run, (origin.host, origin.budget))
        days[origin.run].append(entry.record.created[:10])
        records[origin.run] += 1
    for search in contents.searches:
        asked = search.log.search
        made.setdefault(search.run, (asked.host, asked.budget) if asked else ("", ""))
        days[search.run] += (trial.created[:10] for trial in search.trials)
        trials[search.run] += len(search.trials)
    firsts = {run: min(filter(None, days[run]), default="") for run in made}
    return [
        (run or "not written down", *made[run], firsts[run], records[run], trials[run])
        for run in sorted(made, key=lambda run: (firsts[run], run))
    ]


def _group(record: TuningRecord) -> str:
    workload = record.workload
    if workload.is_decode:
        return f"decode {workload.dtype} d{workload.head_dim}"
    causal = "causal" if workload.causal else "full"
    packed = " packed" if workload.is_packed else ""
    return f"{workload.direction}{packed} {workload.dtype} d{workload.head_dim} {causal}"


def _at(line: Sequence[tuple[float, float]], place: float) -> float | None:
    return next((value for start, value in reversed(line) if start <= place), None)


def _curve(search: Search) -> Curve:
    values: list[tuple[float, float]] = []
    seconds: list[tuple[float, float]] = []
    numbers = {id(trial): number for number, trial in enumerate(search.trials, 1)}
    for trial, value in search.measured:
        if not values or value < values[-1][1]:
            values.append((numbers[id(trial)], value))
            if trial.elapsed_s is not None:
                seconds.append((trial.elapsed_s, value))
    return Curve(search=search, values=tuple(values), seconds=tuple(seconds) if len(seconds) == len(values) else ())
