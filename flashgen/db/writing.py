"""What a writing transaction does to the rows: one row per identity, the old one replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.history import REASONS, UNKNOWN, Origin, Replaced
from flashgen.core.record import Prediction, Trial, TuningRecord, timestamp
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.db import reading, rows
from flashgen.db.past import Origins
from flashgen.db.past_rows import name_of, origin_columns, origin_of
from flashgen.db.reader import OWN
from flashgen.db.reading import Validate
from flashgen.db.schema import (
    DeviceRow,
    FinalistRow,
    OriginRow,
    RecordRow,
    ReplacedRow,
    SearchRow,
    TrialRow,
    WorkloadRow,
)

R = TypeVar("R", DeviceRow, WorkloadRow)

Wins = Callable[[TuningRecord, TuningRecord, Origin], bool]
"""Called with a new record, the old one of the same identity and who made that: whether the new one replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """How many records were new, replaced an old one, or left the old one in place."""

    added: int
    replaced: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Where new records come from: what the history says of those that they replace.

    Attributes:
        reason: one of `core.history.REASONS`.
        source: a run, a race, or the name of a file: files are given away, and folders tell of their maker's machine.
        origins: who made the new records, as far as it is known.
    """

    reason: str = "search"
    source: str = ""
    origins: Origins = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise DatabaseError(f"a record is replaced for one of {', '.join(REASONS)}, got {self.reason!r}")


def merge_records(
    session: Session, records: Sequence[TuningRecord], wins: Wins | None, validate: Validate, incoming: Incoming
) -> Merged:
    """Store each record that is new or wins, or each if nothing decides; what it replaces goes to the history."""
    added = replaced = kept = 0
    now = timestamp()
    for record in records:
        workload, device = _owners(session, record)
        owned = (RecordRow.workload == workload, RecordRow.device == device)
        old = session.scalar(sa.select(RecordRow).where(*owned, RecordRow.provenance == record.provenance))
        if old is None:
            added += 1
        else:
            known = _known(old, validate)
            if wins is not None and known is not None and not wins(record, known, _maker(old)):
                kept += 1
                continue
            replaced += 1
            if known != record:  # one that is stored again is not lost
                _keep(session, old, now, incoming)
            session.delete(old)
            session.flush()  # it must be gone before the new row meets the UNIQUE constraint
        new = rows.record_row(record, workload, device)
        origin = incoming.origins.get(record.identity)
        new.origin = None if origin is None else rows.origin_row(origin)
        session.add(new)
    return Merged(added=added, replaced=replaced, kept=kept)


def add_replaced(session: Session, replaced: Iterable[Replaced]) -> None:
    """Take over what was replaced in other files, behind what was replaced in this one."""
    for each in replaced:
        session.add(rows.replaced_row(each, *_owners(session, each.record)))


def prune_history(session: Session, keep: int) -> int:
    """Delete all but the last `keep` replaced records of each workload, device and provenance; how many those were."""
    identity = (ReplacedRow.workload_id, ReplacedRow.device_id, ReplacedRow.provenance)
    rank = sa.func.row_number().over(partition_by=identity, order_by=ReplacedRow.id.desc())
    ranked = sa.select(ReplacedRow.id, rank.label("rank")).subquery()
    old = session.scalars(sa.select(ranked.c.id).where(ranked.c.rank > keep)).all()
    for row_id in old:
        session.execute(sa.delete(ReplacedRow).where(ReplacedRow.id == row_id))
    return len(old)


def replace_trial(session: Session, trial: Trial) -> None:
    """Store a trial in place of an earlier one of the same config in the same run, and of a prediction of it."""
    workload, device = _owners(session, trial)
    new = rows.trial_row(trial, workload, device)
    for old in _of_same_config(session, new):
        if old.run == new.run or old.source == reading.PREDICTED_SOURCE:
            session.delete(old)
    session.flush()
    session.add(new)


def replace_prediction(session: Session, prediction: Prediction) -> None:
    """Store a prediction in place of an earlier one of the same config; a trial of it stays, and is worth more."""
    workload, device = _owners(session, prediction)
    new = rows.prediction_row(prediction, workload, device)
    found = _of_same_config(session, new)
    if any(old.source != reading.PREDICTED_SOURCE for old in found):
        return
    for old in found:
        session.delete(old)
    session.flush()
    session.add(new)


def replace_search(session: Session, search: SearchRun) -> None:
    """Store how a search was asked for; one of the same run goes on, perhaps on another machine."""
    workload, device = _owners(session, search)
    new = rows.search_row(search, workload, device)
    owned = (SearchRow.workload == workload, SearchRow.device == device)
    old = session.scalar(sa.select(SearchRow).where(*owned, SearchRow.run == search.run))
    if old is not None:
        session.delete(old)
        session.flush()
    session.add(new)


def add_finalists(session: Session, finalists: Sequence[Finalist]) -> None:
    """Store a race in place of one of the same number in the same run."""
    for race in dict.fromkeys((each.workload, each.device, each.run, each.race) for each in finalists):
        same = [each for each in finalists if (each.workload, each.device, each.run, each.race) == race]
        workload, device = _owners(session, same[0])
        owned = (FinalistRow.workload == workload, FinalistRow.device == device)
        number = (FinalistRow.run == same[0].run, FinalistRow.race == same[0].race)
        for old in session.scalars(sa.select(FinalistRow).where(*owned, *number)).all():
            session.delete(old)
        session.flush()
        session.add_all(rows.finalist_row(each, workload, device) for each in same)


def _of_same_config(session: Session, row: TrialRow) -> Sequence[TrialRow]:
    owned = (TrialRow.workload == row.workload, TrialRow.device == row.device)
    same = sa.select(TrialRow).where(*owned, TrialRow.family == row.family, TrialRow.knobs == row.knobs)
    return session.scalars(same).all()


def _owners(
    session: Session, value: TuningRecord | Trial | Prediction | SearchRun | Finalist
) -> tuple[WorkloadRow, DeviceRow]:
    workload = rows.workload_row(value.workload)
    device = rows.device_row(value.device)
    return (
        _upsert(session, workload, sa.select(WorkloadRow.id).where(WorkloadRow.key == workload.key)),
        _upsert(session, device, sa.select(DeviceRow.id).where(DeviceRow.identity == device.identity)),
    )


def _upsert(session: Session, row: R, same: sa.Select[int]) -> R:
    """The stored row of the same identity with the fields of `row`: a driver may report better figures later."""
    found = session.scalar(same)
    if found is not None:
        row.id = found
    stored = session.merge(row)
    session.flush()
    return stored


def _keep(session: Session, old: RecordRow, moment: str, incoming: Incoming) -> None:
    """Copy a row and its origin to the history as they are, good or bad: no value of them is looked at."""
    made = {name: getattr(OriginRow, name) for name in origin_columns(UNKNOWN)}
    given = {"anchors": rows.anchors_column(old), "moment": moment, "reason": incoming.reason}
    given["source"] = name_of(incoming.source)
    columns = {
        **{name: getattr(RecordRow, name) for name in ("workload_id", "device_id", *OWN)},
        **{name: sa.func.coalesce(made[name], usual) for name, usual in origin_columns(UNKNOWN).items()},
        **{name: sa.literal(text) for name, text in given.items()},
    }
    found = sa.select(*columns.values()).select_from(RecordRow).outerjoin(OriginRow).where(RecordRow.id == old.id)
    session.execute(sa.insert(ReplacedRow).from_select(list(columns), found))


def _maker(old: RecordRow) -> Origin:
    """Who made the record of a row; unknown where nobody wrote it down, or the row breaks a rule."""
    try:
        return UNKNOWN if old.origin is None else origin_of(old.origin)
    except FlashgenError:
        return UNKNOWN


def _known(old: RecordRow, validate: Validate) -> TuningRecord | None:
    """The record of a row; None of one that breaks a rule, which would never be served."""
    try:
        return reading.record_of(old, validate)
    except FlashgenError:
        return None
