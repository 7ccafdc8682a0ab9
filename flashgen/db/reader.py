"""`Reader`: the records of one tuning database by plain SQL.

The first call of every process looks records up, and importing SQLAlchemy would take longer than that. What comes back
has passed every rule again (`flashgen.db.reading`); a row that has not is left out with a warning.
"""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from flashgen.codegen.families import validate as validate_config
from flashgen.core.device import Device
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.quoting import printable
from flashgen.core.record import TuningRecord
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.db import files
from flashgen.db.connection import HAS_LIMITS, Access, Deadline, connect, is_too_long, retry
from flashgen.db.inspection import refuse_computed
from flashgen.db.reading import MAX_BASELINES, MAX_TEXT, Validate, plain, record_of

V = TypeVar("V")

BadRow = tuple[str, int, str]
"""Of a row that breaks a rule: its table, its id, and the reason."""

OWN = (
    *("provenance", "family", "knobs", "times_ms", "max_error", "mean_error", "reference_ms", "sm_clock_mhz"),
    *("predicted_ms", "source_digest", "flashgen_version", "triton_version", "torch_version", "driver_version"),
    *("created", "hard_times_ms", "profile_times_ms", "confidence", "power_limit_w", "max_sm_clock_mhz"),
)
"""The columns of a record that are no numbers of other rows."""

_WORKLOAD = ("key", "specialization", *(field.name for field in fields(Workload)))
_DEVICE = ("identity", *(field.name for field in fields(Device)))
_YES_OR_NO = frozenset(field.name for field in fields(Workload) if field.type == "bool")

_OWNERS = (
    *("workloads.id", *(f"workloads.{name}" for name in _WORKLOAD)),
    *("devices.id", *(f"devices.{name}" for name in _DEVICE)),
)


def source(table: str) -> str:
    """Rows of a table with the workloads and devices that they point to."""
    return (
        f"FROM {table} LEFT OUTER JOIN workloads ON workloads.id = {table}.workload_id "
        f"LEFT OUTER JOIN devices ON devices.id = {table}.device_id"
    )


_SOURCE = source("records")


def select_row(*, limited: bool, table: str = "records", own: tuple[str, ...] = OWN) -> str:
    """One row of a table with those that it points to."""
    names = (*(f"{table}.{name}" for name in own), *_OWNERS)
    return f"SELECT {columns(names, limited=limited)} {source(table)} WHERE {table}.id = ?"


def columns(names: Sequence[str], *, limited: bool) -> str:
    """Cells to select; where SQLite's limits could not be set, a text that is too long is not read to its end."""
    cut = f"CASE WHEN length({{0}}) > {MAX_TEXT} THEN substr({{0}}, 1, {MAX_TEXT + 1}) ELSE {{0}} END"
    return ", ".join(names if limited else [cut.format(name) for name in names])


_ROW = select_row(limited=HAS_LIMITS)
_BASELINES = f"SELECT substr(impl, 1, {MAX_TEXT + 1}), median_ms FROM anchors WHERE record_id = ? ORDER BY id LIMIT ?"

MOST_OF_A_CLASS = 2000
"""Records of one class that a look-up reads of a file: about 0.6 s, once a process. All of 100,000 took 26 s."""

_PREFERRED = (
    "ORDER BY devices.identity NOT IN (?, ?), records.provenance <> 'measured', records.id DESC "
    f"LIMIT {MOST_OF_A_CLASS}"
)

WHOLE_FILE_S = 600.0
"""Processor time for all records of a file: somebody asked for it, and no call waits. 100,000 took 19 s."""


