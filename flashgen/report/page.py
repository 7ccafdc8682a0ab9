"""The page: sections with their figures, pictures and tables, written by one Jinja template. Nothing in it is loaded.

What a database says is text of others. The template's environment escapes all of it, characters that would steer a
terminal or reverse a line are shown as escapes, and the page's own policy forbids scripts and whatever lies elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen._version import __version__
from flashgen.core.errors import DatabaseError
from flashgen.core.folders import scratch_beside
from flashgen.core.quoting import printable, shown
from flashgen.core.record import timestamp
from flashgen.report.contents import Contents
from flashgen.report.parts import Cell
from flashgen.report.sections import sections

if TYPE_CHECKING:
    from jinja2 import Environment


SUFFIXES = (".html", ".htm")
SCRATCH_PREFIX = ".flashgen-report-"


def write(contents: Contents, path: Path, *, created: str | None = None) -> None:
    """Write the report to a file, over one that is there.

    Raises:
        DatabaseError: it is not called a page, as a database is not, or cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DatabaseError(f"a report is a file whose name ends in {' or '.join(SUFFIXES)}, got {shown(str(path))}")
    text = html(contents, created=created)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_beside(path, SCRATCH_PREFIX) as scratch:
            draft = scratch / path.name  # a reader sees the old page or the new one
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    except (OSError, ValueError) as error:  # a path with a null is a ValueError
        raise DatabaseError(f"a report needs a place that can be written, got {path}: {error}") from error


def html(contents: Contents, *, created: str | None = None) -> str:
    """The page; equal contents and times give equal pages."""
    template = _environment().get_template("page.html.jinja")
    return template.render(
        title=_title(contents),
        created=(created or timestamp())[:16].replace("T", " "),
        version=__version__,
        contents=contents,
        sections=sections(contents),
    )


def _title(contents: Contents) -> str:
    names = [device.name for device in contents.devices]
    return f"flashgen on {names[0]}" if len(names) == 1 else f"flashgen on {len(names)} devices"


def _cell(value: Cell) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _numeric(rows: Sequence[Sequence[Cell]]) -> list[bool]:
    return [all(isinstance(cell, (int, float, type(None))) for cell in column) for column in zip(*rows, strict=True)]


def _plain(value: Any) -> Any:
    """What every expression of the template passes: only text that others may have written is changed."""
    return printable(value, lines=True) if type(value) is str else value


@functools.cache
def _environment() -> Environment:
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("flashgen.report", ""),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain,
    )
    found.filters.update(cell=_cell)
    found.globals.update(numeric=_numeric)
    return found
