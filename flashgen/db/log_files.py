"""One search as a file: a compressed text of JSON lines, for replay tables and for whoever has no SQLite.

The first line has the format's version and how the search was asked for, with its workload and device; each other one
is a trial or what a config did in a race. The names are those of the columns in `flashgen.db.schema`, and what is read
passes the rules of a row there: a line that breaks one costs itself, and a first line that does the file.

Floats are written with six digits, which is more than a clock has.
"""

from __future__ import annotations

import gzip
import io
import json
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashgen.codegen.families import validate
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.folders import write_public
from flashgen.core.quoting import printable
from flashgen.core.record import Trial
from flashgen.core.search_log import Finalist, SearchLog, SearchRun
from flashgen.db import rows
from flashgen.db.schema import Base
from flashgen.db.trial_rows import finalist_of, search_of, trial_of

SUFFIX = ".jsonl.gz"

VERSION = 1
"""Of the format. A change of columns that readers have to know of is a new one; a column that is new needs none."""

MAX_BYTES = 2**26
"""Of the text of one file; 10,000 trials have a tenth of it."""

DIGITS = 6

_NESTED = ("knobs", "times_ms", "hard_times_ms", "profile_times_ms", "parts", "settings", "state")
"""Columns of a database that hold JSON, which is no text within a text here."""

_OWNERS = frozenset({"id", "workload_id", "device_id"})


def write_log(log: SearchLog, path: Path) -> None:
    """Write a search to one file, whose bytes depend on nothing else.

    Raises:
        DatabaseError: nobody wrote down how it was asked for, the name does not end in `.jsonl.gz`, or the file cannot
            be written.
    """
    if log.search is None:
        raise DatabaseError("a search in a file has its workload, its device and its versions, and this one has none")
    if not path.name.endswith(SUFFIX):
        raise DatabaseError(f"a file of a search has a name that ends in {SUFFIX}, got {path}")
    raw = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        for line in _lines(log, log.search):
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_public(path, raw.getvalue())
    except OSError as error:
        raise DatabaseError(f"a file of a search needs a place that can be written, got {path}: {error}") from error


def read_log(path: Path) -> SearchLog:
    """The search in a file; lines that break a rule are left out with one warning.

    Raises:
        DatabaseError: the file cannot be read, is none of these, of a newer version, or its first line breaks a rule.
    """
    first, *others = _read(path)
    if not isinstance(first.get("search"), dict) or first.get("version") != VERSION:
        raise DatabaseError(
            f"a file of a search begins with one of version {VERSION}, got {str(first.get('version'))[:20]!a} in {path}"
        )
    workload, device = (_row(first.get(name), name) for name in ("workload", "device"))
    try:
        search = search_of(_row(first["search"], "searches", workload=workload, device=device))  # type: ignore[arg-type]
    except FlashgenError as error:
        raise DatabaseError(f"a file of a search begins with a valid one; {path}: {error}") from error
    kinds: dict[str, Callable[[Any], Trial | Finalist]] = {
        "trial": lambda row: trial_of(row, validate),
        "finalist": lambda row: finalist_of(row, validate),
    }
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    bad: list[str] = []
    for number, line in enumerate(others, 2):
        kind = next((kind for kind in kinds if kind in line), "")
        try:
            if not kind:
                raise DatabaseError(f"a line has one of {', '.join(kinds)}")
            found[kind].append(
                kinds[kind](_row(line[kind], f"{kind}s", workload=workload, device=device, run=search.run))
            )
        except FlashgenError as error:
            bad.append(f"line {number} is ignored: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a line holds, it must not cost the good ones
            bad.append(f"line {number} is ignored: {type(error).__name__}: {error}")
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        warnings.warn(printable(f"{path}: {bad[0][:300]}{more}", lines=True), stacklevel=2)
    return SearchLog(search=search, trials=tuple(found["trial"]), finalists=tuple(found["finalist"]))


def _lines(log: SearchLog, search: SearchRun) -> Iterator[dict[str, object]]:
    workload, device = rows.workload_row(search.workload), rows.device_row(search.device)
    yield {
        "version": VERSION,
        "workload": _cells(workload),
        "device": _cells(device),
        "search": _cells(rows.search_row(search, workload, device)),
    }
    for trial in log.trials:
        yield {"trial": _cells(rows.trial_row(trial, workload, device), without=("run",))}
    for finalist in log.finalists:
        yield {"finalist": _cells(rows.finalist_row(finalist, workload, device), without=("run",))}


def _cells(row: Base, without: tuple[str, ...] = ()) -> dict[str, object]:
    """The columns of a row that hold anything, by name."""
    names = [
        column.name for column in row.__table__.columns if column.name not in _OWNERS and column.name not in without
    ]
    values = {name: getattr(row, name) for name in names}
    return {
        name: _short(json.loads(cell) if name in _NESTED else cell) for name, cell in values.items() if cell is not None
    }


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_short(each) for each in value]
    return {name: _short(each) for name, each in value.items()} if isinstance(value, dict) else value


def _row(cells: object, table: str, **more: object) -> SimpleNamespace:
    """What was read as a row of a table, with nothing where a line has none."""
    table = {"workload": "workloads", "device": "devices"}.get(table, table)
    if not isinstance(cells, dict):
        raise DatabaseError(f"a line about {table} has an object of columns, got {str(cells)[:40]!a}")
    names = {column.name for column in Base.metadata.tables[table].columns}
    values = {name: json.dumps(cell) if name in _NESTED else cell for name, cell in cells.items() if name in names}
    return SimpleNamespace(**{**dict.fromkeys(names), "source_digest": "", **values, **more})


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise DatabaseError(f"a file of a search has at most {MAX_BYTES} bytes of text; {path} has more")
        lines = [json.loads(line) for line in text.decode().splitlines()]
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise DatabaseError(f"a file of a search is a compressed text of JSON lines; {path}: {error}") from error
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise DatabaseError(f"a file of a search has a JSON object in each line; {path} has not")
    return lines
