"""The table of random shapes, from the rows of `unseen.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.markdown import mean, provenance, table_row
from benchmarks.race_tables import TITLES
from benchmarks.results import Row

PASSES = {
    "unseen_small": "forward, small",
    "unseen": "forward",
    "unseen_few_queries": "forward, 1 to 16 queries",
    "unseen_backward": "backward",
}
"""What a line says of a suite."""

LISTED = 20
"""Shapes that are listed where a peer is faster, the furthest behind first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One shape: the speed of flashgen over that of the fastest peer. Rates of a file are too coarse for small ones.

    `peer` is the name of an implementation.
    """

    workload: str
    ratio: float
    peer: str


def unseen_parts(rows: Sequence[Row]) -> list[str]:
    """The section, or nothing without rows."""
    suites = {suite: found for suite in PASSES if (found := compared(rows, suite))}
    if not suites:
        return []
    lines = [table_row(["pass", "shapes", "the fastest peer", "lowest", "ahead"]), table_row(["---", *["---:"] * 4])]
    for suite, found in suites.items():
        ratios = [one.ratio for one in found]
        ahead = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        lines.append(table_row([PASSES[suite], str(len(found)), mean(ratios), f"{min(ratios):.2f}", ahead]))
    used = [row for row in rows if row.suite in PASSES and row.median_ms]
    text = (
        "Shapes that a generator drew (`python -m benchmarks.unseen`), in bf16 and fp16: the speed of flashgen over "
        f"that of the fastest peer, as a geometric mean. {provenance(used)}"
    )
    return ["### Random shapes", text, "\n".join(lines), *_behind([one for found in suites.values() for one in found])]


def compared(rows: Sequence[Row], suite: str) -> list[Compared]:
    """The shapes of a suite of which flashgen and a peer have times."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.suite == suite and row.median_ms:
            times.setdefault(row.workload, {})[row.impl] = row.median_ms
    found = []
    for workload, by_impl in times.items():
        own, peers = by_impl.get("flashgen"), {impl: ms for impl, ms in by_impl.items() if impl != "flashgen"}
        if own and peers:
            best = min(peers, key=lambda impl: peers[impl])
            found.append(Compared(workload=workload, ratio=peers[best] / own, peer=best))
    return found


def _behind(every: Sequence[Compared]) -> list[str]:
    behind = sorted((one for one in every if one.ratio < 1), key=lambda one: one.ratio)[:LISTED]
    if not behind:
        return []
    lines = [table_row(["behind a peer", "speed over it", "peer"]), table_row(["---", "---:", "---"])]
    lines += [table_row([f"`{one.workload}`", f"{one.ratio:.2f}", TITLES[one.peer]]) for one in behind]
    return ["\n".join(lines)]
