"""The tables of data.csv: the forward pass on every kind of data, beside the fastest peer on the same data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.markdown import REPOSITORY, image, listed, mean, provenance, table_row
from benchmarks.race_tables import TITLES, Line, lines_of
from benchmarks.results import Row
from benchmarks.suites import DATA_SUITE
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS, HARD_KINDS, NORMAL

SECTION = "Kinds of data"
MINE, BEST = ("flashgen",), tuple(impl for impl in TITLES if impl not in ("flashgen", "flashgen-deterministic"))
"""flashgen, and those of whom the fastest on a workload and its data is what flashgen is held against."""

KEPT = 0.97
"""Of the speed of the fastest peer: what flashgen is to have on any data."""

Kinds = Mapping[str, Sequence[Line]]
"""The workloads of each kind of data."""


def data_parts(device_slug: str, rows: Sequence[Row], charts: Sequence[str]) -> list[str]:
    """The section of the kinds of data, or nothing if none was measured."""
    used = [row for row in rows if row.suite == DATA_SUITE]
    every = {dtype: by_kind(used, dtype) for dtype in dtypes_of(used)}
    if not every:
        return []
    chart = image(charts, f"data_{device_slug}", "Forward pass in TFLOP/s on every kind of data")
    return [f"### {SECTION}", _text(used), *chart, _means(every), *(_details(d, kinds) for d, kinds in every.items())]


def data_sentence(rows: Sequence[Row]) -> list[str]:
    """What README says of data in one paragraph; nothing unless normal and hard data were measured."""
    used = [row for row in rows if row.suite == DATA_SUITE]
    every = [by_kind(used, dtype) for dtype in dtypes_of(used)]
    hard = [name for name in HARD_KINDS if any(name in kinds for kinds in every)]
    mine, theirs = ([ratio for kinds in every for ratio in held(kinds, hard, impls)] for impls in (MINE, BEST))
    normal = [ratio for kinds in every for ratio in ratios(kinds, [NORMAL])]
    beside = [ratio for kinds in every for ratio in ratios(kinds, hard)]
    if not (mine and theirs and normal and beside):
        return []
    every_ratio = [*normal, *beside]
    kept = sum(ratio >= KEPT for ratio in every_ratio)
    return [
        f"On [hard data]({REPOSITORY}/blob/main/docs/benchmarks.md#{_anchor(SECTION)}) flashgen keeps {mean(mine)} of "
        f"its forward speed on normal random numbers (lowest {min(mine):.2f}), the fastest peer {mean(theirs)} (lowest "
        f"{min(theirs):.2f}). Beside it flashgen is at {mean(normal)} on normal and {mean(beside)} on hard data "
        f"(lowest {min(every_ratio):.2f}), and at {KEPT} or above in {kept} of {len(every_ratio)} races."
    ]


def by_kind(rows: Sequence[Row], dtype: str) -> Kinds:
    """The workloads of a dtype on each kind of data that was measured, in the order of `DATA_KINDS`."""
    some = [row for row in rows if row.suite == DATA_SUITE and Workload.parse(row.workload).dtype == dtype]
    found = ((name, lines_of([row for row in some if row.data == name], DATA_SUITE)) for name in DATA_KINDS)
    return {name: lines for name, lines in found if lines}


def dtypes_of(rows: Sequence[Row]) -> list[str]:
    """The dtypes of these rows of data.csv."""
    return sorted({Workload.parse(row.workload).dtype for row in rows if row.suite == DATA_SUITE and row.tflops})


def ratios(kinds: Kinds, names: Iterable[str]) -> list[float]:
    """The speed of flashgen over that of the fastest peer on the same data."""
    lines = (line for name in names for line in kinds.get(name, ()))
    return [ratio for line in lines if (ratio := line.ratio(BEST)) is not None]


def held(kinds: Kinds, names: Iterable[str], impls: Sequence[str]) -> list[float]:
    """The speed of the fastest of `impls` on this data over that of the fastest on normal random numbers."""
    normal = {line.workload: fastest(line, impls) for line in kinds.get(NORMAL, ())}
    pairs = ((fastest(line, impls), normal.get(line.workload)) for name in names for line in kinds.get(name, ()))
    return [mine[1] / usual[1] for mine, usual in pairs if mine is not None and usual is not None]


def fastest(line: Line, impls: Iterable[str]) -> tuple[str, float] | None:
    """The fastest of `impls` on a workload with its TFLOP/s, or None."""
    there = [(impl, line.tflops[impl]) for impl in impls if impl in line.tflops]
    return max(there, key=lambda pair: pair[1], default=None)


def _text(used: Sequence[Row]) -> str:
    meanings = "; ".join(f"`{name}`: {kind.meaning}" for name, kind in DATA_KINDS.items())
    return (
        f"The forward pass on q and k of several kinds ({meanings}): {_extent(used)}, 16k tokens, hidden size 2048 in "
        "whole heads. A cell has the TFLOP/s of flashgen and, behind them, over those of the fastest peer on the same "
        f"data, bold below {KEPT}. All implementations of a workload and a kind take turns in one race, and each is "
        f"compared with float64 on that data before. {provenance(used)}"
    )


def _extent(used: Sequence[Row]) -> str:
    """Which workloads these are."""
    every = [Workload.parse(row.workload) for row in used]
    dims = ", ".join(map(str, sorted({w.head_dim for w in every})))
    lengths = ", ".join(map(str, sorted({w.seqlen_k for w in every})))
    masks = " and ".join("causal" if causal else "no mask" for causal in sorted({w.causal for w in every}))
    return f"{listed(w.dtype for w in every)}, head_dim {dims}, seqlen {lengths}, {masks}"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _means(every: Mapping[str, Kinds]) -> str:
    """A few lines per dtype, a column per kind of data."""
    names = [name for name in DATA_KINDS if any(name in kinds for kinds in every.values())]
    head = ["", *names, "all"]
    table = [table_row(head), table_row(["---", *("---:" for _ in head[1:])])]
    for dtype, kinds in every.items():
        groups = [*([name] for name in names), names]
        table += [table_row([f"{dtype}, {title}", *cells]) for title, cells in _lines(kinds, groups)]
    return "\n".join(table)


def _lines(kinds: Kinds, groups: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    beside = [ratios(kinds, group) for group in groups]
    yield "against the fastest peer, geometric mean", [mean(found) for found in beside]
    yield "lowest", [f"{min(found):.2f}" if found else "-" for found in beside]
    kept = [sum(ratio >= KEPT for ratio in found) for found in beside]
    yield f"at {KEPT} or above", [f"{count} of {len(found)}" for count, found in zip(kept, beside, strict=True)]
    yield "speed of flashgen over that on normal data", [mean(held(kinds, group, MINE)) for group in groups]
    yield "speed of the fastest peer over that on normal data", [mean(held(kinds, group, BEST)) for group in groups]


def _details(dtype: str, kinds: Kinds) -> str:
    lines = {name: {line.workload: line for line in found} for name, found in kinds.items()}
    workloads = list(dict.fromkeys(workload for found in lines.values() for workload in found))
    head = ["head_dim", "seqlen", "causal", *kinds]
    table = [table_row(head), table_row(["---:", "---:", "---", *("---:" for _ in kinds)])]
    for w in workloads:
        shape = [str(w.head_dim), str(w.seqlen_k), "yes" if w.causal else "no"]
        table.append(table_row([*shape, *(_cell(found.get(w)) for found in lines.values())]))
    summary = f"<details><summary>All {len(workloads)} shapes in {dtype}</summary>"
    return "\n\n".join([summary, "\n".join(table), "</details>"])


def _cell(line: Line | None) -> str:
    mine = None if line is None else fastest(line, MINE)
    if line is None or mine is None:
        return "-"
    best, ratio = fastest(line, BEST), line.ratio(BEST)
    if best is None or ratio is None:
        return f"{mine[1]:.0f}"
    text = f"{mine[1]:.0f} ({ratio:.2f} of {TITLES[best[0]]})"
    return text if ratio >= KEPT else f"**{text}**"