class Reader:
    """The records of a file, which is connected to anew for every question: nothing stays open across a fork."""

    def __init__(self, path: Path, actual: Path, access: Access, validate: Validate) -> None:
        """Read a file that `files.prepare` has prepared.

        Args:
            path: the name of the file in messages.
            actual: the file itself: of an older one a migrated copy.
            access: how it is connected to.
            validate: the check that every config must pass.
        """
        self.path = path
        self._actual = actual
        self.access: Access = access
        self.validate = validate
        self._reported: set[tuple[str, int]] = set()

    @property
    def actual(self) -> Path:
        """The file to connect to: of an older one a migrated copy, made again where its cache was deleted meanwhile."""
        if self.access == "read" and self._actual != self.path and not self._actual.exists():
            self._actual = files.prepare(self.path, self.access)
        return self._actual

    @classmethod
    def open(
        cls, path: Path, *, shipped: bool = False, foreign: bool = False, validate: Validate = validate_config
    ) -> Reader:
        """Open a file to read; `shipped` promises that nobody changes it, `foreign` says that others may have made it.

        Raises:
            DatabaseError: it is missing, foreign, corrupt or newer, or not signed where a policy asks for it; the
                message names it.
        """
        access: Access = "shipped" if shipped else "read"
        if foreign and settings().signatures:
            from flashgen.core.signatures import signed_copy  # where no policy asks for it, nobody waits for it

            return cls(path, files.prepare(signed_copy(path), "shipped", path), "shipped", validate)
        return cls(path, files.prepare(path, access), access, validate)

    def record(self, workload: Workload, device: Device, *, provenance: str | None = None) -> TuningRecord | None:
        """The record of exactly this workload on this device identity, a measured one before a predicted one."""
        asked = {"workloads.key": workload.key, "devices.identity": device.identity, "records.provenance": provenance}
        return next(iter(self._records(asked)), None)

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
        asked = {
            "devices.identity": device.identity if device else None,
            "devices.arch": arch,
            "workloads.specialization": specialization,
            "records.provenance": provenance,
        }
        return self._records(asked)

    def of_class(self, specialization: str, device: Device) -> list[TuningRecord]:
        """The records of a `Specialization.workload_class` on the architecture of a device, for look-ups.

        Of very many, `MOST_OF_A_CLASS` are read, those of the device, measured and written last before others.
        """
        where = f"WHERE devices.arch = ? AND workloads.specialization = ? {_PREFERRED}"
        found, bad = self._found(where, (device.arch, specialization, device.identity, device.usual_identity))
        self.report(bad)
        if len(found) + len(bad) == MOST_OF_A_CLASS:
            message = (
                f"{self.path}: look-ups use {MOST_OF_A_CLASS} records of {specialization}, which has as many or more"
            )
            warnings.warn(printable(message), stacklevel=2)
        return found

    def all_records(self) -> list[TuningRecord]:
        """Every record, or an error if one breaks a rule: for imports, which take all or nothing.

        Raises:
            DatabaseError: a row breaks a rule; the message says which and how.
        """
        return self._records({}, strict=True)

    def audited(self) -> tuple[list[TuningRecord], list[BadRow]]:
        """Every record, and the rows of records that break a rule, without a warning.

        Raises:
            DatabaseError: the file cannot be read.
        """
        return self._found("", ())

    def built(
        self, rows: Iterable[tuple[str, int | None, Any]], build: Callable[[Any], V], bad: list[BadRow]
    ) -> list[V]:
        """The value of each row, given with its table and its id; `bad` gets those that break a rule."""
        values = []
        for table, row_id, row in rows:
            if type(row_id) is not int:  # in a file with tables of its own making, an id may be NULL or a text
                bad.append(("a row", 0, "it has no id"))
                continue
            try:
                values.append(build(row))
            except sqlite3.Error as error:
                if not is_too_long(error):
                    raise
                bad.append((table, row_id, "a cell is too long"))
            except FlashgenError as error:
                bad.append((table, row_id, str(error)))
            except Exception as error:  # noqa: BLE001 - whatever a row holds, it must not cost the good ones
                bad.append((table, row_id, plain(f"{type(error).__name__}: {error}")))
        return values

    def report(self, bad: Sequence[BadRow], *, strict: bool = False) -> None:
        """Warn of rows that break a rule, once of each row.

        Raises:
            DatabaseError: `strict`, and there is one.
        """
        if bad and strict:
            table, row_id, reason = bad[0]
            raise DatabaseError(
                f"every row must be valid; {self.path} has {len(bad)} bad: {table} {row_id}: {reason[:300]}"
            )
        new = [entry for entry in bad if entry[:2] not in self._reported]
        self._reported.update(entry[:2] for entry in new)
        if new:
            table, row_id, reason = new[0]
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            message = f"{self.path}: {table} {row_id} is ignored{more}: {reason[:300]}"
            warnings.warn(printable(message, lines=True), stacklevel=2)

    def _records(self, asked: dict[str, str | None], *, strict: bool = False) -> list[TuningRecord]:
        given = {column: value for column, value in asked.items() if value is not None}
        where = f"WHERE {' AND '.join(f'{column} = ?' for column in given)}" if given else ""
        found, bad = self._found(where, tuple(given.values()))
        self.report(bad, strict=strict)
        return found

    def _found(self, where: str, values: tuple[str, ...]) -> tuple[list[TuningRecord], list[BadRow]]:
        """The records that a condition finds, in a fixed order, and the rows that break a rule."""
        bad: list[BadRow] = []
        found = retry(self.path, lambda: self._read(where, values, bad))
        return sorted(found, key=lambda record: record.identity), bad

    def _read(self, where: str, values: tuple[str, ...], bad: list[BadRow]) -> list[TuningRecord]:
        bad.clear()
        found = f"SELECT records.id {_SOURCE} {where}"
        deadline = Deadline() if where else Deadline(WHOLE_FILE_S)
        return self.each("records", found, values, lambda *row: record_of(_row(*row), self.validate), bad, deadline)

    def each(
        self,
        table: str,
        query: str,
        values: Sequence[str | int],
        build: Callable[[sqlite3.Connection, int], V],
        bad: list[BadRow],
        deadline: Deadline,
    ) -> list[V]:
        """What `build` makes of the rows whose ids a query finds, as of one moment.

        Each is read and built on its own, so that no more than one is held unchecked; `bad` gets those that break a
        rule.
        """
        connection = connect(self.actual, self.access)
        try:
            deadline.bind(connection)
            connection.execute("BEGIN").close()
            if self.access != "shipped":
                refuse_computed(connection, self.path)
            found = connection.execute(query, values).fetchall()
            rows = ((table, row_id, row_id) for (row_id,) in deadline.within(found))
            return self.built(rows, lambda row_id: build(connection, row_id), bad)
        finally:
            connection.close()


