"""Connecting to a file that anybody may have written: kinds of access, and what a question may cost.

A file's own text decides what SQLite computes for it, so it is bounded from outside: the length of a cell, the depth of
an expression, the processor time of a question. Whatever SQLite reports becomes a `DatabaseError` that names the file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from flashgen.core.errors import DatabaseError
from flashgen.core.folders import is_own

Access = Literal["write", "read", "shipped"]
"""`write` creates and migrates; `read` sees what other processes write; `shipped` is a file that nobody writes."""

BUSY_TIMEOUT_S = 30.0
"""How long SQLite itself waits for another process's transaction, once; ours take milliseconds."""

LOCKED_RETRIES = 8
"""Some locks (switching to WAL, recovering it) are refused without waiting: try again, from 10 ms on, doubling, but not
once `BUSY_TIMEOUT_S` is over: SQLite has waited then, and would as long again."""

DEADLINE_S = 30.0
"""Processor time of one question; 100,000 records are read in less, and a look-up reads some dozens."""

JOURNAL, WAL, SHARED_MEMORY = "-journal", "-wal", "-shm"
"""How SQLite calls its files beside a database."""

_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")

STEPS = 100_000
"""Instructions of SQLite's machine between two looks at the clock: some milliseconds."""

MAX_CELL_BYTES = 2**18
"""What SQLite reads, or computes, into one cell; the longest text that a row may hold has 16384 characters."""

HAS_LIMITS = sys.version_info >= (3, 11)
"""Whether Python can set SQLite's limits."""

PRAGMAS = ("foreign_keys = ON", "trusted_schema = OFF", "cell_size_check = ON", "synchronous = NORMAL")

T = TypeVar("T")

_interrupted = threading.local()
"""`by_deadline`: whether it was one of ours that ended the statement of this thread which SQLite calls interrupted."""


class Deadline:
    """The processor time that one question may take in the thread that asks it; waiting for a lock takes none."""

    __slots__ = ("_end", "_seconds")

    def __init__(self, seconds: float = DEADLINE_S) -> None:
        """It is over in `seconds`."""
        self._seconds = seconds
        self._end = time.thread_time() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.thread_time() > self._end

    def bind(self, connection: sqlite3.Connection) -> None:
        """Interrupt any statement of `connection` that runs when the time is up, until `unbind`."""
        connection.set_progress_handler(self._interrupts, STEPS)

    def _interrupts(self) -> bool:
        _interrupted.by_deadline = is_over = self.is_over
        return is_over

    def within(self, rows: Iterable[T]) -> Iterator[T]:
        """The rows, as long as there is time.

        Raises:
            DatabaseError: the time is up, and rows are left.
        """
        for row in rows:
            if self.is_over:
                raise DatabaseError(
                    f"a question to a tuning database takes at most {self._seconds:g} s of processor time"
                )
            yield row


def unbind(connection: sqlite3.Connection) -> None:
    """A transaction that writes takes as long as there are rows to write."""
    connection.set_progress_handler(None, 0)


def connect(path: Path, access: Access) -> sqlite3.Connection:
    """A connection that cannot load extensions, trusts no expression of the file's schema and begins explicitly.

    Raises:
        sqlite3.Error: SQLite failed.
        DatabaseError: what lies beside the file is not what SQLite leaves there, or has to be undone by a writer.
    """
    if access == "shipped":
        return _open(path, "mode=ro&immutable=1")
    sizes = sizes_beside(path)
    if access == "read":
        return _open_to_read(path, sizes)
    if sizes.get(JOURNAL):
        _refuse_to_delete(Path(os.path.realpath(path) + JOURNAL))
    return _open(path, "mode=rwc")


def sizes_beside(path: Path) -> dict[str, int]:
    """The bytes of SQLite's own files beside a database, where they are: beside the file itself, not beside a link.

    Raises:
        DatabaseError: one is a pipe, which SQLite would wait for, a link, whose target it would write to, or the like.
    """
    real, found = os.path.realpath(path), {}
    for end in (JOURNAL, WAL, SHARED_MEMORY):
        try:
            seen = os.lstat(real + end)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise DatabaseError(f"a tuning database needs a place that can be used; {path}: {error}") from error
        if not stat.S_ISREG(seen.st_mode):
            raise DatabaseError(f"beside a tuning database lie ordinary files of SQLite; {real + end} is none")
        found[end] = seen.st_size
    return found


def _refuse_to_delete(journal: Path) -> None:
    """Refuse a journal that names another file: SQLite deletes that, and no transaction of ours is of several files.

    The name is in front of its length, its sum and these bytes, at the end (SQLite's file format, section 3).
    """
    with contextlib.suppress(FileNotFoundError), journal.open("rb") as file:  # a writer that ends deletes its own
        file.seek(-min(len(_JOURNAL_MAGIC), os.fstat(file.fileno()).st_size), os.SEEK_END)
        if file.read() == _JOURNAL_MAGIC:
            raise DatabaseError(
                f"a journal of a tuning database names no other file, which SQLite deletes; {journal} does"
            )


