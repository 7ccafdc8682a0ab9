"""`Store`: one tuning database file, read and written in short transactions.

Several processes may use a file at once: writers queue up (BEGIN IMMEDIATE, WAL), readers never wait, and a process
that is killed loses only the row it was writing. What comes back from a file has passed every rule again
(`flashgen.db.reading`); a row that has not is left out with a warning. Nothing in a file is ever executed.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from flashgen.codegen.families import validate as validate_config
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError
from flashgen.core.history import UNKNOWN, Origin, Replaced
from flashgen.core.record import Prediction, Trial, TuningRecord
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.core.workload import Workload
from flashgen.db import files, reading, rows, trial_rows, writing
from flashgen.db.connection import Access, Deadline, connect, retry, unbind, use
from flashgen.db.inspection import refuse_computed
from flashgen.db.past import Past, past_of
from flashgen.db.reader import BadRow, Reader
from flashgen.db.reading import Validate
from flashgen.db.row_reading import R, at_once, build_one, row_counts
from flashgen.db.schema import DeviceRow, FinalistRow, SearchRow, TrialRow, WorkloadRow
from flashgen.db.stored_trials import StoredTrials
from flashgen.db.writing import Incoming, Merged, Wins

V = TypeVar("V")

AUDITED_AT_ONCE = 500
"""Rows in one question, far within its deadline."""


class Store(StoredTrials):
    """One SQLite file. Open it with `Store.open`; close it, or use it as a context manager."""

    def __init__(self, reader: Reader) -> None:
        """The file of `reader`, which reads the records; nothing connects to it yet."""
        self.path = reader.path
        self.access = access = reader.access
        self.validate = reader.validate
        self.reader = reader
        self._writing = threading.Lock()  # threads of this process queue up here, which is quicker than in SQLite
        # a reader connects anew for each look-up: nothing stays open across a fork or beside a migration
        pool = sa.pool.QueuePool if access == "write" else sa.pool.NullPool
        self._engine = sa.create_engine("sqlite://", creator=lambda: connect(reader.actual, access), poolclass=pool)
        self._written = _identity(reader.actual) if access == "write" else None
        sa.event.listen(self._engine, "begin", self._begin)

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
        access: Access = "shipped" if shipped else "read" if read_only else "write"
        return cls(Reader(path, files.prepare(path, access), access, validate))

    def close(self) -> None:
        """Close the file's connections."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put_record(self, record: TuningRecord, origin: Origin = UNKNOWN, incoming: Incoming | None = None) -> None:
        """Store a record; the one of the same workload, device identity and provenance goes to the history.

        Args:
            record: the record, with its baselines.
            origin: who made it; it takes the place of the one in `incoming`.
            incoming: what the history says of why it replaces another one; by default it was searched.

        Raises:
            FlashgenError: it breaks a rule that it would have to pass when read back, its config's knobs included.
            DatabaseError: the file cannot be written.
        """
        origins = {} if origin == UNKNOWN else {record.identity: origin}
        self.merge_records([record], None, replace(incoming or Incoming(), origins=origins))

    def put_records(self, records: Iterable[TuningRecord], incoming: Incoming | None = None) -> None:
        """As `put_record`, for several in one transaction: all of them or none."""
        self.merge_records(records, None, incoming)

    def merge_records(
        self, records: Iterable[TuningRecord], wins: Wins | None, incoming: Incoming | None = None
    ) -> Merged:
        """Store records in one transaction; where there is an old one, `wins` decides, or the new one replaces it.

        Raises:
            FlashgenError: as `put_record`; nothing was changed.
        """
        new = [rows.checked_record(record, self.validate) for record in records]
        given = incoming or Incoming()
        return self._run(lambda session: writing.merge_records(session, new, wins, self.validate, given), write=True)

    def put_replaced(self, replaced: Iterable[Replaced]) -> None:
        """Add what was replaced in other files to the history, in one transaction."""
        every = tuple(replaced)
        self._run(lambda session: writing.add_replaced(session, every), write=True)

    def prune_history(self, keep: int = 0) -> int:
        """Forget all but the last `keep` replaced records of each workload, device and provenance; how many those were.

        Raises:
            DatabaseError: `keep` is below 0, or the file cannot be written.
        """
        if keep < 0:
            raise DatabaseError(f"at least 0 replaced records are kept, got {keep}")
        return self._run(lambda session: writing.prune_history(session, keep), write=True)

    def past(self, workload: Workload, device: Device | None = None) -> Past:
        """Who made the records of a workload, and what they took the place of, for one device identity or for all."""
        return past_of(self.reader, workload, device)

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

    def put_search(self, search: SearchRun) -> None:
        """Store how a search was asked for; what is known of the same run, workload and device identity is replaced.

        Raises:
            FlashgenError: it breaks a rule that it would have to pass when read back.
            DatabaseError: the file cannot be written.
        """
        checked = rows.checked_search(search)
        self._run(lambda session: writing.replace_search(session, checked), write=True)

    def put_finalists(self, finalists: Iterable[Finalist]) -> None:
        """Store the races of finals in one transaction, each in place of one of the same number in the same search.

        Raises:
            FlashgenError: one breaks a rule that it would have to pass when read back, its config's knobs included.
            DatabaseError: the file cannot be written.
        """
        checked = [rows.checked_finalist(each, self.validate) for each in finalists]
        self._run(lambda session: writing.add_finalists(session, checked), write=True)

    def record(self, workload: Workload, device: Device, *, provenance: str | None = None) -> TuningRecord | None:
        """The record of exactly this workload on this device identity, a measured one before a predicted one."""
        return self.reader.record(workload, device, provenance=provenance)

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
        return self.reader.records(device=device, arch=arch, specialization=specialization, provenance=provenance)

    def devices(self) -> list[Device]:
        """Every device that has rows, by identity."""
        return self._read(sa.select(DeviceRow).order_by(DeviceRow.identity), reading.device_of)

    def workloads(self) -> list[Workload]:
        """Every workload that has rows, by key."""
        return self._read(sa.select(WorkloadRow).order_by(WorkloadRow.key), reading.workload_of)

    def check(self) -> None:
        """Read every page, as SQLite's quick_check does.

        Raises:
            DatabaseError: the file is damaged.
        """
        found = use(self.reader.actual, self.access, _damage, name=self.path)
        if found != "ok":
            raise DatabaseError(f"a tuning database must be whole; {self.path}: {reading.plain(found)[:300]}")

    def counts(self) -> dict[str, int]:
        """Number of rows of each table, checked or not."""
        return self._run(row_counts)

    def all_records(self) -> list[TuningRecord]:
        """Every record, or an error if one breaks a rule: for imports, which take all or nothing.

        Raises:
            DatabaseError: a row breaks a rule; the message says which and how.
        """
        return self.reader.all_records()

    def audited(self) -> tuple[dict[str, int], list[BadRow]]:
        """How many good rows each table has that no record is in, and the rows that break a rule, without a warning.

        Raises:
            DatabaseError: the file cannot be read.
        """
        bad: list[BadRow] = []
        counts = {
            "devices": self._audited(DeviceRow, reading.device_of, bad),
            "workloads": self._audited(WorkloadRow, reading.workload_of, bad),
            "trials": self._audited(TrialRow, self._tried, bad),
            "searches": self._audited(SearchRow, trial_rows.search_of, bad),
            "finalists": self._audited(FinalistRow, lambda row: trial_rows.finalist_of(row, self.validate), bad),
        }
        return counts, bad

    def _tried(self, row: TrialRow) -> Trial | Prediction:
        build = reading.prediction_of if row.source == reading.PREDICTED_SOURCE else trial_rows.trial_of
        return build(row, self.validate)

    def _audited(self, table: type[R], build: Callable[[R], object], bad: list[BadRow]) -> int:
        """How many rows of a table can be built; `bad` gets the others. Some at a time, each with a deadline anew."""
        ids = self._run(lambda session: session.scalars(sa.select(table.id)).all())
        good = 0
        for start in range(0, len(ids), AUDITED_AT_ONCE):
            some = ids[start : start + AUDITED_AT_ONCE]
            values, worse = self._run(lambda session: self._built(session, table, some, build))  # noqa: B023
            good += len(values)
            bad += worse
        return good

    def _built(
        self, session: Session, table: type[R], ids: Sequence[Any], build: Callable[[R], V]
    ) -> tuple[list[V], list[BadRow]]:
        bad: list[BadRow] = []
        there = set(session.scalars(sa.select(table.id).where(table.id.in_(ids))))
        found = at_once(session, sa.select(table).where(table.id.in_(ids)))
        # what another process has taken away since is no bad row
        rows = ((table.__tablename__, each, each) for each in ids if type(each) is not int or each in there)
        return self.reader.built(rows, lambda each: build_one(session, found, table, each, build), bad), bad

    def _read(self, query: sa.Select[R], build: Callable[[R], V]) -> list[V]:
        """Build the value of each row; rows that break a rule are left out and reported together, once."""
        bad: list[BadRow] = []
        table: type[R] = query.column_descriptions[0]["entity"]

        def read(session: Session) -> list[V]:
            bad.clear()
            ids = session.scalars(query.with_only_columns(table.id)).all()
            found = at_once(session, query)
            rows = ((table.__tablename__, row_id, row_id) for row_id in ids)
            return self.reader.built(rows, lambda row_id: build_one(session, found, table, row_id, build), bad)

        values = self._run(read)
        self.reader.report(bad)
        return values

    def _run(self, action: Callable[[Session], V], *, write: bool = False) -> V:
        if write and self.access != "write":
            raise DatabaseError(f"a tuning database must be open for writing to be changed; {self.path} is not")
        engine = self._engine.execution_options(write=write)
        turn = self._writing if write else contextlib.nullcontext()

        def attempt() -> V:
            try:
                with turn, Session(engine) as session, session.begin():
                    return action(session)
            except sa.exc.DBAPIError as error:
                raise files.of_sqlite(error) from error

        return retry(self.path, attempt)

    def _begin(self, connection: sa.Connection) -> None:
        raw: Any = connection.connection.dbapi_connection
        # a writer takes its lock first: upgrading a read transaction could fail half way
        if connection.get_execution_options().get("write", False):
            unbind(raw)
            if _identity(self.reader.actual) != self._written:  # what is written would be lost, or spoil the other one
                raise DatabaseError(
                    "a tuning database stays in its place as long as it is open for writing; another file, or none, is "
                    f"now at {self.path}"
                )
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            Deadline().bind(raw)
            connection.exec_driver_sql("BEGIN")
        if self.access != "shipped":
            refuse_computed(raw, self.path)


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file lies at a path, None for none."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def _damage(connection: sqlite3.Connection) -> str:
    connection.execute("PRAGMA ignore_check_constraints = ON").close()  # expressions of whoever wrote the file
    return " ".join(str(connection.execute("PRAGMA quick_check(1)").fetchone()[0]).split())  # it has several lines
