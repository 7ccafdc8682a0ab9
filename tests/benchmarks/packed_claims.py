"""Checks of what the pages say of packed sequences, by the rows of `varlen.csv`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from benchmarks.packed_tiles import filled, rates_beside_dense
from benchmarks.results import Row
from benchmarks.varlen_cases import PAGED_SUITE, SUITE, TRAINING_SUITE
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.runtime.lookup.records import Records

Check = Callable[[re.Match[str], Sequence[Row]], list[str]]
OURS = ("flashgen", "flashgen-dense", "flashgen-mask")

PEERS = {
    SUITE: {"fa3": "fa", "fa4": "fa", "flex": "flex", "sdpa-padded": "flex", "torch-varlen": "torch"},
    TRAINING_SUITE: {"fa4": "fa4", "flex": "fa4", "sdpa-padded": "fa4", "torch-varlen": "trained"},
}
"""Of each suite, the group of the sentence that says on how many batches a peer has a row."""


def speeds_of(rows: Sequence[Row], suite: str) -> Iterator[tuple[str, dict[str, float]]]:
    """The TFLOP/s of each implementation on each batch, with its workload."""
    found: dict[tuple[str, str | None], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.suite == suite and row.tflops:
            found[row.workload, row.data][row.impl] = row.tflops
    for (workload, _), by_impl in found.items():
        yield workload, by_impl


def beside_peers(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    """Ahead of every peer wherever it has a row, which is on as many batches as is said."""
    faults = []
    for suite, groups in PEERS.items():
        batches = [by_impl for _, by_impl in speeds_of(rows, suite)]
        found = {impl for by_impl in batches for impl in by_impl} - set(OURS)
        faults += [f"{impl} has rows in {suite}, too" for impl in sorted(found - groups.keys())]
        for impl, group in groups.items():
            won = [by_impl["flashgen"] > by_impl[impl] for by_impl in batches if impl in by_impl]
            if not sum(won) == len(won) == int(match[group]):
                faults.append(f"it is ahead of {impl} on {sum(won)} of {len(won)} in {suite}")
    return faults


def over_pages(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    """The speed over FlashAttention-4's: of the batch where it is least, and the lowest and highest of the others."""
    rates = sorted(by_impl["flashgen"] / by_impl["fa4"] for _, by_impl in speeds_of(rows, PAGED_SUITE))
    figures = [f"{rate:.2f}" for rate in (rates[1], rates[-1], rates[0])]
    right = len(rates) == 4 and [match["lowest"], match["highest"], match["least"]] == figures
    return [] if right else [f"it is {figures} of {len(rates)}"]


def rates_of(rows: Sequence[Row], suite: str, *head_dims: int) -> list[float]:
    """The speed over that of a dense call with as many visible pairs, of each batch with such heads that has both."""
    rates = rates_beside_dense(rows, suite)
    return [rate for key, rate in rates.items() if Workload.parse(key).head_dim in head_dims]


def beside_dense(suite: str, head_dim: int) -> Check:
    """A check of a row of the table: batches, how many reach 0.97 of a dense call, the lowest and the highest rate."""

    def check(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
        rates = rates_of(rows, suite, head_dim)
        figures = len(rates), sum(rate >= 0.97 for rate in rates), f"{min(rates):.2f}", f"{max(rates):.2f}"
        said = int(match["count"]), int(match["near"]), match["lowest"], match["highest"]
        return [] if said == figures else [f"it is {figures}"]

    return check


def all_beside_dense(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    """How many batches reach 0.97 of a dense call, of how many."""
    rates = [rate for suite in PEERS for rate in rates_of(rows, suite, 64, 128)]
    figures = sum(rate >= 0.97 for rate in rates), len(rates)
    return [] if figures == (int(match["near"]), int(match["count"])) else [f"it is {figures}"]


def what_tiles_leave(match: re.Match[str], rows: Sequence[Row]) -> list[str]:
    """The lowest and the highest rate to a dense call that the tiles of the batches leave."""
    with Layers.open() as layers:
        found = [each.most for each in filled(find_device("h200"), Records(layers), rates_beside_dense(rows))]
    figures = f"{min(found):.2f}", f"{max(found):.2f}"
    return [] if figures == (match["lowest"], match["highest"]) else [f"it is {figures}"]
