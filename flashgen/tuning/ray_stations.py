"""Stations on a Ray cluster: an actor for each GPU (`tuning.ray_host.Host`); the only user of ray.

Ray starts the actors, carries questions and answers, and says when one is gone. An actor that neither answers nor is
gone is asked for a sign of life; without one it counts as lost. Every wait has an end, here or in the executor.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from flashgen._version import __version__
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import MeasureError
from flashgen.core.quoting import shown
from flashgen.core.record import Failure, Versions
from flashgen.core.settings import set_unless_given
from flashgen.core.workload import Specialization
from flashgen.measure.executor import GPU_SERVICE
from flashgen.measure.protocol import EvaluateJob, Executor, HostInfo, Outcome, RaceJob, RaceResult
from flashgen.tuning.compile_pool import COMPILE_SERVICE
from flashgen.tuning.ray_host import Host
from flashgen.tuning.stations import StationLostError
from flashgen.tuning.tune import why_noisy

LOCAL = "local"
"""The address of a cluster that is started here, of this machine alone, and ends with the run."""

LOCAL_STORE_BYTES = 2**27
"""Ray would take a third of the memory for large objects, and here are none."""

_PORT = re.compile("[0-9]{1,5}")
PORT_S = 5.0
START_S = 60.0
"""How long an actor may take to be placed on a GPU and to answer; what is used by others is left to them."""

PING_EVERY_S = 10.0
PING_S = 30.0
"""An actor that works on a question is asked for a sign of life so often, and has so long to give one."""

RESTARTS = 3
THREADS = 4
"""Of an actor: for a question, a sign of life, and what is submitted meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What runs in the processes of a host, as `module:Class`."""

    measure: str = GPU_SERVICE
    compile: str = COMPILE_SERVICE


@contextlib.contextmanager
def stations(
    address: str, *, target: Device | None = None, jobs: int | None = None, services: Services | None = None
) -> Iterator[Sequence[RayStation]]:
    """The stations of a cluster, until the end of the block: one a GPU, or with a `target` one a node that predicts.

    Args:
        address: `host:port` of a cluster that this machine belongs to, `auto` for the one that runs here, or `local`.
        target: compile for this device and measure nothing.
        jobs: compile processes of each; None divides each node's CPUs.
        services: what measures and compiles.

    Raises:
        MeasureError: ray is not installed, the cluster cannot be reached or has nothing to offer, or a node has
            another version of flashgen.
    """
    ray = _connected(address)
    opened: list[RayStation] = []
    try:
        chosen = services or Services()
        places = [(node, index) for node in _nodes(ray, target) for index in range(node.count)]
        for node, index in places:
            opened.append(RayStation(ray, node, index, target, jobs, chosen))
        yield _ready(opened)
    finally:
        for station in opened:
            station.stop()
        ray.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster and how many stations it has."""

    id: str
    name: str
    count: int


