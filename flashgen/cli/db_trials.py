"""`flashgen db trials`: what searches tried, for people, spreadsheets and programs."""

from __future__ import annotations

import csv
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import output
from flashgen.cli.arguments import CommandLineError, DeviceName, Json, named_device, reading
from flashgen.core.errors import DatabaseError
from flashgen.core.record import Failure, Trial
from flashgen.core.workload import Workload

if TYPE_CHECKING:
    from flashgen.core.search_log import SearchLog

COLUMNS = ("workload", "device", "run", "number", "source", "ms", "failed", "registers", "spills", "s", "config")


def trials(
    workload: Annotated[
        str | None, typer.Option("--workload", help="Of this one alone, e.g. b4-h32-hk8-s4096-d128.", metavar="SHAPE")
    ] = None,
    device: DeviceName = None,
    run: Annotated[str | None, typer.Option("--run", help="Of this run alone.", metavar="ID")] = None,
    json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: a line for each trial.")] = False,
) -> None:
    """List what searches tried, in their order: who proposed it, what was compiled, what it took, and the finals.

    JSON has everything: how each search was asked for, all windows, and every race of its finals.
    """
    if json and as_csv:
        raise CommandLineError("a list is printed as JSON or as CSV, and both were asked for")
    with reading():
        wanted = None if workload is None else Workload.parse(workload)
    found = _found(wanted, device, run)
    if json:
        from flashgen.db.trials import search_json

        output.print_json([{**search_json(log), "layer": layer} for log, layer in found])
    elif as_csv:
        from flashgen.db.trials import CSV_COLUMNS, csv_row

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        writer.writerows(csv_row(trial) for log, _ in found for trial in log.trials)
    else:
        output.print_table(COLUMNS, [_row(trial) for log, _ in found for trial in log.trials])


def _found(workload: Workload | None, device: str | None, run: str | None) -> list[tuple[SearchLog, str]]:
    """The searches that match, of all layers, each with the name of its layer."""
    from flashgen.db.layers import Layers

    with Layers.open() as layers:
        found = layers.searches(workload=workload, device=named_device(device), run=run)
    if not any(log.trials for log, _ in found):
        raise DatabaseError("trials to list were measured by `flashgen tune`, without --target, and stored; none match")
    return found


def _row(trial: Trial) -> tuple[output.Cell, ...]:
    failure = trial.outcome if isinstance(trial.outcome, Failure) else None
    return (
        trial.workload.key,
        trial.device.identity,
        trial.run or None,
        trial.number,
        trial.source,
        None if isinstance(trial.outcome, Failure) else trial.outcome.median_ms,
        failure.stage if failure else None,
        trial.compiled.registers if trial.compiled else None,
        trial.compiled.spills if trial.compiled else None,
        trial.elapsed_s,
        str(trial.config),
    )
