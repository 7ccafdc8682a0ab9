"""The table that README shows between its markers: flashgen against each peer, one line a group of workloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.data_tables import data_sentence
from benchmarks.markdown import by_workload, image, mean, provenance, table_row
from benchmarks.race_tables import FORWARD_SUITE, RACES, TITLES, Line, lines_of
from benchmarks.results import Row
from benchmarks.suites import BACKWARD_SUITE, BOTH_PASSES, DATA_SUITE, FP16_SUITE, MODELS
from benchmarks.tables import FEATURE_PEERS, FEATURES_SUITE
from benchmarks.training_tables import MODES
from benchmarks.training_tasks import BERT, PADDED
from flashgen.core.feature_words import feature_words
from flashgen.core.workload import Workload

PEERS = {
    **{impl: title for impl, title in TITLES.items() if not impl.startswith("flashgen")},
    "sdpa-masked": FEATURE_PEERS["sdpa-masked"],
}
"""Every implementation that is not flashgen's own, and the title of its column."""

ANY_SDPA = ("sdpa", "sdpa-efficient")
"""What stands under SDPA with a mask: what torch chooses, and the backend that it is likely to be. Without a mask its
choice is one of the backends that have a column."""

PASSES = {
    FORWARD_SUITE: "Forward",
    BACKWARD_SUITE: "Backward",
    BOTH_PASSES: "Both passes",
}

LEVEL = 0.02
"""Of two runs of one kernel, the times differ by as much: a peer that is ahead by less is level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The fastest peer on one workload; `ratio` is the speed of flashgen over its."""

    workload: Workload
    impl: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Workloads that share a line: for each of them the speed of every implementation, in whatever unit."""

    title: str
    speeds: Sequence[tuple[Workload, Mapping[str, float]]]

    def rivals(self, peers: Iterable[str]) -> list[Rival]:
        """The fastest of `peers` on each workload where flashgen and one of them have a speed."""
        peers, found = tuple(peers), []
        for workload, by_impl in self.speeds:
            mine, theirs = by_impl.get("flashgen"), {peer: by_impl[peer] for peer in peers if peer in by_impl}
            if mine and theirs:
                best = max(theirs, key=lambda peer: theirs[peer])
                found.append(Rival(workload=workload, impl=best, ratio=mine / theirs[best]))
        return found

    def ratios(self, peers: Iterable[str]) -> list[float]:
        """The speed of flashgen over that of the fastest of `peers`, where both have one."""
        return [rival.ratio for rival in self.rivals(peers)]


def summary(device_slug: str, rows: Sequence[Row], *, charts: Sequence[str]) -> str:
    """What README says of one device: a chart of the forward pass, the table, data, and where it was measured.

    Args:
        device_slug: the folder of the results, which is in the names of the charts.
        rows: of all its files.
        charts: the addresses of the charts that there are.
    """
    found = [group for group in groups(rows) if group.ratios(PEERS)]
    if not found:
        return ""
    suites = {*RACES, *MODELS, *MODES, *BERT.suites.values(), *PADDED.suites.values(), FEATURES_SUITE, DATA_SUITE}
    parts = [
        *image(charts, f"{FORWARD_SUITE}_{device_slug}", f"{RACES[FORWARD_SUITE]} in TFLOP/s on {rows[0].device}"),
        _table(found),
        _standing(found),
        *data_sentence(rows),
        provenance([row for row in rows if row.suite in suites], timing=False),
    ]
    return "\n\n".join(parts) + "\n"


def groups(rows: Sequence[Row]) -> Iterator[Group]:
    """The lines of the table: the races per head_dim, fp16, then models, single features and training."""
    for suite, title in PASSES.items():
        lines = lines_of(rows, suite)
        for dim in sorted({line.workload.head_dim for line in lines}):
            some = [line for line in lines if line.workload.head_dim == dim]
            yield Group(title=f"{title}, head_dim {dim}", speeds=_tflops(some))
    yield Group(title="Forward, fp16", speeds=_tflops(lines_of(rows, FP16_SUITE)))
    yield Group(title="Layers of models", speeds=_tflops([line for name in MODELS for line in lines_of(rows, name)]))
    yield Group(title="Single features", speeds=_tflops(lines_of(rows, FEATURES_SUITE)))
    yield Group(title="GPT-2 training, tokens/s", speeds=list(_tokens_per_s(rows, MODES)))
    bert = [*BERT.suites.values(), *PADDED.suites.values()]
    yield Group(title="BERT-large training, tokens/s", speeds=list(_tokens_per_s(rows, bert)))


def _tflops(lines: Sequence[Line]) -> list[tuple[Workload, Mapping[str, float]]]:
    return [(line.workload, line.tflops) for line in lines]


def _tokens_per_s(rows: Sequence[Row], suites: Iterable[str]) -> Iterator[tuple[Workload, Mapping[str, float]]]:
    for suite in suites:
        for workload, by_impl in by_workload(row for row in rows if row.suite == suite):
            speeds: dict[str, float] = {}
            for impl, row in by_impl.items():
                peer = "sdpa-masked" if workload.mask and impl in ANY_SDPA else impl
                if row.tokens_per_s:
                    speeds[peer] = max(row.tokens_per_s, speeds.get(peer, 0.0))
            yield workload, speeds


def _standing(found: Sequence[Group]) -> str:
    """On how many workloads flashgen is ahead of every peer, and where one of them is ahead of it."""
    rivals = [(group.title, rival) for group in found for rival in group.rivals(PEERS)]
    ahead = sum(rival.ratio > 1 for _, rival in rivals)
    behind = [(title, rival) for title, rival in rivals if rival.ratio < 1 - LEVEL]
    level = len(rivals) - ahead - len(behind)
    text = f"flashgen is the fastest on {ahead} of {len(rivals)} workloads"
    text += f" and within {LEVEL:.0%} of the fastest on {level} more." if level else "."
    if not behind:
        return text
    places: dict[str, list[float]] = {}
    for title, rival in behind:
        words = ", ".join((title, *feature_words(rival.workload)))
        places.setdefault(f"{words}: {PEERS[rival.impl]}", []).append(rival.ratio)
    said = "; ".join(f"{where} ({' to '.join(_ends(ratios))})" for where, ratios in places.items())
    return f"{text} A peer is ahead by more than {LEVEL:.0%} on {len(behind)}: {said}."


def _ends(ratios: Sequence[float]) -> list[str]:
    """The smallest and the largest of them, in text, once if they are the same."""
    return list(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))


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
