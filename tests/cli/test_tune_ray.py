"""`flashgen tune --ray` on a real cluster of processes without GPUs: several kinds of devices, kills, errors."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from flashgen._version import __version__
from flashgen.core.errors import MeasureError
from flashgen.core.record import Failure
from flashgen.core.settings import child_environment, settings
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning import ray_stations, runs
from flashgen.tuning.events import (
    CandidateRanked,
    Event,
    RunFinished,
    RunStarted,
    TrialFinished,
    Warned,
    WorkloadStarted,
)
from flashgen.tuning.ray_stations import Services, stations
from flashgen.tuning.stations import StationLostError
from tests.cli.conftest import ROOT, Invoke
from tests.tiers import EXHAUSTIVE
from tests.tuning.ray_processes import ENDLESS, SERVICES, WORKLOADS, stores, tuned
from tests.tuning.ray_services import GPUS, LARGE, SMALL

pytestmark = [
    pytest.mark.xdist_group("ray"),
    # not imported here: ray reads its variables when it is
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed"),
]

TRIALS = 5
SHAPE = "b1-h2-s128-d64"
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all of it listens on 127.0.0.1 alone
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
Told = list[tuple[str, Event]]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    address: str
    pid: int

    def processes(self) -> list[int]:
        """The hosts and what they started."""
        parents = {int(path.name): parent for path in Path("/proc").glob("[0-9]*") if (parent := _parent(path))}
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return [pid for pid in found if "ray::Host" in _line(pid) or "worker.main()" in _line(pid)]


def _parent(process: Path) -> int | None:
    with contextlib.suppress(OSError):
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        return None if state == "Z" else int(parent)
    return None


def _line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def await_end(*pids: int, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while any(_parent(Path(f"/proc/{pid}")) for pid in pids):
        assert time.monotonic() < until, f"{pids} are still there"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of GPUs that are none."""
    os.environ.update(ENVIRONMENT)
    folder = tempfile.mkdtemp(prefix="ray")  # sockets have short names
    process = _python("cluster", folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Cluster(address=process.stdout.readline().strip(), pid=process.pid)
        process.communicate(timeout=20)
    finally:
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        for name in ENVIRONMENT:
            del os.environ[name]


def _python(function: str, *arguments: object, **how: object) -> subprocess.Popen[str]:
    code = f"from tests.tuning import ray_processes; ray_processes.{function}()"
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=child_environment(PYTHONPATH=path),
        **how,
    )


def hosts(told: Told) -> list[int]:
    """The processes of the actors, which the fake GPUs tell of."""
    lines = [event.message for _, event in told if isinstance(event, Warned)]
    return [int(line.rpartition(" ")[2]) for line in lines if "other processes" in line]


def trials_told(told: Told) -> int:
    return sum(isinstance(event, TrialFinished) for _, event in told)


@EXHAUSTIVE
def test_a_mixed_cluster_survives_a_killed_actor_and_a_silent_one(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_stations, "PING_EVERY_S", 0.5)
    monkeypatch.setattr(ray_stations, "PING_S", 2.0)
    told: Told = []
    harmed: dict[int, tuple[str, int]] = {}

    def hear(station: str, event: Event) -> None:
        """The first station that has two trials loses its actor at once, the other one's stays and says nothing."""
        told.append((station, event))
        mine = [each for each in told if each[0] == station]
        if trials_told(mine) == 2 and station not in [name for name, _ in harmed.values()]:
            sign = signal.SIGSTOP if harmed else signal.SIGKILL
            harmed[sign] = (station, hosts(mine)[0])
            os.kill(harmed[sign][1], sign)

    with stations(cluster.address, jobs=1, services=SERVICES) as opened, stores(tmp_path) as found:
        assert len(opened) == GPUS
        finished = tuned(opened, found, hear, trials=TRIALS)
        assert {each.device for each in finished} == {LARGE, SMALL}
        assert not any(each.failed or each.interrupted for each in finished)
        for device in (LARGE, SMALL):
            store = found[device.identity]
            assert store.devices() == [device]
            for workload in WORKLOADS:
                assert store.record(workload, device) is not None
                trials = store.trials(workload, device)
                assert len(trials) == TRIALS
                assert not any(isinstance(trial.outcome, Failure) for trial in trials)
    for sign, said in (
        (signal.SIGKILL, "The actor is dead because its worker process has died."),
        (signal.SIGSTOP, "no sign of life within 2 s"),
    ):
        station, pid = harmed[sign]
        lost = [event.message for name, event in told if name == station and isinstance(event, Warned)]
        assert any("was lost while" in message and message.endswith(said) for message in lost)
        await_end(pid)
    assert not capfd.readouterr().out  # which is ours, and may be JSON
    assert trials_told(told) == 2 * TRIALS * len(WORKLOADS)  # nothing that was told is measured again
    # and a question behind the end of a run, as threads of an interrupted one ask, does not start a cluster
    with pytest.raises(StationLostError, match="the run has ended"):
        opened[0].describe()
    assert not importlib.import_module("ray").is_initialized()


