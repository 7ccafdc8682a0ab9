"""What a merge of two databases gives: of each workload the record that was decided on, and the history of both sides.

The two files stay as they are, and so the new one has a trace of every record that it did not take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.core.history import UNKNOWN, Origin, Replaced, RunnerUp
from flashgen.core.record import TuningRecord, moment, timestamp
from flashgen.db.comparison import Pair
from flashgen.db.past import Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two databases: its file and all that it knows."""

    path: Path
    known: Whole

    def origin(self, record: TuningRecord) -> Origin:
        """Who made a record of this side."""
        return self.known.origin(record.identity)


def merged(first: Side, second: Side, pairs: Sequence[tuple[Pair, Pair]], *, run: str = "", host: str = "") -> Whole:
    """The records of both sides that were taken, their origins, and what they took the place of.

    Args:
        first: one database.
        second: the other one.
        pairs: the records of both sides as they are there, and as they were decided on: by a race, those of today.
        run: the id of that race.
        host: the machine of that race.
    """
    now = timestamp()
    records: list[TuningRecord] = []
    origins: dict[tuple[str, str, str], Origin] = {}
    lost: list[Replaced] = []
    for stored, decided in pairs:
        taken = decided.taken
        sides = [(side, record) for side, record in ((first, stored.first), (second, stored.second)) if record]
        own = next((side for side, record in sides if record == taken), None)
        records.append(taken)
        made = _raced(stored, decided, run, host) if own is None else own.origin(taken)
        if made != UNKNOWN:
            origins[taken.identity] = made
        lost += [
            Replaced(
                record=record,
                origin=side.origin(record),
                moment=now,
                reason="retime" if own is None else "merge",
                source=f"race {run} on {host}" if own is None else own.path.name,
            )
            for side, record in sides
            if record != taken
        ]
    history = _together((*first.known.replaced, *second.known.replaced, *lost))
    return Whole(records=tuple(records), origins=origins, replaced=history)


def _raced(stored: Pair, decided: Pair, run: str, host: str) -> Origin:
    """Who made a record in the race of a merge; the loser is its runner-up, if it ran."""
    loser = decided.first if decided.taken is decided.second else decided.second
    measured = loser.measurement if loser and loser not in (stored.first, stored.second) else None
    if loser is None or measured is None:
        return Origin(run=run, host=host)
    return Origin(run=run, host=host, runners_up=(RunnerUp.of(loser.config, measured),))


def _together(replaced: Iterable[Replaced]) -> tuple[Replaced, ...]:
    """Each once, since both sides may come from one file; the first one first."""
    return tuple(sorted(dict.fromkeys(replaced), key=lambda each: moment(each.moment)))
