"""What a search finds on a GPU that nobody has seen, beside the records that ship: no list, record, default or lesson.

python -m benchmarks.from_nothing --out FOLDER [--workload KEY] [--seconds 180] [--mark 20 --mark 60] [--shard 0/4]

Each workload of `HELD_OUT` has a shipped record, of this GPU or, where it has none, of another one of its architecture
(`record_of`). It is searched for with `--from-nothing` in a database of its own, once, for the most seconds; then the
best config that was known after each mark, the winner and the config of the record race each other on this GPU. So a
mark counts seconds of searching, without finals: `flashgen tune --budget 20s` keeps some for these.

`--from-nothing` learns from tables of other GPUs; with `--own-trials` the model has those of its search alone.
`lessons` counts the trials of others that it knew.

Rows go to `results/<device>/from_nothing.csv` when a workload is done, so that the same command goes on where it
stopped, and searches to a database in FOLDER; it ends with 3 as long as something is left, and prints how far each is
behind the record.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.exit_codes import STOPPED
from benchmarks.fallback import cell
from benchmarks.markdown import table_row
from benchmarks.provenance import add_shard_argument
from benchmarks.search_bench import AFTER_S, Bench, add_run_arguments, raced, raced_row
from benchmarks.search_files import FROM_NOTHING, of_others, read
from flashgen.core.config import Config
from flashgen.core.errors import FlashgenError
from flashgen.core.record import Trial, TuningRecord
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.known_searches import learned_from
from flashgen.tuning.learned_cost import LearnedCost
from flashgen.tuning.regrets import right_ms
from flashgen.tuning.shards import Shard
from flashgen.tuning.tune import tune_one

RECORD, WINNER = "record", "winner"

GOAL = 1.02

RACED = ("workload", "direction", "way", "trials", "ms", "ratio", "family", "knobs", "outcome")
COLUMNS = (*RACED, "record_of", "lessons")

HELD_OUT = (
    "b4-h16-s4096-d128-causal",
    "b16-h32-s1024-d64",
    "b2-h8-s8192-d256",
    "b1-h16-s16384-d128-wl2047-causal",
    "fp16-b8-h32-s2048-d64",
    "bwd-b4-h16-s4096-d128-causal",
    "bwd-b8-h32-s2048-d64",
    "bwd-b2-h8-s8192-d256-causal",
)
"""Forward and backward, each width of heads, with and without a mask, a window, fp16."""

FILE = FROM_NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Searches:
    """Searches for one workload after the other, races what was found, and writes what came out."""

    bench: Bench
    store: Store
    budget: Budget
    marks: tuple[float, ...]
    learned: LearnedCost | None

    def run(self, workloads: Sequence[Workload], until: float) -> bool:
        """Do what is not in the file yet; False if the clock came to `until` before all was.

        Raises:
            ValueError: no GPU of the architecture has a measured record of a workload, to judge a search by.
        """
        for workload in self.bench.left(workloads):
            record = self.bench.judge(workload)
            if record is None:
                arch = self.bench.device.arch
                raise ValueError(f"a search is judged by a record, and no {arch} has one of {workload.key}")
            if self.bench.clock() + (self.budget.seconds or 0.0) + AFTER_S > until:
                return False
            self.bench.add(COLUMNS, self._judged(workload, record))
        return True

    def _judged(self, workload: Workload, record: TuningRecord) -> list[dict[str, object]]:
        trials, winner = self._searched(workload)
        known = {f"{mark:g} s": _best(trials, mark) for mark in self.marks}
        by_way = {RECORD: record.config, **known, WINNER: winner}
        tried = {f"{mark:g} s": len(_until(trials, mark)) for mark in self.marks} | {WINNER: len(trials)}
        configs = [config for config in by_way.values() if config is not None]
        outcomes = raced(self.bench.executor, self.bench.compiler, workload, configs, hard=True)
        of = {"record_of": record.device.name, "lessons": self._lessons(workload)}
        return [
            {**raced_row(workload, way, config, outcomes, [record.config]), "trials": tried.get(way, ""), **of}
            for way, config in by_way.items()
        ]

    def _lessons(self, workload: Workload) -> int:
        """Trials of other searches that the model of a search from nothing has learned from."""
        known = self.learned
        model = known.of(workload, self.bench.device, without_device=True) if known is not None else None
        return 0 if model is None else model.size

    def _searched(self, workload: Workload) -> tuple[list[Trial], Config | None]:
        context = self.bench.context(
            self.store,
            budget=self.budget,
            options=Options(from_nothing=True),
            neighbours=lambda name: (),
            learned=self.learned,
        )
        record = tune_one(context, self.bench.executor, workload, ()).record
        return self.store.trials(workload, context.device), record.config if record is not None else None


def _until(trials: Sequence[Trial], seconds: float) -> list[Trial]:
    return [trial for trial in trials if trial.elapsed_s is not None and trial.elapsed_s <= seconds]


def _best(trials: Sequence[Trial], seconds: float) -> Config | None:
    """The fastest config that was known after so many seconds, in the levelled times of short windows."""
    times = right_ms(SearchLog(search=None, trials=tuple(_until(trials, seconds)), finalists=()))
    return min(times, key=lambda config: times[config], default=None)


def page(rows: Sequence[dict[str, str]]) -> str:
    """How far what a search found is behind the records, forward, backward and all, then each, in Markdown."""
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != RECORD]
    lines = [
        f"Time over that of the shipped record{of_others(rows)}, in one race: geometric mean and, in brackets, the "
        f"worst. The goal is {GOAL}.{_taught(rows)}",
        "",
        table_row(["pass", "workloads", *ways]),
        table_row(["---"] * (2 + len(ways))),
    ]
    for name, directions in (("forward", ("forward",)), ("backward", ("backward",)), ("all", ("forward", "backward"))):
        own = [row for row in rows if row["direction"] in directions]
        cells = [cell([float(row["ratio"]) for row in own if row["way"] == way and row["ratio"]]) for way in ways]
        lines.append(table_row([name, str(len({row["workload"] for row in own})), *cells]))
    head = [word for way in ways for word in (f"trials, {way}", "time over the record's")]
    lines += ["", table_row(["workload", *head]), table_row(["---", *["---:"] * len(head)])]
    for key in dict.fromkeys(row["workload"] for row in rows):
        found = {row["way"]: row for row in rows if row["workload"] == key}
        pairs = [(found[way]["trials"], _ratio(found[way])) if way in found else ("-", "-") for way in ways]
        lines.append(table_row([f"`{key}`", *(word for pair in pairs for word in pair)]))
    return "\n".join(lines) + "\n"


def _ratio(row: Mapping[str, str]) -> str:
    return f"{float(row['ratio']):.3f}" if row["ratio"] else "-"


def _taught(rows: Sequence[Mapping[str, str]]) -> str:
    """What the model of the searches had learned from, where rows say so."""
    counts = {int(row["lessons"]) for row in rows if row["lessons"]}
    if not counts:
        return ""
    if counts == {0}:
        return " A search knew its own trials alone."
    learned = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f" Tables of other GPUs had taught it {learned} trials before."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        shard = Shard.parse(options.shard)
        workloads = [Workload.parse(key) for key in options.workload or HELD_OUT][shard.index :: shard.count]
        budget = Budget(seconds=options.seconds)
    except FlashgenError as error:
        parser.error(str(error))
    with Bench.open(parser, options, FILE) as bench, Store.open(options.out / "from_nothing.sqlite3") as store:
        searches = Searches(
            bench=bench,
            store=store,
            budget=budget,
            marks=tuple(options.mark or (20.0, 60.0)),
            learned=None if options.sampler else LearnedCost() if options.own_trials else learned_from(bench.layers),
        )
        try:
            done = searches.run(workloads, until=began + options.limit_seconds)
        except ValueError as error:
            parser.error(str(error))
    print(page(read(bench.path)))
    return 0 if done else STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.from_nothing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", action="append", default=[], metavar="KEY", help="in place of the usual ones")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each search (default: %(default)s)")
    parser.add_argument("--mark", type=float, action="append", help="seconds to judge a search at (default: 20 and 60)")
    parser.add_argument("--sampler", action="store_true", help="search without the model that learns")
    parser.add_argument("--own-trials", action="store_true", help="a model that learns from no other search")
    add_shard_argument(parser, into="folders of its own")
    add_run_arguments(parser, out="a folder for the searches' database")
    return parser


if __name__ == "__main__":
    sys.exit(main())
