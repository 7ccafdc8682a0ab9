"""What all charts share: looks, style, panels and names of lengths (matplotlib, extra `report`).

Every implementation has a hatch and a marker beside its colour, so that charts can be read and printed without colours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl

COLORS = {
    "flashgen": "#d1495b",
    "flashgen-lse": "#d1495b",
    "flashgen-deterministic": "#e8a0aa",
    "flex": "#edae49",
    "sdpa-flash": "#66a182",
    "sdpa-cudnn": "#2e4057",
    "fa3": "#8d96a3",
    "fa4": "#5b7fb4",
    "sdpa-efficient": "#8a6fa8",
    "sdpa": "#a9cfbd",
    "standard": "#c4c4c4",
}
HATCHES = {
    "flashgen": "",
    "flashgen-lse": "",
    "flashgen-deterministic": "....",
    "flex": "////",
    "sdpa-flash": "\\\\\\\\",
    "sdpa-cudnn": "xxx",
    "fa3": "---",
    "fa4": "|||",
    "sdpa-efficient": "ooo",
    "sdpa": "**",
    "standard": "+++",
}
"""Of bars. No two implementations of one chart of bars share one."""

MARKERS = {
    "flashgen": "o",
    "flashgen-lse": "P",
    "flashgen-deterministic": "p",
    "flex": "v",
    "sdpa-flash": "s",
    "sdpa-cudnn": "^",
    "fa3": "<",
    "fa4": ">",
    "sdpa-efficient": "X",
    "sdpa": "*",
    "standard": "D",
}
"""Of lines, one an implementation."""

MARKS_OF_A_CURVE = 12
"""Markers of a line with a point for each step of a training run."""

STYLE: dict[Any, Any] = {
    "font.size": 12,
    "hatch.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
}
DPI = 130


def bar_looks(impl: str) -> dict[str, Any]:
    """Colour and hatch of an implementation's bars; the hatch is drawn in the colour of their edges."""
    return {"color": COLORS[impl], "hatch": HATCHES[impl], "edgecolor": "white", "linewidth": 0}


def line_looks(impl: str) -> dict[str, Any]:
    """Colour and marker of an implementation's line."""
    return {"color": COLORS[impl], "marker": MARKERS[impl]}


def curve_looks(impl: str, points: int) -> dict[str, Any]:
    """The same of a line of so many points, whose markers stand apart and at other steps than those of other lines."""
    apart = max(1, points // MARKS_OF_A_CURVE)
    first = list(MARKERS).index(impl) * apart // len(MARKERS)
    return {**line_looks(impl), "markevery": (first, apart), "markersize": 5}


@contextlib.contextmanager
def panels(
    rows: int, columns: int, *, size: tuple[float, float], sharey: Literal["row"] | bool = "row"
) -> Iterator[tuple[Any, Any]]:
    """A grid of panels in this module's style, without a window and whatever the reader's own settings are."""
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=size, dpi=DPI)
        yield figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def save(figure: Any, path: Path, *, top: float) -> None:
    """Write a picture whose panels end at `top` of its height; equal rows give equal bytes."""
    figure.tight_layout(rect=(0, 0, 1, top))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def length_text(seqlen: int) -> str:
    """`16k` for 16384."""
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)
