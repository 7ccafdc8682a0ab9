"""The pictures of a report, from its figures."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from flashgen.report.drawing import (
    BOTTOM,
    HATCHES,
    MARKS,
    RIGHT,
    ROW,
    TOP,
    WIDTH,
    Axes,
    Bar,
    Label,
    Line,
    Mark,
    Picture,
    Scale,
    steps,
)
from flashgen.report.figures import WITHIN, Curve, Ratios, Reason, spread
from flashgen.report.importance import Importance

NAMES = 260
"""Width of the names left of bars."""

WORST = 3.0
"""Times over the best that a chart has room for; what is slower lies on the edge."""

LEADS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2)
"""Bounds of the ranges in which races are counted."""

MAX_SHOWN = 2000
"""Marks of one picture: of more every n-th is drawn."""


def torch_ratios(groups: Sequence[Ratios]) -> Picture:
    """A line for each group from its least to its highest ratio, and a mark at its geometric mean."""
    least = min(min(group.ratios) for group in groups)
    most = max(max(group.ratios) for group in groups)
    scale = Scale(min(least, 0.9) * 0.97, max(most, 1.2) * 1.03, NAMES, WIDTH - 70, is_log=True)
    bottom = TOP + ROW * len(groups) + 6
    lines = [Line(points=((scale(tick), TOP), (scale(tick), bottom)), kind="grid") for tick in scale.ticks]
    lines.append(Line(points=((scale(1), TOP - 6), (scale(1), bottom)), kind="even"))
    marks, labels = [], []
    for place, group in enumerate(groups):
        y = TOP + ROW * place + ROW / 2
        lines.append(Line(points=((scale(group.ratios[0]), y), (scale(group.ratios[-1]), y)), kind="range"))
        text = f"{group.group}: {group.mean:.2f}x, {group.ratios[0]:.2f}x to {group.ratios[-1]:.2f}x"
        marks.append(Mark(x=scale(group.mean), y=y, shape="circle" if group.mean >= 1 else "triangle", text=text))
        labels.append(Label(x=NAMES - 10, y=y + 4, text=f"{group.group} ({len(group.ratios)})", anchor="end"))
        labels.append(Label(x=WIDTH - 6, y=y + 4, text=f"{group.mean:.2f}x", anchor="end", kind="value"))
    labels += [
        Label(x=scale(tick), y=bottom + 14, text=f"{tick:g}x", anchor="middle", kind="tick") for tick in scale.ticks
    ]
    labels.append(Label(x=WIDTH - 6, y=TOP - 2, text="mean", anchor="end", kind="tick"))
    labels.append(
        Label(x=(NAMES + WIDTH) / 2, y=bottom + 32, text="torch's time over ours: right of 1x ours is faster",
              anchor="middle")
    )  # fmt: skip
    return Picture(
        title="Ratio of torch's fastest backend to the generated kernel, by group",
        width=WIDTH,
        height=bottom + BOTTOM,
        lines=tuple(lines),
        marks=tuple(marks),
        labels=tuple(labels),
    )


def leads(values: Sequence[float]) -> Picture:
    """How many races were won by how much: a bar for each range of the next best one's time over the winner's."""
    ranges = [*itertools.pairwise(LEADS), (LEADS[-1], math.inf)]
    rows = [("below 1x", sum(value < LEADS[0] for value in values))]
    for low, high in ranges:
        name = f"{low:g}x to {high:g}x" if math.isfinite(high) else f"{low:g}x and more"
        rows.append((name, sum(low <= value < high for value in values)))
    scale = Scale(0, max(count for _, count in rows) or 1, 140, WIDTH - 70)
    drawn, labels = [], []
    for place, (name, count) in enumerate(rows):
        y, end = TOP + ROW * place, scale(count)
        drawn.append(Bar(x=140, y=y + 3, width=end - 140, height=ROW - 6, text=f"{name}: {count} races"))
        labels.append(Label(x=130, y=y + 15, text=name, anchor="end"))
        labels.append(Label(x=end + 6, y=y + 15, text=str(count), kind="value"))
    return Picture(
        title="Last races by the next best one's time over the winner's",
        width=WIDTH,
        height=TOP + ROW * len(rows) + 8,
        bars=tuple(drawn),
        labels=tuple(labels),
    )


def convergence(lines: Sequence[Sequence[tuple[float, float]]], *, unit: str, end: float) -> Picture:
    """The median and the 90th percentile of the best so far of all searches, over trials or seconds (`unit`)."""
    axes = Axes.of(
        x=(0, end), y=(1.0, WORST), names=(unit, "best so far, over the best of all"), log_y=True, units=("", "x")
    )
    found = spread(lines)
    found.append((end, *found[-1][1:]))
    median = steps([(place, value) for place, value, _ in found], axes.x, axes.y)
    tenth = steps([(place, value) for place, _, value in found], axes.x, axes.y)
    return Picture(
        title=f"Best so far of {len(lines)} searches by {unit}: median (solid) and 90th percentile (dashed)",
        width=axes.width,
        height=axes.height,
        lines=(*axes.lines, Line(points=median, kind="solid"), Line(points=tenth, kind="dashed")),
        labels=axes.labels,
    )


def one_search(curve: Curve) -> Picture:
    """The best so far of one search, small."""
    width, height = 240, 130
    scale_x = Scale(0, max(curve.trials, 1), 30, width - 8)
    scale_y = Scale(1.0, WORST, height - 22, 10, is_log=True)
    ticks = (1.0, 1.5, 2.0, WORST)
    return Picture(
        title=f"Convergence of {curve.search.workload.key}: within 2% after {curve.arrived} of {curve.trials} trials",
        width=width,
        height=height,
        lines=(
            *(Line(points=((30, scale_y(tick)), (width - 8, scale_y(tick))), kind="grid") for tick in ticks),
            Line(points=((30, 10), (30, height - 22), (width - 8, height - 22)), kind="axis"),
            Line(points=steps([*curve.values, (curve.trials, 1.0)], scale_x, scale_y), kind="solid"),
        ),
        marks=(Mark(x=scale_x(curve.arrived), y=scale_y(WITHIN), shape="circle",
                    text=f"within 2% after {curve.arrived} trials"),),
        labels=(
            *(Label(x=26, y=scale_y(tick) + 4, text=f"{tick:g}x", anchor="end", kind="tick") for tick in ticks),
            Label(x=scale_x(0), y=height - 8, text="0", anchor="middle", kind="tick"),
            Label(x=width - 8, y=height - 8, text=f"{curve.trials} trials", anchor="end", kind="tick"),
        ),
    )  # fmt: skip


def knob_shares(shares: Sequence[Importance]) -> Picture:
    """A bar for each knob of one family."""
    scale = Scale(0, max(each.share for each in shares) or 1, NAMES, WIDTH - 90)
    drawn, labels = [], []
    for place, each in enumerate(shares):
        y, end = TOP + ROW * place, scale(each.share)
        text = f"{each.knob}: {each.share:.1%}, the mean of {each.searches} searches"
        drawn.append(Bar(x=NAMES, y=y + 3, width=max(end - NAMES, 1), height=ROW - 6, text=text))
        labels.append(Label(x=NAMES - 10, y=y + 15, text=each.knob, anchor="end"))
        labels.append(
            Label(x=end + 6, y=y + 15, text=f"{each.share:.0%}" if each.share >= 0.01 else "<1%", kind="value")
        )
    return Picture(
        title=f"Importance of the knobs of {shares[0].family}",
        width=WIDTH,
        height=TOP + ROW * len(shares) + 8,
        bars=tuple(drawn),
        labels=tuple(labels),
    )


def failed_stages(reasons: Sequence[Reason]) -> Picture:
    """A bar for each stage, in it a part with a hatch of its own for each family; a legend is below."""
    by_stage: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for reason in reasons:
        by_stage[reason.stage][reason.family] = by_stage[reason.stage].get(reason.family, 0) + reason.count
    stages = sorted(by_stage, key=lambda stage: -sum(by_stage[stage].values()))
    families = sorted({reason.family for reason in reasons})
    scale = Scale(0, max(sum(by_stage[stage].values()) for stage in stages), 110, WIDTH - 70)
    drawn, labels = [], []
    for place, stage in enumerate(stages):
        y, start = TOP + ROW * place, 110.0
        labels.append(Label(x=100, y=y + 15, text=stage, anchor="end"))
        for family, count in sorted(by_stage[stage].items()):
            width = scale(count) - 110
            hatch = families.index(family) % HATCHES
            drawn.append(
                Bar(x=start, y=y + 3, width=max(width, 1), height=ROW - 6, hatch=hatch, text=f"{family}: {count}")
            )
            start += width
        labels.append(Label(x=start + 6, y=y + 15, text=str(sum(by_stage[stage].values())), kind="value"))
    below = TOP + ROW * len(stages) + 10
    for place, family in enumerate(families):
        x, y = 110 + 210 * (place % 3), below + 18 * (place // 3)
        drawn.append(Bar(x=x, y=y, width=26, height=12, hatch=place % HATCHES, text=family))
        labels.append(Label(x=x + 32, y=y + 11, text=family))
    return Picture(
        title="Failed candidates by stage and kernel family",
        width=WIDTH,
        height=below + 18 * -(-len(families) // 3) + 8,
        bars=tuple(drawn),
        labels=tuple(labels),
    )


def registers(points: Sequence[tuple[str, int, bool, float, str]]) -> Picture:
    """Registers a thread against the time over the best of the search: a mark of its own shape for each kind.

    A point is the name of a kind, its registers, whether it spills, its time over the best, and a text.
    """
    step = -(-len(points) // MAX_SHOWN)
    chosen = points[::step]
    kinds = sorted({kind for kind, *_ in chosen})
    shapes = dict(zip(kinds, itertools.cycle(MARKS[:-1])))
    counts = [count for _, count, *_ in chosen]
    axes = Axes.of(
        x=(min(counts) // 32 * 32, max(counts) // 32 * 32 + 32),
        y=(1.0, WORST),
        names=("registers a thread", "time over the best of its search"),
        height=320,
        log_y=True,
        units=("", "x"),
    )
    marks = [
        Mark(x=axes.x(count), y=axes.y(value), shape="cross" if spills else shapes[kind], text=text)
        for kind, count, spills, value, text in chosen
    ]
    labels = list(axes.labels)
    for place, (name, shape) in enumerate([*shapes.items(), ("spills", "cross")]):
        x = WIDTH - RIGHT - 100 * (len(shapes) + 1 - place)
        marks.append(Mark(x=x, y=TOP, shape=shape, text=name))
        labels.append(Label(x=x + 10, y=TOP + 4, text=name))
    drawn = "" if len(chosen) == len(points) else f", {len(chosen)} of which are drawn"
    return Picture(
        title=f"Registers against time of {len(points)} candidates{drawn}",
        width=axes.width,
        height=axes.height,
        lines=axes.lines,
        marks=tuple(marks),
        labels=tuple(labels),
    )