def killed_after_trials(driver: subprocess.Popen[str], store: Store, cluster: Cluster) -> list[int]:
    """Kill a driver that has stored some trials, and wait for the end of the processes of its hosts, which they are."""
    until = time.monotonic() + 60
    while store.counts()["trials"] < 4:
        assert driver.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    running = cluster.processes()
    driver.kill()
    driver.wait()
    await_end(*running)
    return running


@EXHAUSTIVE
def test_a_killed_driver_and_ctrl_c_leave_nothing_behind_and_the_next_one_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    told: Told = []

    def interrupt(station: str, event: Event) -> None:
        told.append((station, event))
        if isinstance(event, TrialFinished) and trials_told(told) == 3:
            running.extend(cluster.processes())
            raise KeyboardInterrupt

    driver = _python("driver", cluster.address, tmp_path)
    with stores(tmp_path) as found:
        store = found[LARGE.identity]
        running = killed_after_trials(driver, store, cluster)
        assert len(running) == 3 * GPUS  # each with an executor's worker and a compiler
        before, every = store.counts()["trials"], sum(each.counts()["trials"] for each in found.values())
        running.clear()
        with stations(cluster.address, jobs=1, services=SERVICES) as opened:
            finished = tuned(opened, found, interrupt, trials=ENDLESS)
        assert all(each.interrupted for each in finished)
        await_end(*running)
        assert len(running) == 3 * GPUS
        resumed = [event.resumed_trials for _, event in told if isinstance(event, WorkloadStarted)]
        assert before in resumed
        assert sum(each.counts()["trials"] for each in found.values()) >= every + 3


@EXHAUSTIVE
def test_a_killed_driver_of_a_run_that_compiles_alone_leaves_nothing_behind_and_the_next_one_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    told: Told = []

    def interrupt(station: str, event: Event) -> None:
        is_first = not any(isinstance(other, CandidateRanked) for _, other in told)
        told.append((station, event))
        if isinstance(event, CandidateRanked) and is_first:
            raise KeyboardInterrupt  # once: what is told behind it would end the process of the tests

    driver = _python("compiling_driver", cluster.address, tmp_path)
    with stores(tmp_path) as found:
        store = found[SMALL.identity]
        running = killed_after_trials(driver, store, cluster)
        assert len(running) == 2  # a host and a compiler
        before = store.counts()["trials"]
        with stations(cluster.address, target=SMALL, jobs=1, services=SERVICES) as opened:
            (finished,) = tuned(opened, found, interrupt, trials=ENDLESS)
        assert finished.interrupted
        assert [event.resumed_trials for _, event in told if isinstance(event, WorkloadStarted)] == [before]
        assert store.counts()["trials"] > before


@EXHAUSTIVE
def test_a_killed_actor_of_a_run_that_compiles_alone_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
    told: Told = []
    killed: list[int] = []

    def kill(station: str, event: Event) -> None:
        told.append((station, event))
        if isinstance(event, CandidateRanked) and not killed:
            killed.extend(pid for pid in cluster.processes() if "ray::Host" in _line(pid))
            os.kill(killed[0], signal.SIGKILL)

    with stations(cluster.address, target=SMALL, jobs=1, services=SERVICES) as opened, stores(tmp_path) as found:
        (finished,) = tuned(opened, found, kill, trials=40)
        store = found[SMALL.identity]
        assert not finished.failed
        assert not finished.interrupted
        for workload in WORKLOADS:
            record = store.record(workload, SMALL)
            assert record is not None
            assert record.provenance == "predicted"
            predictions = store.predictions(workload, SMALL)
            assert len(predictions) == 40
            assert not any(isinstance(each.outcome, Failure) for each in predictions)
        assert store.counts()["trials"] == 40 * len(WORKLOADS)
    assert len(killed) == 1
    lost = [event.message for _, event in told if isinstance(event, Warned) and "was lost while" in event.message]
    assert len(lost) == 1
    assert lost[0].endswith("The actor is dead because its worker process has died.")
    await_end(*killed)


def test_the_command_compiles_on_the_nodes_and_ranks(cluster: Cluster, invoke: Invoke) -> None:
    arguments = ("--target", "h100", "--family", "portable_forward", "--jobs", 1, "--budget", 1)
    result = invoke("tune", "--ray", cluster.address, "--shape", SHAPE, *arguments)
    assert result.exit_code == 0, result.output
    assert "[1/1]" in result.stdout
    assert ": predicted, " in result.stdout
    with Store.open(settings().db_layers[0], read_only=True) as store:
        record = store.record(Workload.parse(SHAPE), SMALL)
        assert record is not None
        assert record.provenance == "predicted"
        assert record.versions.triton


