"""The charts of the results (matplotlib, extra `report`): the same rows give the same picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.lines
import matplotlib.patches

from benchmarks.curves import Curves, of_workload
from benchmarks.drawing import COLORS, bar_looks, curve_looks, length_text, line_looks, panels, save
from benchmarks.encoder_tables import CHANCE
from benchmarks.encoder_tables import MODES as MODES_OF_ENCODERS
from benchmarks.encoder_tables import TITLES as ENCODER_TITLES
from benchmarks.encoder_tables import lines_of as encoder_lines
from benchmarks.memory import MEMORY_SUITE
from benchmarks.memory import TRAINING_SUITE as MEMORY_OF_TRAINING
from benchmarks.race_tables import TITLES, Line, lines_of, present
from benchmarks.results import Row
from benchmarks.tables import MEMORY_TITLES
from benchmarks.training_tables import MODES
from benchmarks.training_tables import TITLES as TRAINING_TITLES
from benchmarks.training_tasks import BERT, EAGER, EAGER_SUITE, LONG, PADDED, PATHS, REFERENCE
from flashgen.core.workload import Workload

SMOOTH = 20
"""Steps of a mean: single losses of a batch scatter too much to be seen beside each other."""

GROUP_WIDTH = 0.84
"""Of the distance between two groups of bars; the rest is air."""


def race_chart(path: Path, rows: Sequence[Row], suite: str) -> None:
    """Bars of TFLOP/s: a column of panels per head_dim, a row per mask, a group of bars per length."""
    lines = lines_of(rows, suite)
    impls = present(lines)
    dims = sorted({line.workload.head_dim for line in lines})
    masks = sorted({line.workload.causal for line in lines})
    with panels(len(masks), len(dims), size=(4.1 * len(dims) + 0.6, 3.2 * len(masks) + 0.9)) as (figure, axes):
        for row, causal in enumerate(masks):
            for column, dim in enumerate(dims):
                panel = [line for line in lines if line.workload.head_dim == dim and line.workload.causal == causal]
                _bars(axes[row][column], panel, impls)
                axes[row][column].set_title(f"head_dim {dim}, {'causal' if causal else 'no mask'}", fontsize=13)
            axes[row][0].set_ylabel("TFLOP/s")
        for axis in axes[-1]:
            axis.set_xlabel("sequence length (16k tokens in all)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper center", ncols=len(impls), frameon=False, fontsize=12, columnspacing=1.2
        )
        save(figure, path, top=0.93)


def memory_chart(path: Path, rows: Sequence[Row]) -> None:
    """Bytes beside inputs and output against the length, both logarithmic."""
    with panels(1, 1, size=(8.6, 4.6)) as (figure, axes):
        _memory_lines(axes[0][0], [row for row in rows if row.suite == MEMORY_SUITE], MEMORY_TITLES)
        axes[0][0].set_xlabel("sequence length (1 sequence, 16 heads of 128, bf16)")
        axes[0][0].set_ylabel("MiB beside inputs and output")
        axes[0][0].legend(frameon=False)
        save(figure, path, top=1.0)


def training_memory_chart(path: Path, rows: Sequence[Row]) -> None:
    """The same for a forward and a backward pass together: a panel per head_dim."""
    found = [(Workload.parse(row.workload).head_dim, row) for row in rows if row.suite == MEMORY_OF_TRAINING]
    dims = sorted({dim for dim, _ in found})
    with panels(1, len(dims), size=(4.6 * len(dims) + 0.6, 4.6)) as (figure, axes):
        for axis, dim in zip(axes[0], dims, strict=True):
            _memory_lines(axis, [row for width, row in found if width == dim], TRAINING_TITLES)
            axis.set_title(f"forward and backward, head_dim {dim}", fontsize=13)
            axis.set_xlabel("sequence length (1 sequence, 16 heads, bf16)")
        axes[0][0].set_ylabel("MiB beside the tensors of the call")
        axes[0][0].legend(frameon=False)
        save(figure, path, top=1.0)


def _memory_lines(axis: Any, rows: Sequence[Row], titles: dict[str, str]) -> None:
    for impl, title in titles.items():
        points = sorted(
            (Workload.parse(row.workload).seqlen_k, row.extra_bytes / 2**20)
            for row in rows
            if row.impl == impl and row.extra_bytes is not None
        )
        if not points:
            continue
        lengths, sizes = [n for n, _ in points], [size for _, size in points]
        if not any(sizes):  # a logarithmic axis has no zero
            axis.plot([], [], color=COLORS[impl], linestyle=":", label=f"{title}: none at any length")
            continue
        ours = impl.startswith("flashgen")  # drawn above SDPA's line, which it may lie on
        style = {"linestyle": "--", "zorder": 3} if ours else {"linewidth": 4, "markersize": 10, "alpha": 0.7}
        axis.plot(lengths, sizes, label=title, **line_looks(impl), **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: length_text(int(value)))


def training_chart(path: Path, rows: Sequence[Row], curves: Curves) -> None:
    """Tokens per second for each mode; below, the losses of each length and how far they are from the reference's."""
    with panels(2, 2, size=(11.5, 8.2), sharey=False) as (figure, axes):
        for axis, mode in zip(axes[0], dict.fromkeys(MODES.values()), strict=True):
            _rates(axis, [row for row in rows if MODES.get(row.suite) == mode])
            axis.set_title(f"GPT-2 124M, {mode}", fontsize=13)
            axis.set_ylabel("thousand tokens per second")
            axis.set_xlabel("sequence length (16k tokens a step, or one sequence)")
        top = max(axis.get_ylim()[1] for axis in axes[0])
        for axis in axes[0]:
            axis.set_ylim(0, top)
        _losses(axes[1][0], axes[1][1], curves)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels) or 1, frameon=False, fontsize=12)
        save(figure, path, top=0.94)


