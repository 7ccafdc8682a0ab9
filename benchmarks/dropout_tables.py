"""The table of dropout, from the rows of `dropout.csv`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.encoder_tables import cell
from benchmarks.markdown import by_workload, provenance, table_row
from benchmarks.results import Row

SUITE = "dropout"
WITHOUT, WITH, FLASH = "flashgen", "flashgen-dropout", "sdpa-flash-dropout"
PEERS = {FLASH: "SDPA flash", "sdpa-efficient-dropout": "SDPA efficient"}


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
    heads = ["pass", "batch", "seqlen", "d", "causal", "without", "flashgen", *PEERS.values(), "over flash"]
    lines = [table_row(heads), table_row(["---"] * 5 + ["---:"] * (len(heads) - 5))]
    for w, by_impl in by_workload(used):
        cells = [w.direction, str(w.batch), str(w.seqlen_q), str(w.head_dim), "yes" if w.causal else "no"]
        cells += [cell(by_impl.get(impl), "median_ms", ".3f") for impl in (WITHOUT, WITH, *PEERS)]
        own, flash = (row and row.median_ms for row in map(by_impl.get, (WITH, FLASH)))
        lines.append(table_row([*cells, f"{flash / own:.2f}" if own and flash else "-"]))
    return "\n".join(lines)
