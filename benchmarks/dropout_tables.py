"""The table of dropout, from the rows of `dropout.csv`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.markdown import provenance, table_row
from benchmarks.results import Row
from flashgen.core.workload import Workload

SUITE = "dropout"
WITHOUT, WITH = "flashgen", "flashgen-dropout"
PEERS = {"sdpa-flash-dropout": "SDPA flash", "sdpa-efficient-dropout": "SDPA efficient"}


def dropout_parts(rows: Sequence[Row]) -> list[str]:
    """The section of dropout, or nothing if it has no rows."""
    used = [row for row in rows if row.suite == SUITE and row.median_ms]
    return ["### Dropout", _text(used), _table(used)] if used else []


def _text(used: Sequence[Row]) -> str:
    return (
        "Times in ms of calls with `dropout_p=0.1`, and of flashgen's without it: bf16, 16k tokens, 16 heads; medians "
        "of calls that follow one another in a queue. The last column is the speed of flashgen over that of SDPA's "
        f"flash backend, both with dropout. {provenance(used)}"
    )


def _table(used: Sequence[Row]) -> str:
    found: dict[str, dict[str, float]] = {}
    for row in used:
        if row.median_ms is not None:
            found.setdefault(row.workload, {})[row.impl] = row.median_ms
    heads = ["pass", "batch", "seqlen", "d", "causal", "without", "flashgen", *PEERS.values(), "over flash"]
    lines = [table_row(heads), table_row(["---"] * 5 + ["---:"] * (len(heads) - 5))]
    for key, times in found.items():
        w = Workload.parse(key)
        cells = [w.direction, str(w.batch), str(w.seqlen_q), str(w.head_dim), "yes" if w.causal else "no"]
        cells += [_milliseconds(times.get(impl)) for impl in (WITHOUT, WITH, *PEERS)]
        own, flash = times.get(WITH), times.get(next(iter(PEERS)))
        lines.append(table_row([*cells, f"{flash / own:.2f}" if own and flash else "-"]))
    return "\n".join(lines)


def _milliseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.3f}"
