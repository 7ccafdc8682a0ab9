"""Reading rows of a file that anybody may have written, so that one which cannot be read costs itself alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from flashgen.core.errors import DatabaseError
from flashgen.db import files
from flashgen.db.connection import is_too_long
from flashgen.db.schema import Base, DeviceRow, FinalistRow, RecordRow, SearchRow, TrialRow, WorkloadRow

R = TypeVar("R", RecordRow, TrialRow, SearchRow, FinalistRow, DeviceRow, WorkloadRow)
V = TypeVar("V")


def at_once(session: Session, query: sa.Select[R]) -> dict[int, R]:
    """All rows by id, or none where one of them cannot be read: then each is read on its own."""
    try:
        found: Iterable[R | None] = session.scalars(query)
        return {row.id: row for row in found if row is not None}
    except sa.exc.DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error) and is_too_long(error.orig):
            return {}
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError):  # a value that SQLAlchemy cannot convert
        return {}


def row_counts(session: Session) -> dict[str, int]:
    """Number of rows of each table, checked or not."""
    tables = Base.metadata.sorted_tables
    return {t.name: session.scalar(sa.select(sa.func.count()).select_from(t)) or 0 for t in tables}


def build_one(session: Session, found: dict[int, R], table: type[R], row_id: int, build: Callable[[R], V]) -> V:
    """The value of one row, from those that were read at once if it is among them.

    Raises:
        DatabaseError: there is no such row.
    """
    try:
        row = found.get(row_id) or session.scalars(sa.select(table).where(table.id == row_id)).first()
        if row is None:
            raise DatabaseError("a row must have an id of its own")
        return build(row)
    except sa.exc.DBAPIError as error:
        raise files.of_sqlite(error) from error
