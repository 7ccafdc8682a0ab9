"""`flashgen tune`: choose workloads, measure or predict, show what happens, store what was found."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli import completion
from flashgen.cli.arguments import CommandLineError, device_here, parse_database, reading
from flashgen.core.device import Device, find_device
from flashgen.core.errors import DeviceError
from flashgen.core.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from flashgen.core.calls import CallRecord
    from flashgen.core.record import Versions
    from flashgen.core.workload import Workload
    from flashgen.db.store import Store
    from flashgen.measure.protocol import Executor
    from flashgen.tuning.budget import Budget
    from flashgen.tuning.compile_pool import CompilePool
    from flashgen.tuning.context import AnyStore, Options
    from flashgen.tuning.events import Event, RunFinished

NO_VALID_CANDIDATE, INTERRUPTED = 3, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command's options, read and checked."""

    workloads: tuple[Workload, ...]
    target: Device | None
    target_name: str | None
    index: int
    database: Path
    server: str | None
    budget: Budget
    options: Options
    jobs: int
    jobs_asked: int | None
    as_json: bool
    calls: tuple[CallRecord, ...] = ()
    limit_s: float | None = None


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
            help="For each workload: seconds with finals (20s, 2m), or trials (40). Default: 30s. With --from-calls, "
            "seconds for all of them, 10m by default.",
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
        float, typer.Option("--finals-window", help="Seconds of one window of the last comparison.", min=0.001)
    ] = 0.3,
    finals_rounds: Annotated[int, typer.Option("--finals-rounds", help="Rounds of the last comparison.", min=1)] = 4,
    retune: Annotated[
        bool, typer.Option("--retune", "--force", help="Search again where a record is current.")
    ] = False,
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
    from flashgen.core.calls import read_calls
    from flashgen.tuning.budget import Budget
    from flashgen.tuning.compile_pool import usable_cpus
    from flashgen.tuning.context import Options, lookahead
    from flashgen.tuning.finals import Finals
    from flashgen.tuning.from_calls import by_share
    from flashgen.tuning.shards import Shard
    from flashgen.tuning.workloads import collect

    if list_models:
        print_models(as_json=as_json)
        return
    with reading():
        workloads = collect(
            models=model or [], shapes=shape or [], paths=file or [], direction=direction, deterministic=deterministic
        )
        usual = tune_calls.EACH if from_calls is None else tune_calls.ALL
        part, spent = Shard.parse(shard), Budget.parse(usual if budget is None else budget)
        named = None if target is None else find_device(target)
        calls = () if from_calls is None else read_calls(from_calls)
        finals = Finals(window_s=finals_window, rounds=finals_rounds)
        searched = tuple(families.family(name).id for name in family or [])
    limit_s = None
    if from_calls is not None:
        others = {"--model": model, "--shape": shape, "--file": file, "--direction": direction, "--ray": ray}
        tune_calls.check_alone(from_calls, {**others, "--deterministic": deterministic})
        workloads, (spent, limit_s) = by_share(calls, named or device_here()), tune_calls.limits(spent)
    if not workloads:
        raise CommandLineError(
            "name what to tune with --model, --shape, --file or --from-calls; --list-models shows the presets"
        )
    if ray is not None and (device or dry_run):
        raise CommandLineError(
            "--ray takes all GPUs of a cluster and asks it which they are: no --device, no --dry-run"
        )
    here = jobs or max(1, usable_cpus() // part.count)
    request = Request(
        workloads=part.of(workloads),
        target=named,
        target_name=target,
        index=device,
        database=settings().db_layers[0] if database is None else parse_database(database),
        server=server,
        budget=spent,
        options=Options(seed=seed, retune=retune, lookahead=lookahead(here), finals=finals, families=searched),
        jobs=here,
        jobs_asked=jobs,
        as_json=as_json,
        calls=calls,
        limit_s=limit_s,
    )
    if dry_run:
        print_plan(request)
        return
    before = signal.signal(signal.SIGTERM, _interrupt)  # a scheduler's polite kill is a Ctrl-C
    try:
        finished = _run(request) if ray is None else run_on_cluster(request, ray)
    finally:
        signal.signal(signal.SIGTERM, before)
    if any(each.interrupted for each in finished):
        raise typer.Exit(INTERRUPTED)
    if any(each.failed for each in finished):
        raise typer.Exit(NO_VALID_CANDIDATE)


def make_executor(index: int) -> Executor:
    """The executor of GPU `index`.

    Raises:
        DeviceError: torch sees no GPU; the message says what works without one.
    """
    import torch

    from flashgen.measure.executor import LocalExecutor

    if not torch.cuda.is_available():
        raise DeviceError("measuring needs a GPU that torch can use, and there is none; --target h100 predicts without")
    return LocalExecutor(index)


def make_compiler(device: Device, jobs: int) -> CompilePool:
    """The pool that compiles ahead."""
    from flashgen.tuning.compile_pool import CompilePool

    return CompilePool(device, jobs=jobs)


def _run(request: Request) -> tuple[RunFinished, ...]:
    """Tune, show it, and print the closing table."""
    from flashgen.cli.display import make_display, print_report
    from flashgen.cli.tune_calls import print_gains
    from flashgen.cli.tune_served import print_served
    from flashgen.db.layers import Layers
    from flashgen.tuning.from_calls import Gains
    from flashgen.tuning.tune import tune as tune_workloads

    gains = Gains(request.calls)
    with contextlib.ExitStack() as stack:
        executor = None
        if request.target is None:
            executor = stack.enter_context(contextlib.closing(make_executor(request.index)))
            device = executor.describe().device
        else:
            device = request.target
        layers = stack.enter_context(Layers.open([request.database]))
        store = stack.enter_context(store_of(request, layers.writable, device))
        compiler = stack.enter_context(make_compiler(device, request.jobs))
        with make_display(as_json=request.as_json) as show:

            def on_event(event: Event) -> None:
                gains(event)
                show(event)

            finished = tune_workloads(
                request.workloads,
                device=device,
                store=store,
                compiler=compiler,
                executor=executor,
                budget=request.budget,
                options=request.options,
                versions=None if executor is not None else _versions_here(),
                neighbours=lambda name: [record for record, _ in layers.records(specialization=name)],
                on_event=on_event,
                limit_s=request.limit_s,
            )
    if not request.as_json:
        print_report(finished, device, str(request.database))
    if request.limit_s is not None:
        print_gains(gains, finished, len(request.workloads), as_json=request.as_json)
    if not request.as_json:
        print_served(finished, device, request, request.database)
    return (finished,)


def _versions_here() -> Versions:
    from flashgen.measure.gpu import versions

    return versions()


@contextlib.contextmanager
def store_of(request: Request, file: Store, device: Device) -> Iterator[AnyStore]:
    """Where the run of a device writes: its file, or the server, which hands the records over at the end."""
    from flashgen.db.server import ServerStore

    if request.server is None:
        yield file
        return
    with ServerStore.open(request.server) as server:
        try:
            yield server
        finally:
            server.hand_over(file, request.workloads, device)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
