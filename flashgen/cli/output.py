"""How commands print: a table for a terminal, aligned columns for a pipe, JSON for machines."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TypeVar

import typer

from flashgen.core.quoting import printable

GAP = "  "
"""Between columns, and before what belongs to the row above it."""

V = TypeVar("V")
Cell = str | int | float | None


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print rows under column names; what is in a cell is text, never markup.

    A pipe gets a line for each row. In a terminal a table that is too wide gives up its widest columns, until the
    others fit: each of their cells has lines of its own, above its row or, with the column's name, below it.
    """
    cells = [[text(cell) for cell in row] for row in rows]
    numeric = [all(isinstance(cell, (int, float, type(None))) for cell in column) for column in zip(*rows, strict=True)]
    numeric = numeric or [False] * len(columns)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if sys.stdout.isatty():
        _print_folded(columns, cells, widths, numeric)
        return
    for line in (columns, *cells):
        say(_aligned(line, widths, numeric))


def print_fields(fields: Sequence[tuple[str, Cell]]) -> None:
    """Print one `name  value` line for each field."""
    named = [(printable(name), value) for name, value in fields]
    width = max(len(name) for name, _ in named)
    for name, value in named:
        say(f"{name.ljust(width)}  {text(value)}".rstrip())


def say(line: str, *, err: bool = False) -> None:
    """Print one line. Names, paths and messages in it are of others: they are text, whatever characters they have."""
    typer.echo(printable(line), err=err)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def note(message: str) -> None:
    """Say something beside the answer, on stderr, so that the answer can be piped."""
    say(f"note: {message}", err=True)


def text(cell: Cell) -> str:
    """A cell as text: four significant digits of a float, `-` for nothing, escapes for what would steer a terminal."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return printable(str(cell))


def _aligned(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    parts = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return GAP.join(parts).rstrip()


def _print_folded(
    columns: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], numeric: Sequence[bool]
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    within = _within(widths, console.width)
    above = range(within[0])
    below = [index for index in range(within[0], len(columns)) if index not in within]
    indent = GAP if len(within) < len(columns) else ""

    def row(line: Sequence[str]) -> str:
        return indent + _aligned(_of(line, within), _of(widths, within), _of(numeric, within))

    for line in (*(columns[index] for index in above), row(columns)):
        console.print(Text(line, style="bold"), soft_wrap=True)
    for line_cells in cells:
        folded = (_fold(columns[index], line_cells[index], console.width) for index in below)
        lines = [*(line_cells[index] for index in above), row(line_cells), *itertools.chain.from_iterable(folded)]
        # a key broken into pieces cannot be copied: let the terminal wrap a line that is too long
        console.print(Text("\n".join(lines)), soft_wrap=True)


def _of(values: Sequence[V], indices: Sequence[int]) -> list[V]:
    return [values[index] for index in indices]


def _within(widths: Sequence[int], width: int) -> list[int]:
    """The columns that stay beside each other: all but the widest ones, which do not fit into `width` characters."""
    kept = list(range(len(widths)))
    while len(kept) > 1:
        indent = len(GAP) * (len(kept) < len(widths))
        if indent + sum(widths[index] for index in kept) + len(GAP) * (len(kept) - 1) <= width:
            break
        kept.remove(max(kept, key=lambda index: widths[index]))
    return kept


def _fold(name: str, cell: str, width: int) -> list[str]:
    """A cell under its row: the column's name and the words of the cell in lines, a long word in one piece."""
    return textwrap.wrap(
        f"{name}: {cell}",
        width,
        initial_indent=GAP,
        subsequent_indent=2 * GAP,
        break_long_words=False,
        break_on_hyphens=False,
    )
