"""What only a verification of a file asks: tables that are not ours, and rows that point to none."""

from __future__ import annotations

from flashgen.db.connection import use
from flashgen.db.layout import TABLES
from flashgen.db.reader import BadRow, Reader
from flashgen.db.reading import plain

_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name"


def foreign_tables(reader: Reader) -> list[str]:
    """The tables of a file that flashgen has not made, such as those of Optuna's studies; no look-up reads them.

    Raises:
        DatabaseError: the file cannot be read.
    """
    found = use(reader.actual, reader.access, lambda each: each.execute(_TABLES).fetchall(), name=reader.path)
    return [plain(name) for (name,) in found if name not in {*TABLES, "alembic_version"}]


def orphans(reader: Reader) -> list[BadRow]:
    """The rows of our tables that point to a row that is not there.

    SQLite refuses to make one, but not for a program that does not ask it to.

    Raises:
        DatabaseError: the file cannot be read.
    """
    query = 'SELECT "table", rowid, parent FROM pragma_foreign_key_check(?)'
    found = use(
        reader.actual,
        reader.access,
        lambda each: [row for table in sorted(TABLES) for row in each.execute(query, (table,))],
        name=reader.path,
    )
    return [(table, row_id or 0, f"it points to no row of {plain(parent)}") for table, row_id, parent in found]
