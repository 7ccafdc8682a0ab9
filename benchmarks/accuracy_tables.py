"""The table of distances from float64, from the rows of `accuracy.csv`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.accuracy import SEQLEN, SUITE
from benchmarks.markdown import provenance, table_row
from benchmarks.race_tables import TITLES
from benchmarks.results import Row
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS

MINE = "flashgen"
UNIT = 1e-3
EXACT = 1e-5
"""Below it an error is none of 16 bits: where one key takes all of the weight, outputs are rows of V."""


def accuracy_parts(rows: Sequence[Row]) -> list[str]:
    """The section, or nothing without rows."""
    used = [row for row in rows if row.suite == SUITE]
    if not used:
        return []
    impls = [impl for impl in TITLES if any(row.impl == impl for row in used)]
    head = ["dtype", "data", *(TITLES[impl] for impl in impls), "over the most exact peer", "most"]
    lines = [table_row(head), table_row(["---", "---", *["---:"] * (len(impls) + 2)])]
    for dtype in dict.fromkeys(Workload.parse(row.workload).dtype for row in used):
        for data in DATA_KINDS:
            some = [row for row in used if Workload.parse(row.workload).dtype == dtype and row.data == data]
            if some:
                ratios = over_the_most_exact(some)
                said = [f"{statistics.geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"] if ratios else ["-", "-"]
                lines.append(table_row([dtype, data, *(_mean(some, impl) for impl in impls), *said]))
    text = (
        "The output's relative error in 1e-3: norm of the difference from float64 over the norm of the output, at "
        f"{SEQLEN} queries and keys, head_dim 64 to 256, with and without a causal mask, in the mean over the shapes; "
        "and flashgen's over that of the most exact peer, as a geometric mean and at most. [Why a row is divided by "
        f"the sum of unrounded weights](decisions/row-sums.md). {provenance(used, timing=False)}"
    )
    return ["### Accuracy", text, "\n".join(lines)]


def over_the_most_exact(rows: Iterable[Row]) -> list[float]:
    """Flashgen's error over the least of the peers', of each workload and kind of data where there is any error."""
    errors: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.relative_error is not None:
            errors.setdefault((row.workload, row.data), {})[row.impl] = row.relative_error
    found = []
    for by_impl in errors.values():
        peers = [error for impl, error in by_impl.items() if impl != MINE]
        if MINE in by_impl and peers and max(by_impl.values()) >= EXACT:
            found.append(max(by_impl[MINE], EXACT) / max(min(peers), EXACT))
    return found


def _mean(rows: Sequence[Row], impl: str) -> str:
    errors = [row.relative_error for row in rows if row.impl == impl and row.relative_error is not None]
    return f"{statistics.mean(errors) / UNIT:.2f}" if errors else "-"
