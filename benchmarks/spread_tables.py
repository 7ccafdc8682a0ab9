"""What docs/attention.md says of repeats of one backward pass, from the rows of `spread.csv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import provenance, table_row
from benchmarks.results import Row
from benchmarks.spread import SUITE
from flashgen.codegen.families import family
from flashgen.core.workload import Workload

START, END = "<!-- spread:start -->", "<!-- spread:end -->"
HEAD = (
    "family",
    "head_dim",
    "seqlen",
    "causal",
    "elements of dq",
    "largest",
    "mean",
    "largest, share of its error",
    "mean, share of its error",
    "mean ulps",
)


def page(devices: Mapping[str, Sequence[Row]]) -> str:
    """The text between the markers, of every device that was measured."""
    parts = []
    for rows in devices.values():
        used = [row for row in rows if row.suite == SUITE]
        varying = [row for row in used if not family(row.impl).is_deterministic]
        if varying:
            parts += ["", _text(used, varying), "", _table(varying), ""]
    return "".join(f"{line}\n" for line in parts)


def _text(used: Sequence[Row], varying: Sequence[Row]) -> str:
    fixed = [row for row in used if family(row.impl).is_deterministic]
    changed = sum((row.differing or 0) > 0 for row in fixed)
    others = sum(row.others_differing or 0 for row in used)
    return (
        f"{max(row.repeats or 0 for row in used)} equal calls of each backward family with its default config, one "
        f"sequence, 16 heads, bf16. The families that sum in a fixed order "
        f"({', '.join(dict.fromkeys(f'`{row.impl}`' for row in fixed))}) gave other bits in {changed} of {len(fixed)} "
        f"shapes; {others} elements of dk and dv differed in all families together. Where dq is summed by atomics, "
        f"equal calls lie up to {max(row.spread_max or 0 for row in varying):.1e} of the largest |dq| apart, which is "
        f"{percent(_most(varying, 'max'))} of the largest rounding error that one call has against a float64 oracle; "
        f"in the mean over all elements {percent(_most(varying, 'mean'))} of the mean error at most. {provenance(used)}"
    )


def percent(share: float) -> str:
    """Whole percents, or two digits of less than ten: few elements differ, and by little."""
    return f"{share:.0%}" if share >= 0.1 else f"{float(f'{100 * share:.2g}'):g}%"


def _most(rows: Sequence[Row], which: str) -> float:
    return max(_share(row, which) for row in rows)


def _share(row: Row, which: str) -> float:
    """A spread over the error of one call."""
    spread, error = getattr(row, f"spread_{which}"), getattr(row, f"error_{which}")
    return spread / error if error else 0.0


def _table(varying: Sequence[Row]) -> str:
    lines = [table_row(HEAD), table_row(["---", *("---:" for _ in HEAD[1:])])]
    for row in varying:
        w = Workload.parse(row.workload)
        cells = [f"`{row.impl}`", str(w.head_dim), str(w.seqlen_k), "yes" if w.causal else "no"]
        cells += [percent(row.differing or 0.0), f"{row.spread_max:.1e}", f"{row.spread_mean:.1e}"]
        cells += [percent(_share(row, "max")), percent(_share(row, "mean")), f"{row.ulps_mean:.1e}"]
        lines.append(table_row(cells))
    return "\n".join(lines)