def test_a_node_with_another_flashgen_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_stations, "__version__", "99.0")
    message = rf"all nodes have the flashgen of the coordinator, 99.0; {socket.gethostname()} has {__version__}"
    with pytest.raises(MeasureError, match=message), stations(cluster.address, target=SMALL):
        pass


@EXHAUSTIVE
def test_a_node_without_a_working_gpu_is_said(cluster: Cluster) -> None:
    services = Services(measure="tests.tuning.ray_services:Broken")
    with (
        pytest.raises(MeasureError, match=r"none of 2 does: .*is left out: .*planted"),
        stations(cluster.address, services=services),
    ):
        pass


def test_a_cluster_without_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"Alive": True, "NodeID": "1", "NodeManagerHostname": "node", "Resources": {"CPU": 4.0}}
    ray = SimpleNamespace(nodes=lambda: [node], shutdown=lambda: None)
    monkeypatch.setattr(ray_stations, "_connected", lambda address: ray)
    with pytest.raises(MeasureError, match="needs a GPU, and Ray knows of none on 1 nodes; --target"), stations("auto"):
        pass


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://head:10001", "host:port, auto or local"),
        ("head", "host:port, auto or local"),
        ("head:0", "host:port, auto or local"),
        ("head:\u0666\u0663", "host:port, auto or local"),
        (f"head:{'1' * 5000}", "host:port, auto or local"),
        ("node..cluster:6379", "no Ray cluster answers at 'node..cluster:6379'"),
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
    ],
)
def test_an_address_that_is_none_is_said_at_once(invoke: Invoke, address: str, said: str) -> None:
    result = invoke("tune", "--ray", address, "--shape", SHAPE)
    assert result.exit_code == 1
    assert said in result.output


def test_ray_that_is_not_installed_is_said(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = invoke("tune", "--ray", "auto", "--shape", SHAPE)
    assert result.exit_code == 1
    assert "needs ray, and it is not here: pip install 'flashgen[ray]'" in result.output


def _stand_in(monkeypatch: pytest.MonkeyPatch, *, is_initialized: bool, init: Callable[..., None]) -> list[str]:
    """A module ray; what is ended of it."""
    ended: list[str] = []
    ray = ModuleType("ray")
    ray.__dict__.update(
        is_initialized=lambda: is_initialized,
        init=init,
        shutdown=lambda: ended.append("shutdown"),
        exceptions=SimpleNamespace(RayError=KeyError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ended


def test_a_program_that_is_connected_to_ray_stays_so(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = _stand_in(monkeypatch, is_initialized=True, init=lambda **how: pytest.fail("it connects again"))
    result = invoke("tune", "--ray", "local", "--shape", SHAPE)
    assert result.exit_code == 1
    assert "in a process that is connected already: call ray.shutdown() first" in result.output
    assert not ended


def test_a_cluster_of_another_ray_is_named_with_both_versions(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**how: object) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.11.7\n"
            "This process on node-1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
        )

    ended = _stand_in(monkeypatch, is_initialized=False, init=init)
    result = invoke("tune", "--ray", "auto", "--shape", SHAPE)
    assert result.exit_code == 1
    assert "The cluster was started with: Ray: 2.9.0 Python: 3.11.7 This process on node-1" in result.output
    assert ended == ["shutdown"]


def test_what_a_limit_leaves_is_said_and_is_no_interrupt(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_early(request: runs.Request, address: str, on_event: runs.OnStationEvent) -> tuple[RunFinished, ...]:
        on_event("", RunStarted(device=LARGE, workloads=request.workloads, measured=True))
        return (RunFinished(device=LARGE, outcomes=(), interrupted=False, seconds=5.0),)

    monkeypatch.setattr(runs, "run_on_cluster", ends_early)
    result = invoke("tune", "--ray", "local", "--shape", SHAPE, "--limit-seconds", 5)
    assert result.exit_code == 0, result.output
    assert "The time ended before 1 of 1 workloads" in result.stdout


def test_options_of_one_gpu_are_refused(invoke: Invoke) -> None:
    for option in (("--device", 1), ("--dry-run",)):
        result = invoke("tune", "--ray", "auto", "--shape", SHAPE, *option)
        assert result.exit_code == 2


@EXHAUSTIVE
def test_each_kind_of_device_has_a_database_of_its_own(tmp_path: Path) -> None:
    path, beside = tmp_path / "tuning.sqlite3", tmp_path / "tuning-sm90-132sm-141gb.sqlite3"
    assert runs.databases(path, [LARGE, LARGE]) == {LARGE.identity: path}
    assert runs.databases(path, [LARGE, SMALL])[LARGE.identity] == beside
    beside.touch()
    assert runs.databases(path, [LARGE]) == {LARGE.identity: beside}  # the nodes of the other kind are away
