"""The text that README shows between its benchmark markers, from the rows of the results files alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.memory import MEMORY_SUITE, fit_of, speedups
from benchmarks.results import Row
from flashgen.core.features import describe
from flashgen.core.workload import Workload

SUITE, FEATURES_SUITE, WINDOW_SUITE = "forward", "features", "window"
TITLES = {
    "flashgen": "flashgen",
    "flex": "FlexAttention",
    "sdpa-flash": "SDPA flash",
    "sdpa-cudnn": "SDPA cuDNN",
    "fa3": "FA3",
    "standard": "standard",
}
"""Implementations in the order of the columns: first those in plain Triton, then those in CUDA."""

GOAL = ("flex", "sdpa-flash")
"""What plain Triton is to be ahead of: FlexAttention is plain Triton too, and SDPA flash is FlashAttention-2."""

FEATURE_PEERS = {"flex": "FlexAttention", "sdpa-masked": "SDPA with a mask", "fa3": "FA3"}

MEMORY_TITLES = {
    "flashgen": "flashgen",
    "flashgen-lse": "flashgen with LSE",
    "sdpa-flash": "SDPA flash",
    "standard": "standard attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One workload of the forward table: TFLOP/s by implementation."""

    workload: Workload
    tflops: dict[str, float]

    def ratio(self, others: Sequence[str]) -> float | None:
        """The speed of flashgen over that of the fastest of `others`; None if either is missing."""
        theirs = [self.tflops[name] for name in others if name in self.tflops]
        mine = self.tflops.get("flashgen")
        return mine / max(theirs) if mine and theirs else None


def forward_lines(rows: Iterable[Row]) -> list[Line]:
    """The forward suite's workloads, by head_dim, mask and length."""
    by_workload: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.suite == SUITE and row.tflops:
            by_workload.setdefault(row.workload, {})[row.impl] = row.tflops
    lines = [Line(workload=Workload.parse(key), tflops=tflops) for key, tflops in by_workload.items()]
    return sorted(lines, key=lambda line: (line.workload.head_dim, line.workload.causal, line.workload.seqlen_k))


def present(lines: Sequence[Line]) -> list[str]:
    """The implementations that have a time, in the order of the columns."""
    return [impl for impl in TITLES if any(impl in line.tflops for line in lines)]


def block(device_slug: str, rows: Sequence[Row], *, charts: Sequence[str]) -> str:
    """Everything that README says of one device.

    Args:
        device_slug: the folder of the results, which is in the names of the charts.
        rows: of all its files, those that belong together.
        charts: the file names of charts that there are, relative to README.
    """
    parts = [f"### {rows[0].device}"]
    lines = forward_lines(rows)
    if lines:
        parts += [_forward_text(rows, lines), *_image(charts, f"forward_{device_slug}", "Forward pass in TFLOP/s")]
        parts += [_means(lines), _table(lines)]
    if any(row.suite == FEATURES_SUITE for row in rows):
        parts += [_features_text(rows), _features_table(rows)]
    if any(row.suite == WINDOW_SUITE for row in rows):
        parts += [_window_text(rows)]
    if any(row.suite == MEMORY_SUITE for row in rows):
        parts += [_memory_text(rows), *_image(charts, f"memory_{device_slug}", "Memory against sequence length")]
    if any(row.suite == "overhead" for row in rows):
        parts.append(_overhead_text(rows))
    return "\n\n".join(parts) + "\n"


def _forward_text(rows: Sequence[Row], lines: Sequence[Line]) -> str:
    used = [row for row in rows if row.suite == SUITE]
    return (
        "Forward pass in TFLOP/s: bf16, 16k tokens, hidden size 2048 (batch 16384 / seqlen, heads 2048 / head_dim). "
        "Medians of sustained windows; all implementations take turns in one process; flashgen serves generated "
        f"kernels only. {_provenance(used)}"
    )


def _provenance(rows: Sequence[Row]) -> str:
    versions = {impl: _listed(row.impl_version for row in rows if row.impl == impl) for impl in ("sdpa-cudnn", "fa3")}
    parts = [f"torch {_listed(row.torch for row in rows)}", f"Triton {_listed(row.triton for row in rows)}"]
    parts += [f"{name} {versions[impl]}" for impl, name in (("sdpa-cudnn", "cuDNN"), ("fa3", "FA3")) if versions[impl]]
    parts += [f"commit {_listed(row.commit for row in rows)}", _listed(row.date for row in rows)]
    return f"Measured on {rows[0].device} with {', '.join(parts)}."


