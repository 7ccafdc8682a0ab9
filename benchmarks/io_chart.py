"""The chart of memory traffic: what the hardware's counters say beside the models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import COLORS, length_text, line_looks, panels, save
from benchmarks.io_cases import BLOCKS_SUITE, blocks_of
from benchmarks.io_tables import PASSES, TITLES, hbm_bytes
from benchmarks.results import Row
from benchmarks.traffic import tiled_bytes
from flashgen.core.workload import Workload

CHART_BLOCK_N = 32
"""The block of keys whose rows the chart of block sizes shows."""


def io_chart(path: Path, rows: Sequence[Row]) -> None:
    """Bytes from and to HBM over the length, a panel per pass; then bytes and time over the blocks of queries."""
    with panels(1, 3, size=(14.6, 4.8), sharey=False) as (figure, axes):
        for axis, (suite, name) in zip(axes[0], PASSES.items(), strict=False):
            _traffic(axis, [row for row in rows if row.suite == suite])
            axis.set_title(f"{name}, 16k tokens, hidden size 2048", fontsize=13)
            axis.set_xlabel("sequence length")
        axes[0][0].set_ylabel("GB from and to HBM")
        axes[0][0].legend(frameon=False, fontsize=9)
        _blocks(axes[0][2], [row for row in rows if row.suite == BLOCKS_SUITE])
        save(figure, path, top=1.0)


def _traffic(axis: Any, rows: Sequence[Row]) -> None:
    """Measured bytes as lines, solid and dashed by head_dim, and the fewest bytes that there could be."""
    if not rows:  # a logarithmic axis of nothing cannot be drawn
        axis.set_axis_off()
        return
    dims = sorted({Workload.parse(row.workload).head_dim for row in rows})
    for impl, title in TITLES.items():
        for dim, style in zip(dims, ("-", "--"), strict=False):
            points = _over_lengths([row for row in rows if row.impl == impl], dim)
            lengths, sizes = [n for n, _ in points], [size for _, size in points]
            axis.plot(lengths, sizes, style, label=f"{title}, heads of {dim}", **line_looks(impl))
    least = {Workload.parse(row.workload).seqlen_k: Workload.parse(row.workload).bytes / 1e9 for row in rows}
    axis.plot(sorted(least), [least[n] for n in sorted(least)], ":", color="black", label="every tensor once")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: length_text(int(value)))


def _over_lengths(rows: Sequence[Row], dim: int) -> list[tuple[int, float]]:
    found = ((Workload.parse(row.workload), hbm_bytes(row)) for row in rows)
    return sorted((w.seqlen_k, moved / 1e9) for w, moved in found if w.head_dim == dim and moved)


def _blocks(axis: Any, rows: Sequence[Row]) -> None:
    """The longest sequence: bytes of L2 beside their model, bytes of HBM, and the time."""
    longest = max((Workload.parse(row.workload) for row in rows), key=lambda w: w.seqlen_k, default=None)
    found = {blocks_of(row.impl): row for row in rows if longest is not None and row.workload == longest.key}
    of_one_n = {m: row for (m, n), row in sorted(found.items()) if n == CHART_BLOCK_N}
    if longest is None or not of_one_n:
        axis.set_axis_off()
        return
    sizes = list(of_one_n)
    model = [tiled_bytes(longest, m) / 1e9 for m in sizes]
    axis.plot(sizes, model, ":", color="black", label="L2 to SMs, model")
    moved = {"L2 to SMs": [row.l2_bytes or 0 for row in of_one_n.values()]}
    moved["HBM"] = [hbm_bytes(row) or 0 for row in of_one_n.values()]
    looks = ({"color": COLORS["flashgen"], "marker": "o"}, {"color": COLORS["sdpa-cudnn"], "marker": "^"})
    for (label, values), look in zip(moved.items(), looks, strict=True):
        axis.plot(sizes, [value / 1e9 for value in values], label=f"{label}, GB", **look)
    axis.plot(sizes, [row.median_ms or 0 for row in of_one_n.values()], "s--", color=COLORS["flex"], label="time, ms")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: str(int(value)))
    axis.set_xlabel(f"block_m (block_n {CHART_BLOCK_N})")
    axis.set_title(f"one head of {longest.head_dim}, {length_text(longest.seqlen_k)} tokens", fontsize=13)
    axis.legend(frameon=False, fontsize=9)