class RayStation:
    """See `tuning.stations.Station`; it is its own executor and compiler."""

    def __init__(
        self, ray: Any, node: Node, index: int, target: Device | None, jobs: int | None, services: Services
    ) -> None:
        """Ask for an actor on a node; `begin` waits for it."""
        self.name = f"{node.name}:{index}"
        self.hostname = node.name
        self.device: Device
        self.versions = Versions()
        self.jobs = 1
        self.warnings: tuple[str, ...] = ()
        self._ray = ray
        self._node = node
        self._target = target
        self._asked_jobs = jobs
        self._services = services
        self._restarts = 0
        self._is_stopped = False
        self._lock = threading.Lock()
        self._actor = self._create()

    @property
    def executor(self) -> Executor | None:
        """Itself, if it measures."""
        return None if self._target else self

    @property
    def compiler(self) -> RayStation:
        """Itself."""
        return self

    def begin(self, until: float) -> None:
        """Wait for the actor, compare versions, learn what it measures on, and start its compile pool.

        Raises:
            StationLostError: it does not answer until then (seconds of `time.monotonic`), or cannot measure.
            MeasureError: it has another version of flashgen.
        """
        theirs = self._get(self._call("hello"), max(0.0, until - time.monotonic()))
        if theirs != __version__:
            raise MeasureError(
                f"all nodes have the flashgen of the coordinator, {__version__}; {self._node.name} has {theirs}"
            )
        if self._target is None:
            host = self.describe()
            self.device, self.versions, self.warnings = host.device, host.versions, why_noisy(host)
            self.hostname = host.hostname
        else:
            self.device, self.versions = self._target, self._ask("software")
        self.jobs = self._ask("start_compiling", self.device, self._asked_jobs, self._node.count)

    def restart(self) -> None:
        """See `tuning.stations.Station.restart`."""
        before = self.device
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise StationLostError(f"a station is started again {RESTARTS} times at the most")
        self._kill()
        self._actor = self._create()
        self.begin(time.monotonic() + START_S)
        if self.device.identity != before.identity:
            raise StationLostError(f"its node has another device now, {self.device.identity}, not {before.identity}")

    def stop(self) -> None:
        """See `tuning.stations.Station.stop`."""
        with self._lock:
            self._is_stopped = True
        self._kill()

    def describe(self) -> HostInfo:
        """See `measure.protocol.Executor.describe`."""
        found: HostInfo = self._ask("describe")
        return found

    def evaluate(self, job: EvaluateJob) -> Outcome:
        """See `measure.protocol.Executor.evaluate`."""
        outcome: Outcome = self._ask("evaluate", job)
        return outcome

    def race(self, job: RaceJob) -> RaceResult:
        """See `measure.protocol.Executor.race`."""
        result: RaceResult = self._ask("race", job)
        return result

    def submit(self, spec: Specialization, config: Config) -> None:
        """See `tuning.compile_pool.Compiler.submit`; if it is lost, the next question says so."""
        self._call("submit", spec, config)

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        """See `tuning.compile_pool.Compiler.result`."""
        compiled: Compiled | Failure = self._ask("result", spec, config)
        return compiled

    def close(self) -> None:
        """See `measure.protocol.Executor.close`."""
        self.stop()

    def _create(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            if self._is_stopped:
                raise StationLostError("it was stopped")
            actor = self._ray.remote(Host).options(
                num_gpus=0 if self._target else 1,
                num_cpus=0,
                max_concurrency=THREADS,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node.id, soft=False),
            )
            return actor.remote(self._services.measure, self._services.compile)

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone, or the whole cluster is
            self._ray.kill(self._actor)

    def _ask(self, method: str, *arguments: object) -> Any:
        """The answer to a question, however long it takes, as long as there are signs of life."""
        answer = self._call(method, *arguments)
        while not self._wait(answer, PING_EVERY_S):
            self._get(self._call("ping"), PING_S)
        return self._get(answer, PING_S)

    def _call(self, method: str, *arguments: object) -> Any:
        """What an answer is asked for by; behind the end of a run, Ray would start a cluster of its own for it."""
        if not self._ray.is_initialized():
            raise StationLostError("the run has ended")
        try:
            return getattr(self._actor, method).remote(*arguments)
        except self._ray.exceptions.RayError as error:
            raise StationLostError(_reason(error)) from error

    def _wait(self, answer: Any, timeout_s: float) -> bool:
        """Whether an answer is there in time."""
        try:
            return bool(self._ray.wait([answer], timeout=timeout_s)[0])
        except self._ray.exceptions.RayError as error:
            raise StationLostError(_reason(error)) from error

    def _get(self, answer: Any, timeout_s: float) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(answer, timeout=timeout_s)
        except errors.GetTimeoutError as error:
            raise StationLostError(f"no sign of life within {timeout_s:.0f} s") from error
        except errors.RayTaskError as error:
            raise StationLostError(f"its host failed: {error.cause}") from error
        except errors.RayError as error:
            raise StationLostError(_reason(error)) from error


