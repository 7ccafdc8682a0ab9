"""Two databases side by side: what each of them knows, and which of two records is the faster one, if that can be told.

Without a GPU two times compare only if they were taken in the same way. A pair that does not is undecided, and both of
its records are shown; nobody's is believed over the other's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flashgen.core.history import Origin
from flashgen.core.record import TuningRecord
from flashgen.db.exchange import IsCurrent, better, raced
from flashgen.db.past import Whole

Verdict = Literal["first", "second", "same", "undecided"]

POLICY = "an undecided workload keeps the record of the first database"
"""What a merge does where nothing tells which of two records is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The records of one workload, device identity and provenance in two databases; at least one is there.

    `verdict` names the one that a merge takes (`same`: they are one record), and `reason` why.
    """

    first: TuningRecord | None
    second: TuningRecord | None
    verdict: Verdict
    reason: str

    @property
    def either(self) -> TuningRecord:
        """One that is there: workload, device and provenance are those of both."""
        record = self.first or self.second
        assert record is not None
        return record

    @property
    def taken(self) -> TuningRecord:
        """The record that a merge takes; of an undecided pair the first (`POLICY`)."""
        record = self.second if self.verdict == "second" else self.first
        return record or self.either


def compare(first: Whole, second: Whole, is_current: IsCurrent | None = None) -> tuple[Pair, ...]:
    """Every workload, device identity and provenance of either side, in a fixed order, with what can be told of it.

    A record that is current is taken before one that is not, if `is_current` tells, as by an import; so is the winner
    of a race that had both configs, whatever the versions.
    """
    ours, theirs = _by_identity(first.records), _by_identity(second.records)
    return tuple(
        _pair(ours.get(key), theirs.get(key), (first.origin(key), second.origin(key)), is_current)
        for key in sorted(ours.keys() | theirs.keys())
    )


def why_incomparable(one: TuningRecord, other: TuningRecord) -> str | None:
    """The reason why two records' times were not taken in the same way, None if they were."""
    if one.measurement is None or other.measurement is None:
        same = one.versions.released == other.versions.released
        return None if same else "a prediction is compared with none of another version"
    for name in ("flashgen", "triton", "torch", "driver"):
        mine, others = (getattr(each.versions.released, name) for each in (one, other))
        if mine != others or not mine:
            return f"versions of {name} differ or are not known ({mine or 'unknown'}, {others or 'unknown'})"
    if not one.baselines or [each.impl for each in one.baselines] != [each.impl for each in other.baselines]:
        return "other implementations were measured beside them"
    if not (one.measurement.reference_ms and other.measurement.reference_ms):
        return "one has no time of the reference kernel"
    if bool(one.measurement.hard_times_ms) != bool(other.measurement.hard_times_ms):
        return "one has no times on hard data"
    return None


def _pair(
    first: TuningRecord | None,
    second: TuningRecord | None,
    origins: tuple[Origin, Origin],
    is_current: IsCurrent | None,
) -> Pair:
    if first is None or second is None:
        name: Verdict = "second" if first is None else "first"
        return Pair(first=first, second=second, verdict=name, reason=f"only the {name} has it")
    if first == second:
        return Pair(first=first, second=second, verdict="same", reason="the same record")
    if is_current is not None and (current := is_current(first)) != is_current(second):
        verdict: Verdict = "first" if current else "second"
        return Pair(first=first, second=second, verdict=verdict, reason="the other's kernel is generated no more")
    won = raced(second, first, *reversed(origins))
    if won is not None:
        verdict = "second" if won else "first"
        return Pair(first=first, second=second, verdict=verdict, reason="the winner of a race that had both")
    reason = why_incomparable(first, second)
    if reason is not None:
        return Pair(first=first, second=second, verdict="undecided", reason=reason)
    if better(second, first):
        return Pair(first=first, second=second, verdict="second", reason="faster, or as fast and newer")
    told = "faster, or as fast and newer" if better(first, second) else "as fast and as old"
    return Pair(first=first, second=second, verdict="first", reason=told)


def _by_identity(records: Iterable[TuningRecord]) -> dict[tuple[str, str, str], TuningRecord]:
    return {record.identity: record for record in records}
