"""The tables of packed sequences, from the rows of `varlen.csv` and `packed_training.csv`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.markdown import provenance, table_row
from benchmarks.results import Row
from benchmarks.varlen_cases import PAGED_SUITE, SUITE, TRAINING_SUITE
from flashgen.core.workload import Workload

STEPS_SUITE = "packed_gpt2"
TITLES = {
    "flashgen": "flashgen",
    "flashgen-dense": "dense",
    "flashgen-mask": "mask_mod",
    "torch-varlen": "torch varlen_attn",
    "flex": "FlexAttention",
    "sdpa-padded": "SDPA padded",
    "fa3": "FA3",
    "fa4": "FA4",
}
HEADINGS = {SUITE: "forward pass", TRAINING_SUITE: "forward and backward pass", PAGED_SUITE: "over pages"}


def varlen_parts(rows: Sequence[Row]) -> list[str]:
    """The section of packed sequences, or nothing if it has no rows."""
    parts = []
    for suite, heading in HEADINGS.items():
        used = [row for row in rows if row.suite == suite and row.median_ms]
        if used:
            parts += [f"### Packed sequences, {heading}", _text(used), _table(used)]
    steps = [row for row in rows if row.suite == STEPS_SUITE and row.tokens_per_s]
    return [*parts, "### Packed GPT-2", _steps(steps)] if steps else parts


def _text(used: Sequence[Row]) -> str:
    masked = (
        "`mask_mod` is flashgen's dense call on all rows as one sequence, whose function and block mask hide other "
        "documents. "
    )
    return (
        "Packed sequences in bf16: TFLOP/s of the pairs that the lengths leave visible, so that padding counts as no "
        "work. `dense` is flashgen's kernel for sequences of one length with as many visible pairs a row, without "
        f"packing. {masked if any(row.impl == 'flashgen-mask' for row in used) else ''}{provenance(used)}"
    )


def _table(used: Sequence[Row]) -> str:
    present = [impl for impl in TITLES if any(row.impl == impl for row in used)]
    found: dict[str, dict[str, Row]] = {}
    for row in used:
        found.setdefault(row.workload, {})[row.impl] = row
    heads = ["sequences, rows", "lengths", "heads", "d", "causal", *(TITLES[impl] for impl in present)]
    lines = [table_row(heads), table_row(["---"] * len(heads))]
    for key, by_impl in found.items():
        w = Workload.parse(key)
        rows = f"{w.batch}, {w.total_q}" + ("" if w.total_k == w.total_q else f" over {w.total_k}")
        rows += "" if w.page_size is None else f" in pages of {w.page_size}"
        cells = [rows, f"{w.lengths} to {w.seqlen_q}", f"{w.nheads}/{w.nheads_k}", str(w.head_dim)]
        cells += ["yes" if w.causal else "no", *(_rate(by_impl.get(impl)) for impl in present)]
        lines.append(table_row(cells))
    return "\n".join(lines)


def _rate(row: Row | None) -> str:
    return "-" if row is None or row.tflops is None else f"{row.tflops:.0f}"


def _steps(rows: Sequence[Row]) -> str:
    lines = [table_row(["attention", "tokens/s", "ms a step", "GiB"]), table_row(["---"] * 4)]
    for row in rows:
        memory = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        ms = "-" if row.median_ms is None else f"{row.median_ms:.1f}"
        lines.append(table_row([row.impl, f"{row.tokens_per_s:.0f}", ms, memory]))
    return "\n".join(
        [f"`examples/packed_gpt2.py`, documents packed to 16384 tokens a step. {provenance(rows)}", "", *lines]
    )
