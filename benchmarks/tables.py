"""The tables of docs/benchmarks.md, from the rows of the results files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.accuracy_tables import accuracy_parts
from benchmarks.data_tables import data_parts
from benchmarks.decode_tables import decode_parts
from benchmarks.dropout_tables import dropout_parts
from benchmarks.functions_tables import function_parts
from benchmarks.io_tables import io_parts
from benchmarks.markdown import by_workload, image, mean, provenance, speedup, table_row, variants
from benchmarks.memory import MEMORY_SUITE, fit_of
from benchmarks.model_tables import model_parts
from benchmarks.race_tables import RACES, TITLES, race_parts
from benchmarks.regressions_tables import regressions_parts
from benchmarks.results import Row
from benchmarks.speedup_tables import speedup_parts
from benchmarks.training_tables import training_parts
from benchmarks.unseen_tables import unseen_parts
from benchmarks.varlen_tables import varlen_parts
from flashgen.core.feature_words import describe
from flashgen.core.workload import Workload

FEATURES_SUITE, WINDOW_SUITE = "features", "window"
FEATURE_PEERS = {
    **{impl: TITLES[impl] for impl in ("flex", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4")},
    "sdpa-masked": "SDPA with a mask",
}
MEMORY_HELD = ("flashgen", "flex", "sdpa-masked")
"""Implementations whose memory is in the table of features: the others hold what a kernel needs and no mask."""

LOADS = {"pointer": "pointers", "descriptor": "descriptors", "hopper": "Hopper family"}
"""What ends the names of cases of `overhead`: kinds of loads of the portable family, and another family."""

MEMORY_TITLES = {
    "flashgen": "flashgen",
    "flashgen-lse": "flashgen with LSE",
    "sdpa-flash": "SDPA flash",
    "standard": "standard attention",
}


def block(device_slug: str, rows: Sequence[Row], *, charts: Sequence[str]) -> str:
    """All tables and charts of one device.

    Args:
        device_slug: the folder of the results, which is in the names of the charts.
        rows: of all its files.
        charts: the file names of charts that there are, relative to the page.
    """
    parts = [f"## {rows[0].device}"]
    for suite in RACES:
        parts += race_parts(device_slug, rows, suite, charts)
    parts += data_parts(device_slug, rows, charts)
    parts += accuracy_parts(rows)
    parts += unseen_parts(rows)
    parts += regressions_parts(rows)
    parts += training_parts(device_slug, rows, charts)
    parts += model_parts(rows)
    parts += decode_parts(rows)
    parts += varlen_parts(rows)
    if any(row.suite == FEATURES_SUITE for row in rows):
        parts += ["### Features", _features_text(rows), _features_table(rows)]
    parts += function_parts(rows)
    parts += dropout_parts(rows)
    if any(row.suite == WINDOW_SUITE for row in rows):
        parts += ["### Sliding windows", _window_text(rows)]
    if any(row.suite == MEMORY_SUITE for row in rows):
        chart = image(charts, f"memory_{device_slug}", "Memory against sequence length")
        parts += ["### Memory of the forward pass", _memory_text(rows), *chart]
    parts += speedup_parts(rows)
    parts += io_parts(device_slug, rows, charts)
    if any(row.suite == "overhead" for row in rows):
        parts += ["### Host time", _overhead_text(rows)]
    return "\n\n".join(parts) + "\n"


def _features_text(rows: Sequence[Row]) -> str:
    used = [row for row in rows if row.suite == FEATURES_SUITE]
    ratios = [ratio for _, by_impl in by_workload(used) if (ratio := speedup(by_impl, "flex")) is not None]
    ahead = ""
    if ratios:
        ahead = (
            f" Against FlexAttention: geometric mean {mean(ratios)}, lowest {min(ratios):.2f}, ahead on "
            f"{sum(r > 1 for r in ratios)} of {len(ratios)}."
        )
    return (
        "Features, in TFLOP/s of the visible pairs, with the MiB that a call holds beside inputs and output: bf16, 16k "
        "tokens. A peer without a figure cannot run the row. `sdpa-masked` is scaled_dot_product_attention with all it "
        "needs in one mask tensor, which counts where the user would have to build it."
        f"{ahead}{variants(used)} {provenance(used)}"
    )


def _features_table(rows: Sequence[Row]) -> str:
    lines = by_workload(row for row in rows if row.suite == FEATURES_SUITE)
    impls = ["flashgen", *(impl for impl in FEATURE_PEERS if any(impl in by_impl for _, by_impl in lines))]
    held = [impl for impl in MEMORY_HELD if impl in impls]
    titles = {"flashgen": "flashgen", **FEATURE_PEERS}
    head = ["features", "heads", "head_dim", "seqlen", *(titles[impl] for impl in impls)]
    head += ["vs FlexAttention", "vs fastest", *(f"MiB, {titles[impl]}" for impl in held)]
    table = [table_row(head), table_row(["---", *("---:" for _ in head[1:])])]
    for w, by_impl in lines:
        heads = str(w.nheads) if w.nheads == w.nheads_k else f"{w.nheads}/{w.nheads_k}"
        dims = str(w.head_dim) if w.head_dim == w.head_dim_v else f"{w.head_dim}/{w.head_dim_v}"
        found = [by_impl.get(impl) for impl in impls]
        cells = [describe(w), heads, dims, str(w.seqlen_k)]
        cells += ["-" if row is None or not row.tflops else f"{row.tflops:.0f}" for row in found]
        ratios = [ratio for impl in impls[1:] if (ratio := speedup(by_impl, impl)) is not None]
        ratio = speedup(by_impl, "flex")
        cells += ["-" if ratio is None else f"{ratio:.2f}", f"{min(ratios):.2f}" if ratios else "-"]
        sizes = [row.extra_bytes if (row := by_impl.get(impl)) is not None else None for impl in held]
        table.append(table_row([*cells, *("-" if size is None else f"{size / 2**20:.1f}" for size in sizes)]))
    return "\n".join(table)


def _window_text(rows: Sequence[Row]) -> str:
    """What a window costs against the pairs that it leaves visible."""
    used = [row for row in rows if row.suite == WINDOW_SUITE]
    timed = ((w, by_impl["flashgen"]) for w, by_impl in by_workload(used) if "flashgen" in by_impl)
    lines = [(w, row.median_ms, row.tflops) for w, row in timed if row.median_ms and row.tflops]
    lines.sort(key=lambda line: line[0].visible_pairs)
    table = [
        "Causal sliding windows over 16k tokens, 16 heads of 128. The last column is time per visible pair, over that "
        f"of the widest window: at 1.00 hidden pairs cost nothing. {provenance(used)}",
        "",
        table_row(["window_left", "visible pairs, share of causal", "ms", "TFLOP/s", "time per visible pair"]),
        table_row(["---:"] * 5),
    ]
    for w, ms, tflops in lines:
        causal = replace(w, window_left=None)
        width = "unlimited" if w.window_left is None else str(w.window_left)
        share = w.visible_pairs / causal.visible_pairs
        table.append(table_row([width, f"{share:.1%}", f"{ms:.3f}", f"{tflops:.0f}", f"{lines[-1][2] / tflops:.2f}"]))
    return "\n".join(table)


def _memory_text(rows: Sequence[Row]) -> str:
    fits = ((title, fit_of(rows, impl)) for impl, title in MEMORY_TITLES.items())
    said = [f"{title} {fit.bytes_per_token:.0f}" for title, fit in fits if fit is not None and fit.r2 > 0.999]
    text = f"Memory beside inputs and output, in bytes per token of a sequence with 16 heads: {', '.join(said)}."
    return text + _largest(rows)


def _largest(rows: Sequence[Row]) -> str:
    """How much standard attention holds at the longest sequence that it can do."""
    sizes = [
        (Workload.parse(row.workload).seqlen_k, row.extra_bytes)
        for row in rows
        if row.suite == MEMORY_SUITE and row.impl == "standard" and row.extra_bytes is not None
    ]
    return f" Standard attention holds {max(sizes)[1] / 2**30:.1f} GiB at {max(sizes)[0]} tokens." if sizes else ""


def _overhead_text(rows: Sequence[Row]) -> str:
    """Host time per call; a case with every kind of kernel in one line, a table for each workload."""
    rows = [row for row in rows if row.suite == "overhead"]
    tables = [
        _overhead_table([row for row in rows if row.workload == workload])
        for workload in dict.fromkeys(row.workload for row in rows)
    ]
    return "\n\n".join(tables)


def _overhead_table(used: Sequence[Row]) -> str:
    times = {row.impl: row.median_ms * 1e3 for row in used if row.median_ms}
    table = [
        f"Host time of one call of `{used[0].workload}`, whose kernel is shorter than that. {provenance(used)}",
        "",
        table_row(["call", "us"]),
        table_row(["---", "---:"]),
    ]
    for name in dict.fromkeys(_case(impl) for impl in times):
        found = {kind: times[f"{name}/{kind}"] for kind in LOADS if f"{name}/{kind}" in times}
        label = f" ({', '.join(LOADS[kind] for kind in found)})" if found else ""
        shown = found.values() if found else [times[name]]
        table.append(table_row([f"`{name}`{label}", ", ".join(f"{us:.1f}" for us in shown)]))
    return "\n".join(table)


def _case(impl: str) -> str:
    name, _, kind = impl.rpartition("/")
    return name if kind in LOADS else impl
