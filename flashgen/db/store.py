"""`Store`: one tuning database file, read and written in short transactions.

Several processes may use a file at once: writers queue up (BEGIN IMMEDIATE, WAL), readers never wait, and a process
that is killed loses only the row it was writing. What comes back from a file has passed every rule again
(`flashgen.db.rows`); a row that has not is left out with a warning. Nothing in a file is ever executed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session, contains_eager, selectinload

from flashgen.codegen.families import validate as validate_config
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.record import Prediction, Trial, TuningRecord
from flashgen.core.workload import Workload
from flashgen.db import files, rows, writing
from flashgen.db.rows import Validate
from flashgen.db.schema import BaselineRow, DeviceRow, RecordRow, TrialRow, WorkloadRow
from flashgen.db.writing import Merged, Wins

R = TypeVar("R", RecordRow, TrialRow, DeviceRow, WorkloadRow)
V = TypeVar("V")


class Store:
    """One SQLite file. Open it with `Store.open`; close it, or use it as a context manager."""

    def __init__(self, path: Path, engine: sa.Engine, access: files.Access, validate: Validate) -> None:
        self.path = path
        self.access = access
        self._engine = engine
        self.validate = validate
        self._reported: set[tuple[str, int]] = set()

    @classmethod
    def open(
        cls, path: Path | str, *, read_only: bool = False, shipped: bool = False, validate: Validate = validate_config
    ) -> Store:
        """Open a file: created and migrated if it may be written, else as it is (an older schema: a migrated copy).

        Args:
            path: the file.
            read_only: never write to it; other processes may, and their rows are seen.
            shipped: read-only, and promised not to change while it is open (SQLite's `immutable`).
            validate: the check that every config read or written must pass.

        Raises:
            DatabaseError: the file is missing, foreign, corrupt, newer, or cannot be written; the message names it.
        """
        path = Path(path)
        access: files.Access = "shipped" if shipped else "read" if read_only else "write"
        actual = files.prepare(path, access)
        # a reader connects anew for each look-up: nothing stays open across a fork or beside a migration
        pool = sa.pool.QueuePool if access == "write" else sa.pool.NullPool
        engine = sa.create_engine("sqlite://", creator=lambda: files.connect(actual, access), poolclass=pool)
        sa.event.listen(engine, "begin", _begin)
        return cls(path, engine, access, validate)

    def close(self) -> None:
        """Close the file's connections."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put_record(self, record: TuningRecord) -> None:
        """Store a record; the one of the same workload, device identity and provenance is replaced with its baselines.

        Raises:
            FlashgenError: it breaks a rule that it would have to pass when read back, its config's knobs included.
            DatabaseError: the file cannot be written.
        """
        self.put_records([record])

    def put_records(self, records: Iterable[TuningRecord]) -> None:
        """As `put_record`, for several in one transaction: all of them or none."""
        self.merge_records(records, lambda new, old: True)

    def merge_records(self, records: Iterable[TuningRecord], wins: Wins) -> Merged:
        """Store records in one transaction; where there is an old one, `wins(new, old)` says whether it is replaced.

        Raises:
            FlashgenError: as `put_record`; nothing was changed.
        """
        new = [rows.checked_record(record, self.validate) for record in records]
        return self._run(lambda session: writing.merge_records(session, new, wins, self.validate), write=True)

    def put_trial(self, trial: Trial) -> None:
        """Store a trial; an earlier one of the same config, workload and device identity is replaced.

        Raises:
            FlashgenError: it breaks a rule that it would have to pass when read back, its config's knobs included.
            DatabaseError: the file cannot be written.
        """
        checked = rows.checked_trial(trial, self.validate)
        self._run(lambda session: writing.replace_trial(session, checked), write=True)

    def put_prediction(self, prediction: Prediction) -> None:
        """Store a prediction; an earlier one of the same config, workload and device identity is replaced, a trial not.

        Raises:
            FlashgenError: it breaks a rule that it would have to pass when read back, its config's knobs included.
            DatabaseError: the file cannot be written.
        """
        checked = rows.checked_prediction(prediction, self.validate)
        self._run(lambda session: writing.replace_prediction(session, checked), write=True)

    def forget_trials(self, workload: Workload, device: Device) -> int:
        """Delete the trials and predictions of a workload on a device, to search afresh; how many there were."""
        keys = (workload.key, device.identity)
        trials = sa.select(TrialRow).join(TrialRow.workload).join(TrialRow.device).where(*_same(*keys))

        def delete(session: Session) -> int:
            found = session.scalars(trials).all()
            for row in found:
                session.delete(row)
            return len(found)

        return self._run(delete, write=True)

    def trials(self, workload: Workload, device: Device) -> list[Trial]:
        """Every trial of a workload on a device identity, in the order they were stored."""
        query = _trial_query(workload, device).where(TrialRow.source.is_distinct_from(rows.PREDICTED_SOURCE))
        return self._read(query, lambda row: rows.trial_of(row, self.validate))

    def predictions(self, workload: Workload, device: Device) -> list[Prediction]:
        """Every prediction of a workload for a device identity, in the order they were stored."""
        query = _trial_query(workload, device).where(TrialRow.source == rows.PREDICTED_SOURCE)
        return self._read(query, lambda row: rows.prediction_of(row, self.validate))

    def record(self, workload: Workload, device: Device, *, provenance: str | None = None) -> TuningRecord | None:
        """The record of exactly this workload on this device identity, a measured one before a predicted one."""
        found = self._records(*_same(workload.key, device.identity), provenance=provenance)
        return found[0] if found else None

    def records(
        self,
        *,
        device: Device | None = None,
        arch: str | None = None,
        specialization: str | None = None,
        provenance: str | None = None,
    ) -> list[TuningRecord]:
        """Records in a fixed order, narrowed by what is given.

        Args:
            device: of this device identity.
            arch: of this architecture, e.g. `sm90`.
            specialization: of this `Specialization.workload_class`.
            provenance: `measured` or `predicted`.
        """
        conditions = []
        if device is not None:
            conditions.append(DeviceRow.identity == device.identity)
        if arch is not None:
            conditions.append(DeviceRow.arch == arch)
        if specialization is not None:
            conditions.append(WorkloadRow.specialization == specialization)
        return self._records(*conditions, provenance=provenance)

    def devices(self) -> list[Device]:
        """Every device that has rows, by identity."""
        return self._read(sa.select(DeviceRow).order_by(DeviceRow.identity), rows.device_of)

    def workloads(self) -> list[Workload]:
        """Every workload that has rows, by key."""
        return self._read(sa.select(WorkloadRow).order_by(WorkloadRow.key), rows.workload_of)

    def counts(self) -> dict[str, int]:
        """Number of rows of each table, checked or not."""
        tables = (DeviceRow, WorkloadRow, RecordRow, TrialRow, BaselineRow)

        def count(session: Session) -> dict[str, int]:
            return {
                table.__tablename__: session.scalar(sa.select(sa.func.count()).select_from(table)) or 0
                for table in tables
            }

        return self._run(count)

    def all_records(self) -> list[TuningRecord]:
        """Every record, or an error if one breaks a rule: for imports, which take all or nothing.

        Raises:
            DatabaseError: a row breaks a rule; the message says which and how.
        """
        return self._read(_record_query(), lambda row: rows.record_of(row, self.validate), strict=True)

    def _records(self, *conditions: sa.ColumnElement[bool], provenance: str | None) -> list[TuningRecord]:
        query = _record_query().where(*conditions)
        if provenance is not None:
            query = query.where(RecordRow.provenance == provenance)
        return self._read(query, lambda row: rows.record_of(row, self.validate))

    def _read(self, query: sa.Select[R], build: Callable[[R], V], *, strict: bool = False) -> list[V]:
        """Build the value of each row; rows that break a rule are left out and reported together, once."""
        bad: list[tuple[str, int, str]] = []

        def read(session: Session) -> list[V]:
            bad.clear()
            values = []
            found: Iterable[R | None] = session.scalars(query)
            for row in found:
                if row is None:  # in a file with tables of its own making, an id may be NULL
                    bad.append(("a row", 0, "it has no id"))
                    continue
                try:
                    values.append(build(row))
                except FlashgenError as error:  # it must not cost the good ones
                    bad.append((row.__tablename__, row.id, str(error)))
            return values

        values = self._run(read)
        if bad and strict:
            table, row_id, reason = bad[0]
            raise DatabaseError(
                f"every row must be valid; {self.path} has {len(bad)} bad: {table} {row_id}: {reason[:300]}"
            )
        self._report(bad)
        return values

    def _report(self, bad: Sequence[tuple[str, int, str]]) -> None:
        new = [entry for entry in bad if entry[:2] not in self._reported]
        self._reported.update(entry[:2] for entry in new)
        if new:
            table, row_id, reason = new[0]
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            warnings.warn(f"{self.path}: {table} {row_id} is ignored{more}: {reason[:300]}", stacklevel=2)

    def _run(self, action: Callable[[Session], V], *, write: bool = False) -> V:
        if write and self.access != "write":
            raise DatabaseError(f"a tuning database must be open for writing to be changed; {self.path} is not")
        engine = self._engine.execution_options(write=write)

        def attempt() -> V:
            with Session(engine) as session, session.begin():
                return action(session)

        return files.retry(self.path, attempt)


def _begin(connection: sa.Connection) -> None:
    # a writer takes its lock first: upgrading a read transaction could fail half way
    write = connection.get_execution_options().get("write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _same(key: str, identity: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return WorkloadRow.key == key, DeviceRow.identity == identity


def _trial_query(workload: Workload, device: Device) -> sa.Select[TrialRow]:
    query = sa.select(TrialRow).join(TrialRow.workload).join(TrialRow.device)
    query = query.where(*_same(workload.key, device.identity)).order_by(TrialRow.id)
    return query.options(contains_eager(TrialRow.workload), contains_eager(TrialRow.device))


def _record_query() -> sa.Select[RecordRow]:
    query = sa.select(RecordRow).outerjoin(RecordRow.workload).outerjoin(RecordRow.device)
    loading = (contains_eager(RecordRow.workload), contains_eager(RecordRow.device), selectinload(RecordRow.baselines))
    query = query.options(*loading)
    return query.order_by(DeviceRow.identity, WorkloadRow.key, RecordRow.provenance)  # measured before predicted
