"""What it takes to time records again, a record each: the best few configs race, and no search is made.

python -m benchmarks.reverify --out FOLDER [--top 3] [--shard 0/4] [--limit-seconds 300] [--workload KEY]

Each workload that has a measured record is timed again as `flashgen tune --reverify` does it, in a database of its own
in FOLDER. What has no record of this GPU but of another one of its architecture (`record_of`) is taken as if it were of
this one, so that a GPU without records tells as much; such a database is for nothing else. Records come in random
order, so that a run that is stopped speaks for all of them.

Rows go to `results/<device>/reverify.csv` one by one, so that the same command goes on where it stopped; it ends with 3
as long as something is left, and prints the seconds of a record.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.exit_codes import STOPPED
from benchmarks.markdown import table_row
from benchmarks.provenance import add_shard_argument
from benchmarks.search_bench import Bench, add_run_arguments
from benchmarks.search_files import REVERIFY, read
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.record import TuningRecord
from flashgen.core.workload import DECODE, Workload
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, FinalsStarted
from flashgen.tuning.shards import Shard
from flashgen.tuning.tune import tune_one

RECORD_S = 15.0
"""More than a record takes, so that the last one ends in time."""

GPUS, GOAL_RECORDS, GOAL_MINUTES = 4, 258, 15

COLUMNS = ("workload", "direction", "status", "configs", "seconds", "ms", "family", "knobs", "outcome", "record_of")
"""`status` is that of a workload of `flashgen tune`: the record's config is kept, or a rival is tuned in its place."""

FILE = REVERIFY


def known(layers: Layers, device: Device) -> list[TuningRecord]:
    """A measured record of each workload, of the device or another one of its architecture, in random order."""
    every = [record for record, _ in layers.records(arch=device.arch, provenance="measured")]
    every.sort(key=lambda record: (record.workload.key, record.device.identity != device.identity))
    found: dict[str, TuningRecord] = {}
    for record in every:
        found.setdefault(record.workload.key, record)
    return random.Random(0).sample([*found.values()], len(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retiming:
    """Times one record after the other again, and writes what it took."""

    bench: Bench
    store: Store
    options: Options = field(default_factory=lambda: Options(reverify=3, retune=True))

    def run(self, records: Sequence[TuningRecord], until: float) -> bool:
        """Do what is not in the file yet; False if the clock came to `until` before all was."""
        workloads = self.bench.left(record.workload for record in records)
        left = [record for record in records if record.workload in workloads]
        self._adopt(left)
        for number, record in enumerate(left):
            if self.bench.clock() + RECORD_S > until:
                return False
            row = self._timed(record, workloads[number + 1 :])
            self.bench.add(COLUMNS, [row], f"{row['status']} after {row['seconds']} s")
        return True

    def _adopt(self, records: Iterable[TuningRecord]) -> None:
        device = self.bench.device
        for record in records:
            if self.store.record(record.workload, device) is None:
                self.store.put_record(replace(record, device=device))

    def _timed(self, record: TuningRecord, following: Iterable[Workload]) -> dict[str, object]:
        races = list[FinalsStarted]()

        def emit(event: Event) -> None:
            races.extend([event] if isinstance(event, FinalsStarted) else [])

        context = self.bench.context(self.store, budget=Budget(trials=1), options=self.options, emit=emit)
        began = self.bench.clock()
        found = tune_one(context, self.bench.executor, record.workload, following)
        now = found.record
        measured = now.measurement if now is not None else None
        cells = (
            record.workload.key,
            record.workload.direction,
            found.status,
            len(races[-1].configs) if races else 0,
            f"{self.bench.clock() - began:.2f}",
            f"{measured.median_ms:.5f}" if measured is not None else "",
            now.config.family if now is not None else "",
            now.config.to_json() if now is not None else "",
            found.reason,
            record.device.name,
        )
        return dict(zip(COLUMNS, cells, strict=True))


def page(rows: Sequence[dict[str, str]]) -> str:
    """The seconds of a record, and how many winners still win, in Markdown."""
    lines = [
        table_row(["records", "timed again", "seconds, mean", "median", "most", "kept", "beaten by a rival", "failed"]),
        table_row(["---", *["---:"] * 7]),
    ]
    for name in ("forward", "backward", DECODE, "all"):
        own = [row for row in rows if name in (row["direction"], "all")]
        if own:
            seconds = [float(row["seconds"]) for row in own]
            of = [sum(row["status"] == status for row in own) for status in ("kept", "tuned")]
            cells = (f"{each:.1f}" for each in (statistics.fmean(seconds), statistics.median(seconds), max(seconds)))
            lines.append(table_row([name, str(len(own)), *cells, *map(str, of), str(len(own) - sum(of))]))
    if rows:
        mean = statistics.fmean(float(row["seconds"]) for row in rows)
        minutes = mean * GOAL_RECORDS / GPUS / 60
        lines += [
            "",
            f"So {GOAL_RECORDS} records take {minutes:.0f} minutes on {GPUS} GPUs; the goal is {GOAL_MINUTES}.",
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        shard = Shard.parse(options.shard)
        asked = [Workload.parse(key) for key in options.workload]
        wanted = Options(reverify=options.top, retune=True)
    except FlashgenError as error:
        parser.error(str(error))
    with Bench.open(parser, options, FILE) as bench, Store.open(options.out / "reverify.sqlite3") as store:
        records = [each for each in known(bench.layers, bench.device) if not asked or each.workload in asked]
        retiming = Retiming(bench=bench, store=store, options=wanted)
        done = retiming.run(records[shard.index :: shard.count], until=began + options.limit_seconds)
    print(page(read(bench.path)))
    return 0 if done else STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.reverify", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", action="append", default=[], metavar="KEY", help="in place of all with a record")
    parser.add_argument("--top", type=int, default=3, help="configs of a record (default: %(default)s)")
    add_shard_argument(parser, into="folders of its own")
    add_run_arguments(parser, out="a folder for a database that serves nobody")
    return parser


if __name__ == "__main__":
    sys.exit(main())
