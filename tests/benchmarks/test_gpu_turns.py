"""Benchmarks that share a GPU, as real processes: whoever measures is alone, and nobody stays stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks import everything, race
from benchmarks.everything import runner_of
from benchmarks.gpu_turns import VARIABLE, GpuTurns, my_turn
from benchmarks.jobs import Benchmark, Job
from tests.benchmarks.races import FakeGpu, impl_of, raced
from tests.processes import eventually

SLEEPS = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])"


@pytest.fixture
def processes() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process group that runs a program; all are killed in the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str, **environment: str) -> subprocess.Popen[bytes]:
        command, path = [sys.executable, "-c", program], os.pathsep.join(sys.path)
        env = os.environ | {"PYTHONPATH": path} | environment
        started.append(subprocess.Popen(command, start_new_session=True, env=env, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def states(group: int) -> set[str]:
    """The states of the processes of a group: T is stopped."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number, *_ = path.read_text().rpartition(")")[2].split()
            found |= {state} if int(number) == group else set()
    return found


def test_others_and_their_children_stand_still_in_a_turn(tmp_path: Path, processes: Callable[..., object]) -> None:
    turns = GpuTurns(tmp_path)
    mine, other, stranger = (
        *(turns.join(partial(processes, program)) for program in (SLEEPS, PARENT)),
        processes(SLEEPS),
    )
    assert eventually(lambda: states(other.pid) == {"S"})
    with turns.alone(mine.pid):
        assert eventually(lambda: states(other.pid) == {"T"})
        assert states(mine.pid) | states(stranger.pid) <= {"S", "R"}
    assert eventually(lambda: states(other.pid) == {"S"})


TAKES_TURNS = """
import time
from benchmarks.gpu_turns import my_turn
for _ in range(8):
    with my_turn():
        began = time.monotonic()
        time.sleep(0.01)
        print(began, time.monotonic(), flush=True)
"""


def test_no_two_measure_at_once_and_all_come_to_their_end(tmp_path: Path, processes: Callable[..., object]) -> None:
    turns = GpuTurns(tmp_path)
    sharing = [turns.join(partial(processes, TAKES_TURNS, **{VARIABLE: str(tmp_path)})) for _ in range(3)]
    printed = [process.communicate(timeout=60)[0].decode().splitlines() for process in sharing]
    assert [lines.pop().partition(":")[0] for lines in printed] == ["8 turns"] * 3
    assert [len(lines) for lines in printed] == [8, 8, 8]
    visits = sorted(tuple(map(float, line.split())) for lines in printed for line in lines)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(visits))


def test_whoever_is_killed_in_its_turn_leaves_nobody_stopped(tmp_path: Path, processes: Callable[..., object]) -> None:
    turns = GpuTurns(tmp_path)
    other = turns.join(partial(processes, SLEEPS))
    hangs = "from benchmarks.gpu_turns import my_turn\nimport time\nwith my_turn(): time.sleep(60)"
    hanging = turns.join(partial(processes, hangs, **{VARIABLE: str(tmp_path)}))
    assert eventually(lambda: states(other.pid) == {"T"})
    os.killpg(hanging.pid, signal.SIGKILL)
    hanging.wait()
    turns.leave(hanging.pid)
    assert eventually(lambda: states(other.pid) == {"S"})
    with turns.alone():
        assert eventually(lambda: states(other.pid) == {"T"})


def test_a_process_without_turns_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with GpuTurns(tmp_path).alone(), my_turn():
        assert list(tmp_path.iterdir()) == [tmp_path / "lock"]


def job_of(name: str, *, is_alone: bool) -> Job:
    return Job(benchmark=Benchmark(name=name, module=name, seconds=1.0, is_alone=is_alone), shard=0)


@pytest.mark.parametrize("is_alone", [False, True])
def test_who_is_alone_stops_the_others_for_its_whole_time_and_takes_no_turns(
    is_alone: bool, tmp_path: Path, processes: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    folder = tmp_path / everything.TURNS / "7"
    other = GpuTurns(folder).join(partial(processes, SLEEPS))
    says = (
        f"import os; print(os.environ.get('{VARIABLE}'), open('/proc/{other.pid}/stat').read().rpartition(')')[2][1])"
    )
    monkeypatch.setattr(Job, "command", lambda *_: [sys.executable, "-c", f"import time; time.sleep(0.2); {says}"])
    runner = runner_of(tmp_path, "7", None, beside=2)
    assert runner(job_of("it", is_alone=is_alone), 60.0) == 0
    expected = "None T\n" if is_alone else f"{folder} S\n"
    assert (tmp_path / "logs" / "it.txt").read_text() == expected
    assert eventually(lambda: states(other.pid) == {"S"})
    assert sorted(path.name for path in folder.iterdir()) == sorted([str(other.pid), "lock"])


def test_lists_of_one_gpu_share_what_compiles_beforehand(tmp_path: Path) -> None:
    job = everything.planned(4, ["forward"])[0][0]
    words = [job.command(tmp_path, None, 60.0, beside) for beside in (1, 4, 100)]
    assert [each[each.index("--prepare") + 1] for each in words] == ["12", "3", "1"]


class Held:
    """Stands for `my_turn`, and knows whether somebody measures."""

    def __init__(self) -> None:
        self.now, self.turns = False, 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        assert not self.now, "a turn in a turn waits for itself"
        self.now, self.turns = True, self.turns + 1
        yield
        self.now = False


def test_a_race_measures_in_its_turns_and_prepares_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    held, gpu = Held(), FakeGpu()
    monkeypatch.setattr(race, "my_turn", held.turn)
    elapsed, seen = gpu.elapsed_ms, list[bool]()
    monkeypatch.setattr(gpu, "elapsed_ms", lambda *given: (seen.append(held.now), elapsed(*given))[1])
    impls = [impl_of(gpu, name, 1.0) for name in ("a", "b")]
    for impl in impls:
        prepare = impl.prepare
        object.__setattr__(
            impl, "prepare", lambda *given, prepare=prepare: (seen.append(not held.now), prepare(*given))[1]
        )
    assert all(result.reason is None for result in raced(gpu, *impls))
    assert len(seen) > 8
    assert all(seen)
    assert held.turns == 3  # how each is timed, and the race
