"""The table that README shows between its markers: flashgen against each peer, one line a group of workloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.markdown import by_workload, image, mean, provenance, table_row
from benchmarks.race_tables import FORWARD_SUITE, RACES, TITLES, Line, lines_of
from benchmarks.results import Row
from benchmarks.suites import BACKWARD_SUITE, BOTH_PASSES, MODELS
from benchmarks.tables import FEATURE_PEERS, FEATURES_SUITE
from benchmarks.training_tables import MODES
from benchmarks.training_tasks import BERT, PADDED

PEERS = {
    **{impl: title for impl, title in TITLES.items() if not impl.startswith("flashgen")},
    "sdpa-masked": FEATURE_PEERS["sdpa-masked"],
}
"""Every implementation that is not flashgen's own, and the title of its column."""

ANY_SDPA = ("sdpa", "sdpa-efficient")
"""What stands under SDPA with a mask: what torch chooses, and the backend that it is likely to be. Without a mask its
choice is one of the backends that have a column."""

PASSES = {FORWARD_SUITE: "Forward", BACKWARD_SUITE: "Backward", BOTH_PASSES: "Both passes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Workloads that share a line: for each of them the speed of every implementation, in whatever unit."""

    title: str
    speeds: Sequence[Mapping[str, float]]

    def ratios(self, peers: Iterable[str]) -> list[float]:
        """The speed of flashgen over that of the fastest of `peers`, where both have one."""
        peers = tuple(peers)
        pairs = ((by_impl.get("flashgen"), [by_impl[p] for p in peers if p in by_impl]) for by_impl in self.speeds)
        return [mine / max(theirs) for mine, theirs in pairs if mine and theirs]


def summary(device_slug: str, rows: Sequence[Row], *, charts: Sequence[str]) -> str:
    """What README says of one device: a chart of the forward pass, the table, and where it was measured.

    Args:
        device_slug: the folder of the results, which is in the names of the charts.
        rows: of all its files.
        charts: the addresses of the charts that there are.
    """
    found = [group for group in groups(rows) if group.ratios(PEERS)]
    if not found:
        return ""
    suites = {*RACES, *MODELS, *MODES, *BERT.suites.values(), *PADDED.suites.values(), FEATURES_SUITE}
    parts = [
        *image(charts, f"{FORWARD_SUITE}_{device_slug}", f"{RACES[FORWARD_SUITE]} in TFLOP/s on {rows[0].device}"),
        _table(found),
        provenance([row for row in rows if row.suite in suites]),
    ]
    return "\n\n".join(parts) + "\n"


def groups(rows: Sequence[Row]) -> Iterator[Group]:
    """The lines of the table: the races per head_dim, then models, single features and training."""
    for suite, title in PASSES.items():
        lines = lines_of(rows, suite)
        for dim in sorted({line.workload.head_dim for line in lines}):
            some = [line for line in lines if line.workload.head_dim == dim]
            yield Group(title=f"{title}, head_dim {dim}", speeds=_tflops(some))
    yield Group(title="Layers of models", speeds=_tflops([line for name in MODELS for line in lines_of(rows, name)]))
    yield Group(title="Single features", speeds=_tflops(lines_of(rows, FEATURES_SUITE)))
    yield Group(title="GPT-2 training, tokens/s", speeds=list(_tokens_per_s(rows, MODES)))
    bert = [*BERT.suites.values(), *PADDED.suites.values()]
    yield Group(title="BERT-large training, tokens/s", speeds=list(_tokens_per_s(rows, bert)))


def _tflops(lines: Sequence[Line]) -> list[Mapping[str, float]]:
    return [line.tflops for line in lines]


def _tokens_per_s(rows: Sequence[Row], suites: Iterable[str]) -> Iterator[Mapping[str, float]]:
    for suite in suites:
        for workload, by_impl in by_workload(row for row in rows if row.suite == suite):
            speeds: dict[str, float] = {}
            for impl, row in by_impl.items():
                peer = "sdpa-masked" if workload.mask and impl in ANY_SDPA else impl
                if row.tokens_per_s:
                    speeds[peer] = max(row.tokens_per_s, speeds.get(peer, 0.0))
            yield speeds


def _table(found: Sequence[Group]) -> str:
    """Geometric means; the first two columns are against whichever peer is fastest on each workload."""
    peers = [peer for peer in PEERS if any(group.ratios((peer,)) for group in found)]
    head = [
        "speed of flashgen over that of",
        "workloads",
        "the fastest peer",
        "lowest",
        *(PEERS[peer] for peer in peers),
    ]
    table = [table_row(head), table_row(["---", *("---:" for _ in head[1:])])]
    for group in found:
        best = group.ratios(PEERS)
        cells = [group.title, str(len(best)), mean(best), f"{min(best):.2f}"]
        table.append(table_row([*cells, *(mean(group.ratios((peer,))) for peer in peers)]))
    return "\n".join(table)
