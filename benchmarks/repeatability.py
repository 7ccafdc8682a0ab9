"""Whether two searches of one workload end with configs as fast as each other: each is tuned twice, with other seeds.

python -m benchmarks.repeatability --out FOLDER [--workload KEY] [--budget 20s] [--shard 0/4] [--limit-seconds 900]

Each workload is tuned as `flashgen tune` does it, by every seed in a database of its own, with the records, lists and
lessons that ship but the workload's own record: else both would begin with it. Then the winners race each other, and
the record's config where there is one, of this GPU or another one of its architecture (`record_of`).

Rows go to `results/<device>/repeatability.csv` when a workload is done, so that the same command goes on where it
stopped, and searches to databases in FOLDER; it ends with 3 as long as something is left, and prints how far the
winners are apart.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.exit_codes import STOPPED
from benchmarks.markdown import table_row
from benchmarks.provenance import add_shard_argument
from benchmarks.search_bench import AFTER_S, Bench, add_run_arguments, raced, raced_row
from benchmarks.search_files import REPEATABILITY, of_others, read
from flashgen.core.config import Config
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.known_searches import learned_from
from flashgen.tuning.learned_cost import LearnedCost
from flashgen.tuning.shards import Shard
from flashgen.tuning.tune import tune_one

SEEDS = (0, 1)

RECORD = "record"

GOAL = 1.02
"""How far apart the winners of nine workloads in ten may be."""

RACED = ("workload", "direction", "way", "trials", "confidence", "ms", "ratio", "family", "knobs", "outcome")
COLUMNS = (*RACED, "record_of")
"""`way` is the seed of a search, or the record; `ratio` is the time over that of the first seed's winner."""

WORKLOADS = (
    "b8-h16-s2048-d128-causal",
    "b1-h32-hk8-s4096-d128-causal",
    "b4-h16-s4096-d128",
    "b8-h32-s2048-d64",
    "b4-h8-s4096-d256",
    "fp16-b8-h32-s2048-d64-causal",
    "b1-h16-s16384-d128-wl2047-causal",
    "bwd-b4-h16-s4096-d128-causal",
    "bwd-b8-h32-s2048-d64",
    "bwd-b4-h8-s4096-d256-causal",
)
"""The five that were tuned twice first, fp16, a window, and backward passes of each width of heads."""

