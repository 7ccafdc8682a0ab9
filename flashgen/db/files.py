"""Opening files: created, migrated in place, or copied and migrated, by what may be done to them.

SQLAlchemy and alembic are imported only when a file must be created or migrated: every look-up in an up-to-date file
does without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.folders import DRAFT_SUFFIX, is_own_file, remove_abandoned, scratch_beside
from flashgen.core.settings import cache_folder
from flashgen.db.connection import JOURNAL, WAL, Access, sizes_beside, use
from flashgen.db.inspection import version_of
from flashgen.db.layout import APPLICATION_ID, SCHEMA_VERSION

if TYPE_CHECKING:
    import sqlalchemy as sa

MIGRATIONS = Path(__file__).parent / "migrations"

SCRATCH_PREFIX = ".flashgen-new-"
"""Of the folder of an unfinished file beside its place; who makes the next one there deletes those of killed ones."""


def prepare(path: Path, access: Access, name: Path | None = None) -> Path:
    """Make sure that `path` is a tuning database of the present schema, and return the file to connect to.

    With `write` a missing file is created and an older one migrated in place. Otherwise an older file is copied to the
    cache directory and the copy is migrated.

    Args:
        path: the file.
        access: what shall be done with it.
        name: the file that messages name, if `path` is a copy or a draft of it.

    Raises:
        DatabaseError: the file is missing, foreign, corrupt, newer, or cannot be written; the message names it.
    """
    name = name or path
    try:
        return _prepare(path, access, name)
    except OSError as error:
        raise DatabaseError(f"a tuning database needs a place that can be used; {name}: {error}") from error
    except MemoryError as error:
        raise DatabaseError(f"a tuning database must fit into memory; {name} does not") from error


def present(path: Path) -> bool:
    """Whether there is anything at `path`.

    Raises:
        DatabaseError: nothing can be there: a name that is too long, a folder that cannot be searched.
    """
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise DatabaseError(f"a file needs a place that can be used, got {str(path)[:200]}: {error}") from error


def is_unmade(path: Path) -> bool:
    """Whether a database is still to be made at `path`, where there is nothing or an empty file.

    Raises:
        DatabaseError: as `present`, or there is another file.
    """
    return not present(path) or (path.is_file() and read_version(path) is None)


def _prepare(path: Path, access: Access, name: Path) -> Path:
    if path.is_dir():
        raise DatabaseError(f"a tuning database is a file, got the directory {name}")
    if path.exists() and not path.is_file():  # a pipe would be waited for, and a device has no end
        raise DatabaseError(f"a tuning database is an ordinary file, which {name} is not")
    if access == "write":
        return _prepare_writable(path, name)
    if not path.is_file():
        raise DatabaseError(f"a tuning database to read must exist, got {name}")
    version = read_version(path, access, name)
    if version is None:
        raise DatabaseError(f"a tuning database must hold flashgen's tables, got the empty file {name}")
    return path if version == SCHEMA_VERSION else _migrated_copy(path, access, name)


def read_version(path: Path, access: Access = "read", name: Path | None = None) -> str | None:
    """The schema version of a file, None for an empty one; plain SQL, so that a look-up needs no alembic.

    Messages call the file `name`, if it is a copy or a draft of that one.

    Raises:
        DatabaseError: the file is not a SQLite database, not ours, or newer than this flashgen.
    """
    return use(path, access, lambda connection: version_of(connection, name or path), name=name)


def pack(source: Path, target: Path, name: Path | None = None) -> None:
    """Write `source` to the new file `target`: without free pages, without a WAL, so that it can be shipped alone.

    Messages call both `name`, if that is what they are drafts of.
    """
    use(source, "read", lambda connection: _vacuum_into(connection, target), name=name)
    use(target, "write", lambda connection: connection.execute("PRAGMA journal_mode = DELETE").fetchone(), name=name)


def _prepare_writable(path: Path, name: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # what a deleted file has left is no part of a new one, and SQLite clears it away where it makes the file itself
    is_missing = not path.exists() and not sizes_beside(path).keys() & {JOURNAL, WAL}
    is_new = is_missing and _placed_new(path, name)
    if not is_new and read_version(path, "write", name) != SCHEMA_VERSION:
        use(path, "write", lambda connection: _upgrade(connection, name), name=name)
    use(path, "write", _become_writer, name=name)
    return path


def _placed_new(path: Path, name: Path) -> bool:
    """Make a file elsewhere and link it to its place, so that no reader opens one that has no tables yet.

    False where another process was faster, or where files cannot be made or linked; the file itself says which.
    """
    with contextlib.suppress(OSError), scratch_beside(path, SCRATCH_PREFIX) as scratch:
        draft = scratch / path.name
        use(draft, "write", lambda connection: _upgrade(connection, name), name=name)
        os.link(draft, path)
        return True
    return False


def _become_writer(connection: sqlite3.Connection) -> None:
    """Fails now, not after an hour of search, where writing is not allowed.

    BEGIN IMMEDIATE alone succeeds on a file of mode 0444 that is in WAL mode already: the transaction then only reads.
    """
    connection.execute("PRAGMA journal_mode = WAL").close()
    connection.execute("BEGIN IMMEDIATE").close()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(f"PRAGMA user_version = {version}").close()
    connection.execute("ROLLBACK").close()


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Create or migrate in one transaction, so that a killed process leaves the old file and a second one waits."""
    import sqlalchemy as sa

    # a changed table is dropped and made again, which SQLite would refuse while rows of other tables point to its rows
    connection.execute("PRAGMA foreign_keys = OFF").close()
    engine = sa.create_engine("sqlite://", creator=lambda: connection, poolclass=sa.pool.StaticPool)
    try:
        with engine.connect() as bound:
            bound.exec_driver_sql("BEGIN IMMEDIATE")
            version = version_of(connection, path)  # again: another process may have been faster
            if version is None:
                _create(bound)
            elif version != SCHEMA_VERSION:
                migrate(bound)
            bound.commit()
    except sa.exc.DBAPIError as error:
        raise of_sqlite(error) from error
    except (FlashgenError, sqlite3.Error):
        raise
    except Exception as error:  # alembic and SQLAlchemy read the tables of a file that anybody may have written
        raise DatabaseError(f"a tuning database must have the tables of its schema; {path}: {error!r:.300}") from error


