"""What all charts share: colours, style, panels and names of lengths (matplotlib, extra `report`)."""

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
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
}
DPI = 130


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
