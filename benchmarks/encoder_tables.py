"""The tables of encoders in training: BERT-large, and a classifier of sequences of 16k pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.curves import LAST
from benchmarks.markdown import by_workload, image, listed, provenance, table_row
from benchmarks.results import Row
from benchmarks.training_tasks import BERT, COMPILED, EAGER, PADDED, PATHS, Task

MODES = {EAGER: "eager", COMPILED: "torch.compile"}
TITLES = {
    "flashgen": "flashgen",
    "sdpa-flash": "SDPA flash",
    "sdpa-cudnn": "SDPA cuDNN",
    "sdpa-efficient": "SDPA efficient",
    "sdpa": "SDPA",
    "flex": "FlexAttention",
    "standard": "standard",
}
"""Attentions of encoders. `sdpa` is what torch chooses."""

KEYS = {BERT.name: "no", PADDED.name: "masked"}
"""What a line of BERT's table says of padding."""

CHANCE = 0.5


def encoder_parts(device_slug: str, rows: Sequence[Row], charts: Sequence[str]) -> list[str]:
    """The sections of encoders, or nothing if they have no rows."""
    parts = []
    used = [row for task in (BERT, PADDED) for row in _of_task(rows, task)]
    if used:
        chart = image(charts, f"bert_{device_slug}", "BERT-large in training")
        parts += ["### Training BERT-large", _bert_text(used), *chart, _bert_table(used)]
    used = _of_task(rows, PATHS)
    if used:
        chart = image(charts, f"paths_{device_slug}", "Classification of sequences of 16k")
        parts += ["### Classifying sequences of 16k pixels", _paths_text(used), *chart, _paths_table(used)]
    return parts


