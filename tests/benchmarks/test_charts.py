"""Charts can be read without colours: whatever is drawn in one chart differs in its hatch, marker or style of line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import BarContainer

from benchmarks import data_tables, drawing, encoder_tables, race_tables, report, tables, training_tables
from tests.tiers import EXHAUSTIVE


def test_every_colour_has_a_hatch_and_a_marker_of_its_own() -> None:
    assert drawing.COLORS.keys() == drawing.HATCHES.keys() == drawing.MARKERS.keys()
    assert len(set(drawing.MARKERS.values())) == len(drawing.MARKERS)
    bars = (race_tables.TITLES, training_tables.TITLES, encoder_tables.TITLES, (data_tables.MINE[0], "sdpa-cudnn"))
    for chart in bars:
        assert len({drawing.HATCHES[impl] for impl in chart}) == len(chart), chart
    assert len({drawing.MARKERS[impl] for impl in tables.MEMORY_TITLES}) == len(tables.MEMORY_TITLES)


@pytest.fixture(scope="module")
def axes() -> list[tuple[str, Any]]:
    """Every panel of every chart that the committed results give, without drawing one."""
    drawn: list[tuple[str, Any]] = []

    def keep(figure: Any, path: Path, *, top: float) -> None:
        drawn.extend((path.name, axis) for axis in figure.axes)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("charts", "data_chart", "io_chart"):
            patch.setattr(f"benchmarks.{module}.save", keep)
        report.draw(report.load(report.RESULTS), Path("img"), report.RESULTS)
    return drawn


@EXHAUSTIVE
def test_bars_and_lines_of_a_panel_differ_without_their_colours(axes: list[tuple[str, Any]]) -> None:
    assert len(axes) > 20
    for name, axis in axes:
        hatches = {
            one.get_label(): one.patches[0].get_hatch() for one in axis.containers if isinstance(one, BarContainer)
        }
        assert len(set(hatches.values())) == len(hatches), (name, hatches)
        looks = Counter((line.get_marker(), line.get_linestyle()) for line in axis.get_lines() if len(line.get_xdata()))
        assert max(looks.values(), default=1) == 1, (name, looks)
