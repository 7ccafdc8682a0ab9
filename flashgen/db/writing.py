"""What a writing transaction does to the rows: one row per identity, the old one replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from flashgen.core.errors import FlashgenError
from flashgen.core.record import Prediction, Trial, TuningRecord
from flashgen.db import reading, rows
from flashgen.db.reading import Validate
from flashgen.db.schema import DeviceRow, RecordRow, TrialRow, WorkloadRow

R = TypeVar("R", DeviceRow, WorkloadRow)

Wins = Callable[[TuningRecord, TuningRecord], bool]
"""Called with a new record and the old one of the same identity: whether the new one replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """How many records were new, replaced an old one, or left the old one in place."""

    added: int
    replaced: int
    kept: int


def merge_records(session: Session, records: Sequence[TuningRecord], wins: Wins, validate: Validate) -> Merged:
    """Store each record that is new or wins."""
    added = replaced = kept = 0
    for record in records:
        workload, device = _owners(session, record)
        owned = (RecordRow.workload == workload, RecordRow.device == device)
        old = session.scalar(sa.select(RecordRow).where(*owned, RecordRow.provenance == record.provenance))
        if old is None:
            added += 1
        elif _beats(record, old, wins, validate):
            replaced += 1
            session.delete(old)
            session.flush()  # it must be gone before the new row meets the UNIQUE constraint
        else:
            kept += 1
            continue
        session.add(rows.record_row(record, workload, device))
    return Merged(added=added, replaced=replaced, kept=kept)


def replace_trial(session: Session, trial: Trial) -> None:
    """Store a trial in place of an earlier one of the same config."""
    workload, device = _owners(session, trial)
    new = rows.trial_row(trial, workload, device)
    for old in _of_same_config(session, new):
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


def _of_same_config(session: Session, row: TrialRow) -> Sequence[TrialRow]:
    owned = (TrialRow.workload == row.workload, TrialRow.device == row.device)
    same = sa.select(TrialRow).where(*owned, TrialRow.family == row.family, TrialRow.knobs == row.knobs)
    return session.scalars(same).all()


def _owners(session: Session, value: TuningRecord | Trial | Prediction) -> tuple[WorkloadRow, DeviceRow]:
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


def _beats(record: TuningRecord, old: RecordRow, wins: Wins, validate: Validate) -> bool:
    try:
        return wins(record, reading.record_of(old, validate))
    except FlashgenError:
        return True  # a row that breaks a rule would never be served
