"""`Request`: what a run is asked to do, read and checked in one place for the command line and for Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashgen.core.calls import CallRecord, read_calls
from flashgen.core.checks import instance, items, real_number, text, whole_number
from flashgen.core.device import Device, find_device
from flashgen.core.errors import TuningError
from flashgen.core.input_copies import as_served
from flashgen.core.quoting import shown
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.tuning.budget import Budget
from flashgen.tuning.compile_pool import usable_cpus
from flashgen.tuning.context import Options, lookahead
from flashgen.tuning.from_calls import LEAST_S, by_share
from flashgen.tuning.shards import Shard
from flashgen.tuning.study_files import check_study
from flashgen.tuning.workloads import collect

WHOLE = "0/1"
"""The shard that is everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run is asked to do.

    Attributes:
        workloads: what to tune; of a file of calls the longest share of the time first.
        target: the GPU to predict for; None measures.
        index: torch's index of the GPU to measure on.
        database: the file that gets the records.
        server: the URL of the server that keeps the trials, None where the file does.
        budget: for each workload.
        options: how to search.
        jobs: compile processes on this machine.
        jobs_asked: the same as it was asked for; None lets every node of a cluster choose.
        ray: the address of a cluster, None for this machine alone.
        calls: what a program was recorded to call, where that names the workloads.
        limit_s: seconds for all workloads.
        study: the storage of Optuna that also gets the trials, None for none.
        shard: the part of the workloads; of a run that times records again and names none, of all that have one.
        notes: what a user should know of the workloads: which others serve in the place of those that were named.
    """

    workloads: tuple[Workload, ...]
    target: Device | None
    index: int
    database: Path
    server: str | None
    budget: Budget
    options: Options
    jobs: int
    jobs_asked: int | None
    ray: str | None = None
    calls: tuple[CallRecord, ...] = ()
    limit_s: float | None = None
    study: str | None = None
    shard: Shard = field(default_factory=Shard)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        workloads: Iterable[Workload | str] = (),
        models: Iterable[str] = (),
        files: Iterable[str | Path] = (),
        from_calls: str | Path | None = None,
        direction: str | None = None,
        deterministic: bool = False,
        target: str | None = None,
        device: int = 0,
        budget: Budget,
        limit_s: float | None = None,
        database: str | Path | None = None,
        store: str | None = None,
        shard: str = WHOLE,
        ray: str | None = None,
        jobs: int | None = None,
        options: Options | None = None,
        study: str | None = None,
    ) -> Request:
        """Read what is named, and the shard's part of it; see `flashgen.tune` for the arguments.

        Raises:
            TuningError: nothing is named, or a shard, a number or an option is not valid.
            WorkloadError: a workload, a model, a direction or a file is not.
            DeviceError: no GPU is called `target`.
            DatabaseError: `study` names a file of others, or none.
        """
        others = {"target": target, "from_calls": from_calls, "store": store}
        if options is not None and options.reverify is not None and any(value is not None for value in others.values()):
            raise TuningError(f"records of this GPU are timed again into a file: no {', no '.join(others)}")
        part, index = Shard.parse(shard), whole_number("device", device, 0, error=TuningError)
        named = None if target is None else find_device(target)
        asked = None if jobs is None else whole_number("jobs", jobs, 1, error=TuningError)
        here = asked or max(1, usable_cpus() // part.count)
        shapes = [one.key if isinstance(one, Workload) else one for one in items("workloads", workloads, TuningError)]
        paths = [_path("a file of workloads", path) for path in items("files", files, TuningError)]
        asked_for = collect(models=models, shapes=shapes, paths=paths, direction=direction, deterministic=deterministic)  # type: ignore[arg-type]
        serving = {each: as_served(each) for each in asked_for}
        found = tuple(dict.fromkeys(serving.values()))
        notes = tuple(_note(each, instead) for each, instead in serving.items() if instead != each)
        calls: tuple[CallRecord, ...] = ()
        if from_calls is not None:
            calls = read_calls(_path("from_calls", from_calls))
            found = by_share(calls, named or _device_at(index))
        file = settings().db_layers[0] if database is None else _path("database", database)
        server = None if store is None else text("store", store, TuningError)
        if study is not None:
            check_study(text("study", study, TuningError), (file, *settings().db_layers), server)
        if study is not None and named is not None:
            raise TuningError(f"a study keeps what is measured, and for a target nothing is, got {shown(target)}")
        if named is not None and options is not None and options.until is not None:
            raise TuningError(f"until is of what is measured, and for a target nothing is, got {shown(target)}")
        if named is not None and index:
            raise TuningError(f"a device measures, and for a target nothing is measured, got {index}, {shown(target)}")
        if not found and (options is None or options.reverify is None):
            raise TuningError("what is tuned is named by workloads, models, files or calls, and nothing was")
        own = set(part.of(found))
        return cls(
            workloads=tuple(workload for workload in found if workload in own) if calls else part.of(found),
            target=named,
            index=index,
            database=file,
            server=server,
            budget=instance("budget", budget, Budget, TuningError),
            options=options or Options(lookahead=lookahead(here)),
            jobs=here,
            jobs_asked=asked,
            ray=None if ray is None else text("ray", ray, TuningError),
            calls=calls,
            limit_s=None if limit_s is None else _limit(limit_s),
            study=study,
            shard=part,
            notes=notes,
        )


def _note(asked: Workload, instead: Workload) -> str:
    return f"calls of {asked.key} get copies with rows of multiples of 16 bytes, which are tuned: {instead.key}"


def check_alone(name: str, path: object, others: Mapping[str, object]) -> None:
    """Refuse what names workloads beside a file of calls, which does; `name` and the keys are what its user wrote.

    Raises:
        TuningError: there is some.
    """
    given = [other for other, value in others.items() if value]
    if path is not None and given:
        raise TuningError(f"{name} names what is tuned: no {', '.join(given)}, got {shown(str(path))}")


def check_cluster(name: str, address: object, others: Mapping[str, object]) -> None:
    """Refuse what is about one GPU beside a cluster, which has its own; `name` and the keys are what its user wrote.

    Raises:
        TuningError: there is some.
    """
    if address is not None and any(others.values()):
        raise TuningError(f"{name} takes all GPUs of a cluster and asks it which they are: no {', no '.join(others)}")


def _path(name: str, value: object) -> Path:
    if not isinstance(value, (str, Path)):
        raise TuningError(f"{name} is the path of a file, got {shown(value)}")
    return Path(value)


def _limit(seconds: float) -> float:
    """Seconds for all workloads, within which a search can begin."""
    found = real_number("a limit", seconds, TuningError)
    if not found >= LEAST_S:  # NaN is not
        raise TuningError(f"all workloads have at least {LEAST_S:g} s, with less no search begins, got {found:g}")
    return found


def _device_at(index: int) -> Device | None:
    """GPU `index` of this machine; None without one, or without torch: a recording's own figures order its calls."""
    try:
        import torch
    except ImportError:
        return None
    from flashgen.launch.gpu import current_device

    return current_device(index) if torch.cuda.is_available() else None
