"""`flashgen tune`: choose workloads, measure or predict, show what happens, store what was found."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import output
from flashgen.core.device import Device, find_device
from flashgen.core.errors import DeviceError

if TYPE_CHECKING:
    from flashgen.core.record import TuningRecord
    from flashgen.core.workload import Workload
    from flashgen.db.layers import Layers
    from flashgen.db.store import Store
    from flashgen.measure.protocol import Executor
    from flashgen.tuning.budget import Budget
    from flashgen.tuning.context import Options
    from flashgen.tuning.events import RunFinished

NO_VALID_CANDIDATE, INTERRUPTED = 3, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The command's options, read."""

    workloads: tuple[Workload, ...]
    device: Device
    budget: Budget
    options: Options
    jobs: int
    measured: bool
    as_json: bool


def tune(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="A model preset, or all; repeatable.", metavar="NAME")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", "-s", help="A workload, e.g. b4-h32-hk8-s4096-d128-causal; repeatable."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A YAML or JSON file in the form of the presets; repeatable."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Predict for this GPU (h100, 'RTX 4090', sm_86) without measuring.", metavar="GPU"),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="For each workload: seconds with finals (20s, 2m), or trials (40).", metavar="BUDGET")
    ] = "30s",
    database: Annotated[
        Path | None, typer.Option("--db", help="The database to write. Default: the first of FLASHGEN_DB, or the user's.")
    ] = None,
    device: Annotated[int, typer.Option(help="Index of the GPU to measure on.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Equal seeds search in the same order.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Compile processes. Default: one for each CPU but one.", min=1)
    ] = None,
    finals_window: Annotated[float, typer.Option(help="Seconds of one window of the last comparison.", min=0.001)] = 0.3,
    finals_rounds: Annotated[int, typer.Option(help="Rounds of the last comparison.", min=1)] = 4,
    retune: Annotated[bool, typer.Option("--retune", "--force", help="Search again where a record is current.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print workloads, candidates and the expected time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event and line.")] = False,
    list_models: Annotated[bool, typer.Option("--list-models", help="Print the model presets and exit.")] = False,
) -> None:
    """Find the fastest verified kernel for workloads and store it; go on where an earlier run stopped.

    Measures on the GPU here, or, with --target, compiles for another one and ranks by an analytic model without
    measuring. A workload with a current record is skipped unless --retune is given. Ctrl-C or a kill loses at most the
    candidate in flight: the same command resumes.

    Exit codes: 0 done; 1 an error; 2 wrong usage; 3 some workloads have no valid candidate; 130 interrupted (results are
    saved).
    """
    if list_models:
        _list_models(as_json)
        return
    run = _read_options(
        model or [], shape or [], file or [], target, budget, device, seed, jobs, finals_window, finals_rounds, retune, as_json
    )
    if dry_run:
        _dry_run(run, database)
        return
    finished, where = _tune(run, database, device)
    if not as_json:
        from flashgen.cli.display import print_report

        print_report(finished, run.device, where)
    if finished.interrupted:
        raise typer.Exit(INTERRUPTED)
    if finished.failed:
        raise typer.Exit(NO_VALID_CANDIDATE)
