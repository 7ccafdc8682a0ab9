"""Models in training with one attention after the other: writes `results/<device>/training.csv` and its curves.

python -m benchmarks.training [4096 1024:flashgen,sdpa-flash bert ...] [--append] [--limit-seconds 280]

Every attention trains a model of `examples/` from the same weights on the same batches: GPT-2 at a length, BERT-large
with and without padding, and a classifier of images as sequences of 16k pixels. Tasks and attentions are named on the
command line, so that GPUs can share the runs: a process each, with a folder of results each (`benchmarks.merge`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flashgen
from benchmarks import curves
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.forward import say
from benchmarks.impls import cudnn_version, torch_version
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import Say, side_by_side
from benchmarks.provenance import ROOT, Provenance, add_arguments, add_db_argument, serve_generated
from benchmarks.results import TRAINING_COLUMNS, ResultsFile, Row
from benchmarks.training_tasks import BY_DEFAULT, COMPILED, MODES, TASKS, Task
from flashgen.core.workload import Workload

START_SECONDS = 120
"""What a run may take beside its steps: imports, compilation, the first step."""

PREPARING_SECONDS, PREPARING_THREADS = 120, 4
"""After which a process that fills caches starts no further run; threads of each for torch.compile."""

LARGE_SEQLEN = 4096
"""The scores of longer sequences leave no room for another process."""

WORKER = (sys.executable, "-m", "benchmarks.training_worker")

Result = dict[str, Any]
"""A run as `training_worker` reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: a task, an attention, and "eager" or "compiled"; as text `1024:flashgen:eager`."""

    task: Task
    impl: str
    mode: str

    def __str__(self) -> str:
        return f"{self.task.name}:{self.impl}:{self.mode}"

    @property
    def is_large(self) -> bool:
        """Whether scores in memory take much of a GPU."""
        return self.impl == "standard" and self.task.workload.seqlen_q > LARGE_SEQLEN

    @property
    def subject(self) -> tuple[str, str, str]:
        """That of its row."""
        return self.task.suites[self.mode], self.task.workload.key, self.impl


class CrashError(Exception):
    """The process that trained ended in the middle of a run."""


Trainer = Callable[[Sequence[Job], float], Iterator[Result]]
"""Trains in one process, in order, what is likely to be done in so many seconds.

Raises:
    CrashError: the run behind the last result ended its process.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no time where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    modes = [mode for mode, steps in zip(MODES, (options.steps, options.compiled_steps), strict=True) if steps != 0]
    with usage_of(parser):
        jobs = jobs_of(options.runs, modes)
        provenance, file = opened(options, "training", TRAINING_COLUMNS)
    folder = file.path.parent
    if not file.rows:
        for name in curves.FILES.values():
            (folder / name).unlink(missing_ok=True)
    say(f"{provenance.device}, torch {provenance.torch}, commit {provenance.commit}")
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(options.db, Path(scratch))  # in the environment, which the children inherit

        def trainer(jobs: Sequence[Job], limit_s: float) -> Iterator[Result]:
            return _in_a_process(jobs, limit_s, options)

        if options.prepare:
            prepare(jobs, options.prepare, say)
        return run(jobs, trainer, file, provenance, limit_s=options.limit_seconds, say=say)


def jobs_of(runs: Sequence[str], modes: Sequence[str] = MODES) -> list[Job]:
    """What a command line names: `4096`, `4096:flashgen,standard` or `4096:standard:eager`; everything if nothing.

    Raises:
        ValueError: a task, an attention or a mode is not one of those that are measured.
    """
    found = []
    for text in runs or TASKS:
        name, *more = text.split(":")
        task = TASKS.get(name)
        named = more[1].split(",") if len(more) > 1 else BY_DEFAULT.get(name, MODES)
        if task is None or not set(named) <= set(MODES):
            raise ValueError(
                f"a run is one of {', '.join(TASKS)}, behind a colon attentions, and behind another one "
                f"{' or '.join(MODES)}, got {text!r}"
            )
        asked = more[0].split(",") if more else list(task.accepted)
        if not set(asked) <= set(task.accepted):
            raise ValueError(f"the attentions of {name} are {', '.join(task.accepted)}, got {text!r}")
        found += [
            Job(task=task, impl=impl, mode=mode)
            for impl in asked
            for mode in modes
            if mode in named and (more or impl in task.impls[mode])
        ]
    return found


