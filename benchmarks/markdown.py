"""Pieces of text that all tables of the results are made of."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.results import Row
from flashgen.core.workload import Workload

REPOSITORY = "https://github.com/flashgen/flashgen"
"""As `project.urls` of pyproject.toml has it (a test compares)."""

RAW = REPOSITORY.replace("//github.com", "//raw.githubusercontent.com") + "/main"
"""Before the path of a file whose bytes a page shows, such as a chart."""

VERSIONED = (("sdpa-cudnn", "cuDNN"), ("fa3", "FA3"), ("fa4", "FA4"))
"""Implementations that have a version of their own, beside torch's."""


def table_row(cells: Iterable[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def listed(values: Iterable[str]) -> str:
    """Each value once, in order: `a, b and c`."""
    *others, last = sorted({value for value in values if value}) or [""]
    return f"{', '.join(others)} and {last}" if others else last


def image(charts: Sequence[str], stem: str, text: str) -> list[str]:
    """The chart with this stem, if there is one."""
    return [f"![{text}]({path})" for path in charts if path.endswith(f"/{stem}.png")]


def speedup(by_impl: dict[str, Row], impl: str) -> float | None:
    """How many times as fast as another implementation flashgen is, None where one of them has no time."""
    mine, theirs = by_impl.get("flashgen"), by_impl.get(impl)
    if mine is None or theirs is None or not mine.median_ms or not theirs.median_ms:
        return None
    return theirs.median_ms / mine.median_ms


def mean(ratios: Sequence[float]) -> str:
    """The geometric mean."""
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"


def provenance(rows: Sequence[Row], *, timing: bool = True) -> str:
    """Where and with what these rows were measured; `timing` adds how the times of races were taken."""
    parts = [f"torch {listed(row.torch for row in rows)}", f"Triton {listed(row.triton for row in rows)}"]
    for impl, name in VERSIONED:
        version = listed(row.version for row in rows if row.impl == impl)
        parts += [f"{name} {version}"] if version else []
    parts += [f"commit {listed(row.commit for row in rows)}", _days(rows)]
    return f"Measured on {rows[0].device} with {', '.join(parts)}.{_timing(rows) if timing else ''}"


def _days(rows: Sequence[Row]) -> str:
    first, last = min(row.date for row in rows), max(row.date for row in rows)
    return first if first == last else f"{first} to {last}"


def _timing(rows: Sequence[Row]) -> str:
    """How the times of races were taken, where the rows say so."""
    counts = Counter(row.timing for row in rows if row.tflops)
    if not counts or "" in counts:
        return ""
    said = f" Device times from CUDA graphs in {counts['graph']} rows"
    return f"{said} and from queued calls in {counts['queue']}." if counts["queue"] else f"{said}."


def variants(rows: Sequence[Row], impl: str = "flex", title: str = "FlexAttention") -> str:
    """A sentence with a space before it: which variants raced, on how many workloads; empty where it had none."""
    found = Counter(row.variant or "default" for row in rows if row.impl == impl and row.median_ms)
    if not set(found) - {"default"}:
        return ""
    said = ", ".join(f"`{name}` on {count}" for name, count in found.most_common())
    return f" {title} raced with the fastest of its variants: {said}."


def by_workload(rows: Iterable[Row]) -> list[tuple[Workload, dict[str, Row]]]:
    """The rows of each workload by implementation, in the order of the file."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.workload, {})[row.impl] = row
    return [(Workload.parse(key), by_impl) for key, by_impl in found.items()]
