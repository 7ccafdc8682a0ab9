"""The history of a file's records by plain SQL: who made them, and what they took the place of.

No look-up asks for it. A row that breaks a rule costs itself, as one of a record does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

from flashgen.core.device import Device
from flashgen.core.history import UNKNOWN, Origin, Replaced
from flashgen.core.record import TuningRecord, moment
from flashgen.core.workload import Workload
from flashgen.db import reader as plain
from flashgen.db.connection import HAS_LIMITS, Deadline, retry
from flashgen.db.past_rows import origin_of, replaced_of
from flashgen.db.reader import WHOLE_FILE_S, BadRow, Reader
from flashgen.db.reading import typed

if TYPE_CHECKING:
    from flashgen.db.layers import Found, Layer

V = TypeVar("V")

Identity = tuple[str, str, str]
"""`TuningRecord.identity`."""

Origins = Mapping[Identity, Origin]
"""The origins of a file's records that are known."""

MAX_LISTED = 1000
"""Replaced records of one workload that are listed: the last ones."""

_ORIGIN = ("run", "host", "seed", "budget", "runners_up")
_REPLACED = (*plain.OWN, "anchors", *_ORIGIN, "moment", "reason", "source")
_ROW = plain.select_row(limited=HAS_LIMITS, table="history", own=_REPLACED)
_OF_RECORD = (
    "FROM origins JOIN records ON records.id = origins.record_id " + plain.source("records")[len("FROM records ") :]
)
_ORIGIN_CELLS = (*(f"origins.{name}" for name in _ORIGIN), "devices.identity", "workloads.key", "records.provenance")
_ORIGIN_ROW = f"SELECT {plain.columns(_ORIGIN_CELLS, limited=HAS_LIMITS)} {_OF_RECORD} WHERE origins.id = ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The history of some of a file's records.

    Attributes:
        records: those that are there, with their origins.
        replaced: those that others took the place of, the last one first.
    """

    records: tuple[tuple[TuningRecord, Origin], ...] = ()
    replaced: tuple[Replaced, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """All that a file knows of its records: themselves, who made them, and what they took the place of."""

    records: tuple[TuningRecord, ...] = ()
    origins: Origins = field(default_factory=dict)
    replaced: tuple[Replaced, ...] = ()

    def origin(self, identity: Identity) -> Origin:
        """Who made the record of this identity."""
        return self.origins.get(identity, UNKNOWN)


def past_of(reader: Reader, workload: Workload, device: Device | None = None) -> Past:
    """The history of the records of a workload, of one device identity or of all of them.

    Raises:
        DatabaseError: the file cannot be read.
    """
    spec = workload.specialization.workload_class
    found = [each for each in reader.records(device=device, specialization=spec) if each.workload == workload]
    known = origins_of(reader, workload)
    asked = [workload.key, *([device.identity] if device else [])]
    where = "WHERE workloads.key = ?" + (" AND devices.identity = ?" if device else "")
    ids = f"SELECT history.id {plain.source('history')} {where} ORDER BY history.id DESC LIMIT {MAX_LISTED}"
    return Past(
        records=tuple((record, known.get(record.identity, UNKNOWN)) for record in found),
        replaced=tuple(_each(reader, "history", ids, asked, _replaced)),
    )


def origins_of(reader: Reader, workload: Workload | None = None, *, strict: bool = False) -> dict[Identity, Origin]:
    """The origins of the records of a workload, or of all.

    Raises:
        DatabaseError: the file cannot be read, or `strict` and a row breaks a rule.
    """
    where, asked = ("WHERE workloads.key = ?", [workload.key]) if workload else ("", [])
    return dict(_each(reader, "origins", f"SELECT origins.id {_OF_RECORD} {where}", asked, _origin, strict=strict))


def all_replaced(reader: Reader, *, strict: bool = False) -> list[Replaced]:
    """Every replaced record, the first one first.

    Raises:
        DatabaseError: the file cannot be read, or `strict` and a row breaks a rule.
    """
    return _each(reader, "history", "SELECT id FROM history ORDER BY id", [], _replaced, strict=strict)


def whole(reader: Reader) -> Whole:
    """All of a file, or an error if a row breaks a rule: what is merged must be valid.

    Raises:
        DatabaseError: a row breaks a rule; the message says which and how.
    """
    return Whole(
        records=tuple(reader.all_records()),
        origins=origins_of(reader, strict=True),
        replaced=tuple(all_replaced(reader, strict=True)),
    )


def exported(layers: Sequence[Layer], found: Sequence[Found]) -> tuple[dict[Identity, Origin], list[Replaced]]:
    """Who made these records of layers, and what was replaced by them in any of these layers, the first one first.

    Raises:
        DatabaseError: a layer cannot be read.
    """
    wanted = {record.identity: name for record, name in found}
    origins: dict[Identity, Origin] = {}
    replaced: dict[Replaced, None] = {}
    for layer in layers:
        if layer.name in wanted.values():
            known = origins_of(layer.reader)
            origins |= {identity: known[identity] for identity in known if wanted.get(identity) == layer.name}
            replaced |= dict.fromkeys(each for each in all_replaced(layer.reader) if each.record.identity in wanted)
    return origins, sorted(replaced, key=lambda each: moment(each.moment))


def audited(reader: Reader) -> tuple[int, list[BadRow]]:
    """How many replaced records there are, and the rows of the history that break a rule, without a warning.

    Raises:
        DatabaseError: the file cannot be read.
    """
    bad: list[BadRow] = []
    replaced = _found(reader, "history", "SELECT id FROM history ORDER BY id", [], _replaced, bad)
    worse: list[BadRow] = []
    _found(reader, "origins", f"SELECT origins.id {_OF_RECORD}", [], _origin, worse)
    return len(replaced), bad + worse


def _each(
    reader: Reader,
    table: str,
    query: str,
    values: list[str],
    build: Callable[[sqlite3.Connection, int], V],
    *,
    strict: bool = False,
) -> list[V]:
    bad: list[BadRow] = []
    found = _found(reader, table, query, values, build, bad)
    reader.report(bad, strict=strict)
    return found


def _found(
    reader: Reader,
    table: str,
    query: str,
    values: list[str],
    build: Callable[[sqlite3.Connection, int], V],
    bad: list[BadRow],
) -> list[V]:
    def attempt() -> list[V]:
        bad.clear()
        return reader.each(table, query, values, build, bad, Deadline() if values else Deadline(WHOLE_FILE_S))

    return retry(reader.path, attempt)


def _replaced(connection: sqlite3.Connection, row_id: int) -> Replaced:
    return replaced_of(plain.with_owners(_REPLACED, connection.execute(_ROW, (row_id,)).fetchone()))


def _origin(connection: sqlite3.Connection, row_id: int) -> tuple[Identity, Origin]:
    *cells, identity, key, provenance = connection.execute(_ORIGIN_ROW, (row_id,)).fetchone()
    origin = origin_of(SimpleNamespace(**dict(zip(_ORIGIN, cells, strict=True))))
    names = ("identity", "key", "provenance")
    identity, key, provenance = (
        typed(name, cell, "str") for name, cell in zip(names, (identity, key, provenance), strict=True)
    )
    return (identity, key, provenance), origin
