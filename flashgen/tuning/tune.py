"""`tune`: from workloads to records in a database, measured on a GPU or predicted for one that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from flashgen.core.checks import instance, items
from flashgen.core.device import Device
from flashgen.core.errors import MeasureError, TuningError, UnsupportedError
from flashgen.core.record import Limits, TuningRecord, Versions
from flashgen.core.workload import Workload
from flashgen.db.server import ServerStore
from flashgen.db.store import Store
from flashgen.measure.protocol import Executor, HostInfo
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import Compiler
from flashgen.tuning.context import AnyStore, Context, Neighbours, Options
from flashgen.tuning.events import OnEvent, RunFinished, RunStarted, Warned, WorkloadFinished
from flashgen.tuning.from_calls import LEAST_S, exact_record
from flashgen.tuning.history import current_record
from flashgen.tuning.learned_cost import LearnedCost
from flashgen.tuning.measured import MeasuredSearch
from flashgen.tuning.predicted import PredictedSearch, what_is_not_ranked, why_not_ranked
from flashgen.tuning.reverify import Reverification

WITHOUT_NVML = (
    "NVML does not answer (is nvidia-ml-py installed?): nobody can tell whether other processes use this GPU, and "
    "records have neither clocks nor the driver's version"
)
"""Said once a run where an NVIDIA GPU is measured without it."""


def tune(
    workloads: Sequence[Workload],
    *,
    device: Device,
    store: AnyStore,
    compiler: Compiler,
    executor: Executor | None,
    budget: Budget,
    options: Options | None = None,
    versions: Versions | None = None,
    neighbours: Neighbours | None = None,
    learned: LearnedCost | None = None,
    on_event: OnEvent = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
    run: str | None = None,
    limit_s: float | None = None,
) -> RunFinished:
    """Tune workloads one after the other, those of one specialization together.

    Trials, predictions and records are stored as they come: an interrupt or a crash loses at most the candidate in
    flight, and the same call goes on where it stopped. A workload without a valid candidate is reported, and the others
    go on.

    Args:
        workloads: what to tune.
        device: the GPU of `executor`, or the one to predict for.
        store: the database to resume from and write to.
        compiler: compiles ahead for `device`.
        executor: measures; None predicts instead.
        budget: for each workload.
        options: how to search.
        versions: what to write into predicted records; measured ones have the executor's.
        neighbours: known records by `Specialization.workload_class`; the store's if not given.
        learned: what is known of other searches, to propose candidates by; None leaves that to the sampler.
        on_event: is told everything as it happens, in the calling thread.
        clock: seconds that only grow.
        run: the id of the run in the history of its records, where several calls are one run; a new one by default.
        limit_s: seconds for all workloads. Then they are tuned in the order given, those with a current exact record
            in any layer are skipped, and no search begins once less than `from_calls.LEAST_S` are left.

    Returns:
        All outcomes; `interrupted` says that a KeyboardInterrupt ended the run.

    Raises:
        TuningError: an argument is of a wrong type.
        MeasureError: the executor cannot measure at all, or measures on another device.
        DatabaseError: results cannot be stored.
    """
    check_arguments(workloads, device, store, budget, options)
    context = Context(
        device=device,
        versions=_versions(executor, device, versions, on_event),
        store=store,
        compiler=compiler,
        budget=budget,
        options=options or Options(),
        neighbours=both_neighbours(store, neighbours),
        emit=on_event,
        clock=clock,
        run=run or new_run(),
        host=socket.gethostname() if executor is None else executor.describe().hostname,
        limits=Limits() if executor is None else Limits.of(executor.describe().state),
        learned=learned,
    )
    ordered = grouped(workloads) if limit_s is None else tuple(dict.fromkeys(workloads))
    started = clock()
    context.emit(RunStarted(device=device, workloads=ordered, measured=executor is not None))
    if executor is None:
        for message in what_is_not_ranked(ordered, device, context.options.families):
            context.emit(Warned(message=message))
    outcomes: list[WorkloadFinished] = []
    interrupted = False
    try:
        for position, workload in enumerate(ordered):
            following = ordered[position + 1 :]
            if limit_s is None:
                outcomes.append(tune_one(context, executor, workload, following))
            else:
                outcome = _within(limit_s - (clock() - started), context, executor, workload, following)
                if outcome is None:
                    break
                outcomes.append(outcome)
            context.emit(outcomes[-1])
    except KeyboardInterrupt:
        interrupted = True
    finished = RunFinished(device=device, outcomes=tuple(outcomes), interrupted=interrupted, seconds=clock() - started)
    context.emit(finished)
    return finished


def new_run() -> str:
    """An id that no other run has."""
    return uuid.uuid4().hex[:16]


def check_arguments(
    workloads: Sequence[Workload], device: Device, store: AnyStore | None, budget: Budget, options: Options | None
) -> None:
    """Refuse arguments of wrong types.

    Raises:
        TuningError: one is.
    """
    for workload in items("workloads", workloads, TuningError):
        instance("a workload", workload, Workload, TuningError)
    instance("device", device, Device, TuningError)
    instance("budget", budget, Budget, TuningError)
    if store is not None and not isinstance(store, ServerStore):
        instance("store", store, Store, TuningError)
    if options is not None:
        instance("options", options, Options, TuningError)


def grouped(workloads: Iterable[Workload]) -> tuple[Workload, ...]:
    """Each workload once, those of one specialization together, groups and members in the order they came."""
    groups: dict[str, dict[Workload, None]] = {}
    for workload in workloads:
        groups.setdefault(workload.specialization.key, {})[workload] = None
    return tuple(workload for group in groups.values() for workload in group)


def tune_one(
    context: Context, executor: Executor | None, workload: Workload, following: Iterable[Workload]
) -> WorkloadFinished:
    """Tune one workload of a run, or skip it where a record is current; `following` are likely to be the next ones.

    Raises:
        MeasureError: the executor cannot measure at all.
        DatabaseError: results cannot be stored.
    """
    try:
        searches = context.options.reverify is None and not context.options.retune
        record = None if not searches else current_record(context, workload, predicted=executor is None)
        if record is not None:
            day = record.created[:10] or "an unknown day"
            return ended(workload, "skipped", f"{record.provenance} on {day}", record)
        if executor is None:
            why = why_not_ranked(workload)
            return ended(workload, "skipped", why) if why else PredictedSearch(context, workload).run()
        if context.options.reverify is not None:
            return _verified_again(context, executor, workload, following)
        return MeasuredSearch(context, executor, workload).run(lambda: _warm_up(context, executor, workload, following))
    except UnsupportedError as error:
        return ended(workload, "unsupported", str(error))


def _verified_again(
    context: Context, executor: Executor, workload: Workload, following: Iterable[Workload]
) -> WorkloadFinished:
    """Time the record of a workload again, while the pool compiles what the next one of them needs."""
    known = Reverification(context, executor, workload)
    known.warm_up()
    for other in following if known.is_needed else ():
        with contextlib.suppress(UnsupportedError):
            waiting = Reverification(context, executor, other)
            if waiting.is_needed:
                waiting.warm_up()
                break
    return known.run()


def _within(
    rest_s: float, context: Context, executor: Executor | None, workload: Workload, following: Iterable[Workload]
) -> WorkloadFinished | None:
    """`tune_one` with what is left of a time for all; None where that is too little for a search."""
    if context.options.reverify is None and not context.options.retune:
        known = context.neighbours(workload.specialization.workload_class)
        record = exact_record(workload, context.device, known)
        if record is not None:
            return ended(workload, "skipped", f"measured on {record.created[:10] or 'an unknown day'}", record)
    if rest_s < LEAST_S:
        return None
    seconds = min(rest_s, context.budget.seconds or rest_s)
    budget = context.budget if context.budget.trials is not None else Budget(seconds=seconds)
    return tune_one(dataclasses.replace(context, budget=budget), executor, workload, following)


def _warm_up(context: Context, executor: Executor, done: Workload, following: Iterable[Workload]) -> None:
    """Let the compile pool begin with the next specialization while the finals keep the GPU busy."""
    for workload in following:
        if context.options.retune or current_record(context, workload) is None:
            if workload.specialization != done.specialization:
                try:
                    MeasuredSearch(context, executor, workload).warm_up()
                except UnsupportedError:
                    continue  # it will be reported when its turn comes
            return


def ended(workload: Workload, status: str, reason: str, record: TuningRecord | None = None) -> WorkloadFinished:
    """The end of a workload of which nothing was tried."""
    return WorkloadFinished(
        workload=workload, status=status, record=record, trials=0, failures=(), reason=reason, seconds=0.0
    )


def _versions(executor: Executor | None, device: Device, versions: Versions | None, on_event: OnEvent) -> Versions:
    if executor is None:
        return plain(versions or Versions())
    host = executor.describe()
    if host.device.identity != device.identity:
        raise MeasureError(f"an executor measures on the device that is tuned, {device.identity}, not {host.device}")
    for message in why_noisy(host):
        on_event(Warned(message=message))
    return plain(host.versions)


def why_noisy(host: HostInfo) -> tuple[str, ...]:
    """What a person should know of the times that this host measures."""
    found = []
    if host.other_processes:
        found.append(f"other processes use this GPU, so times will be noisy: {', '.join(host.other_processes)}")
    if host.device.is_nvidia and not host.versions.driver:
        found.append(WITHOUT_NVML)
    return tuple(found)


def plain(versions: Versions) -> Versions:
    """Plain strings, which is all that a database takes: torch's version is a subclass of str."""
    return Versions(**{field.name: str(getattr(versions, field.name)) for field in dataclasses.fields(versions)})


def both_neighbours(store: AnyStore, neighbours: Neighbours | None) -> Neighbours:
    """The given look-up and the store, which has what this run found a moment ago."""

    def both(specialization: str) -> list[TuningRecord]:
        own = store.records(specialization=specialization)
        return own + list(neighbours(specialization) if neighbours else ())

    return both