def _row(connection: sqlite3.Connection, row_id: int) -> Any:
    """A row as `reading.record_of` takes it: like one of `schema.RecordRow`, yes and no included."""
    cells = connection.execute(_ROW, (row_id,)).fetchone()
    baselines = connection.execute(_BASELINES, (row_id, MAX_BASELINES + 1)).fetchall()
    if len(baselines) > MAX_BASELINES:
        raise DatabaseError(f"a record has at most {MAX_BASELINES} times of other implementations")
    row = with_owners(OWN, cells)
    row.baselines = [SimpleNamespace(impl=impl, median_ms=median_ms) for impl, median_ms in baselines]
    return row


def with_owners(own: tuple[str, ...], cells: Sequence[Any]) -> SimpleNamespace:
    """What `select_row` found, as a row with its workload and its device."""
    rest = cells[len(own) :]
    workload, device = rest[: 1 + len(_WORKLOAD)], rest[1 + len(_WORKLOAD) :]
    return SimpleNamespace(
        **dict(zip(own, cells[: len(own)], strict=True)),
        workload=_joined(workload, _WORKLOAD),
        device=_joined(device, _DEVICE),
    )


def _joined(cells: Sequence[Any], names: tuple[str, ...]) -> SimpleNamespace | None:
    """The row that a record points to; None where there is none."""
    row_id, *values = cells
    if row_id is None:
        return None
    named = dict(zip(names, values, strict=True))
    for name in _YES_OR_NO & named.keys():
        if named[name] is not None:
            named[name] = bool(named[name])  # SQLite has integers for these
    return SimpleNamespace(**named)