def _rates(axis: Any, rows: Sequence[Row]) -> None:
    lengths = sorted({Workload.parse(row.workload).seqlen_k for row in rows})
    width = GROUP_WIDTH / len(TRAINING_TITLES)
    for number, (impl, title) in enumerate(TRAINING_TITLES.items()):
        shift = (number - (len(TRAINING_TITLES) - 1) / 2) * width
        found = {Workload.parse(row.workload).seqlen_k: row for row in rows if row.impl == impl}
        places = {length: group + shift for group, length in enumerate(lengths) if length in found}
        heights = {length: (found[length].tokens_per_s or 0.0) / 1e3 for length in places}
        axis.bar(places.values(), heights.values(), width=width * 0.94, label=title, **bar_looks(impl))
        for length, place in places.items():
            height = heights[length]
            text = f"{height:.0f}" if height else found[length].outcome
            axis.annotate(text, (place, height), ha="center", va="bottom", fontsize=9, rotation=0 if height else 90)
    axis.set_xticks(range(len(lengths)), [length_text(length) for length in lengths])


def _losses(left: Any, right: Any, curves: Curves) -> None:
    """Losses without compilation, one style of line per length, and their distances from the reference's."""
    styles = ("-", "--", ":", "-.")
    suites = (EAGER_SUITE, LONG.suites[EAGER])
    workloads = sorted({(Workload.parse(w).seqlen_k, suite, w) for suite, w, _ in curves if suite in suites})
    for (seqlen, suite, workload), style in zip(workloads, styles, strict=False):
        found, length = of_workload(curves, suite, workload), length_text(seqlen)
        for impl in TRAINING_TITLES:
            curve, reference = found.get(impl, []), found.get(REFERENCE, [])
            looks = {"linestyle": style, "zorder": 3 if impl == "flashgen" else 2, **curve_looks(impl, len(curve))}
            left.plot(range(len(curve)), curve, **looks, label=length if impl == "flashgen" else None)
            if impl != REFERENCE:
                distances = _smooth([abs(a - b) for a, b in zip(curve, reference, strict=False)])
                right.plot(range(len(distances)), distances, **looks)
    left.set_ylabel("loss (nats a byte)")
    right.set_ylabel(f"distance from {TRAINING_TITLES[REFERENCE]}, mean of {SMOOTH} steps", fontsize=11)
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xlabel("step, eager")
    if workloads:
        left.legend(frameon=False, title="sequence length")
        right.legend(handles=_marked(TRAINING_TITLES), frameon=False, loc="upper left")


def bert_chart(path: Path, rows: Sequence[Row], curves: Curves) -> None:
    """Tokens per second with and without padding and torch.compile; beside it the losses of all of them."""
    groups = [
        (MODES_OF_ENCODERS[mode] + (",\nmasked keys" if task is PADDED else ""), task.suites[mode], by_impl)
        for task in (BERT, PADDED)
        for mode, by_impl in encoder_lines(rows, task)
    ]
    with panels(1, 2, size=(13.5, 4.8), sharey=False) as (figure, axes):
        left, right = axes[0]
        _encoder_rates(left, [by_impl for _, _, by_impl in groups])
        left.set_xticks(range(len(groups)), [name for name, _, _ in groups])
        left.set_title("BERT-large, 64 sequences of 512 a step", fontsize=13)
        left.set_ylabel("thousand tokens per second")
        _encoder_losses(right, groups, curves)
        shown = {impl: title for impl, title in ENCODER_TITLES.items() if any(impl in g[2] for g in groups)}
        handles = [matplotlib.patches.Patch(label=title, **_patch(impl)) for impl, title in shown.items()]
        figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False, fontsize=11)
        save(figure, path, top=0.92)


