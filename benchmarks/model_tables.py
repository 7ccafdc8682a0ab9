"""The tables of attention as models run it: speed beside others, and what a sliding window costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.markdown import by_workload, mean, provenance, table_row, variants
from benchmarks.race_tables import TITLES, Line, lines_of, present
from benchmarks.results import Row
from benchmarks.suites import MODELS
from flashgen.core.feature_words import feature_words
from flashgen.core.workload import Workload

PEERS = tuple(impl for impl in TITLES if impl not in ("flashgen", "flashgen-deterministic", "standard"))
"""Whoever is fastest among them is what flashgen is held against."""

BLOCK = 128
"""Side of the blocks of scores in which the visible part of a window is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """A workload with a window beside the same without one.

    `shares` is the time of each implementation, `blocks` the number of visible blocks, both over those without it.
    """

    title: str
    workload: Workload
    shares: dict[str, float]
    blocks: float


def model_parts(rows: Sequence[Row]) -> list[str]:
    """The section of the models, or nothing if none was measured."""
    used = [row for row in rows if row.suite in MODELS]
    lines = {name: found for name in MODELS if (found := lines_of(used, name))}
    if not lines:
        return []
    count = sum(map(len, lines.values()))
    table = f"<details><summary>All {count} workloads of models</summary>\n\n{_table(lines)}\n\n</details>"
    parts = ["### Models", _text(used), _means(lines), table]
    windows = list(_windows(used))
    return [*parts, _window_table(windows)] if windows else parts


def visible_blocks(workload: Workload, block: int = BLOCK) -> int:
    """Blocks of `block` queries and as many keys in which mask and window leave a score visible, of one head."""
    w, found = workload, 0
    right = 0 if w.causal else w.window_right
    for start in range(0, w.seqlen_q, block):
        first = start + w.seqlen_k - w.seqlen_q
        last = min(start + block, w.seqlen_q) - 1 + w.seqlen_k - w.seqlen_q
        low = 0 if w.window_left is None else max(0, first - w.window_left)
        high = w.seqlen_k - 1 if right is None else min(w.seqlen_k - 1, last + right)
        found += high // block - low // block + 1 if low <= high else 0
    return found


def _text(used: Sequence[Row]) -> str:
    reasons = "; ".join(_reasons(used))
    return (
        "Attention as models run it (prefill, image and cross attention), raced as the forward pass is. "
        f"{provenance(used)}{variants(used)}"
        + (f" A peer without a figure cannot run the row: {reasons}." if reasons else "")
    )


def _reasons(used: Sequence[Row]) -> Iterator[str]:
    """For each implementation the reasons of its rows without a time, each with the number of rows."""
    for impl in TITLES:
        counts: dict[str, int] = {}
        for row in used:
            if row.impl == impl and row.outcome:
                counts[row.outcome] = counts.get(row.outcome, 0) + 1
        said = ", ".join(f"{_plain(reason)} ({count})" for reason, count in counts.items())
        if said:
            yield f"{TITLES[impl]}: {said}"


def _plain(reason: str) -> str:
    """Text that ends no table and starts no markup."""
    return reason.rstrip(".").replace("|", "/").replace("<", "").replace(">", "").replace("`", "")


def _means(lines: dict[str, list[Line]]) -> str:
    """Geometric means of the ratios of each model and of all, against the best peer and against each."""
    every = [line for found in lines.values() for line in found]
    peers = [impl for impl in present(every) if impl in PEERS]
    head = ["flashgen against, geometric mean", "rows", "the best of them", "lowest", *(TITLES[impl] for impl in peers)]
    table = [table_row(head), table_row(["---", *("---:" for _ in head[1:])])]
    for title, some in [*((MODELS[name], found) for name, found in lines.items()), ("all", every)]:
        best = _ratios(some, PEERS)
        cells = [title, str(len(some)), mean(best), f"{min(best):.2f}" if best else "-"]
        table.append(table_row([*cells, *(mean(_ratios(some, (impl,))) for impl in peers)]))
    return "\n".join(table)


def _ratios(lines: Sequence[Line], others: Sequence[str]) -> list[float]:
    return [ratio for line in lines if (ratio := line.ratio(others)) is not None]


def _table(lines: dict[str, list[Line]]) -> str:
    every = [line for found in lines.values() for line in found]
    impls = [impl for impl in present(every) if impl == "flashgen" or impl in PEERS]
    head = ["model", "features", "batch", "heads", "head_dim", "seqlen", *(TITLES[impl] for impl in impls)]
    table = [table_row([*head, "vs best"]), table_row(["---", "---", *("---:" for _ in head[1:])])]
    for name, found in lines.items():
        for line in found:
            cells = [MODELS[name], *_shape(line.workload)]
            cells += [f"{line.tflops[impl]:.0f}" if impl in line.tflops else "-" for impl in impls]
            ratio = line.ratio(PEERS)
            table.append(table_row([*cells, "-" if ratio is None else f"{ratio:.2f}"]))
    return "\n".join(table)


def _shape(w: Workload) -> list[str]:
    """Features (with the dtype where it is not bf16), batch, heads, head_dim and lengths; pairs where they differ."""
    words = [*feature_words(w), *([] if w.dtype == "bf16" else [w.dtype])]
    pairs = ((w.nheads, w.nheads_k), (w.head_dim, w.head_dim_v), (w.seqlen_q, w.seqlen_k))
    return [", ".join(words), str(w.batch), *(str(a) if a == b else f"{a}/{b}" for a, b in pairs)]


def _windows(used: Sequence[Row]) -> Iterator[Windowed]:
    """The windows that flashgen was timed with, where it was timed without them as well."""
    found = dict(by_workload(used))
    for workload, by_impl in found.items():
        full = replace(workload, window_left=None, window_right=None)
        if full == workload or full not in found:
            continue
        times = {
            impl: (row.median_ms, found[full][impl].median_ms) for impl, row in by_impl.items() if impl in found[full]
        }
        shares = {impl: mine / whole for impl, (mine, whole) in times.items() if mine and whole}
        if "flashgen" in shares:
            blocks = visible_blocks(workload) / visible_blocks(full)
            yield Windowed(title=MODELS[by_impl["flashgen"].suite], workload=workload, shares=shares, blocks=blocks)


def _window_table(windows: Sequence[Windowed]) -> str:
    """The time of a window beside the share of its visible blocks."""
    others = [impl for impl in PEERS if any(impl in each.shares for each in windows)]
    head = ["model", "window_left", "seqlen", "visible blocks", "time, flashgen", "time per visible block, flashgen"]
    head += [f"time, {TITLES[impl]}" for impl in others]
    table = [
        f"What a sliding window costs: visible blocks of {BLOCK} by {BLOCK} scores, and time, as shares of those "
        "without the window. Where the time per visible block is 1.00, hidden blocks cost nothing.",
        "",
        table_row(head),
        table_row(["---", *("---:" for _ in head[1:])]),
    ]
    for each in windows:
        w, shares, mine = each.workload, each.shares, each.shares["flashgen"]
        cells = [each.title, str(w.window_left), str(w.seqlen_k), f"{each.blocks:.1%}", f"{mine:.1%}"]
        cells.append(f"{mine / each.blocks:.2f}")
        cells += [f"{shares[impl]:.1%}" if impl in shares else "-" for impl in others]
        table.append(table_row(cells))
    return "\n".join(table)
