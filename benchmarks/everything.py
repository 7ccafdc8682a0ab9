"""Measure every benchmark of one commit on all GPUs of this machine, and go on where the last run stopped.

    python -m benchmarks.everything --out /tmp/measured --gpus 0,1 [--limit-seconds 560] [--only forward --only data]
    python -m benchmarks.merge /tmp/measured/shard0 /tmp/measured/shard1 --into benchmarks/results

Each GPU has a folder of results and works off a list of its own: its shard of the races, and some of what one GPU
measures alone. What is done is noted in `done.json` as soon as it is, so the same command, after a time limit or a
crash, does what is left; with `--shards 2` also on one GPU, which then works off both lists. What a benchmark prints is
in `logs/`. This process itself touches no GPU.

`--gpus 0,0,0` cuts the races into three lists for one GPU: they prepare side by side and take turns to measure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.gpu_turns import VARIABLE, GpuTurns
from benchmarks.jobs import Job, divided, needed, planned
from benchmarks.peers import PEERS, absent

ROOT = Path(__file__).resolve().parents[1]
TAIL_LINES = 3
LOOK_S = 0.5
"""How often a list looks whether it is to stop."""

TURNS = "turns"
"""Folder in that of a run: who shares which GPU."""


class Done:
    """Which jobs are done, in a file; and into how many shards the races were cut.

    Raises:
        ValueError: the folder is one of another commit or another number of shards.
    """

    def __init__(self, path: Path, *, commit: str | None, shards: int) -> None:
        self._path, self._lock = path, threading.Lock()
        self._is = {"commit": commit, "shards": shards}
        kept = json.loads(path.read_text()) if path.exists() else {"run": self._is, "done": []}
        if kept["run"] != self._is:
            raise ValueError(f"{path.parent} is of {kept['run']}, and this run of {self._is}: give another --out")
        self._names: list[str] = kept["done"]

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Written at once, and whole."""
        with self._lock:
            self._names.append(name)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps({"run": self._is, "done": self._names}))
            partial.replace(self._path)


Runner = Callable[[Job, float], int]
"""Runs a job within so many seconds; its exit code, or STOPPED where it was killed."""


def run(
    jobs: Sequence[Job],
    done: Done,
    runner: Runner,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    stop: threading.Event | None = None,
) -> list[str]:
    """One GPU's jobs in order, until somebody stops them; what did not end well, a line each.

    A job that has no limit of its own does not start where less time is left than it takes.
    """
    ends, wrong, stop = clock() + limit_s, list[str](), stop or threading.Event()
    for job in jobs:
        left = ends - clock()
        if job.name in done:
            continue
        if stop.is_set():
            return wrong
        if left <= 0 or (job.seconds > left and not job.benchmark.has_limit):
            wrong.append(f"{job.name}: not started, {left:.0f} s were left")
            continue
        began = clock()
        code = runner(job, left)
        if code in (0, MISSING):
            done.add(job.name)
        print(f"shard {job.shard}: {job.name} ended with {code} after {clock() - began:.0f} s", flush=True)
        if code:
            why = ", stopped" if stop.is_set() else ", the time limit"
            wrong.append(f"{job.name}: ended with {code}" + (why if code == STOPPED else ""))
    return wrong


def runner_of(out: Path, gpu: str, commit: str | None, beside: int = 1, stop: threading.Event | None = None) -> Runner:
    """Each job as a process that sees one GPU alone, and with its own session, so that its children end with it.

    Where so many lists are worked off beside each other on the GPU, it takes turns with theirs. Once somebody stops
    them, it ends at once.
    """
    ended = partial(_ended, stop=stop or threading.Event())
    turns = GpuTurns(out / TURNS / gpu) if beside > 1 else None

    def runner(job: Job, limit_s: float) -> int:
        ends = time.monotonic() + limit_s
        command = job.command(out / f"shard{job.shard}", commit, limit_s, beside)
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        log = out / "logs" / f"{job.name}.txt"
        with log.open("a") as file:
            start = partial(
                subprocess.Popen[bytes], command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )
            if turns is None:
                code = ended(start(env=environment), ends)
            elif job.benchmark.is_alone:
                with turns.alone():
                    code = ended(start(env=environment), ends)
            else:
                process = turns.join(partial(start, env=environment | {VARIABLE: str(turns.folder)}))
                code = ended(process, ends)
                turns.leave(process.pid)
        if code not in (0, STOPPED):
            print("\n".join(log.read_text().splitlines()[-TAIL_LINES:]), flush=True)
        return code

    return runner


def _ended(process: subprocess.Popen[bytes], ends: float, stop: threading.Event) -> int:
    """The exit code of a process; STOPPED if it was killed, with its group, at a time of the monotonic clock."""
    while True:
        left = ends - time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=max(0.0, min(left, LOOK_S)))
        if left <= 0 or stop.is_set():
            os.killpg(process.pid, signal.SIGKILL)  # also what stands still in the turn of another one
            process.wait()
            return STOPPED


@contextlib.contextmanager
def _set_by_signals(stop: threading.Event) -> Iterator[None]:
    """By Ctrl-C or SIGTERM: jobs have sessions of their own, and would go on, or stand still for ever."""
    before = {which: signal.signal(which, lambda *_: stop.set()) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 if something is left for the next run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    gpus = options.gpus.split(",")
    shards = options.shards or len(gpus)
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    try:
        lists = divided(planned(shards, options.only), len(gpus))
        done = Done(options.out / "done.json", commit=options.commit, shards=shards)
    except ValueError as error:
        parser.error(str(error))
    left = [job for jobs in lists for job in jobs if job.name not in done]
    if missing := [name for name in absent(needed(left)) if name not in options.without]:
        parser.error(
            f"what a benchmark races is installed, or its rows are left out with {_without(missing)}: "
            + "; ".join(f"{name} needs {PEERS[name].what}" for name in missing)
        )
    shutil.rmtree(options.out / TURNS, ignore_errors=True)  # of processes that are no more
    wrong, stop = list[str](), threading.Event()

    def work(jobs: Sequence[Job], gpu: str) -> None:
        try:
            runner = runner_of(options.out, gpu, options.commit, gpus.count(gpu), stop)
            wrong.extend(run(jobs, done, runner, limit_s=options.limit_seconds, stop=stop))
        except Exception as error:  # noqa: BLE001 - the other lists go on, and a thread's own report names no list
            names = ", ".join(job.name for job in jobs if job.name not in done)
            wrong.append(f"{names}: the list broke off: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=each) for each in zip(lists, gpus, strict=True)]
    with _set_by_signals(stop):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    left = [job for jobs in lists for job in jobs if job.name not in done]
    print("\n".join(sorted(wrong)) or (f"{len(left)} are left" if left else "everything is measured"))
    return STOPPED if left else MISSING if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.everything", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results, logs and what is done")
    parser.add_argument(
        "--gpus", default="0", help="CUDA_VISIBLE_DEVICES of each list, which one GPU may have several of (%(default)s)"
    )
    parser.add_argument("--shards", type=_positive, help="lists that the work is cut into (default: one for each GPU)")
    parser.add_argument("--only", action="append", default=[], help="a benchmark; repeatable (default: all)")
    parser.add_argument(
        "--without", action="append", default=[], choices=list(PEERS), help="rows of what is not here; repeatable"
    )
    parser.add_argument("--commit", help="the commit that is measured, where there is no git to ask")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="end by then (default: no limit)")
    return parser


def _without(names: Sequence[str]) -> str:
    return " ".join(f"--without {name}" for name in names)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a number from 1 on, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