def _create(bound: sa.Connection) -> None:
    from flashgen.db.schema import Base

    Base.metadata.create_all(bound)
    bound.exec_driver_sql(_VERSION_TABLE)
    bound.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (SCHEMA_VERSION,))
    bound.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")


def of_sqlite(error: sa.exc.DBAPIError) -> BaseException:
    """The error of SQLite that SQLAlchemy has wrapped."""
    return error if error.orig is None else error.orig


_VERSION_TABLE = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)
"""As alembic makes it (a test compares): a new file has the newest schema and needs no migration."""


def migrate(connection: sa.Connection) -> None:
    """Bring the tables to the newest schema in the connection's transaction (alembic)."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _migrated_copy(path: Path, access: Access, name: Path) -> Path:
    """A copy of an older file, migrated; made once and found again by the content of the original."""
    folder = cache_folder("databases")
    remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, suffix=DRAFT_SUFFIX) as scratch:
        draft = Path(scratch) / path.name
        _copy(path, draft, access, name)
        digest = hashlib.sha256(draft.read_bytes()).hexdigest()[:16]
        copy = folder / f"{path.stem}-{digest}-{SCHEMA_VERSION}.sqlite3"
        if not is_own_file(copy):
            use(draft, "write", lambda connection: _upgrade(connection, name), name=name)
            draft.chmod(0o600)  # whatever the umask: a copy that others could have written is made again
            draft.replace(copy)
    return copy


def _copy(path: Path, target: Path, access: Access, name: Path) -> None:
    """Copy through SQLite, which includes what is still in the WAL; a shipped file is copied as it is."""
    if access == "shipped":
        shutil.copyfile(path, target)
        return
    use(path, access, lambda connection: _vacuum_into(connection, target), name=name)


def _vacuum_into(connection: sqlite3.Connection, target: Path) -> None:
    connection.execute("PRAGMA query_only = OFF").close()  # which forbids writing to the target, too
    connection.execute("VACUUM INTO ?", (str(target),)).close()
