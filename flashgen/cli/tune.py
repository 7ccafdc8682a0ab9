"""`flashgen tune`: choose workloads, measure or predict, show what happens, store what was found."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import completion
from flashgen.cli.arguments import CommandLineError, parse_database, reading

if TYPE_CHECKING:
    from types import FrameType

    from flashgen.tuning.events import Event, RunFinished
    from flashgen.tuning.request import Request

NO_VALID_CANDIDATE, INTERRUPTED = 3, 130

TOP = 3
"""Configs of a record that --reverify times again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A request, how its run is printed, and what its user called the target."""

    request: Request
    as_json: bool
    target: str | None


def tune(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A model preset, or all, training, serving or packed; repeatable.",
            metavar="NAME",
            autocompletion=completion.models,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", "-s", help="A workload, e.g. b4-h32-hk8-s4096-d128-causal; repeatable.", metavar="SHAPE"
        ),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", help="A YAML or JSON file in the form of the presets; repeatable.", metavar="FILE"
        ),
    ] = None,
    from_calls: Annotated[
        Path | None,
        typer.Option(
            "--from-calls", help="What a program was recorded to call, the longest share first.", metavar="FILE"
        ),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            "--family",
            help="Only candidates of this kernel family; repeatable.",
            metavar="ID",
            autocompletion=completion.families,
        ),
    ] = None,
    direction: Annotated[
        str | None,
        typer.Option(
            "--direction",
            help="forward, backward or both, of everything named. Default: as named, a shape without bwd forward.",
            metavar="PASS",
            autocompletion=completion.directions,
        ),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Backward passes that give the same bits every time.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Predict for this GPU (h100, 'RTX 4090', sm_86) without measuring.",
            metavar="GPU",
            autocompletion=completion.gpus,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="For each workload: seconds (20s, 2m) from its first measured candidate on, the last comparison "
            "included, or trials (40). Default: 30s. With --from-calls, seconds for all of them, 10m by default.",
            metavar="BUDGET",
        ),
    ] = None,
    database: Annotated[
        Path | None,
        typer.Option(
            "--db", help="The database to write. Default: the first of FLASHGEN_DB, or the user's.", metavar="FILE"
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--store",
            help="Keep trials on the server at this URL of SQLAlchemy, shared by several runs; --db gets the records.",
            metavar="URL",
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            help="Also keep every trial in this storage of Optuna, for optuna-dashboard: sqlite:///studies.db.",
            metavar="URL",
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(
            "--shard",
            help="Only part i of n of the workloads, i from 0: one for each GPU, each with a --db.",
            metavar="I/N",
        ),
    ] = "0/1",
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Tune on all GPUs of a Ray cluster: host:port, auto for the one that runs here, or local for this "
            "machine's GPUs. Needs flashgen[ray].",
            metavar="ADDRESS",
        ),
    ] = None,
    device: Annotated[int, typer.Option("--device", help="Index of the GPU to measure on.", min=0)] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds search in the same order.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            help="Compile processes, for each GPU. Default: one for each CPU but one, divided by shards, or by GPUs "
            "of a node.",
            min=1,
        ),
    ] = None,
    finals_window: Annotated[
        float,
        typer.Option(
            "--finals-window",
            help="Seconds of one window of the last comparison; a short budget has shorter ones.",
            min=0.001,
        ),
    ] = 0.3,
    finals_rounds: Annotated[
        int,
        typer.Option("--finals-rounds", help="The most rounds of the last comparison; it ends when sure.", min=1),
    ] = 40,
    retune: Annotated[
        bool, typer.Option("--retune", "--force", help="Search again where a record is current.")
    ] = False,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            help="End each search when going on is expected to save less than this share of the best time; the budget "
            "is the most, 5m by default.",
            metavar="PERCENT",
        ),
    ] = None,
    from_nothing: Annotated[
        bool,
        typer.Option(
            "--from-nothing",
            help="Try no default, no list and no other record first: what a search finds by itself. With a new "
            "database (FLASHGEN_DB) it knows nothing of what ships.",
        ),
    ] = False,
    reverify: Annotated[
        bool,
        typer.Option(
            "--reverify",
            help="Search for nothing: time the best configs of records again that are not current, of all records "
            "where no workload is named. The old ones stay in the history.",
        ),
    ] = False,
    top: Annotated[
        int | None,
        typer.Option("--top", help="With --reverify, so many configs a record: 3.", metavar="K", min=1),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            help="With --reverify, also time each record's config with these knobs changed, of current ones too: what "
            "a new knob gains; repeatable.",
            metavar="KNOB=VALUE,...",
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit-seconds", help="For all workloads together, 5 at least; the same command goes on.", metavar="S"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print workloads, candidates and the expected time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event and line.")] = False,
    list_models: Annotated[bool, typer.Option("--list-models", help="Print the model presets and exit.")] = False,
) -> None:
    """Find the fastest verified kernel for workloads and store it; go on where an earlier run stopped.

    Measures on the GPU here, or, with --target, compiles for another one and ranks by an analytic model without
    measuring. A workload with a current record is skipped unless --retune is given. Ctrl-C or a kill loses at most the
    candidate in flight: the same command resumes.

    Exit codes: 0 done; 1 an error; 2 wrong usage; 3 some workloads have no valid candidate; 130 interrupted (what was
    found is saved).
    """
    from flashgen.cli import tune_calls
    from flashgen.cli.tune_many import run_on_cluster
    from flashgen.cli.tune_plan import print_models, print_plan
    from flashgen.codegen import families
    from flashgen.tuning.budget import Budget, parse_share
    from flashgen.tuning.compile_pool import usable_cpus
    from flashgen.tuning.context import Options, lookahead
    from flashgen.tuning.finals import Finals
    from flashgen.tuning.request import Request, check_alone, check_cluster
    from flashgen.tuning.shards import Shard
    from flashgen.tuning.variations import Variation

    if list_models:
        print_models(as_json=as_json)
        return
    if not any((model, shape, file, from_calls, reverify)):
        raise CommandLineError(
            "name what to tune with --model, --shape, --file or --from-calls; --list-models shows the presets"
        )
    if top is not None and not reverify:
        raise CommandLineError("--top says how many configs --reverify times; without --reverify a search decides")
    if vary and not reverify:
        raise CommandLineError("--vary changes knobs of records that --reverify times; a search varies all knobs")
    if reverify and dry_run:
        raise CommandLineError("--dry-run says what a search would do, and --reverify searches for nothing")
    if limit is not None and from_calls is not None:
        raise CommandLineError("with --from-calls the budget is for all workloads: no --limit-seconds")
    others = {"--model": model, "--shape": shape, "--file": file, "--direction": direction, "--ray": ray}
    with reading():
        usual = tune_calls.EACH if until is None else tune_calls.MOST
        given = budget if budget is not None else usual if from_calls is None else tune_calls.ALL
        spent = Budget.parse(given)
        check_alone("--from-calls", from_calls, {**others, "--deterministic": deterministic})
        check_cluster("--ray", ray, {"--device": device, "--dry-run": dry_run})
        searched = tuple(families.family(name).id for name in family or [])
        options = Options(
            seed=seed,
            retune=retune,
            lookahead=lookahead(jobs or max(1, usable_cpus() // Shard.parse(shard).count)),
            finals=Finals(window_s=finals_window, rounds=finals_rounds),
            families=searched,
            from_nothing=from_nothing,
            reverify=(top or TOP) if reverify else None,
            vary=tuple(Variation.parse(each) for each in vary or []),
            until=None if until is None else parse_share(until),
        )
        each, limit_s = (spent, limit) if from_calls is None else tune_calls.limits(spent)
        request = Request.of(
            workloads=shape or [],
            models=model or [],
            files=file or [],
            from_calls=from_calls,
            direction=direction,
            deterministic=deterministic,
            target=target,
            device=device,
            budget=each,
            limit_s=limit_s,
            database=None if database is None else parse_database(database),
            store=server,
            shard=shard,
            ray=ray,
            jobs=jobs,
            options=options,
            study=study,
        )
    if dry_run:
        print_plan(request, as_json=as_json)
        return
    run = Shown(request=request, as_json=as_json, target=target)
    before = signal.signal(signal.SIGTERM, _interrupt)  # a scheduler's polite kill is a Ctrl-C
    try:
        finished = _run(run) if ray is None else run_on_cluster(run, ray)
    finally:
        signal.signal(signal.SIGTERM, before)
    if any(each.interrupted for each in finished):
        raise typer.Exit(INTERRUPTED)
    if any(each.failed for each in finished):
        raise typer.Exit(NO_VALID_CANDIDATE)


def _run(run: Shown) -> tuple[RunFinished, ...]:
    """Tune, show it, and print the closing table."""
    from flashgen.cli.display import make_display, print_report
    from flashgen.cli.tune_calls import print_gains, print_left
    from flashgen.cli.tune_served import print_served
    from flashgen.tuning.events import RunStarted
    from flashgen.tuning.from_calls import Gains
    from flashgen.tuning.runs import run_here

    request = run.request
    gains, begun = Gains(request.calls), list[RunStarted]()
    with make_display(as_json=run.as_json) as show:

        def on_event(event: Event) -> None:
            gains(event)
            begun.extend([event] if isinstance(event, RunStarted) else [])
            show(event)

        finished = run_here(request, on_event)
    if not run.as_json:
        print_report(finished, finished.device, str(request.database))
        print_left(finished, begun)
    if request.calls:
        print_gains(gains, finished, as_json=run.as_json)
    if not run.as_json:
        print_served(finished, finished.device, run.target, request.database)
    return (finished,)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
