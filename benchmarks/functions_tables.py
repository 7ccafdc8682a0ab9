"""The tables of functions of the caller, from the rows of `functions.csv`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.functions_cases import BACKWARD, BOTH, FORWARD
from benchmarks.markdown import mean, provenance, table_row, variants
from benchmarks.results import Row
from flashgen.core.workload import Workload

HEADINGS = {FORWARD: "forward pass", BACKWARD: "backward pass", BOTH: "forward and backward pass"}
TITLES = {
    "documents": "documents",
    "causal-documents": "causal documents",
    "prefix-lm": "prefix of 1k, causal behind it",
    "relative-bias": "relative bias from a table, causal",
    "softcap-mod": "softcap as score_mod, causal",
    "alibi-mod": "ALiBi as score_mod, causal",
    "documents-unlisted": "documents, no block mask",
    "softcap": "softcap, built in",
    "alibi": "ALiBi, built in",
    "key-mask": "half of the keys are padding, built in",
}
"""What a line says of a function, in the order of the lines."""

NOT_COMPARED = ("documents-unlisted",)
"""Functions that FlexAttention has a block mask for, and flashgen none."""

IMPLS = {
    "flashgen": "flashgen",
    "flex": "FlexAttention",
    "fa4": "FA4",
    "sdpa-cudnn": "SDPA cuDNN",
    "sdpa-masked": "SDPA with a mask",
}


def function_parts(rows: Sequence[Row]) -> list[str]:
    """The sections of the suites that have rows."""
    parts = []
    for suite, heading in HEADINGS.items():
        used = [row for row in rows if row.suite == suite and row.tflops]
        if used:
            parts += [f"### Functions of the caller, {heading}", _text(used), _table(used)]
    return parts


def _found(used: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of each call by implementation; shards of a run leave their calls in any order."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    order = list(TITLES)
    for row in sorted(used, key=lambda row: (order.index(row.function), Workload.parse(row.workload).head_dim)):
        found.setdefault((row.function, row.workload), {})[row.impl] = row
    return found


def _text(used: Sequence[Row]) -> str:
    ratios = [ratio for by_impl in _found(used).values() if (ratio := _ratio(by_impl)) is not None]
    ahead = ""
    if ratios:
        ahead = (
            f" Against FlexAttention: geometric mean {mean(ratios)}, lowest {min(ratios):.2f}, ahead on "
            f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}."
        )
    return (
        "Functions that the caller writes, each in the language of its implementation, in TFLOP/s of the visible pairs "
        "of bf16 calls; documents are eight of mixed lengths. FlexAttention always has a block mask, flashgen where "
        "the line does not say otherwise: such a line shows what one is worth, and is not compared. A peer without a "
        f"figure was not asked or cannot run the row.{ahead}"
        f"{variants(used)} {provenance(used)}"
    )


def _table(used: Sequence[Row]) -> str:
    present = [impl for impl in IMPLS if any(row.impl == impl for row in used)]
    head = ["function", "heads", "head_dim", "seqlen", *(IMPLS[impl] for impl in present), "vs FlexAttention"]
    lines = [table_row(head), table_row(["---", *("---:" for _ in head[1:])])]
    for (function, key), by_impl in _found(used).items():
        w, ratio = Workload.parse(key), _ratio(by_impl)
        heads = str(w.nheads) if w.nheads == w.nheads_k else f"{w.nheads}/{w.nheads_k}"
        cells = [TITLES[function], heads, str(w.head_dim), str(w.seqlen_k)]
        cells += [f"{by_impl[impl].tflops:.0f}" if impl in by_impl else "-" for impl in present]
        lines.append(table_row([*cells, "-" if ratio is None else f"{ratio:.2f}"]))
    return "\n".join(lines)


def _ratio(by_impl: dict[str, Row]) -> float | None:
    """How many times as fast as FlexAttention flashgen is."""
    mine, theirs = by_impl.get("flashgen"), by_impl.get("flex")
    if mine is None or theirs is None or mine.function in NOT_COMPARED:
        return None
    if not mine.median_ms or not theirs.median_ms:
        return None
    return theirs.median_ms / mine.median_ms
