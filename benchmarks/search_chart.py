"""The chart of a comparison of searches: what trials and seconds buy (matplotlib, extra `report`).

What is behind the best is drawn as a logarithm, `LEAST` or less of it as that: searches differ where little is left.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.drawing import MARKERS, panels, save
from benchmarks.search_replay import after_seconds, after_trials

if TYPE_CHECKING:
    from benchmarks.search import Run

MARKS = (1, 2, 3, 5, 7, 10, 15, 25, 35, 50, 75, 100)
"""Trials, and seconds, with a point."""

COLORS = (
    *("#d1495b", "#2e4057", "#66a182", "#edae49", "#8d96a3", "#c4c4c4"),
    *("#5b7fb4", "#8a6fa8", "#a9cfbd", "#e8a0aa", "#7a5c3e"),
)

LEAST = 0.05
"""Per cent behind the best, below which the clock of a GPU tells nothing apart."""

LOOKS = tuple(zip(COLORS, MARKERS.values(), strict=True))
"""Of contestants, in their order; more than these are told by the table alone."""


def draw(runs: Sequence[Run], path: Path) -> None:
    """Two panels, over trials and seconds, with a line for each contestant: how far its geometric mean is behind."""
    names = list(dict.fromkeys(run.contestant for run in runs))
    with panels(1, 2, size=(13, 5.5), sharey=True) as (figure, ((left, right),)):
        for name, (color, marker) in zip(names, LOOKS, strict=False):
            own = [run for run in runs if run.contestant == name]
            looks = {"color": color, "marker": marker, "markersize": 5, "label": name}
            most = max(len(run.steps) for run in own)
            trials = [count for count in MARKS if count <= most]
            left.plot(trials, [_mean(after_trials(run.steps, count) for run in own) for count in trials], **looks)
            found = {mark: [after_seconds(run.steps, mark) for run in own] for mark in MARKS}
            known = {mark: [r for r in ratios if r] for mark, ratios in found.items() if None not in ratios}
            right.plot(list(known), [_mean(ratios) for ratios in known.values()], **looks)
        left.set_ylabel("behind the best of the table, %")
        left.set_yscale("log")
        left.set_yticks([0.1, 0.5, 1, 5, 10, 50], labels=["0.1", "0.5", "1", "5", "10", "50"])
        for panel, unit in ((left, "trials"), (right, "seconds, as measured")):
            panel.set_xlabel(unit)
            panel.set_xscale("log")
            panel.set_xticks([1, 2, 5, 10, 20, 50, 100], labels=["1", "2", "5", "10", "20", "50", "100"])
        figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
        save(figure, path, top=0.8)


def _mean(ratios: Iterable[float]) -> float:
    return max((statistics.geometric_mean(ratios) - 1) * 100, LEAST)
