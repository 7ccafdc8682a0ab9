"""Opening files: whose they are, which schema they have, and how each kind of access connects.

SQLAlchemy and alembic are imported only when a file must be created or migrated: every look-up in an up-to-date file
does without them.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from flashgen.core.errors import DatabaseError
from flashgen.core.folders import DRAFT_SUFFIX, is_own, remove_abandoned
from flashgen.core.settings import cache_folder
from flashgen.db.layout import APPLICATION_ID, SCHEMA_VERSION, TABLES

if TYPE_CHECKING:
    import sqlalchemy as sa

Access = Literal["write", "read", "shipped"]
"""`write` creates and migrates; `read` sees what other processes write; `shipped` is a file that nobody writes."""

BUSY_TIMEOUT_S = 30.0
"""How long SQLite itself waits for another process's transaction; ours take milliseconds."""

LOCKED_RETRIES = 8
"""Some locks (switching to WAL, recovering it) are refused without waiting: try again, from 10 ms on, doubling."""

MIGRATIONS = Path(__file__).parent / "migrations"

T = TypeVar("T")


def prepare(path: Path, access: Access) -> Path:
    """Make sure that `path` is a tuning database of the present schema, and return the file to connect to.

    With `write` a missing file is created and an older one migrated in place. Otherwise an older file is copied to the
    cache directory and the copy is migrated.

    Raises:
        DatabaseError: the file is missing, foreign, corrupt, newer, or cannot be written; the message names it.
    """
    try:
        return _prepare(path, access)
    except OSError as error:
        raise DatabaseError(f"a tuning database needs a place that can be used; {path}: {error}") from error


def _prepare(path: Path, access: Access) -> Path:
    if path.is_dir():
        raise DatabaseError(f"a tuning database is a file, got the directory {path}")
    if access == "write":
        return _prepare_writable(path)
    if not path.is_file():
        raise DatabaseError(f"a tuning database to read must exist, got {path}")
    version = read_version(path, access)
    if version is None:
        raise DatabaseError(f"a tuning database must hold flashgen's tables, got the empty file {path}")
    return path if version == SCHEMA_VERSION else _migrated_copy(path, access)


def connect(path: Path, access: Access) -> sqlite3.Connection:
    """A connection that cannot load extensions, trusts no expression of the file's schema and begins explicitly."""
    if access == "write":
        return _open(path, "mode=rwc")
    if access == "shipped":
        return _open(path, "mode=ro&immutable=1")
    try:
        # not mode=ro: the last one to close tidies up the WAL; SQLite itself falls back where writing is not allowed
        return _open(path, "mode=rw")
    except sqlite3.OperationalError:
        if path.with_name(path.name + "-wal").exists():
            raise  # somebody is writing it: only a real connection may read it
        # WAL needs a shared-memory file beside the database; in a read-only directory there can be none
        return _open(path, "mode=ro&immutable=1")


def read_version(path: Path, access: Access = "read") -> str | None:
    """The schema version of a file, None for an empty one; plain SQL, so that a look-up needs no alembic.

    Raises:
        DatabaseError: the file is not a SQLite database, not ours, or newer than this flashgen.
    """
    return _use(path, access, lambda connection: version_of(connection, path))