def _patch(impl: str) -> dict[str, Any]:
    looks = bar_looks(impl)
    return {"facecolor": looks.pop("color"), **looks}


def _encoder_rates(axis: Any, groups: Sequence[Mapping[str, Row]]) -> None:
    """Bars of each group side by side, whichever attentions it has."""
    width = GROUP_WIDTH / max(len(by_impl) for by_impl in groups)
    for group, by_impl in enumerate(groups):
        there = [impl for impl in ENCODER_TITLES if impl in by_impl]
        for number, impl in enumerate(there):
            place, row = group + (number - (len(there) - 1) / 2) * width, by_impl[impl]
            height = (row.tokens_per_s or 0.0) / 1e3
            text = f"{height:.0f}" if height else row.outcome
            axis.bar([place], [height], width=width * 0.94, **bar_looks(impl))
            axis.annotate(text, (place, height), ha="center", va="bottom", fontsize=8, rotation=0 if height else 90)


def _encoder_losses(axis: Any, groups: Sequence[Any], curves: Curves) -> None:
    """One style of line per group, a color per attention."""
    for (name, suite, by_impl), style in zip(groups, ("-", "--", ":", "-."), strict=False):
        for impl, row in by_impl.items():
            curve = curves.get((suite, row.workload, impl), [])
            label = name.replace("\n", " ") if impl == "flashgen" else None
            axis.plot(range(len(curve)), curve, linestyle=style, label=label, **curve_looks(impl, len(curve)))
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats a masked token)")
    there = {impl: title for impl, title in ENCODER_TITLES.items() if any(impl in by_impl for _, _, by_impl in groups)}
    if groups:
        axis.legend(handles=[*axis.get_legend_handles_labels()[0], *_marked(there)], frameon=False)


def _marked(titles: Mapping[str, str]) -> list[Any]:
    """The lines of a legend that says which marker is whose, where styles of lines mean something else."""
    return [matplotlib.lines.Line2D([], [], linestyle="", label=titles[impl], **line_looks(impl)) for impl in titles]


def paths_chart(path: Path, rows: Sequence[Row], losses: Curves, accuracies: Curves) -> None:
    """Loss and accuracy of the classifier over steps, each the mean of the last ones."""
    with panels(1, 2, size=(11.5, 4.4), sharey=False) as (figure, axes):
        for axis, found, title in zip(axes[0], (losses, accuracies), ("loss (nats)", "right"), strict=True):
            for mode, by_impl in encoder_lines(rows, PATHS):
                for impl, row in by_impl.items():
                    means = _smooth(found.get(row.subject, []))
                    looks = {"linestyle": "-" if mode == EAGER else "--", **curve_looks(impl, len(means))}
                    label = f"{ENCODER_TITLES[impl]}, {MODES_OF_ENCODERS[mode]}"
                    axis.plot(range(len(means)), means, **looks, label=label)
            axis.set_xlabel("step")
            axis.set_ylabel(f"{title}, mean of {SMOOTH} steps")
        axes[0][1].axhline(CHANCE, color="#888888", linewidth=1)
        axes[0][1].legend(frameon=False)
        save(figure, path, top=1.0)


def _smooth(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, end - SMOOTH) : end]) for end in range(1, len(values) + 1)]


def _bars(axis: Any, lines: Sequence[Line], impls: Sequence[str]) -> None:
    width = GROUP_WIDTH / len(impls)
    for number, impl in enumerate(impls):
        shift = (number - (len(impls) - 1) / 2) * width
        heights = [line.tflops.get(impl, 0.0) for line in lines]
        places = [group + shift for group in range(len(lines))]
        axis.bar(places, heights, width=width * 0.94, label=TITLES[impl], **bar_looks(impl))
        if impl == "flashgen":
            for place, height in zip(places, heights, strict=True):
                if height:
                    axis.annotate(
                        f"{height:.0f}", (place, height), ha="center", va="bottom", fontsize=9, color=COLORS[impl]
                    )
    axis.set_xticks(range(len(lines)), [length_text(line.workload.seqlen_k) for line in lines])