def encoder_claims(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Claims of FlashAttention (Dao et al. 2022) on encoders, each with what the rows say of it."""
    lines = [
        f"{ratio:.2f} times torch's fastest attention, {MODES[mode]}{' and masked keys' if task is PADDED else ''}"
        for task in (BERT, PADDED)
        for mode, by_impl in lines_of(rows, task)
        if (ratio := speedup(by_impl, torchs(by_impl))) is not None
    ]
    if lines:
        yield "BERT-large trains 15% faster than the record of MLPerf 1.1, at 512", "; ".join(lines)
    for mode, by_impl in lines_of(rows, PATHS):
        mine = by_impl.get("flashgen")
        if mine is not None and mine.accuracy is not None and mine.steps:
            peers = [impl for impl in by_impl if impl != "flashgen"]
            ratio, names = speedup(by_impl, peers), listed(TITLES[impl] for impl in peers)
            best = "the fastest of " if len(peers) > 1 else ""
            beside = f", at {ratio:.2f} times the speed of {best}{names}" if ratio else ""
            said = f"{mine.accuracy:.0%} right after {mine.steps} steps of an easier task of this kind{beside}"
            yield "the first transformer better than chance on Path-X (61%), at 16k", f"{said}, {MODES[mode]}"


def lines_of(rows: Sequence[Row], task: Task) -> Iterator[tuple[str, Mapping[str, Row]]]:
    """For each mode that has any, the rows of a task by implementation."""
    for mode, suite in task.suites.items():
        for _, by_impl in by_workload(row for row in rows if row.suite == suite):
            yield mode, by_impl


def torchs(by_impl: Mapping[str, Row]) -> list[str]:
    """What PyTorch has of its own: all but flashgen and standard attention."""
    return [impl for impl in by_impl if impl not in ("flashgen", "standard")]


def speedup(by_impl: Mapping[str, Row], others: Sequence[str]) -> float | None:
    """The speed of flashgen over that of the fastest of `others`."""
    mine = by_impl.get("flashgen")
    theirs = [rate for impl in others if impl in by_impl and (rate := by_impl[impl].tokens_per_s)]
    return mine.tokens_per_s / max(theirs) if mine and mine.tokens_per_s and theirs else None


def _of_task(rows: Sequence[Row], task: Task) -> list[Row]:
    return [row for row in rows if row.suite in task.suites.values()]


def _bert_text(used: Sequence[Row]) -> str:
    chosen = listed(row.outcome.rpartition(", ")[2] for row in used if row.impl == "sdpa" and row.tokens_per_s)
    choice = f" SDPA without a name is what torch chooses: {chosen}." if chosen else ""
    return (
        "Training BERT-large (335M parameters) with `examples/train_bert.py`: thousands of tokens per second at the "
        "median step, 64 sequences of 512 tokens a step, 15% of them masked, 16 heads of 64, bf16 autocast, fused "
        "AdamW, no dropout. With masked keys a sequence is a function or a class of Python's sources, padded to 512: "
        "tokens of padding count, and no implementation packs sequences. All train from the same weights on the same "
        f"batches.{choice} The loss columns are those of GPT-2's table; with masked keys the reference is SDPA "
        f"efficient, since SDPA flash takes no mask. {provenance(used)}"
    )


def _bert_table(used: Sequence[Row]) -> str:
    titles = {impl: title for impl, title in TITLES.items() if any(row.impl == impl for row in used)}
    head = ["keys", "mode", "steps", *titles.values(), "vs best of torch", "vs standard", "GiB", "loss"]
    head += ["flashgen from the reference", "cuDNN from the reference"]
    table = [table_row(head), table_row(["---", "---", *("---:" for _ in head[2:])])]
    for task in (BERT, PADDED):
        for mode, by_impl in lines_of(used, task):
            steps = max(row.steps or 0 for row in by_impl.values())
            cells = [KEYS[task.name], MODES[mode], str(steps), *(_rate(by_impl.get(impl), steps) for impl in titles)]
            cells += [ratio_of(by_impl, torchs(by_impl)), ratio_of(by_impl, ("standard",))]
            mine = by_impl.get("flashgen")
            cells += [cell(mine, "peak_gib", ".1f"), cell(mine, "loss_last", ".4f")]
            cells += [cell(by_impl.get(impl), "loss_deviation", ".2g") for impl in ("flashgen", task.noise)]
            table.append(table_row(cells))
    return "\n".join(table)


def _paths_text(used: Sequence[Row]) -> str:
    return (
        "Training a small encoder (4 layers, 4 heads of 64) with `examples/train_paths.py`: 8 images of 128 x 128 "
        "pixels a step, each read as a sequence of 16384, and whether two dots lie on one dashed path. This is of the "
        "kind of Path-X and not as hard: an image whose dots lie on one path has no other path, so that the amount of "
        "ink tells the answer, while Path-X hides it among distractors and takes far longer to learn. "
        f"{_learnt(used)} {provenance(used)}"
    )


def _learnt(used: Sequence[Row]) -> str:
    """What the accuracies say, beside what guessing would give."""
    found = [row for row in used if row.accuracy is not None and row.steps]
    if not found:
        return ""
    images = PATHS.workload.batch * min(LAST, *(row.steps or 0 for row in found))
    spread = 2 * math.sqrt(CHANCE * (1 - CHANCE) / images)
    least = min(row.accuracy for row in found if row.accuracy is not None)
    verdict = "beyond chance" if least > CHANCE + spread else "not beyond chance"
    return (
        f"Loss and accuracy are means over the last {images // PATHS.workload.batch} steps, {images} images that no "
        f"step saw before: guessing gives {CHANCE:.0%} with two standard deviations of {spread:.0%}, so what was "
        f"learnt in this time is {verdict}."
    )


def _paths_table(used: Sequence[Row]) -> str:
    head = ["attention", "mode", "steps", "steps/s", "tokens/s", "GiB", "loss", "right"]
    table = [table_row(head), table_row(["---", "---", *("---:" for _ in head[2:])])]
    for mode, by_impl in lines_of(used, PATHS):
        for impl, title in TITLES.items():
            row = by_impl.get(impl)
            if row is None:
                continue
            rate = f"{1e3 / row.median_ms:.1f}" if row.median_ms else row.outcome
            right = "-" if row.accuracy is None else f"{row.accuracy:.1%}"
            cells = [title, MODES[mode], str(row.steps or 0), rate, cell(row, "tokens_per_s", ".0f")]
            cells += [cell(row, "peak_gib", ".1f"), cell(row, "loss_mean", ".4f"), right]
            table.append(table_row(cells))
    return "\n".join(table)


def _rate(row: Row | None, steps: int) -> str:
    if row is None:
        return "-"
    if not row.tokens_per_s:
        return row.outcome
    cut = f" ({row.steps} steps)" if row.steps != steps else ""
    return f"{row.tokens_per_s / 1e3:.1f}{cut}"


def ratio_of(by_impl: Mapping[str, Row], others: Sequence[str]) -> str:
    """`speedup` as a cell."""
    ratio = speedup(by_impl, others)
    return "-" if ratio is None else f"{ratio:.2f}"


def cell(row: Row | None, field: str, form: str) -> str:
    """A number of a row as a cell."""
    value = None if row is None else getattr(row, field)
    return "-" if value is None else format(value, form)