def _listed(values: Iterable[str]) -> str:
    return " and ".join(sorted({value for value in values if value}))


def _image(charts: Sequence[str], stem: str, text: str) -> list[str]:
    return [f"![{text}]({path})" for path in charts if path.endswith(f"/{stem}.png")]


def _means(lines: Sequence[Line]) -> str:
    """Geometric means of the ratios, per head_dim and over all."""
    goals = (
        ("the better of FlexAttention and SDPA flash", GOAL),
        *((TITLES[i], (i,)) for i in TITLES if i != "flashgen"),
    )
    dims = sorted({line.workload.head_dim for line in lines})
    head = [f"head_dim {dim}" for dim in dims] + ["all", "lowest", "ahead on"]
    table = [_row(["flashgen against, geometric mean", *head]), _row(["---", *("---:" for _ in head)])]
    for name, impls in goals:
        ratios = [(line.workload.head_dim, ratio) for line in lines if (ratio := line.ratio(impls)) is not None]
        if ratios:
            cells = [_mean([ratio for dim, ratio in ratios if dim == wanted]) for wanted in dims]
            every = [ratio for _, ratio in ratios]
            cells += [_mean(every), f"{min(every):.2f}", f"{sum(r > 1 for r in every)} of {len(every)}"]
            table.append(_row([name, *cells]))
    return "\n".join(table)


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"


def _table(lines: Sequence[Line]) -> str:
    impls = present(lines)
    last = ["vs better of Flex, SDPA flash", "vs cuDNN"]
    head = ["head_dim", "seqlen", "causal", *(TITLES[impl] for impl in impls), *last]
    table = [_row(head), _row(["---:", "---:", "---", *("---:" for _ in head[3:])])]
    for line in lines:
        w = line.workload
        cells = [str(w.head_dim), str(w.seqlen_k), "yes" if w.causal else "no"]
        cells += [f"{line.tflops[impl]:.0f}" if impl in line.tflops else "-" for impl in impls]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in (line.ratio(GOAL), line.ratio(["sdpa-cudnn"]))]
        table.append(_row(cells))
    return "\n".join(table)


def _features_text(rows: Sequence[Row]) -> str:
    used = [row for row in rows if row.suite == FEATURES_SUITE]
    ratios = [ratio for _, by_impl in _by_workload(used) if (ratio := _speedup(by_impl, "flex")) is not None]
    ahead = ""
    if ratios:
        ahead = (
            f" Against FlexAttention: geometric mean {_mean(ratios)}, lowest {min(ratios):.2f}, ahead on "
            f"{sum(r > 1 for r in ratios)} of {len(ratios)}."
        )
    return (
        "Features, in TFLOP/s of the visible pairs, with the MiB that a call holds beside inputs and output: bf16, 16k "
        "tokens. A peer without a figure cannot run the row. `sdpa-masked` is scaled_dot_product_attention with all it "
        f"needs in one mask tensor, which counts where the user would have to build it.{ahead} {_provenance(used)}"
    )


def _features_table(rows: Sequence[Row]) -> str:
    head = ["features", "heads", "head_dim", "seqlen", "flashgen", "MiB"]
    for title in FEATURE_PEERS.values():
        head += [title, "MiB"]
    table = [_row([*head, "vs FlexAttention"]), _row(["---", *("---:" for _ in head)])]
    for workload, by_impl in _by_workload(row for row in rows if row.suite == FEATURES_SUITE):
        w = workload
        heads = str(w.nheads) if w.nheads == w.nheads_k else f"{w.nheads}/{w.nheads_k}"
        dims = str(w.head_dim) if w.head_dim == w.head_dim_v else f"{w.head_dim}/{w.head_dim_v}"
        cells = [describe(w), heads, dims, str(w.seqlen_k)]
        for impl in ("flashgen", *FEATURE_PEERS):
            row = by_impl.get(impl)
            size = row.extra_bytes if row is not None else None
            cells.append("-" if row is None or not row.tflops else f"{row.tflops:.0f}")
            cells.append("-" if size is None else f"{size / 2**20:.1f}")
        ratio = _speedup(by_impl, "flex")
        table.append(_row([*cells, "-" if ratio is None else f"{ratio:.2f}"]))
    return "\n".join(table)


