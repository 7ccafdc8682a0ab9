"""The tables of training: GPT-2 step by step, and what the papers claim beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks import curves
from benchmarks.curves import Curves
from benchmarks.encoder_tables import cell, encoder_claims, encoder_parts, ratio_of, speedup
from benchmarks.markdown import by_workload, image, provenance, table_row
from benchmarks.memory import TRAINING_SUITE, savings
from benchmarks.race_tables import lines_of
from benchmarks.results import Row
from benchmarks.speedup import speedups
from benchmarks.speedup_tables import LONG_CLAIM, LONG_SEQLEN
from benchmarks.suites import BOTH_PASSES
from benchmarks.training_tasks import COMPILED, COMPILED_SUITE, EAGER, EAGER_SUITE, LONG, NOISE, OF_SUITE, REFERENCE
from flashgen.core.workload import Workload

LONG_SUITES = tuple(LONG.suites.values())
MODES = {
    EAGER_SUITE: "eager",
    COMPILED_SUITE: "torch.compile",
    LONG.suites[EAGER]: "eager",
    LONG.suites[COMPILED]: "torch.compile",
}
"""What the suites of GPT-2 run with."""

TITLES = {
    "flashgen": "flashgen",
    "sdpa-flash": "SDPA flash",
    "sdpa-cudnn": "SDPA cuDNN",
    "standard": "standard",
}
STAR = "\\*"
CLAIM_SEQLEN = 1024
"""Of the claim about training GPT-2."""

CLAIM_HEAD_DIM = 64
"""Of GPT-2, and of the figure of FlashAttention's README that shows memory."""


def training_parts(device_slug: str, rows: Sequence[Row], charts: Sequence[str]) -> list[str]:
    """The sections of training, or nothing if it has no rows."""
    used = [row for row in rows if row.suite in MODES]
    parts = []
    if used:
        chart = image(charts, f"training_{device_slug}", "GPT-2 in training")
        parts = ["### Training GPT-2", _text(used), *chart, _table(used)]
    parts += encoder_parts(device_slug, rows, charts)
    if any(row.suite == TRAINING_SUITE for row in rows):
        chart = image(charts, f"training_memory_{device_slug}", "Memory of both passes")
        parts += ["### Memory of both passes", _memory_text(rows), *chart, _memory_table(rows)]
    claims = list(_claims(rows))
    if claims:
        head = [table_row(["the papers' claim", "measured here"]), table_row(["---", "---"])]
        parts += ["### Claims of the papers", "\n".join([*head, *(table_row(claim) for claim in claims)])]
    return parts


def compared(rows: Sequence[Row], losses: Curves, accuracies: Curves) -> list[Row]:
    """The rows, those of training with what the curves say of them."""
    return [
        replace(
            row,
            loss_deviation=_distance(row, losses),
            loss_mean=curves.last_mean(losses.get(row.subject, [])),
            accuracy=curves.last_mean(accuracies.get(row.subject, [])),
        )
        if row.suite in OF_SUITE
        else row
        for row in rows
    ]


def _distance(row: Row, losses: Curves) -> float | None:
    reference = OF_SUITE[row.suite].reference
    if row.impl == reference:
        return None
    return curves.deviation(losses.get(row.subject, []), losses.get((row.suite, row.workload, reference), []))


def _text(used: Sequence[Row]) -> str:
    steps = max(row.steps or 0 for row in used)
    of_long = [row.steps or 0 for row in used if row.suite in LONG_SUITES]
    long = f" (one sequence for {max(of_long)} steps, where it is longer)" if of_long else ""
    return (
        "Training GPT-2 (124M parameters) with `examples/train_gpt2.py`: thousands of tokens per second at the median "
        f"step, 16k tokens a step{long}, causal attention with 12 heads of 64, bf16 autocast, fused AdamW. All train "
        f"from the same weights on the same batches for {steps} steps, or for those that stand beside a "
        f"rate.{_recomputed(used)} The loss column "
        "is flashgen's last; beside it stand the mean distances in nats of flashgen's losses, and of cuDNN's, from "
        "those of SDPA flash. "
        f"{provenance(used)}"
    )


def _recomputed(used: Sequence[Row]) -> str:
    """What a rate marked with a star stands for."""
    if not any(_is_recomputed(row) for row in used):
        return ""
    return (
        f" A rate marked with {STAR} is that of standard attention that computes its scores a second time in the "
        "backward pass (`torch.utils.checkpoint`), because those of all layers do not fit into memory."
    )


def _is_recomputed(row: Row) -> bool:
    return "recomputed" in row.outcome


def _table(used: Sequence[Row]) -> str:
    head = ["seqlen", "mode", *TITLES.values(), "vs standard", "vs better SDPA", "GiB", "GiB, standard", "loss"]
    head += ["flashgen from SDPA flash", "cuDNN from SDPA flash"]
    table = [table_row(head), table_row(["---:", "---", *("---:" for _ in head[2:])])]
    for suite, mode in MODES.items():
        most_steps = max((row.steps or 0 for row in used if row.suite == suite), default=0)
        for workload, by_impl in by_workload(row for row in used if row.suite == suite):
            mine = by_impl.get("flashgen")
            cells = [str(workload.seqlen_k), mode, *(_rate(by_impl.get(impl), most_steps) for impl in TITLES)]
            cells += [ratio_of(by_impl, ("standard",)), ratio_of(by_impl, (REFERENCE, NOISE))]
            cells += [cell(by_impl.get(impl), "peak_gib", ".1f") for impl in ("flashgen", "standard")]
            cells.append(cell(mine, "loss_last", ".4f"))
            cells += [cell(by_impl.get(impl), "loss_deviation", ".2g") for impl in ("flashgen", NOISE)]
            table.append(table_row(cells))
    return "\n".join(table)