def version_of(connection: sqlite3.Connection, path: Path) -> str | None:
    """As `read_version`, on an open connection."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    objects = connection.execute("SELECT type, name FROM sqlite_master").fetchall()
    if not objects and application in (0, APPLICATION_ID):
        return None
    if application != APPLICATION_ID:
        raise DatabaseError(f"a tuning database is a SQLite file made by flashgen; {path} was made by something else")
    if any(kind not in ("table", "index") for kind, _ in objects):
        raise DatabaseError(f"a tuning database holds tables and indices only; {path} has views or triggers")
    rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    version = rows[0][0] if len(rows) == 1 else None
    if not isinstance(version, str) or len(version) != 4 or not version.isdecimal():
        raise DatabaseError(f"a tuning database states one schema version of four digits; {path} states {version!a}")
    if version > SCHEMA_VERSION:
        raise DatabaseError(
            f"this flashgen reads tuning databases up to schema {SCHEMA_VERSION}; {path} has schema {version}: "
            "upgrade flashgen, or leave the file out of FLASHGEN_DB"
        )
    missing = TABLES - {name for _, name in objects}
    if missing and version == SCHEMA_VERSION:
        raise DatabaseError(f"a tuning database has every table of its schema; {path} lacks {sorted(missing)}")
    return version


def pack(source: Path, target: Path) -> None:
    """Write `source` to the new file `target`: without free pages, without a WAL, so that it can be shipped alone."""
    _use(source, "read", lambda connection: _vacuum_into(connection, target))
    _use(target, "write", lambda connection: connection.execute("PRAGMA journal_mode = DELETE").fetchone())


def retry(path: Path, action: Callable[[], T]) -> T:
    """Run `action`; try again while another process holds a lock; any other failure of SQLite names the file.

    Raises:
        DatabaseError: SQLite failed, or the lock did not go away.
    """
    for attempt in range(LOCKED_RETRIES):
        try:
            return action()
        except sqlite3.Error as error:
            if attempt + 1 == LOCKED_RETRIES or not _is_locked(error):
                raise DatabaseError(f"a tuning database must be usable by SQLite; {path}: {error}") from error
        except OverflowError as error:
            raise DatabaseError(f"a tuning database holds integers of 64 bits; {path}: {error}") from error
        time.sleep(0.01 * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _is_locked(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))


def _prepare_writable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if read_version(path, "write") != SCHEMA_VERSION:
        _use(path, "write", lambda connection: _upgrade(connection, path))
    _use(path, "write", _become_writer)
    return path


def _become_writer(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL").close()
    connection.execute(
        "BEGIN IMMEDIATE"
    ).close()  # fails now, not after an hour of search, where writing is not allowed
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


def migrate(connection: sa.Connection, revision: str = "head") -> None:
    """Bring the tables to `revision` in the connection's transaction (alembic)."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _migrated_copy(path: Path, access: Access) -> Path:
    """A copy of an older file, migrated; made once and found again by the content of the original."""
    folder = cache_folder("databases")
    remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, suffix=DRAFT_SUFFIX) as scratch:
        draft = Path(scratch) / path.name
        _copy(path, draft, access)
        digest = hashlib.sha256(draft.read_bytes()).hexdigest()[:16]
        copy = folder / f"{path.stem}-{digest}-{SCHEMA_VERSION}.sqlite3"
        if not _is_own_file(copy):
            _use(draft, "write", lambda connection: _upgrade(connection, path))
            draft.chmod(0o600)  # whatever the umask: a copy that others could have written is made again
            draft.replace(copy)
    return copy


def _is_own_file(path: Path) -> bool:
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(seen.st_mode) and is_own(seen)


def _copy(path: Path, target: Path, access: Access) -> None:
    """Copy through SQLite, which includes what is still in the WAL; a shipped file is copied as it is."""
    if access == "shipped":
        shutil.copyfile(path, target)
        return
    _use(path, access, lambda connection: _vacuum_into(connection, target))


def _vacuum_into(connection: sqlite3.Connection, target: Path) -> None:
    connection.execute("PRAGMA query_only = OFF").close()  # which forbids writing to the target, too
    connection.execute("VACUUM INTO ?", (str(target),)).close()


def _open(path: Path, query: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{query}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    # a text that is not UTF-8 spoils its own row only: it fails the checks of that row
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        for pragma in ("foreign_keys = ON", "trusted_schema = OFF", "cell_size_check = ON", "synchronous = NORMAL"):
            connection.execute(f"PRAGMA {pragma}").close()
        if query != "mode=rwc":
            connection.execute("PRAGMA query_only = ON").close()
        connection.execute("SELECT count(*) FROM sqlite_master").close()  # reads the header: not a database?
    except BaseException:
        connection.close()
        raise
    return connection


def _use(path: Path, access: Access, action: Callable[[sqlite3.Connection], T]) -> T:
    """Run `action` on a connection of its own."""

    def attempt() -> T:
        connection = connect(path, access)
        try:
            return action(connection)
        finally:
            connection.close()

    return retry(path, attempt)
