"""The processes around the hosts of a Ray cluster without GPUs: the cluster itself, and a driver to be killed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flashgen.core.device import Device
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import RunFinished
from flashgen.tuning.finals import Finals
from flashgen.tuning.many import OnStationEvent, tune_on_stations
from flashgen.tuning.ray_stations import Services, stations
from flashgen.tuning.stations import Station
from tests.tuning.ray_services import GPUS, LARGE, SMALL

SERVICES = Services(measure="tests.tuning.ray_services:Gpus", compile="tests.tuning.ray_services:Compiler")
WORKLOADS = tuple(Workload.parse(f"b1-h8-s{length}-d64") for length in (512, 1024, 2048))
OPTIONS = Options(finals=Finals(rounds=1), families=("portable_forward",), seed_configs=1)

ENDLESS = 1000
"""More trials of a workload than a run makes that is killed or interrupted."""


@contextlib.contextmanager
def stores(folder: Path) -> Iterator[dict[str, Store]]:
    """The databases of both kinds of GPUs."""
    with Store.open(folder / "large.sqlite3") as large, Store.open(folder / "small.sqlite3") as small:
        yield {LARGE.identity: large, SMALL.identity: small}


def tuned(
    opened: Sequence[Station],
    found: Mapping[str, Store],
    on_event: OnStationEvent = lambda station, event: None,
    *,
    trials: int,
) -> tuple[RunFinished, ...]:
    """All workloads on stations, so many trials of each."""
    return tune_on_stations(
        WORKLOADS, stations=opened, stores=found, budget=Budget(trials=trials), options=OPTIONS, on_event=on_event
    )


def cluster() -> None:
    """A cluster of this process: prints its address and ends with its standard input."""
    import ray

    found = ray.init(
        address="local",
        num_gpus=GPUS,
        num_cpus=0,  # else Ray starts a process for each beforehand
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**27,
        _temp_dir=sys.argv[1],
        _system_config={"kill_worker_timeout_milliseconds": 500},  # what is stopped would have 5 s to end by itself
    )
    print(found.address_info["gcs_address"], flush=True)
    sys.stdin.read()


def driver() -> None:
    """A run that is to be killed: address and a folder for databases as arguments."""
    _tune(None)


def compiling_driver() -> None:
    """The same of a run that compiles and measures nothing."""
    _tune(SMALL)


def _tune(target: Device | None) -> None:
    with (
        stations(sys.argv[1], target=target, jobs=1, services=SERVICES) as opened,
        stores(Path(sys.argv[2])) as found,
    ):
        tuned(opened, found, trials=ENDLESS)
