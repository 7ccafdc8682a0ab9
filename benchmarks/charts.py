"""The charts of the results (matplotlib, extra `report`): the same rows give the same picture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.memory import MEMORY_SUITE
from benchmarks.results import Row
from benchmarks.tables import MEMORY_TITLES, TITLES, Line, forward_lines, present
from flashgen.core.workload import Workload

COLORS = {
    "flashgen": "#d1495b",
    "flashgen-lse": "#d1495b",
    "flex": "#edae49",
    "sdpa-flash": "#66a182",
    "sdpa-cudnn": "#2e4057",
    "fa3": "#8d96a3",
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
GROUP_WIDTH = 0.84
"""Of the distance between two groups of bars; the rest is air."""


def forward_chart(path: Path, rows: Sequence[Row]) -> None:
    """Bars of TFLOP/s: a column of panels per head_dim, a row per mask, a group of bars per length."""
    lines = forward_lines(rows)
    impls = present(lines)
    dims = sorted({line.workload.head_dim for line in lines})
    masks = sorted({line.workload.causal for line in lines})
    with _figure(len(masks), len(dims), size=(4.1 * len(dims) + 0.6, 3.2 * len(masks) + 0.9)) as (figure, axes):
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
        _save(figure, path, top=0.93)


def memory_chart(path: Path, rows: Sequence[Row]) -> None:
    """Bytes beside inputs and output against the length, both logarithmic."""
    with _figure(1, 1, size=(8.6, 4.6)) as (figure, axes):
        axis = axes[0][0]
        for impl, title in MEMORY_TITLES.items():
            points = sorted(
                (Workload.parse(row.workload).seqlen_k, row.extra_bytes / 2**20)
                for row in rows
                if row.suite == MEMORY_SUITE and row.impl == impl and row.extra_bytes is not None
            )
            if not points:
                continue
            lengths, sizes = [n for n, _ in points], [size for _, size in points]
            if not any(sizes):  # a logarithmic axis has no zero
                axis.plot([], [], color=COLORS[impl], linestyle=":", label=f"{title}: none at any length")
                continue
            ours = impl == "flashgen-lse"  # drawn above SDPA's line, which it may lie on
            style = {"linestyle": "--", "marker": "o", "zorder": 3} if ours else {"linewidth": 4, "alpha": 0.7}
            axis.plot(lengths, sizes, color=COLORS[impl], label=title, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: _length(int(value)))
        axis.set_xlabel("sequence length (1 sequence, 16 heads of 128, bf16)")
        axis.set_ylabel("MiB beside inputs and output")
        axis.legend(frameon=False)
        _save(figure, path, top=1.0)


def _bars(axis: Any, lines: Sequence[Line], impls: Sequence[str]) -> None:
    width = GROUP_WIDTH / len(impls)
    for number, impl in enumerate(impls):
        shift = (number - (len(impls) - 1) / 2) * width
        heights = [line.tflops.get(impl, 0.0) for line in lines]
        places = [group + shift for group in range(len(lines))]
        axis.bar(places, heights, width=width * 0.94, color=COLORS[impl], label=TITLES[impl])
        if impl == "flashgen":
            for place, height in zip(places, heights, strict=True):
                if height:
                    axis.annotate(
                        f"{height:.0f}", (place, height), ha="center", va="bottom", fontsize=9, color=COLORS[impl]
                    )
    axis.set_xticks(range(len(lines)), [_length(line.workload.seqlen_k) for line in lines])


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


@contextlib.contextmanager
def _figure(rows: int, columns: int, *, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A grid of panels in this module's style, without a window and whatever the reader's own settings are."""
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=size, dpi=DPI)
        yield figure, figure.subplots(rows, columns, squeeze=False, sharey="row")


def _save(figure: Any, path: Path, *, top: float) -> None:
    figure.tight_layout(rect=(0, 0, 1, top))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
