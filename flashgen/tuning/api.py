"""The public call `tune`: what `flashgen tune` does on one GPU, with events as objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from flashgen.core.calls import read_calls
from flashgen.core.checks import items
from flashgen.core.device import Device, find_device
from flashgen.core.errors import DeviceError, TuningError
from flashgen.core.record import Versions
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.measure.protocol import Executor
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import CompilePool, usable_cpus
from flashgen.tuning.context import Options, lookahead
from flashgen.tuning.events import OnEvent, RunFinished
from flashgen.tuning.from_calls import by_share
from flashgen.tuning.tune import tune as tune_workloads
from flashgen.tuning.workloads import collect


def tune(
    workloads: Iterable[Workload | str] = (),
    *,
    models: Iterable[str] = (),
    from_calls: str | Path | None = None,
    target: str | None = None,
    device: int = 0,
    budget: str = "30s",
    limit_s: float | None = None,
    database: str | Path | None = None,
    jobs: int | None = None,
    options: Options | None = None,
    on_event: OnEvent = lambda event: None,
) -> RunFinished:
    """Find the fastest verified kernel for workloads and store it; go on where an earlier run stopped.

    Calls of this process are served by what was found after `flashgen.reload()`.

    Args:
        workloads: workloads, or their keys.
        models: names of presets.
        from_calls: a file of `flashgen.record`: its workloads, the longest share of the time first. They are tuned
            alone, in 600 seconds where `limit_s` is not given.
        target: predict for this GPU without measuring; None measures on the one here.
        device: torch's index of that.
        budget: for each workload, as of `flashgen tune`.
        limit_s: seconds for all workloads; None is no limit.
        database: where records go; None is the first of FLASHGEN_DB, or the user's.
        jobs: compile processes; None is one for each CPU but one.
        options: how to search (`flashgen.tuning.context.Options`).
        on_event: is told all events (`flashgen.tuning.events`) as they happen, in this thread.

    Returns:
        All outcomes; `interrupted` says that a KeyboardInterrupt ended the run.

    Raises:
        TuningError: nothing, or too much, names what is tuned, or an argument is wrong.
        WorkloadError: a workload, a model or the file is not valid.
        DeviceError: there is no GPU to measure on, or none is called `target`.
        DatabaseError: results cannot be stored.
    """
    named = None if target is None else find_device(target)
    spent, count = Budget.parse(budget), usable_cpus() if jobs is None else jobs
    path = settings().db_layers[0] if database is None else Path(database)
    asked = _asked(workloads, models, from_calls)
    with contextlib.ExitStack() as stack:
        executor = None if named is not None else stack.enter_context(contextlib.closing(make_executor(device)))
        gpu = named if executor is None else executor.describe().device
        assert gpu is not None
        if from_calls is not None:
            asked = by_share(read_calls(Path(from_calls)), gpu)
            limit_s = 600.0 if limit_s is None else limit_s
        layers = stack.enter_context(Layers.open([path]))
        compiler = stack.enter_context(make_compiler(gpu, count))
        return tune_workloads(
            asked,
            device=gpu,
            store=layers.writable,
            compiler=compiler,
            executor=executor,
            budget=spent,
            options=options or Options(lookahead=lookahead(count)),
            versions=None if executor is not None else _versions_here(),
            neighbours=lambda name: [record for record, _ in layers.records(specialization=name)],
            on_event=on_event,
            limit_s=limit_s,
        )


def make_executor(index: int) -> Executor:
    """The executor of GPU `index`.

    Raises:
        DeviceError: torch sees no GPU.
    """
    import torch

    from flashgen.measure.executor import LocalExecutor

    if not torch.cuda.is_available():
        raise DeviceError("measuring needs a GPU that torch can use, and there is none; target='h100' predicts without")
    return LocalExecutor(index)


def make_compiler(device: Device, jobs: int) -> CompilePool:
    """The pool that compiles ahead."""
    return CompilePool(device, jobs=jobs)


def _versions_here() -> Versions:
    from flashgen.measure.gpu import versions

    return versions()


def _asked(
    workloads: Iterable[Workload | str], models: Iterable[str], from_calls: str | Path | None
) -> tuple[Workload, ...]:
    listed = items("workloads", workloads, TuningError)
    parsed = [one if isinstance(one, Workload) else Workload.parse(one) for one in listed]  # type: ignore[arg-type]
    found = tuple(dict.fromkeys([*parsed, *collect(models=models)]))
    if bool(found) == (from_calls is not None):
        raise TuningError("what is tuned is named by workloads and models, or by from_calls alone")
    return found
