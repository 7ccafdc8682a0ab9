"""The parts of a page: sections with their lines, pictures and tables."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.report.drawing import Picture

Cell = str | int | float | None

MAX_ROWS = 1000
"""Of one table; how many more there are is said below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that is folded away under its title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_open: bool = False

    @property
    def shown(self) -> tuple[tuple[Cell, ...], ...]:
        """The rows that the page has."""
        return self.rows[:MAX_ROWS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page; `lines` say what is seen, or why there is nothing to see.

    `small` has pictures that stand beside each other, each with its caption.
    """

    id: str
    title: str
    lines: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    small: tuple[tuple[str, Picture], ...] = ()
    tables: tuple[Table, ...] = ()
