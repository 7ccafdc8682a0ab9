"""The tables of the races over the papers' grid: forward, backward, and both passes together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.markdown import image, listed, mean, provenance, table_row, variants
from benchmarks.results import Row
from benchmarks.suites import BACKWARD_SUITE, BOTH_PASSES, FP16_SUITE
from flashgen.core.workload import Workload

FORWARD_SUITE = "forward"
RACES = {
    FORWARD_SUITE: "Forward pass",
    FP16_SUITE: "Forward pass in fp16",
    BACKWARD_SUITE: "Backward pass",
    BOTH_PASSES: "Forward and backward pass together",
}
"""Suites by what their tables are called."""

DETAILS = {
    FORWARD_SUITE: "",
    FP16_SUITE: "",
    BACKWARD_SUITE: " Operations of a backward pass count as 2.5 times those of the forward pass.",
    BOTH_PASSES: " Called through autograd as in training; operations count as 3.5 times those of the forward pass.",
}

TITLES = {
    "flashgen": "flashgen",
    "flashgen-deterministic": "flashgen, deterministic",
    "flex": "FlexAttention",
    "sdpa-flash": "SDPA flash",
    "sdpa-cudnn": "SDPA cuDNN",
    "fa3": "FA3",
    "fa4": "FA4",
    "standard": "standard",
}
"""Implementations in the order of the columns: first those in Triton, then those in CUDA."""

GOAL = ("flex", "sdpa-flash")
"""The usual ways to attention in torch: FlexAttention in its fastest variant, and SDPA flash (FlashAttention-2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One workload of a table: TFLOP/s by implementation."""

    workload: Workload
    tflops: dict[str, float]

    def ratio(self, others: Sequence[str]) -> float | None:
        """The speed of flashgen over that of the fastest of `others`; None if either is missing."""
        theirs = [self.tflops[name] for name in others if name in self.tflops]
        mine = self.tflops.get("flashgen")
        return mine / max(theirs) if mine and theirs else None


def lines_of(rows: Iterable[Row], suite: str) -> list[Line]:
    """The workloads of one suite, by head_dim, mask and length."""
    by_workload: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.suite == suite and row.tflops:
            by_workload.setdefault(row.workload, {})[row.impl] = row.tflops
    lines = [Line(workload=Workload.parse(key), tflops=tflops) for key, tflops in by_workload.items()]
    return sorted(lines, key=lambda line: (line.workload.head_dim, line.workload.causal, line.workload.seqlen_k))


def present(lines: Sequence[Line]) -> list[str]:
    """The implementations that have a time, in the order of the columns."""
    return [impl for impl in TITLES if any(impl in line.tflops for line in lines)]


def race_parts(device_slug: str, rows: Sequence[Row], suite: str, charts: Sequence[str]) -> list[str]:
    """The section of one suite, or nothing if it has no rows."""
    lines = lines_of(rows, suite)
    if not lines:
        return []
    every = _table(lines)
    if suite != FORWARD_SUITE:
        every = f"<details><summary>All {len(lines)} shapes</summary>\n\n{every}\n\n</details>"
    chart = image(charts, f"{suite}_{device_slug}", f"{RACES[suite]} in TFLOP/s")
    return [f"### {RACES[suite]}", _text(rows, suite), *chart, _means(lines), every]


def _text(rows: Sequence[Row], suite: str) -> str:
    used = [row for row in rows if row.suite == suite]
    dtypes = listed(Workload.parse(row.workload).dtype for row in used)
    return (
        f"{RACES[suite]} in TFLOP/s: {dtypes}, 16k tokens, hidden size 2048 (batch 16384 / seqlen, "
        f"heads 2048 / head_dim).{DETAILS[suite]} "
        "Medians of sustained windows; all implementations take turns in one process; flashgen serves generated "
        f"kernels only.{variants(used)} {provenance(used)}"
    )


def _means(lines: Sequence[Line]) -> str:
    """Geometric means of the ratios, per head_dim and over all."""
    goals = (
        ("the better of FlexAttention and SDPA flash", GOAL),
        *((TITLES[i], (i,)) for i in TITLES if i != "flashgen"),
    )
    dims = sorted({line.workload.head_dim for line in lines})
    head = [f"head_dim {dim}" for dim in dims] + ["all", "lowest", "ahead on"]
    table = [table_row(["flashgen against, geometric mean", *head]), table_row(["---", *("---:" for _ in head)])]
    for name, impls in goals:
        ratios = [(line.workload.head_dim, ratio) for line in lines if (ratio := line.ratio(impls)) is not None]
        if ratios:
            cells = [mean([ratio for dim, ratio in ratios if dim == wanted]) for wanted in dims]
            every = [ratio for _, ratio in ratios]
            cells += [mean(every), f"{min(every):.2f}", f"{sum(r > 1 for r in every)} of {len(every)}"]
            table.append(table_row([name, *cells]))
    return "\n".join(table)


def _table(lines: Sequence[Line]) -> str:
    impls = present(lines)
    last = ["vs better of Flex, SDPA flash", "vs cuDNN"]
    head = ["head_dim", "seqlen", "causal", *(TITLES[impl] for impl in impls), *last]
    table = [table_row(head), table_row(["---:", "---:", "---", *("---:" for _ in head[3:])])]
    for line in lines:
        w = line.workload
        cells = [str(w.head_dim), str(w.seqlen_k), "yes" if w.causal else "no"]
        cells += [f"{line.tflops[impl]:.0f}" if impl in line.tflops else "-" for impl in impls]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in (line.ratio(GOAL), line.ratio(["sdpa-cudnn"]))]
        table.append(table_row(cells))
    return "\n".join(table)