def _memory_text(rows: Sequence[Row]) -> str:
    return (
        "Memory of a forward and a backward pass together, in MiB beside q, k, v, the output and the gradients of "
        "these four: one sequence, 16 heads, bf16, no mask. The last column is what the papers compare: all memory of "
        f"standard attention, these tensors included, over that of flashgen. {provenance(_of_memory(rows))}"
    )


def _memory_table(rows: Sequence[Row]) -> str:
    titles = {impl: title for impl, title in TITLES.items() if any(row.impl == impl for row in _of_memory(rows))}
    saved = savings(rows)
    head = ["head_dim", "seqlen", *titles.values(), "standard over flashgen"]
    table = [table_row(head), table_row(["---:"] * len(head))]
    for workload, by_impl in by_workload(_of_memory(rows)):
        cells = [str(workload.head_dim), str(workload.seqlen_k), *(_mib(by_impl.get(impl)) for impl in titles)]
        table.append(table_row([*cells, f"{saved[workload]:.1f}" if workload in saved else "-"]))
    return "\n".join(table)


def _of_memory(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.suite == TRAINING_SUITE]


def _mib(row: Row | None) -> str:
    return "-" if row is None or row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"


def _rate(row: Row | None, most_steps: int) -> str:
    if row is None:
        return "-"
    if not row.tokens_per_s:
        return row.outcome
    cut = f" ({row.steps} steps)" if row.steps != most_steps else ""
    return f"{row.tokens_per_s / 1e3:.0f}{STAR if _is_recomputed(row) else ''}{cut}"


def _claims(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Claims of FlashAttention (Dao et al. 2022 and its README), each with what the rows say of it."""
    faster = [
        f"{ratio:.1f} at {workload.seqlen_k}{' compiled' if suite == COMPILED_SUITE else ''}"
        for suite in MODES
        for workload, by_impl in by_workload(row for row in rows if row.suite == suite)
        if workload.seqlen_k == CLAIM_SEQLEN and (ratio := speedup(by_impl, ("standard",))) is not None
    ]
    if faster:
        yield "GPT-2 trains up to 3 times as fast as with standard attention, at 1k", f"{', '.join(faster)}"
    for suite, mode in MODES.items():
        for workload, by_impl in by_workload(row for row in rows if row.suite == suite and suite in LONG_SUITES):
            if (ratio := speedup(by_impl, (REFERENCE, NOISE))) is not None:
                standard = f"; standard attention: {by_impl['standard'].outcome}" if "standard" in by_impl else ""
                said = f"GPT-2 trains at {workload.seqlen_k}, {ratio:.2f} times the faster SDPA, {mode}{standard}"
                yield "sequences of 64k are trained (Path-256)", said
    yield from encoder_claims(rows)
    ratios = [r for line in lines_of(rows, BOTH_PASSES) if (r := line.ratio(("standard",))) is not None]
    if ratios:
        said = f"{min(ratios):.1f} to {max(ratios):.1f} times over {len(ratios)} shapes, forward and backward"
        yield "attention is 2 to 4 times as fast as standard attention", said
    faster = [
        f"{ratio:.1f} for heads of {w.head_dim}{' causal' if w.causal else ''}"
        for w, ratio in ((Workload.parse(key), ratio) for key, ratio in speedups(rows).items())
        if w.seqlen_k == LONG_SEQLEN
    ]
    if faster:
        claim = f"attention is {LONG_CLAIM[0]} to {LONG_CLAIM[1]} times as fast as standard attention at 16k"
        yield claim, ", ".join(faster)
    saved = {w.seqlen_k: s for w, s in savings(rows).items() if w.head_dim == CLAIM_HEAD_DIM}
    if saved:
        said = ", ".join(f"{saving:.0f} times at {seqlen}" for seqlen, saving in sorted(saved.items()))
        yield "10 times less memory at 2k and 20 times at 4k, forward and backward", f"{said}{_beside(rows)}"


def _beside(rows: Sequence[Row]) -> str:
    """How much both of them hold beside the tensors of the call, at 4k."""
    wanted = ((row, Workload.parse(row.workload)) for row in rows if row.suite == TRAINING_SUITE)
    sizes = {r.impl: r.extra_bytes for r, w in wanted if (w.seqlen_k, w.head_dim) == (4096, CLAIM_HEAD_DIM)}
    mine, theirs = sizes.get("flashgen"), sizes.get("standard")
    if mine is None or theirs is None:
        return ""
    return f"; beside q, k, v, out and gradients {mine / 2**20:.1f} MiB against {theirs / 2**20:.0f} MiB at 4096"
