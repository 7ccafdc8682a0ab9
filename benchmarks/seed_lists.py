"""What a list to begin with is worth: searches on replay tables with the hand-written lists, learned ones, and none.

python -m benchmarks.seed_lists [TABLE.jsonl.gz ...] [--seeds 5] [--out FOLDER]

The tables are those of `benchmarks.search`; lists are learned from those of a matrix and from records, too. The learned
list of a table is made without it and without the record of its workload. Each list is replayed alone and behind the
configs of the four nearest records, as `flashgen tune` tries them. Prints the table of `benchmarks.search`, and how
many configs of each list a table knows: the others are skipped, and samples were measured with the hand-written ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.markdown import table_row
from benchmarks.search import TABLES, TRIALS, compare, page, shipped, write
from benchmarks.search_contestants import Maker, Ours
from benchmarks.search_replay import Table
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.core.record import TuningRecord
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Specialization
from flashgen.db.layers import Layers
from flashgen.db.log_files import SUFFIX, read_log
from flashgen.tuning.learned_seeds import Row, chosen
from flashgen.tuning.regrets import known_of
from flashgen.tuning.seed_lists import Lists, by_hand, seed_class


def no_list(spec: Specialization, device: Device) -> Sequence[Config] | None:
    """An empty list: the defaults, and what the analytic model likes."""
    return ()


def left_out(table: Table, records: Sequence[TuningRecord], logs: Sequence[SearchLog]) -> Lists:
    """The list that the class of a table would have on its device if nobody had measured its workload."""
    others = [
        log
        for log in logs
        if log.search is not None and log.search.workload != table.workload and table.device.may_use(log.search.device)
    ]
    known = known_of([each for each in records if each.workload != table.workload], others, table.device)
    name = seed_class(table.workload.specialization)
    rows = (Row.of(each, table.device) for each in known if seed_class(each.workload.specialization) == name)
    configs = chosen([row for row in rows if row is not None])
    return lambda spec, device: configs


def contestants(
    tables: Sequence[Table], records: Sequence[TuningRecord], logs: Sequence[SearchLog]
) -> dict[str, Maker]:
    """A search with each list, by name; the last ones also have the nearest records of other workloads."""
    learned = {table.name: left_out(table, records, logs) for table in tables}

    def search(kind: str, known: Sequence[TuningRecord]) -> Maker:
        def make(table: Table, seed: int) -> Ours:
            lists = {"hand-written": by_hand, "learned": learned[table.name], "none": no_list}[kind]
            return Ours(table, seed, table.starts(known, lists))

        return make

    kinds = ("hand-written", "learned", "none")
    alone = {f"lists: {kind}": search(kind, ()) for kind in kinds}
    return {**alone, **{f"lists: {kind}, with records": search(kind, records) for kind in kinds}}


def counts(tables: Sequence[Table], records: Sequence[TuningRecord], logs: Sequence[SearchLog]) -> str:
    """How many configs of the lists each table knows, in Markdown."""
    lines = [table_row(["table", "hand-written", "learned"]), table_row(["---"] * 3)]
    for table in tables:
        kinds = (by_hand, left_out(table, records, logs))
        found = [sum(source == "seed" for _, source in table.starts(lists=lists)) for lists in kinds]
        lines.append(table_row([f"`{table.name}`", *map(str, found)]))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done."""
    parser = _parser()
    options = parser.parse_args(arguments)
    paths = options.tables or shipped()
    try:
        tables = [Table.of(read_log(path)) for path in paths]
        others = [read_log(path) for path in sorted({*paths, *TABLES.glob(f"*/replays/*{SUFFIX}")})]
    except (FlashgenError, ValueError) as error:
        parser.error(str(error))
    if not tables:
        parser.error("no table is named, and none ships; python -m benchmarks.replay_tables measures one")
    with Layers.open() as layers:
        records = [record for record, _ in layers.records(provenance="measured")]
    runs = compare(
        tables,
        contestants(tables, records, others),
        seeds=range(options.seeds),
        trials=options.trials,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    text = page(runs, tables) + "\n" + counts(tables, records, others)
    print(text)
    if options.out:
        write(runs, text, options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.seed_lists", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", type=Path, nargs="*", help="default: those of tuning_db/*/replays/")
    parser.add_argument("--seeds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=max(TRIALS), help="the most of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for search.md, search.csv and search.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