def _window_text(rows: Sequence[Row]) -> str:
    """What a window costs against the pairs that it leaves visible."""
    used = [row for row in rows if row.suite == WINDOW_SUITE]
    lines = [(w, by_impl["flashgen"]) for w, by_impl in _by_workload(used) if "flashgen" in by_impl]
    table = [
        "Causal sliding windows over 16k tokens, 16 heads of 128: time follows the visible pairs.",
        "",
        _row(["window_left", "visible pairs, share of causal", "ms", "TFLOP/s"]),
        _row(["---:"] * 4),
    ]
    for w, row in sorted(lines, key=lambda line: line[0].visible_pairs):
        causal = replace(w, window_left=None)
        width = "unlimited" if w.window_left is None else str(w.window_left)
        share = w.visible_pairs / causal.visible_pairs
        table.append(_row([width, f"{share:.1%}", f"{row.median_ms:.3f}", f"{row.tflops:.0f}"]))
    return "\n".join(table)


def _by_workload(rows: Iterable[Row]) -> list[tuple[Workload, dict[str, Row]]]:
    """The rows of each workload by implementation, in the order of the file."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.workload, {})[row.impl] = row
    return [(Workload.parse(key), by_impl) for key, by_impl in found.items()]


def _speedup(by_impl: dict[str, Row], peer: str) -> float | None:
    """How many times as fast as `peer` flashgen is."""
    mine, theirs = by_impl.get("flashgen"), by_impl.get(peer)
    if mine is None or theirs is None or not mine.median_ms or not theirs.median_ms:
        return None
    return theirs.median_ms / mine.median_ms


def _memory_text(rows: Sequence[Row]) -> str:
    fits = ((title, fit_of(rows, impl)) for impl, title in MEMORY_TITLES.items())
    said = [f"{title} {fit.bytes_per_token:.0f}" for title, fit in fits if fit is not None and fit.r2 > 0.999]
    text = f"Memory beside inputs and output, in bytes per token of a sequence with 16 heads: {', '.join(said)}."
    text += _largest(rows)
    ratios = [
        f"{ratio:.1f} at {w.seqlen_k}{' causal' if w.causal else ''}"
        for w, ratio in sorted(
            ((Workload.parse(key), ratio) for key, ratio in speedups(rows).items()),
            key=lambda item: (item[0].seqlen_k, item[0].causal),
        )
    ]
    return f"{text} Speed-up over standard attention (head_dim 128): {', '.join(ratios)}." if ratios else text


def _largest(rows: Sequence[Row]) -> str:
    """How much standard attention holds at the longest sequence that it can do."""
    sizes = [
        (Workload.parse(row.workload).seqlen_k, row.extra_bytes)
        for row in rows
        if row.suite == MEMORY_SUITE and row.impl == "standard" and row.extra_bytes is not None
    ]
    return f" Standard attention holds {max(sizes)[1] / 2**30:.1f} GiB at {max(sizes)[0]} tokens." if sizes else ""


def _overhead_text(rows: Sequence[Row]) -> str:
    """Host time per call; both kinds of loads of a flashgen case in one line."""
    times = {row.impl: row.median_ms * 1e3 for row in rows if row.suite == "overhead" and row.median_ms}
    used = [row for row in rows if row.suite == "overhead"]
    table = [
        f"Host time of one call of `{used[0].workload}`, whose kernel is shorter than that. {_provenance(used)}",
        "",
        _row(["call", "us"]),
        _row(["---", "---:"]),
    ]
    for name in dict.fromkeys(_case(impl) for impl in times):
        both = [f"{times[impl]:.1f}" for impl in times if _case(impl) == name]
        table.append(_row([f"`{name}`{' (pointers, descriptors)' if len(both) > 1 else ''}", ", ".join(both)]))
    return "\n".join(table)


def _case(impl: str) -> str:
    return impl.removesuffix("/pointer").removesuffix("/descriptor")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