FILE = REPEATABILITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """What a search ended with; `config` is None where nothing works."""

    config: Config | None
    trials: int
    confidence: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Tunes one workload after the other by each seed, races the winners, and writes what came out.

    `stores` has a database for each seed.
    """

    bench: Bench
    stores: Mapping[int, Store]
    budget: Budget
    learned: LearnedCost | None
    options: Options = field(default_factory=Options)

    def run(self, workloads: Sequence[Workload], until: float) -> bool:
        """Do what is not in the file yet; False if the clock came to `until` before all was."""
        for workload in self.bench.left(workloads):
            if self.bench.clock() + len(self.stores) * (self.budget.seconds or 0.0) + AFTER_S > until:
                return False
            winners = {str(seed): self._tuned(workload, seed) for seed in self.stores}
            self.bench.add(COLUMNS, self._judged(workload, winners))
        return True

    def _tuned(self, workload: Workload, seed: int) -> Winner:
        context = self.bench.context(
            self.stores[seed],
            budget=self.budget,
            options=replace(self.options, seed=seed),
            neighbours=lambda name: [each for each in self.bench.neighbours(name) if each.workload != workload],
            learned=self.learned,
        )
        record = tune_one(context, self.bench.executor, workload, ()).record
        found = record.measurement if record is not None else None
        return Winner(
            config=record.config if record is not None else None,
            trials=len(self.stores[seed].trials(workload, context.device)),
            confidence=found.confidence if found is not None else None,
        )

    def _judged(self, workload: Workload, winners: Mapping[str, Winner]) -> list[dict[str, object]]:
        record = self.bench.judge(workload)
        by_way = dict(winners)
        if record is not None:
            by_way[RECORD] = Winner(config=record.config, trials=0, confidence=None)
        configs = [each.config for each in by_way.values() if each.config is not None]
        outcomes = raced(self.bench.executor, self.bench.compiler, workload, configs, hard=True) if configs else {}
        first = next(iter(winners.values())).config
        return [
            {
                **raced_row(workload, way, each.config, outcomes, [first]),
                "trials": "" if way == RECORD else each.trials,
                "confidence": "" if each.confidence is None else f"{each.confidence:.3f}",
                "record_of": record.device.name if record is not None else "",
            }
            for way, each in by_way.items()
        ]


def apart(rows: Sequence[dict[str, str]]) -> dict[str, float | None]:
    """Of each workload the time of the slowest winner over that of the fastest; None where one has no time."""
    found: dict[str, float | None] = {}
    for key in dict.fromkeys(row["workload"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["workload"] == key and row["way"] != RECORD]
        found[key] = None if "" in ratios else max(map(float, ratios)) / min(map(float, ratios))
    return found


def nine_in_ten(values: Sequence[float]) -> float:
    """The 90th percentile: the least one that nine in ten do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def page(rows: Sequence[dict[str, str]]) -> str:
    """How far the winners of each workload are apart, in Markdown."""
    distances = apart(rows)
    known = [each for each in distances.values() if each is not None]
    within = sum(each <= GOAL for each in known)
    lines = [
        "Each workload tuned twice, with different seeds, in databases of their own and without its own record; then "
        "both winners race each other. Time of the slower winner over that of the faster one, and of each over that of "
        f"the record's config{of_others(rows)}, in the same race.",
        "",
        table_row(["workload", "config", "slower / faster", "first / record", "second / record"]),
        table_row(["---", "---", "---:", "---:", "---:"]),
    ]
    for key, distance in distances.items():
        own = {row["way"]: row for row in rows if row["workload"] == key}
        winners = [row for way, row in own.items() if way != RECORD]
        same = "the same" if len({(row["family"], row["knobs"]) for row in winners}) == 1 else "another"
        cell = "-" if distance is None else f"{distance:.3f}"
        lines.append(table_row([f"`{key}`", same, cell, *(_over(row, own.get(RECORD)) for row in winners)]))
    if known:
        p90 = nine_in_ten(known) - 1
        lines += ["", f"{within} of {len(distances)} agree within {GOAL - 1:.0%}; nine in ten within {p90:.1%} (p90)."]
    return "\n".join(lines) + "\n"


def _over(row: Mapping[str, str], record: Mapping[str, str] | None) -> str:
    if record is None or not row["ratio"] or not record["ratio"]:
        return "-"
    return f"{float(row['ratio']) / float(record['ratio']):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        shard = Shard.parse(options.shard)
        workloads = [Workload.parse(key) for key in options.workload or WORKLOADS][shard.index :: shard.count]
        budget = Budget.parse(options.budget)
    except FlashgenError as error:
        parser.error(str(error))
    with contextlib.ExitStack() as stack:
        bench = stack.enter_context(Bench.open(parser, options, FILE))
        paths = {seed: options.out / f"repeatability{seed}.sqlite3" for seed in SEEDS}
        stores = {seed: stack.enter_context(Store.open(path)) for seed, path in paths.items()}
        repeats = Repeats(bench=bench, stores=stores, budget=budget, learned=learned_from(bench.layers))
        done = repeats.run(workloads, until=began + options.limit_seconds)
    print(page(read(bench.path)))
    return 0 if done else STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.repeatability", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", action="append", default=[], metavar="KEY", help="in place of the usual ones")
    parser.add_argument("--budget", default="20s", help="of each search (default: %(default)s)")
    add_shard_argument(parser, into="folders of its own")
    add_run_arguments(parser, out="a folder for the searches' databases")
    return parser


if __name__ == "__main__":
    sys.exit(main())
