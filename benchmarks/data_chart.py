"""The chart of data.csv: how fast flashgen and its fastest peer are on each kind of data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.data_tables import BEST, MINE, Kinds, by_kind, dtypes_of, fastest
from benchmarks.drawing import bar_looks, length_text, panels, save
from benchmarks.results import Row
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS

BARS = (("flashgen", MINE, "flashgen"), ("the fastest peer", BEST, "sdpa-cudnn"))
"""Labels, implementations, and whose looks the bars have."""

WIDTH = 0.42
"""Of a bar, where groups are 1 apart."""


def data_chart(path: Path, rows: Sequence[Row]) -> None:
    """The longest sequences: a column of panels per head_dim, a row per dtype and mask, a pair of bars per kind."""
    every = {dtype: by_kind(rows, dtype) for dtype in dtypes_of(rows)}
    shapes = {line.workload for kinds in every.values() for lines in kinds.values() for line in lines}
    longest = max(w.seqlen_k for w in shapes)
    dims = sorted({w.head_dim for w in shapes})
    sides = [(dtype, causal) for dtype in every for causal in sorted({w.causal for w in shapes})]
    with panels(len(sides), len(dims), size=(3.7 * len(dims) + 0.6, 2.7 * len(sides) + 0.9)) as (figure, axes):
        for row, (dtype, causal) in enumerate(sides):
            for axis, dim in zip(axes[row], dims, strict=True):
                _pairs(axis, every[dtype], dim, causal, longest)
                axis.set_title(f"{dtype}, head_dim {dim}, {'causal' if causal else 'no mask'}", fontsize=12)
            axes[row][0].set_ylabel("TFLOP/s")
        handles, labels = axes[0][0].get_legend_handles_labels()
        title = f"sequences of {length_text(longest)}"
        figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False, fontsize=12, title=title)
        save(figure, path, top=0.95)


def _pairs(axis: Any, kinds: Kinds, dim: int, causal: bool, seqlen: int) -> None:
    names = [name for name in DATA_KINDS if name in kinds]
    for number, (label, impls, looks) in enumerate(BARS):
        found = [_speed(kinds, name, impls, dim, causal, seqlen) for name in names]
        places = [group + (number - 0.5) * WIDTH for group in range(len(names))]
        axis.bar(places, found, width=WIDTH * 0.94, label=label, **bar_looks(looks))
    axis.set_xticks(range(len(names)), names, fontsize=10)


def _speed(kinds: Kinds, name: str, impls: Sequence[str], dim: int, causal: bool, seqlen: int) -> float:
    """TFLOP/s of the fastest of `impls`, 0 where none has a time."""

    def wanted(w: Workload) -> bool:
        return (w.head_dim, w.causal, w.seqlen_k) == (dim, causal, seqlen)

    best = next((fastest(line, impls) for line in kinds[name] if wanted(line.workload)), None)
    return 0.0 if best is None else best[1]
