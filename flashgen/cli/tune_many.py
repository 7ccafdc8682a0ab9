"""`flashgen tune --ray`: the same run on all GPUs of a cluster, one database for each kind of device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.cli import output
from flashgen.core.device import Device

if TYPE_CHECKING:
    from flashgen.cli.tune import Request
    from flashgen.tuning.events import RunFinished
    from flashgen.tuning.stations import Station


def run_on_cluster(request: Request, address: str) -> tuple[RunFinished, ...]:
    """Tune on the cluster at `address`, show it, and print the closing tables.

    Raises:
        MeasureError: there is no such cluster, or it cannot measure.
        DatabaseError: results cannot be stored.
    """
    from flashgen.cli.display_many import make_display
    from flashgen.cli.tune import store_of
    from flashgen.db.layers import Layers
    from flashgen.db.store import Store
    from flashgen.tuning.many import tune_on_stations

    with contextlib.ExitStack() as stack:
        stations = stack.enter_context(make_stations(address, target=request.target, jobs=request.jobs_asked))
        paths = databases(request.database, stations)
        stores = {}
        for identity, device in {station.device.identity: station.device for station in stations}.items():
            file = stack.enter_context(Store.open(paths[identity]))
            stores[identity] = stack.enter_context(store_of(request, file, device))
        layers = stack.enter_context(Layers.open([*paths.values()]))
        show = stack.enter_context(make_display(as_json=request.as_json))
        finished = tune_on_stations(
            request.workloads,
            stations=stations,
            stores=stores,
            budget=request.budget,
            options=request.options,
            neighbours=lambda name: [record for record, _ in layers.records(specialization=name)],
            on_event=show,
        )
    if not request.as_json:
        _report(request, finished, paths)
    return finished


def make_stations(
    address: str, *, target: Device | None, jobs: int | None
) -> contextlib.AbstractContextManager[Sequence[Station]]:
    """The stations of the cluster."""
    from flashgen.tuning.ray_stations import stations

    return stations(address, target=target, jobs=jobs)


def databases(path: Path, stations: Iterable[Station]) -> dict[str, Path]:
    """The file of each device identity.

    Where a cluster has one kind of device, that is `path`; where it has several, or had when an earlier run wrote them,
    one beside it for each: `tuning-sm90-132sm-141gb.sqlite3`.
    """
    identities = dict.fromkeys(station.device.identity for station in stations)
    beside = {identity: path.with_name(f"{path.stem}-{identity}{path.suffix}") for identity in identities}
    if len(identities) > 1:
        return beside
    return {identity: own if own.exists() else path for identity, own in beside.items()}


def _report(request: Request, finished: Iterable[RunFinished], paths: Mapping[str, Path]) -> None:
    from flashgen.cli.display import print_report
    from flashgen.cli.tune_served import print_served

    for each in finished:
        path = paths[each.device.identity]
        print_report(each, each.device, str(path))
        print_served(each, each.device, request, path)
        output.say("")
