"""`flashgen db learn`: from tables and records to the lists that searches begin with and the rules of the fallback."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import output
from flashgen.cli.arguments import CommandLineError, DeviceName, Json, named_device
from flashgen.core.errors import DatabaseError

if TYPE_CHECKING:
    from flashgen.core.device import Device
    from flashgen.core.record import TuningRecord
    from flashgen.core.search_log import SearchLog
    from flashgen.tuning.learned_fallback import LearnedRule
    from flashgen.tuning.learned_seeds import LearnedList

LIST_COLUMNS = ("class", "workloads", "default", "by hand", "generated", "left out", "configs", "serves")
RULE_COLUMNS = ("class", "workloads", "timed", "default", "frequent", "nearest", "tree", "serves")


def learn(
    tables: Annotated[
        list[Path] | None, typer.Argument(help="Tables of searches (*.jsonl.gz); none means records alone.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for seed_configs.json and fallback.json, each with a CSV."),
    ] = None,
    commit: Annotated[str, typer.Option("--commit", help="The commit of tables and records, for the files.")] = "",
    device: DeviceName = None,
    json: Json = False,
) -> None:
    """Learn which configs searches begin with, and what serves calls without a record; for maintainers.

    Reads tables of `benchmarks.replay_tables` and the records of all databases. Columns of lists count workloads with a
    config within 3%: by the default, the hand-written lists, the generated one, and that which was learned without the
    workload. Columns of rules are the mean and the worst time over the best, on workloads that were left out.
    """
    from flashgen.tuning import learned_fallback, learned_files, learned_seeds
    from flashgen.tuning.regrets import known_of

    logs, records = _read(tables or [])
    where = _device(logs, records, device)
    records = [record for record in records if where.may_use(record.device)]
    known = known_of(records, [log for _, log in logs], where)
    lists, rules = learned_seeds.learn(known, where), learned_fallback.learn(known, where)
    learned = learned_files.Learned(device=where, records=len(records), tables=tuple(logs), commit=commit)
    if target is not None:
        from flashgen.runtime.lookup.rules import FILE as RULES
        from flashgen.tuning.seed_lists import FILE as LISTS

        learned_files.write(target / LISTS, learned_files.seeds_text(lists, learned))
        learned_files.write((target / LISTS).with_suffix(".csv"), learned_files.seeds_csv(lists))
        learned_files.write(target / RULES, learned_files.rules_text(rules, learned))
        learned_files.write((target / RULES).with_suffix(".csv"), learned_files.rules_csv(rules))
    if json:
        output.print_json({"lists": [_list_row(each) for each in lists], "rules": [_rule_row(each) for each in rules]})
        return
    output.print_table(LIST_COLUMNS, [tuple(_list_row(each).values()) for each in lists])
    output.say("")
    output.print_table(RULE_COLUMNS, [tuple(_rule_row(each).values()) for each in rules])


def _read(paths: list[Path]) -> tuple[list[tuple[str, SearchLog]], list[TuningRecord]]:
    from flashgen.db.layers import Layers
    from flashgen.db.log_files import read_log

    logs = [(path.name, read_log(path)) for path in paths]
    with Layers.open() as layers:
        return logs, [record for record, _ in layers.records(provenance="measured")]


def _device(logs: list[tuple[str, SearchLog]], records: list[TuningRecord], name: str | None) -> Device:
    """The device that is named, or the only one that there is.

    Raises:
        DatabaseError: there are several, or none.
    """
    every = [*(log.search.device for _, log in logs if log.search), *(record.device for record in records)]
    named = named_device(name, every)
    if named is not None:
        return named
    kinds = {each.identity: each for each in reversed(every)}
    if not kinds:
        raise DatabaseError("what to learn from are records or tables, and there are none")
    if len(kinds) > 1:
        raise CommandLineError(f"--device says which of {', '.join(sorted(kinds))}, of all of which there are records")
    return next(iter(kinds.values()))


def _list_row(learned: LearnedList) -> dict[str, output.Cell]:
    from flashgen.tuning.learned_files import KINDS
    from flashgen.tuning.learned_seeds import is_near

    counts = [sum(is_near(getattr(each, kind)) for each in learned.judged) for kind in KINDS]
    own: tuple[output.Cell, ...] = (len(learned.configs), learned.serves)
    cells: tuple[output.Cell, ...] = (learned.name, len(learned.judged), *counts, *own)
    return dict(zip(LIST_COLUMNS, cells, strict=True))


def _rule_row(learned: LearnedRule) -> dict[str, output.Cell]:
    from flashgen.tuning.learned_files import WAYS

    found = learned.outcomes
    ways = [f"{found[way].mean:.3f} {found[way].worst:.2f}" if way in found else None for way in WAYS]
    cells = (learned.name, len(learned.workloads), sum(learned.timed), *ways, learned.serves)
    return dict(zip(RULE_COLUMNS, cells, strict=True))
