"""Pictures as geometry: what a template writes as SVG. Nothing here knows what is drawn.

A picture can be read without colours: marks differ in shape, lines in dashes, bars in hatches, and values are printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 14, 40
"""Margins of a picture with axes, in the units of its view box, as all lengths here."""

ROW = 22
MARKS = ("circle", "triangle", "square", "diamond", "cross")
HATCHES = 6
DASHES = ("solid", "dashed")

LOG_TICKS = (
    (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6),
    (0.25, 0.5, 0.7, 0.8, 1, 1.2, 1.5, 2, 2.5, 3, 4),
    (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100),
    (0.01, 0.1, 1, 10, 100, 1000, math.inf),
)
"""Of a logarithmic axis: the first row that goes so far and of which at most eight are on it."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Text at a place; `anchor` is start, middle or end, `kind` a class of the style sheet."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    kind: str = "label"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points; `kind` is a class of the style sheet, such as `axis` or a name of `DASHES`."""

    points: tuple[Point, ...]
    kind: str

    @property
    def path(self) -> str:
        """As SVG's `points`."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point: its shape is one of `MARKS`, and a pointer that rests on it shows the text."""

    x: float
    y: float
    shape: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar with a hatch of `HATCHES`, and what a pointer that rests on it shows."""

    x: float
    y: float
    width: float
    height: float
    hatch: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing and what it says in words, for those who do not see it."""

    title: str
    width: float
    height: float
    bars: tuple[Bar, ...] = ()
    lines: tuple[Line, ...] = ()
    marks: tuple[Mark, ...] = ()
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places on one axis, linear or logarithmic; what is outside lies on the edge."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        turn: Callable[[float], float] = math.log if self.is_log else float
        low, high = turn(self.low), turn(self.high)
        share = (turn(min(max(value, self.low), self.high)) - low) / ((high - low) or 1.0)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> tuple[float, ...]:
        """Round values on the axis, about eight at most."""
        if self.is_log:
            rows = [
                tuple(tick for tick in row if self.low <= tick <= self.high)
                for row in LOG_TICKS
                if self.high <= row[-1]
            ]
            return next((row for row in rows if len(row) <= 8), rows[-1])
        span = (self.high - self.low) or 1.0
        size = 10 ** math.floor(math.log10(span / 4))
        step = next(size * times for times in (1, 2, 5, 10, 20) if span / (size * times) <= 7)
        first = math.ceil(self.low / step)
        return tuple(step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """A plane with two axes and their names; `lines` and `labels` are what it looks like empty."""

    x: Scale
    y: Scale
    x_name: str
    y_name: str
    height: float
    width: float = WIDTH
    unit_x: str = ""
    unit_y: str = ""
    lines: tuple[Line, ...] = field(init=False)
    labels: tuple[Label, ...] = field(init=False)

    def __post_init__(self) -> None:
        left, right, top, bottom = self.x.start, self.x.end, self.y.end, self.y.start
        grid = [Line(points=((left, self.y(tick)), (right, self.y(tick))), kind="grid") for tick in self.y.ticks]
        frame = Line(points=((left, top), (left, bottom), (right, bottom)), kind="axis")
        below = [
            Label(x=self.x(tick), y=bottom + 16, text=f"{tick:g}{self.unit_x}", anchor="middle", kind="tick")
            for tick in self.x.ticks
        ]
        beside = [
            Label(x=left - 6, y=self.y(tick) + 4, text=f"{tick:g}{self.unit_y}", anchor="end", kind="tick")
            for tick in self.y.ticks
        ]
        names = [
            Label(x=(left + right) / 2, y=bottom + 34, text=self.x_name, anchor="middle"),
            Label(x=left, y=top - 4, text=self.y_name, anchor="start"),
        ]
        object.__setattr__(self, "lines", (*grid, frame))
        object.__setattr__(self, "labels", (*below, *beside, *names))

    @classmethod
    def of(
        cls,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        names: tuple[str, str],
        height: float = 260,
        width: float = WIDTH,
        log_y: bool = False,
        units: tuple[str, str] = ("", ""),
    ) -> Axes:
        """Axes that span these values."""
        return cls(
            x=Scale(*x, LEFT, width - RIGHT),
            y=Scale(*y, height - BOTTOM, TOP + 12, log_y),
            x_name=names[0],
            y_name=names[1],
            height=height,
            width=width,
            unit_x=units[0],
            unit_y=units[1],
        )


def steps(points: Sequence[Point], scale_x: Scale, scale_y: Scale) -> tuple[Point, ...]:
    """A line that stays at a value until the next one, in places."""
    found: list[Point] = []
    for x, y in points:
        place = scale_x(x)
        if found:
            found.append((place, found[-1][1]))
        found.append((place, scale_y(y)))
    return tuple(found)
