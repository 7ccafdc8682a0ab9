"""URLs of SQLAlchemy: the file of SQLite that one names, and how a message shows one."""

from __future__ import annotations

import os
import warnings
from urllib.parse import parse_qsl, unquote_to_bytes

import sqlalchemy as sa

from flashgen.core.errors import DatabaseError

LIBPQ_DRIVERS = ("psycopg", "psycopg2")
"""Those that take the options of PostgreSQL's own client library."""

LIBPQ_OPTIONS = {"connect_timeout": "10", "client_encoding": "utf8"}
"""A host that does not answer, whose packets get lost, is waited for 10 s; psycopg alone would wait for 130 s, libpq
without end. Texts are UTF-8, whatever a database calls its own: one without an encoding, as Debian makes without a
locale, gives psycopg bytes in place of texts."""


def parse_url(url: str) -> sa.URL:
    """A text as a URL.

    Raises:
        DatabaseError: it is none; the message does not quote it, as there may be a password in it.
    """
    try:
        parsed = sa.make_url(url)
        if "@" not in (parsed.host or ""):  # else the end of a password is taken for the host
            return parsed
    except (sa.exc.ArgumentError, ValueError):  # of a port that is no number, too
        pass
    raise DatabaseError(
        "a URL of a database is like postgresql+psycopg://tuner@db/flashgen or sqlite:///studies.db, with each @ of a "
        "password as %40, and this one cannot be parsed"
    )


def to_connect(url: sa.URL) -> sa.URL:
    """A URL with the options that a connection to PostgreSQL needs, where it says nothing of them itself."""
    if url.get_backend_name() != "postgresql" or url.get_driver_name() not in LIBPQ_DRIVERS:
        return url
    return url.update_query_dict({**LIBPQ_OPTIONS, **url.query})


def is_same_database(one: sa.URL, other: sa.URL) -> bool:
    """Whether two URLs name the same database of a server alike, whoever connects, by whichever driver."""
    first, second = (
        (url.get_backend_name(), url.host, url.port, url.query.get("host"), url.query.get("port"), url.database)
        for url in (one, other)
    )
    return first == second


def without_secrets(url: sa.URL) -> str:
    """A URL as messages show it: without its password, and without its options, where drivers take passwords too."""
    return url.set(query={}).render_as_string(hide_password=True)


def sqlite_file(url: sa.URL) -> str | None:
    """The file that SQLite opens for a URL, empty where it keeps everything in memory; None for other databases.

    What is before the file name, the options and `uri=true` is read by SQLAlchemy; a `file:` URI as SQLite does
    (https://sqlite.org/uri.html).
    """
    if url.get_backend_name() != "sqlite":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of options that have no effect: what connects says so, too
            (name, *_), options = url.get_dialect()().create_connect_args(url)
    except (sa.exc.ArgumentError, ImportError, TypeError, ValueError):  # what connects says why
        return None
    name = name or ""
    if options.get("uri") and name.startswith("file:"):
        return _file_of_uri(name.removeprefix("file:"))
    return "" if name == ":memory:" else name


def _file_of_uri(uri: str) -> str:
    path, _, query = uri.partition("#")[0].partition("?")
    options = dict(parse_qsl(query))
    if options.get("mode") == "memory" or options.get("vfs") == "memdb":
        return ""
    if path.startswith("//"):
        path = "/" + path[2:].partition("/")[2]  # without the host, which is empty or localhost
    name = os.fsdecode(unquote_to_bytes(path).partition(b"\0")[0])  # SQLite ends the name there
    return "" if name == ":memory:" else name