def run(
    jobs: Sequence[Job],
    trainer: Trainer,
    file: ResultsFile,
    provenance: Provenance,
    *,
    limit_s: float = float("inf"),
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train whatever the file does not have yet; row and curves of a run are written as soon as it is over.

    One process trains all of them; where it crashes, another one goes on behind the run that did it.
    """
    started, done, missing = clock(), file.done(provenance.commit), 0
    left = [job for job in jobs if job.subject not in done]
    total = len(left)
    while left and clock() - started < limit_s:
        try:
            for result in trainer(tuple(left), limit_s - (clock() - started)):
                row = _row(left.pop(0), result, provenance)
                _keep_curves(file.path.parent, row, result)
                file.write([row])
                say(f"[{total - len(left)}/{total}] {line_of(row)}  ({clock() - started:.0f} s)")
                missing += row.impl == "flashgen" and not row.tokens_per_s
            break
        except CrashError as error:
            job = left.pop(0)
            say(f"{job} has no row: {error}")
            missing += job.impl == "flashgen"
    if left:
        say(f"stopped at the time limit, {len(left)} runs left: run again with --append")
    say(f"{file.path}: {len(file.rows)} rows")
    return STOPPED if left else MISSING if missing else 0


def prepare(jobs: Sequence[Job], processes: int, say: Say) -> None:
    """Fill the caches of torch.compile and Triton by a step of every compiled run, in so many processes side by side.

    What they measure is dropped, and so is what fails: a run that finds nothing in a cache compiles for itself. Runs
    that need a GPU of their own are left out.
    """
    compiled, started = [str(job) for job in jobs if job.mode == COMPILED and not job.is_large], time.monotonic()
    shares = [share for n in range(processes) if (share := compiled[n::processes])]
    commands = [[*WORKER, *share, "--compiled-steps=1", f"--limit-seconds={PREPARING_SECONDS}"] for share in shares]
    side_by_side(commands, threads=PREPARING_THREADS, seconds=PREPARING_SECONDS + START_SECONDS)
    say(f"compiled {len(compiled)} runs in {len(commands)} processes ({time.monotonic() - started:.0f} s)")


def line_of(row: Row) -> str:
    """One run for people."""
    seqlen = Workload.parse(row.workload).seqlen_k
    rate = f"{row.tokens_per_s:9.0f} tokens/s, {row.median_ms:.1f} ms a step" if row.tokens_per_s else "no time"
    loss = "" if row.loss_last is None else f", loss {row.loss_first:.4f} to {row.loss_last:.4f}"
    ended = f"{row.steps} steps, {row.outcome}"
    return f"{row.suite:20} {seqlen:5} {row.impl:14} {rate}, {row.peak_gib:.1f} GiB{loss}, {ended}"


def _row(job: Job, result: Result, provenance: Provenance) -> Row:
    curve, (suite, *_) = result["losses"], job.subject
    row = provenance.row(
        suite, job.task.workload, job.impl, _version(job.impl), median_ms=result["step_ms"], rates=False
    )
    return replace(
        row,
        outcome=result["outcome"] + (f", {result['backend']}" if job.impl == "sdpa" else ""),
        steps=len(curve),
        tokens_per_s=result["tokens_per_s"],
        peak_gib=result["peak_gib"],
        loss_first=curve[0] if curve else None,
        loss_last=curve[-1] if curve else None,
    )


def _keep_curves(folder: Path, row: Row, result: Result) -> None:
    curves.append(folder / curves.FILES[curves.LOSS], row.subject, row.commit, result["losses"])
    if result["accuracies"]:
        path = folder / curves.FILES[curves.ACCURACY]
        curves.append(path, row.subject, row.commit, result["accuracies"], curves.ACCURACY)


def _version(impl: str) -> str:
    return {"flashgen": flashgen.__version__, "sdpa-cudnn": cudnn_version()}.get(impl, torch_version())


def _in_a_process(jobs: Sequence[Job], limit_s: float, options: argparse.Namespace) -> Iterator[Result]:
    """See `Trainer`; what the process prints beside its results is passed on."""
    command = [*WORKER, *map(str, jobs)]
    for name in ("steps", "compiled_steps", "run_seconds"):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--limit-seconds", str(limit_s)]
    longest = START_SECONDS + (options.run_seconds or max(job.task.run_seconds for job in jobs))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watch = _ended_after(longest, process)
        for line in process.stdout:
            if not line.startswith("{"):
                say(line.rstrip())
                continue
            watch.cancel()
            yield json.loads(line)
            watch = _ended_after(longest, process)
        code = process.wait()
        watch.cancel()
    if code:
        raise CrashError(f"its process ended with {code}")


def _ended_after(seconds: float, process: subprocess.Popen[Any]) -> threading.Timer:
    """A run that hangs costs no more than this."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "runs", nargs="*", metavar="TASK[:ATTENTION,...[:MODE]]", help=f"of {', '.join(TASKS)}; default: all"
    )
    add_arguments(parser)
    parser.add_argument("--steps", type=int, help="without torch.compile, 0 for none (default: those of the task)")
    parser.add_argument("--compiled-steps", type=int, help="with it, 0 for none (default: those of the task)")
    parser.add_argument("--run-seconds", type=float, help="longest run, behind its first step (default: of the task)")
    parser.add_argument(
        "--prepare", type=int, default=0, metavar="N", help="first compile in N processes side by side, untimed"
    )
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no run that would end later")
    add_db_argument(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
