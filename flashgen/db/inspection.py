"""What a file holds, before anything in it is asked: whose it is, its schema version, and nothing but plain tables.

A view, a trigger, a virtual table, a generated column or the expression of an index is code of whoever wrote the file,
which SQLite would run with every question. Ours have none, so a file that has one is refused.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from flashgen.core.errors import DatabaseError
from flashgen.db.layout import APPLICATION_ID, SCHEMA_VERSION, TABLES

MAX_OBJECTS = 64
"""Tables and indices of one file; ours have 24."""

MAX_SQL = 8192
"""Characters of the statement that made a table; the longest of ours has 1500."""

_NAME = r'(?:\w+|"\w+")'
_INDEX = re.compile(rf"CREATE (?:UNIQUE )?INDEX {_NAME} ON {_NAME} ?\({_NAME}(?:, ?{_NAME})*\)")
"""An index of whole columns and whole tables: no expression, no condition."""

_NAMED = ", ".join(f"('{name}')" for name in sorted({*TABLES, "alembic_version"}))
_COMPUTED = (
    f"SELECT known.column1, found.name FROM (VALUES {_NAMED}) known, "
    "pragma_table_xinfo(known.column1) found WHERE found.hidden LIMIT 1"
)
"""A computed column of any table of ours, by our names of them: those that a file states may be others. One question
takes 60 microseconds, a PRAGMA for each table took 140."""


def version_of(connection: sqlite3.Connection, path: Path) -> str | None:
    """The schema version of a file, None for an empty one.

    Raises:
        DatabaseError: the file is not ours, holds more than plain tables and indices, or is newer than this flashgen.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    names = _plain_objects(connection, path)
    if not names and application in (0, APPLICATION_ID):
        return None
    if application != APPLICATION_ID:
        raise DatabaseError(f"a tuning database is a SQLite file made by flashgen; {path} was made by something else")
    version = _stated_version(connection, path)
    missing = TABLES - names
    if missing and version == SCHEMA_VERSION:
        raise DatabaseError(f"a tuning database has every table of its schema; {path} lacks {sorted(missing)}")
    _refuse_computed_columns(connection, path)
    return version


def refuse_computed(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that holds more than plain tables and indices, where it may have changed since it was opened.

    Raises:
        DatabaseError: it does; the message names it.
    """
    _plain_objects(connection, path)
    _refuse_computed_columns(connection, path)


def _plain_objects(connection: sqlite3.Connection, path: Path) -> set[str]:
    """The names of all objects, whose statements are believed rather than the kinds that are stated beside them."""
    query = f"SELECT name, substr(sql, 1, {MAX_SQL + 1}) FROM sqlite_master LIMIT {MAX_OBJECTS + 1}"
    objects = connection.execute(query).fetchall()
    if len(objects) > MAX_OBJECTS:
        raise DatabaseError(f"a tuning database holds at most {MAX_OBJECTS} tables and indices; {path} has more")
    for _, sql in objects:
        if sql is None:  # of a UNIQUE constraint
            continue
        if not isinstance(sql, str) or len(sql) > MAX_SQL:
            raise DatabaseError(f"a table is made by a text of at most {MAX_SQL} characters; {path} has a longer one")
        if not sql.startswith("CREATE TABLE ") and not _INDEX.fullmatch(sql):
            raise DatabaseError(
                f"a tuning database holds plain tables and indices only, no virtual tables, views or triggers; "
                f"{path} has {sql[:60]!a}"
            )
    return {str(name) for name, _ in objects}


def _stated_version(connection: sqlite3.Connection, path: Path) -> str:
    rows = connection.execute("SELECT version_num FROM alembic_version LIMIT 2").fetchall()
    version = rows[0][0] if len(rows) == 1 else None
    if not isinstance(version, str) or not re.fullmatch("[0-9]{4}", version) or version == "0000":
        found = version[:20] if isinstance(version, (str, bytes)) else version
        raise DatabaseError(f"a tuning database states one schema version of four digits; {path} states {found!a}")
    if version > SCHEMA_VERSION:
        raise DatabaseError(
            f"this flashgen reads tuning databases up to schema {SCHEMA_VERSION}; {path} has schema {version}: "
            "upgrade flashgen, or leave the file out of FLASHGEN_DB"
        )
    return version


def _refuse_computed_columns(connection: sqlite3.Connection, path: Path) -> None:
    for table, name in connection.execute(_COMPUTED).fetchall():
        raise DatabaseError(
            f"a tuning database has no columns that are computed; {path} has {table}.{str(name)[:60]!a}"
        )
