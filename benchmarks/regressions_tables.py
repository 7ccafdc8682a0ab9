"""The table of shapes that were behind once, from the rows of `regressions.csv`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.impls import EFFICIENT
from benchmarks.markdown import mean, provenance, table_row
from benchmarks.race_tables import TITLES
from benchmarks.regressions import BACKWARD_SUITE, FORWARD_SUITE
from benchmarks.results import Row
from benchmarks.unseen_tables import compared
from flashgen.core.workload import Workload

PEERS = {**TITLES, EFFICIENT.name: "SDPA efficient"}
PASSES = {FORWARD_SUITE: "forward", BACKWARD_SUITE: "backward"}
DTYPES = {"fp32": "float32", "fp16": "fp16", "bf16": "bf16"}


def regressions_parts(rows: Sequence[Row]) -> list[str]:
    """The section, or nothing without rows."""
    found = [(suite, one) for suite in PASSES for one in compared(rows, suite)]
    if not found:
        return []
    times = {(row.suite, row.workload): row.median_ms for row in rows if row.impl == "flashgen"}
    head = [
        "pass",
        "dtype",
        "batch",
        "heads",
        "head_dim",
        "queries x keys",
        "causal",
        "ms",
        "fastest peer",
        "speed over it",
    ]
    lines = [table_row(head), table_row(["---", "---", *["---:"] * 4, "---", "---:", "---", "---:"])]
    for suite, one in found:
        w = Workload.parse(one.workload)
        heads = str(w.nheads) if w.nheads == w.nheads_k else f"{w.nheads}/{w.nheads_k}"
        cells = [PASSES[suite], DTYPES[w.dtype], str(w.batch), heads, str(w.head_dim), f"{w.seqlen_q} x {w.seqlen_k}"]
        cells += ["yes" if w.causal else "no", f"{times[suite, one.workload]:.4f}", PEERS[one.peer], f"{one.ratio:.2f}"]
        lines.append(table_row(cells))
    ratios = [one.ratio for _, one in found]
    text = (
        "Shapes of no other table, on which flashgen was behind a peer once (`python -m benchmarks.regressions`): "
        f"geometric mean {mean(ratios)} of the fastest peer, lowest {min(ratios):.2f}, ahead on "
        f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}. "
        f"{provenance([row for row in rows if row.suite in PASSES and row.median_ms])}"
    )
    return ["### Shapes that were behind once", text, "\n".join(lines)]
