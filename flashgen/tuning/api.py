"""The public call `tune`: what `flashgen tune` does, with events as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, overload

from flashgen.core.workload import Workload
from flashgen.tuning import runs
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, OnEvent, RunFinished
from flashgen.tuning.request import WHOLE, Request, check_alone, check_cluster

CALLS_S = 600.0
"""Of a file of calls: seconds for all workloads where none are given."""


@overload
def tune(
    workloads: Iterable[Workload | str] = ...,
    *,
    models: Iterable[str] = ...,
    files: Iterable[str | Path] = ...,
    from_calls: str | Path | None = ...,
    direction: str | None = ...,
    deterministic: bool = ...,
    target: str | None = ...,
    device: int = ...,
    budget: str = ...,
    limit_s: float | None = ...,
    database: str | Path | None = ...,
    store: str | None = ...,
    shard: str = ...,
    ray: None = ...,
    jobs: int | None = ...,
    options: Options | None = ...,
    study: str | None = ...,
    on_event: OnEvent = ...,
) -> RunFinished: ...


@overload
def tune(
    workloads: Iterable[Workload | str] = ...,
    *,
    models: Iterable[str] = ...,
    files: Iterable[str | Path] = ...,
    direction: str | None = ...,
    deterministic: bool = ...,
    target: str | None = ...,
    budget: str = ...,
    limit_s: float | None = ...,
    database: str | Path | None = ...,
    store: str | None = ...,
    shard: str = ...,
    ray: str,
    jobs: int | None = ...,
    options: Options | None = ...,
    study: str | None = ...,
    on_event: Callable[[str, Event], None] = ...,
) -> tuple[RunFinished, ...]: ...


def tune(
    workloads: Iterable[Workload | str] = (),
    *,
    models: Iterable[str] = (),
    files: Iterable[str | Path] = (),
    from_calls: str | Path | None = None,
    direction: str | None = None,
    deterministic: bool = False,
    target: str | None = None,
    device: int = 0,
    budget: str = "30s",
    limit_s: float | None = None,
    database: str | Path | None = None,
    store: str | None = None,
    shard: str = WHOLE,
    ray: str | None = None,
    jobs: int | None = None,
    options: Options | None = None,
    study: str | None = None,
    on_event: Callable[..., None] = lambda *event: None,
) -> RunFinished | tuple[RunFinished, ...]:
    """Find the fastest verified kernel for workloads and store it; go on where an earlier run stopped.

    Calls of this process are served by what was found after `flashgen.reload()`.

    Args:
        workloads: workloads, or their keys.
        models: names of presets.
        files: YAML or JSON files in the form of the presets.
        from_calls: a file of `flashgen.record`: its workloads, the longest share of the time first. They are tuned
            alone, in 600 seconds where `limit_s` is not given.
        direction: `forward`, `backward` or `both`, of everything named; None is as it was named.
        deterministic: backward passes that give the same bits every time.
        target: predict for this GPU without measuring; None measures on the one here.
        device: torch's index of that.
        budget: for each workload, as of `flashgen tune`.
        limit_s: seconds for all workloads; None is no limit.
        database: where records go; None is the first of FLASHGEN_DB, or the user's.
        store: the URL of a server that keeps the trials, shared by several runs; `database` gets the records.
        shard: part i of n of the workloads, `0/4` the first of four.
        ray: tune on all GPUs of a Ray cluster: `host:port`, `auto` for the one that runs here, or `local`. Such a run
            has no `from_calls` and `device`, and a database for each kind of device.
        jobs: compile processes, of each GPU of a cluster; None is one for each CPU but one, divided by the shards.
        options: how to search (`flashgen.tuning.context.Options`).
        study: a storage of Optuna that also gets every trial, as `sqlite:///studies.db`, for optuna-dashboard.
        on_event: is told all events (`flashgen.tuning.events`) as they happen, in this thread. Of a cluster it gets
            two values: the name of the station, empty for the run as a whole, and the event.

    Returns:
        All outcomes; `interrupted` says that a KeyboardInterrupt ended the run. Of a cluster one for each kind of
        device.

    Raises:
        TuningError: nothing, or too much, names what is tuned, or an argument is wrong.
        WorkloadError: a workload, a model or the file is not valid.
        DeviceError: there is no GPU to measure on, or none is called `target`.
        MeasureError: the executor or the cluster cannot measure.
        DatabaseError: results cannot be stored.
    """
    named: dict[str, Any] = {"workloads": workloads, "models": models, "files": files, "direction": direction}
    check_alone("from_calls", from_calls, {**named, "deterministic": deterministic, "ray": ray})
    check_cluster("ray", ray, {"device": device})
    request = Request.of(
        **named,
        from_calls=from_calls,
        deterministic=deterministic,
        target=target,
        device=device,
        budget=Budget.parse(budget),
        limit_s=CALLS_S if from_calls is not None and limit_s is None else limit_s,
        database=database,
        store=store,
        shard=shard,
        ray=ray,
        jobs=jobs,
        options=options,
        study=study,
    )
    if request.ray is not None:
        return runs.run_on_cluster(request, request.ray, on_event)
    return runs.run_here(request, on_event)
