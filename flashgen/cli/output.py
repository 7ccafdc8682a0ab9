"""How commands print: a table for a terminal, aligned columns for a pipe, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import typer

MAX_WIDTH = 10_000
"""Characters; wider than any table, so that none is cut or folded."""

Cell = str | int | float | None


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print rows under column names; what is in a cell is text, never markup."""
    cells = [[text(cell) for cell in row] for row in rows]
    numeric = [all(isinstance(cell, (int, float, type(None))) for cell in column) for column in zip(*rows, strict=True)]
    numeric = numeric or [False] * len(columns)
    if sys.stdout.isatty():
        _print_rich(columns, cells, numeric)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        typer.echo("  ".join(parts).rstrip())


def print_fields(fields: Sequence[tuple[str, Cell]]) -> None:
    """Print one `name  value` line for each field."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        typer.echo(f"{name.ljust(width)}  {text(value)}".rstrip())


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def note(message: str) -> None:
    """Say something beside the answer, on stderr, so that the answer can be piped."""
    typer.echo(f"note: {message}", err=True)


def text(cell: Cell) -> str:
    """A cell as text: four significant digits of a float, `-` for nothing."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return str(cell)


def _print_rich(columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    # a key broken into pieces cannot be copied: let the terminal wrap a line that is too long
    Console(width=MAX_WIDTH).print(table, crop=False)
