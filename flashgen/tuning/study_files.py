"""The file of a study: Optuna writes into whatever it is given, so what is there is looked at first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from flashgen.core.errors import DatabaseError
from flashgen.core.quoting import shown
from flashgen.db.layout import APPLICATION_ID
from flashgen.db.urls import is_same_database, parse_url, sqlite_file, without_secrets

APPLICATION_AT, HEADER_BYTES = 68, 72
"""Where the header of an SQLite file says whose it is."""

MOST_LINE_BYTES = 2**16
"""Of the first line of a journal, which makes a study: its name has at most 512 characters."""


def check_study(url: str, databases: Iterable[Path], server: str | None = None) -> None:
    """Refuse a storage that would spoil a file of others, or keep nothing.

    Args:
        url: as `Studies.open` takes it.
        databases: tuning databases; one that is not there yet would be made by Optuna, and then be none.
        server: the URL of the tuning database on a server, of which the same is true; None where there is none.

    Raises:
        DatabaseError: the URL cannot be parsed; or its storage is in memory, in no ordinary file, in a tuning
            database, or in a file that is no journal where one is asked for; or `server` cannot be parsed.
    """
    is_journal = "://" not in url
    if server is not None and not is_journal and is_same_database(parse_url(url), parse_url(server)):
        name = shown(without_secrets(parse_url(url)))
        raise DatabaseError(f"a study has a database of its own, and {name} is that of trials and records")
    file = url if is_journal else sqlite_file(parse_url(url))
    if file is None or "\0" in file:  # a server, or what no file is called: what opens it says so
        return
    if not file and not is_journal:
        name = shown(without_secrets(parse_url(url)))
        raise DatabaseError(f"a study is kept in a file or on a server, and one in memory is lost, got {name}")
    if os.path.exists(file) and not os.path.isfile(file):
        raise DatabaseError(f"the file of a study is an ordinary one, got {shown(file)}")
    if os.path.realpath(file) in {os.path.realpath(path) for path in databases if "\0" not in str(path)}:
        raise DatabaseError(f"a study has a file of its own, and {shown(file)} is that of a tuning database")
    _check_content(file, is_journal)


def _check_content(file: str, is_journal: bool) -> None:
    try:
        with open(file, "rb") as opened:
            start = opened.read(MOST_LINE_BYTES)
    except OSError:
        return  # there is none yet, or Optuna says why it cannot be opened
    if start[APPLICATION_AT:HEADER_BYTES] == APPLICATION_ID.to_bytes(4, "big") and start.startswith(b"SQLite"):
        raise DatabaseError(f"a study has a file of its own, and {shown(file)} is a tuning database")
    if is_journal and start and not _begins_a_journal(start):
        raise DatabaseError(
            "a study without :// is a journal of Optuna, whose lines are JSON objects with an op_code, and "
            f"{shown(file)} is another file"
        )


def _begins_a_journal(start: bytes) -> bool:
    line, end, _ = start.partition(b"\n")
    try:
        read = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return bool(end) and isinstance(read, dict) and "op_code" in read
