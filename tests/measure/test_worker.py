from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.core.errors import MeasureError
from flashgen.core.record import Failure
from flashgen.core.settings import child_environment
from flashgen.measure.worker import Worker
from tests.processes import alive, eventually
from tests.tiers import only

TROUBLE = "tests.measure.services:Troublemaker"


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(TROUBLE, "tag", start_timeout_s=60) as made:
        yield made


def test_it_answers_from_another_process_that_lives_on(worker: Worker) -> None:
    assert worker.pid is None
    assert worker.call("echo", {"a": 1}, timeout_s=60) == ("tag", {"a": 1})
    pid = worker.call("pid", timeout_s=60)
    assert pid == worker.pid != os.getpid()
    assert os.getpgid(pid) == pid != os.getpgid(0)
    assert [worker.call("count", timeout_s=60) for _ in range(3)] == [1, 2, 3]
    worker.close()
    assert not alive(pid)
    worker.close()
    assert worker.call("count", timeout_s=60) == 1


@pytest.mark.parametrize(
    ("method", "payload", "stage", "reason"),
    [
        ("abort", None, "launch", "died of SIGABRT: terminate called"),
        ("segfault", None, "launch", "died of SIGSEGV"),
        ("kill_itself", None, "memory", "killed from outside"),
        ("leave", 7, "launch", "exit code 7"),
        ("lose_the_gpu", None, "verify", "an illegal memory access was encountered"),
        ("sleep", 600, "timeout", "no answer within 1 s in stage verify"),
    ],
)
def test_a_death_is_one_failure_and_the_next_call_works(
    worker: Worker, method: str, payload: object, stage: str, reason: str
) -> None:
    before = worker.call("pid", timeout_s=60)
    outcome = worker.call(method, payload, timeout_s=1 if method == "sleep" else 60)
    assert isinstance(outcome, Failure)
    assert outcome.stage == stage
    assert reason in outcome.reason
    assert not alive(before)
    assert worker.call("echo", 1, timeout_s=60) == ("tag", 1)
    assert worker.pid != before


@pytest.mark.parametrize(
    ("method", "payload", "stage", "reason"),
    [
        ("raise_error", "no such knob\nsecond line", "build", "ValueError: no such knob"),
        ("allocate", None, "memory", "MemoryError"),
        ("unpicklable", None, "launch", "pickle"),
        ("no_such_method", None, "launch", "no_such_method"),
    ],
)
def test_an_exception_is_one_failure_and_the_process_stays(
    worker: Worker, method: str, payload: object, stage: str, reason: str
) -> None:
    before = worker.call("pid", timeout_s=60)
    outcome = worker.call(method, payload, timeout_s=60)
    assert isinstance(outcome, Failure)
    assert (outcome.stage, "\n" in outcome.reason) == (stage, False)
    assert reason in outcome.reason
    assert worker.call("pid", timeout_s=60) == before


def test_a_death_between_two_calls_is_nobodys_failure(worker: Worker) -> None:
    pid = worker.call("pid", timeout_s=60)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    assert worker.call("count", timeout_s=60) == 1


def test_what_was_announced_last_can_be_blamed(worker: Worker) -> None:
    assert worker.call("sleep", 0, timeout_s=60) == "awake"
    assert worker.subject == 3
    worker.call("echo", timeout_s=60)
    assert worker.subject is None


def test_a_timeout_kills_what_the_process_had_started(worker: Worker, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    worker.call("pid", timeout_s=60)
    outcome = worker.call("hang_with_child", str(pid_file), timeout_s=1)
    assert isinstance(outcome, Failure)
    assert outcome.stage == "timeout"
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 2
    assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_an_interrupt_leaves_no_late_answer(worker: Worker) -> None:
    worker.call("pid", timeout_s=60)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.call("sleep", 2, timeout_s=60)
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert worker.call("echo", "fresh", timeout_s=60) == ("tag", "fresh")


def test_a_worker_ends_when_its_parent_is_killed_in_the_middle_of_a_call(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    script = (
        "from flashgen.measure.worker import Worker\n"
        f"Worker({TROUBLE!r}).call('hang_with_child', {str(pid_file)!r}, timeout_s=600)\n"
    )
    environment = child_environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as parent:
        assert eventually(lambda: pid_file.is_file() and len(pid_file.read_text().split()) == 2, 60)
        parent.kill()
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_a_script_without_a_main_guard_is_not_run_twice(tmp_path: Path) -> None:
    script = tmp_path / "user_script.py"
    script.write_text(
        "from flashgen.measure.worker import Worker\n"
        "print('started', flush=True)\n"
        f"with Worker({TROUBLE!r}, 'x') as worker:\n"
        "    print(worker.call('echo', 1, timeout_s=60))\n"
    )
    environment = child_environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "started\n('x', 1)\n"


def test_a_service_that_does_not_come_up_has_a_second_chance(tmp_path: Path) -> None:
    with Worker("tests.measure.services:BusyOnce", str(tmp_path / "seen")) as worker:
        assert worker.call("echo", 1, timeout_s=60) == 1


@pytest.mark.parametrize(
    ("service", "reason"),
    only(
        [
            ("tests.measure.services:Broken", "OSError: no GPU here"),
            ("tests.measure.services:Absent", "Absent"),
            ("no.such.module:Service", "no.such.module|No module named 'no'"),
            ("tests.measure.services:Slow", "not ready after 0.5 s"),
        ],
        ("tests.measure.services:Broken", "OSError: no GPU here"),
        ("tests.measure.services:Slow", "not ready after 0.5 s"),
    ),
)
def test_a_service_that_does_not_come_up_is_an_error(service: str, reason: str) -> None:
    with (
        Worker(service, start_timeout_s=0.5 if service.endswith("Slow") else 60) as worker,
        pytest.raises(MeasureError, match=reason),
    ):
        worker.call("echo", timeout_s=1)