def _open_to_read(path: Path, sizes: dict[str, int]) -> sqlite3.Connection:
    """A connection that changes nothing that the file or one beside it holds, whoever has made them.

    SQLite rolls back what a journal says, deletes what it names, and copies a WAL into the file, wherever it may write.
    """
    if JOURNAL in sizes:  # of a writer that is at work, or was stopped
        try:
            return _open(path, "mode=ro")
        except sqlite3.OperationalError as error:
            if "readonly" not in str(error):
                raise
            left = sizes_beside(path)
            if JOURNAL not in left:  # another process has undone it meanwhile
                return _open_to_read(path, left)
            raise DatabaseError(
                "a tuning database whose writer was stopped is read once its owner has opened it for writing, which "
                f"undoes what was begun, or without the journal that lies beside it; {path} has one"
            ) from error
    if sizes.get(WAL):
        return _open(path, "mode=ro")
    if is_own(os.stat(path)) and os.access(path, os.W_OK):
        try:
            # not mode=ro: the last one to close tidies up what SQLite makes beside the file
            return _open(path, "mode=rw")
        except sqlite3.OperationalError as error:
            if _is_locked(error) or sizes_beside(path).get(WAL):
                raise  # somebody is writing it: only a real connection may read it
    # what is made beside the file would stay, of another owner than it, or cannot be made: a full disk, a read-only
    # folder. What a writer commits meanwhile is in a WAL, and in the file at the end of its work
    return _open(path, "mode=ro&immutable=1")


def use(path: Path, access: Access, action: Callable[[sqlite3.Connection], T], *, name: Path | None = None) -> T:
    """Run `action` on a connection of its own; messages call the file `name` if it is a copy or a draft of that one.

    Raises:
        DatabaseError: as `retry`.
    """

    def attempt() -> T:
        connection = connect(path, access)
        try:
            return action(connection)
        finally:
            connection.close()

    return retry(name or path, attempt)


def retry(path: Path, action: Callable[[], T]) -> T:
    """Run `action`; try again while another process holds a lock; any other failure of SQLite names the file.

    Raises:
        DatabaseError: SQLite failed, the file takes too much time or memory, or a lock did not go away.
        KeyboardInterrupt: it came while SQLite worked.
    """
    end = time.monotonic() + BUSY_TIMEOUT_S
    for attempt in range(LOCKED_RETRIES):
        _interrupted.by_deadline = False
        try:
            return action()
        except sqlite3.Error as error:
            if str(error) == "interrupted" and not _interrupted.by_deadline:
                # the handler of a signal runs in ours, what it raises there ends the statement and is gone
                raise KeyboardInterrupt from error
            if attempt + 1 == LOCKED_RETRIES or time.monotonic() >= end or not _is_locked(error):
                raise DatabaseError(f"a tuning database must be usable by SQLite; {path}: {error}") from error
        except OverflowError as error:
            raise DatabaseError(f"a tuning database holds integers of 64 bits; {path}: {error}") from error
        except UnicodeError as error:  # SQLite quotes names of the file in its messages, which need not be text
            raise DatabaseError(f"a tuning database has names in UTF-8; {path}: {error}") from error
        except MemoryError as error:
            raise DatabaseError(f"a tuning database must fit into memory; {path} does not") from error
        time.sleep(0.01 * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


def is_too_long(error: sqlite3.Error) -> bool:
    """Whether SQLite refused to read a cell of more than `MAX_CELL_BYTES`: a failure of its row alone."""
    return isinstance(error, sqlite3.DataError) and "too big" in str(error)


def _is_locked(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))


def _open(path: Path, query: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{query}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        # a text that is not UTF-8 spoils its own row only: it fails the checks of that row
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        _limit(connection)
        Deadline().bind(connection)
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()
        if query != "mode=rwc":
            connection.execute("PRAGMA query_only = ON").close()
        connection.execute("SELECT count(*) FROM sqlite_master").close()  # reads the header: not a database?
    except BaseException:
        connection.close()
        raise
    return connection


def _limit(connection: sqlite3.Connection) -> None:
    """SQLite's own limits, as far below its defaults as our statements and schemas allow."""
    if sys.version_info >= (3, 11):  # HAS_LIMITS, as mypy reads it
        for limit, value in (
            (sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES),
            (sqlite3.SQLITE_LIMIT_COLUMN, 128),
            (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
            (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 8),
            (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 8),
            (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 64),
            (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 4),  # rows that go with the row they belong to
            (sqlite3.SQLITE_LIMIT_ATTACHED, 1),  # VACUUM INTO attaches the file that it writes
            (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
        ):
            connection.setlimit(limit, value)
