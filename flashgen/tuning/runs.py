"""A `Request` as a run: its executor, compiler, database and server are opened, used and closed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.core.device import Device
from flashgen.core.errors import DeviceError
from flashgen.core.record import Versions
from flashgen.core.workload import Workload
from flashgen.db.files import is_unmade
from flashgen.db.layers import Layers
from flashgen.db.server import ServerStore
from flashgen.db.store import Store
from flashgen.measure.protocol import Executor
from flashgen.tuning.compile_pool import CompilePool
from flashgen.tuning.context import AnyStore
from flashgen.tuning.events import Event, OnEvent, RunFinished, Warned
from flashgen.tuning.known_searches import learned_from
from flashgen.tuning.request import Request
from flashgen.tuning.studies import Mirror
from flashgen.tuning.tune import tune

if TYPE_CHECKING:
    from flashgen.tuning.learned_cost import LearnedCost
    from flashgen.tuning.many import OnStationEvent
    from flashgen.tuning.stations import Station


def run_here(request: Request, on_event: OnEvent) -> RunFinished:
    """Tune on one GPU of this machine, or for a target.

    Raises:
        DeviceError: there is no GPU to measure on.
        FlashgenError: as `tuning.tune.tune`.
    """
    mirror = Mirror(request.study)

    def tell(event: Event) -> None:
        for each in (event, *mirror(event)):
            on_event(each)

    for note in request.notes:
        on_event(Warned(message=note))
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
        return tune(
            _asked(request, layers, [device]),
            device=device,
            store=store,
            compiler=compiler,
            executor=executor,
            budget=request.budget,
            options=request.options,
            versions=None if executor is not None else _versions_here(),
            neighbours=lambda name: [record for record, _ in layers.records(specialization=name)],
            learned=_learned(request, layers),
            on_event=tell,
            limit_s=request.limit_s,
        )


def run_on_cluster(request: Request, address: str, on_event: OnStationEvent) -> tuple[RunFinished, ...]:
    """Tune on all GPUs of the cluster at `address`; one result for each kind of device.

    Raises:
        MeasureError: there is no such cluster, or it cannot measure.
        DatabaseError: results cannot be stored.
    """
    from flashgen.tuning.many import tune_on_stations

    mirror = Mirror(request.study)

    def tell(station: str, event: Event) -> None:
        on_event(station, event)
        for said in mirror(event):
            on_event("", said)

    for note in request.notes:
        on_event("", Warned(message=note))
    with contextlib.ExitStack() as stack:
        stations = stack.enter_context(make_stations(address, target=request.target, jobs=request.jobs_asked))
        devices = {station.device.identity: station.device for station in stations}
        paths = databases(request.database, devices.values())
        stores = {}
        for identity, device in devices.items():
            file = stack.enter_context(Store.open(paths[identity]))
            stores[identity] = stack.enter_context(store_of(request, file, device))
        layers = stack.enter_context(Layers.open([*paths.values()]))
        return tune_on_stations(
            _asked(request, layers, devices.values()),
            stations=stations,
            stores=stores,
            budget=request.budget,
            options=request.options,
            neighbours=lambda name: [record for record, _ in layers.records(specialization=name)],
            learned=_learned(request, layers),
            on_event=tell,
            limit_s=request.limit_s,
        )


def _learned(request: Request, layers: Layers) -> LearnedCost | None:
    """What a model learns from; nothing is read where candidates are ranked alone, or records timed again."""
    searches = request.target is None and request.options.reverify is None
    return learned_from(layers) if searches else None


def _asked(request: Request, layers: Layers, devices: Iterable[Device]) -> tuple[Workload, ...]:
    """What the request names; of one that times records again and names nothing, all that have a measured record."""
    if request.workloads or request.options.reverify is None:
        return request.workloads
    kinds = tuple(devices)
    known = [record for record, _ in layers.records(provenance="measured")]
    return request.shard.of(
        record.workload for record in known if any(device.may_use(record.device) for device in kinds)
    )


def make_executor(index: int) -> Executor:
    """The executor of GPU `index`.

    Raises:
        DeviceError: torch sees no GPU; the message says what works without one.
    """
    import torch

    from flashgen.measure.executor import LocalExecutor

    if not torch.cuda.is_available():
        raise DeviceError(
            "measuring needs a GPU that torch can use, and there is none; a search for another one needs none "
            "(--target h100, or target='h100')"
        )
    return LocalExecutor(index)


def make_compiler(device: Device, jobs: int) -> CompilePool:
    """The pool that compiles ahead."""
    return CompilePool(device, jobs=jobs)


def make_stations(
    address: str, *, target: Device | None, jobs: int | None
) -> contextlib.AbstractContextManager[Sequence[Station]]:
    """The stations of the cluster."""
    from flashgen.tuning.ray_stations import stations

    return stations(address, target=target, jobs=jobs)


def databases(path: Path, devices: Iterable[Device]) -> dict[str, Path]:
    """The file of each device identity.

    Where a cluster has one kind of device, that is `path`; where it has several, or had when an earlier run wrote them,
    one beside it for each: `tuning-sm90-132sm-141gb.sqlite3`. A kind that `path` has rows of stays there, so that its
    trials are found when others join.

    Raises:
        DatabaseError: the file at `path` cannot be read.
    """
    identities = dict.fromkeys(device.identity for device in devices)
    beside = {identity: path.with_name(f"{path.stem}-{identity}{path.suffix}") for identity in identities}
    known = _known_devices(path) if len(identities) > 1 else set(identities)
    return {identity: path if identity in known and not own.exists() else own for identity, own in beside.items()}


def _known_devices(path: Path) -> set[str]:
    """The identities that a file has rows of."""
    if is_unmade(path):
        return set()
    with Store.open(path, read_only=True) as store:
        return {device.identity for device in store.devices()}


@contextlib.contextmanager
def store_of(request: Request, file: Store, device: Device) -> Iterator[AnyStore]:
    """Where the run of a device writes: its file, or the server, which hands the records over at the end."""
    if request.server is None:
        yield file
        return
    with ServerStore.open(request.server) as server:
        try:
            yield server
        finally:
            server.hand_over(file, request.workloads, device)


def _versions_here() -> Versions:
    from flashgen.measure.gpu import versions
    from flashgen.measure.source import version_of_source

    return dataclasses.replace(versions(), flashgen=version_of_source())
