"""What docs/models.md says of whole models, from the rows of `models_transformers.csv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import provenance, table_row
from benchmarks.results import Row

START, END = "<!-- whole-models:start -->", "<!-- whole-models:end -->"
TITLES = {
    "transformers-llama-3-8b": "Llama-3-8B, 8 of 32 layers",
    "transformers-gpt2": "GPT-2",
    "transformers-bert": "BERT-base",
}
"""Of the suites of `benchmarks.models_transformers`."""

IMPLS = {
    "flashgen": "flashgen",
    "sdpa": "SDPA",
    "flash_attention_2": "FlashAttention-2",
    "flash_attention_3": "FlashAttention-3",
    "eager": "eager",
}
NOTHING = "\nWhole models are **not measured** yet.\n"


def page(devices: Mapping[str, Sequence[Row]]) -> str:
    """The text between the markers, of every device that was measured."""
    parts = []
    for rows in devices.values():
        used = [row for row in rows if row.suite in TITLES]
        parts += ["", _text(used), "", _table(used)] if used else []
    return "".join(f"{line}\n" for line in parts) + "\n" if parts else f"{NOTHING}\n"


def _text(used: Sequence[Row]) -> str:
    failed: dict[str, list[str]] = {}
    for row in used:
        if row.outcome:
            failed.setdefault(row.outcome, []).append(f"{IMPLS[row.impl]} in {TITLES[row.suite]}, {_what(row)}")
    reasons = "; ".join(f"{reason.replace('|', '/')} ({', '.join(cases)})" for reason, cases in failed.items())
    version = used[0].variant.removeprefix("transformers ")
    return (
        "Tokens per second of models with random weights in bf16, the batch's, and of `generate` the new ones behind a "
        f"prompt. {provenance(used, timing=False)} transformers {version}."
        + (f" Without a figure: {reasons}." if reasons else "")
    )


def _table(used: Sequence[Row]) -> str:
    impls = [impl for impl in IMPLS if any(row.impl == impl for row in used)]
    head = ["model", "what", "batch", "tokens", *(IMPLS[impl] for impl in impls), "over SDPA"]
    lines = [table_row(head), table_row(["---", "---", *("---:" for _ in head[2:])])]
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in used:
        cases.setdefault((row.suite, row.workload), {})[row.impl] = row
    for (model, workload), found in cases.items():
        what, batch, seqlen = workload.rsplit("-", 2)
        rates = {impl: row.tokens_per_s for impl, row in found.items() if row.tokens_per_s}
        ratio = f"{rates['flashgen'] / rates['sdpa']:.2f}" if {"flashgen", "sdpa"} <= {*rates} else "-"
        cells = [TITLES[model], what, batch[1:], seqlen[1:]]
        cells += [f"{rates[impl]:,.0f}" if impl in rates else "-" for impl in impls]
        lines.append(table_row([*cells, ratio]))
    return "\n".join(lines)


def _what(row: Row) -> str:
    return row.workload.rsplit("-", 2)[0]