def _connected(address: str) -> Any:
    """The module ray, connected to a cluster."""
    # a cluster that does not answer costs seconds and not minutes; one that is started here is nobody else's
    set_unless_given(RAY_NUM_REDIS_GET_RETRIES="3", RAY_py_gcs_connect_timeout_s="5")
    set_unless_given(RAY_ENABLE_AUTO_CONNECT="0")  # a question behind the end of a run would start a cluster
    set_unless_given(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")  # what it will be, and says so at each start
    if address == LOCAL:
        set_unless_given(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    _check_port(address)
    try:
        import ray
    except ImportError as error:
        raise MeasureError(
            f"tuning on a cluster needs ray, and it is not here: pip install 'flashgen[ray]' ({error})"
        ) from error
    if ray.is_initialized():  # by a program around this run, whose actors would end with a connection of its own
        raise MeasureError(
            f"a run connects to a Ray cluster by itself, got {shown(address)} in a process that is connected already: "
            "call ray.shutdown() first, or tune in a process of its own"
        )
    before = signal.getsignal(signal.SIGTERM)
    try:
        own = {"object_store_memory": LOCAL_STORE_BYTES} if address == LOCAL else {}
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR", **own)
    except (OSError, RuntimeError, ValueError, SystemExit, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise MeasureError(f"no Ray cluster answers at {shown(address)}: {_reason(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # ray sets one that ends the process
    # else ray prints what its daemons say of lost actors to standard output, between our lines
    ray._private.worker._worker_logs_enabled = False
    return ray


def _check_port(address: str) -> None:
    """Ray itself tries for minutes to reach an address where nobody listens."""
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not _PORT.fullmatch(port) or not 0 < int(port) < 2**16:
        raise MeasureError(
            f"the address of a Ray cluster is host:port, auto or {LOCAL}, and this machine is one of its nodes; "
            f"got {shown(address)}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PORT_S).close()
    except (OSError, UnicodeError) as error:  # the latter of what is no name of a machine
        raise MeasureError(f"no Ray cluster answers at {shown(address)}: {error}") from error


def _nodes(ray: Any, target: Device | None) -> list[Node]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    counts = [1 if target else int(node["Resources"].get("GPU", 0)) for node in alive]
    if not any(counts):
        raise MeasureError(
            f"measuring needs a GPU, and Ray knows of none on {len(alive)} nodes; --target h100 predicts without"
        )
    names: dict[str, int] = {}
    found = []
    for node, count in zip(alive, counts, strict=True):
        name = node["NodeManagerHostname"]
        names[name] = names.get(name, 0) + 1
        name += "" if names[name] == 1 else f"-{names[name]}"
        found.append(Node(id=node["NodeID"], name=name, count=count))
    return found


def _ready(opened: Sequence[RayStation]) -> list[RayStation]:
    """Those that answer and can measure, if there are any; what keeps the others is a warning of the first."""
    until = time.monotonic() + START_S
    pool = ThreadPoolExecutor(len(opened), thread_name_prefix="start")
    begun = [pool.submit(station.begin, until) for station in opened]
    pool.shutdown(wait=False)
    wait(begun)
    ready, lost = [], []
    for station, future in zip(opened, begun, strict=True):
        try:
            future.result()
            ready.append(station)
        except StationLostError as error:  # noqa: PERF203 - once a station
            lost.append(f"{station.name} is left out: {error}")
            station.stop()
    if not ready:
        raise MeasureError(f"a run needs a machine that answers, and none of {len(opened)} does: {'; '.join(lost)}")
    ready[0].warnings += tuple(lost)
    return ready


def _reason(error: BaseException) -> str:
    """The last line, which has the reason, up to details of Ray's own processes; of other versions all lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Version mismatch"):
        return " ".join(lines)
    return " ".join(lines[-1:]).partition(" Worker exit type")[0] or type(error).__name__
