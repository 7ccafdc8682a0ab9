"""GPT-2 in training with one attention after the other: writes `results/<device>/training.csv` and `training_loss.csv`.

python -m benchmarks.training [4096 1024:flashgen,sdpa-flash ...] [--append] [--limit-seconds 280]

Every attention trains `examples/train_gpt2.py` from the same weights on the same batches. Lengths and attentions are
named on the command line, so that GPUs can share the runs: a process each, with --append and one folder of results.
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
from benchmarks.forward import Say, say
from benchmarks.impls import cudnn_version, torch_version
from benchmarks.provenance import ROOT, Provenance, add_arguments, serve_generated
from benchmarks.results import TRAINING_COLUMNS, ResultsFile, Row
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload

EAGER_SUITE, COMPILED_SUITE = "training", "training_compiled"
MODES = {"eager": EAGER_SUITE, "compiled": COMPILED_SUITE}
SEQLENS = (1024, 4096, 16384)
TOKENS, NHEADS, HEAD_DIM = 16384, 12, 64
"""Of a step, and of GPT-2 with 124M parameters."""

REFERENCE, NOISE = "sdpa-flash", "sdpa-cudnn"
"""Losses are compared with those of the first; how far the second is from it is the noise of bf16 kernels that are
both right."""

IMPLS = (REFERENCE, NOISE, "flashgen", "standard")

START_SECONDS = 120
"""What a run may take beside its steps: imports, compilation, the first step."""

Result = dict[str, Any]
"""A run as `training_worker` reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: a length, an attention, and "eager" or "compiled"; as text `1024:flashgen:eager`."""

    seqlen: int
    impl: str
    mode: str

    def __str__(self) -> str:
        return f"{self.seqlen}:{self.impl}:{self.mode}"

    @property
    def subject(self) -> tuple[str, str, str]:
        """That of its row."""
        return MODES[self.mode], workload_of(self.seqlen).key, self.impl


class CrashError(Exception):
    """The process that trained ended in the middle of a run."""


Trainer = Callable[[Sequence[Job], float], Iterator[Result]]
"""Trains in one process, in order, what is likely to be done in so many seconds.

Raises:
    CrashError: the run behind the last result ended its process.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done (or stopped at the time limit), 1 if flashgen has no time where it should have one."""
    parser = _parser()
    options = parser.parse_args(arguments)
    modes = [mode for mode, steps in zip(MODES, (options.steps, options.compiled_steps), strict=True) if steps]
    try:
        jobs, provenance = jobs_of(options.runs, modes), Provenance.here(options.commit)
        folder = options.results / provenance.slug
        path = folder / "training.csv"
        file = ResultsFile(path, TRAINING_COLUMNS, append=options.append, commit=provenance.commit)
    except (FlashgenError, ValueError) as error:
        parser.error(str(error))
    losses = folder / "training_loss.csv"
    if not file.rows:
        curves.start(losses)
    say(f"{provenance.device}, torch {provenance.torch}, commit {provenance.commit}")
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(options.db, Path(scratch))  # in the environment, which the children inherit

        def trainer(jobs: Sequence[Job], limit_s: float) -> Iterator[Result]:
            return _in_a_process(jobs, limit_s, options)

        return run(jobs, trainer, file, losses, provenance, limit_s=options.limit_seconds, say=say)


def jobs_of(runs: Sequence[str], modes: Sequence[str] = tuple(MODES)) -> list[Job]:
    """What a command line names: `4096`, `4096:flashgen,standard` or `4096:standard:eager`; everything if nothing.

    Raises:
        ValueError: a length, an attention or a mode is not one of those that are measured.
    """
    found = []
    for text in runs or map(str, SEQLENS):
        seqlen, *more = text.split(":")
        impls = more[0].split(",") if more else list(IMPLS)
        named = more[1].split(",") if len(more) > 1 else list(MODES)
        if seqlen not in map(str, SEQLENS) or not set(impls) <= set(IMPLS) or not set(named) <= set(MODES):
            raise ValueError(
                f"a run is a length of {', '.join(map(str, SEQLENS))}, behind a colon attentions of "
                f"{', '.join(IMPLS)}, and behind another one {' or '.join(MODES)}, got {text!r}"
            )
        found += [Job(seqlen=int(seqlen), impl=impl, mode=mode) for impl in impls for mode in modes if mode in named]
    return found


def run(
    jobs: Sequence[Job],
    trainer: Trainer,
    file: ResultsFile,
    losses: Path,
    provenance: Provenance,
    *,
    limit_s: float = float("inf"),
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train whatever the file does not have yet; row and curve of a run are written as soon as it is over.

    One process trains all of them; where it crashes, another one goes on behind the run that did it.
    """
    started, done, missing = clock(), file.done(provenance.commit), 0
    left = [job for job in jobs if job.subject not in done]
    total = len(left)
    while left and clock() - started < limit_s:
        try:
            for result in trainer(tuple(left), limit_s - (clock() - started)):
                row = _row(left.pop(0), result, provenance)
                curves.append(losses, row.subject, provenance.commit, result["losses"])
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
    return 1 if missing else 0


def workload_of(seqlen: int) -> Workload:
    """The attention of one layer of GPT-2 in a step of `TOKENS` tokens."""
    return Workload(
        direction="backward",
        batch=TOKENS // seqlen,
        nheads=NHEADS,
        seqlen_q=seqlen,
        head_dim=HEAD_DIM,
        causal=True,
    )


def line_of(row: Row) -> str:
    """One run for people."""
    seqlen = Workload.parse(row.workload).seqlen_k
    rate = f"{row.tokens_per_s:9.0f} tokens/s, {row.median_ms:.1f} ms a step" if row.tokens_per_s else "no time"
    loss = "" if row.loss_last is None else f", loss {row.loss_first:.4f} to {row.loss_last:.4f}"
    ended = f"{row.steps} steps, {row.outcome}"
    return f"{row.suite:17} {seqlen:5} {row.impl:10} {rate}, {row.peak_gib:.1f} GiB{loss}, {ended}"


def _row(job: Job, result: Result, provenance: Provenance) -> Row:
    suite, curve = MODES[job.mode], result["losses"]
    row = provenance.row(
        suite, workload_of(job.seqlen), job.impl, _version(job.impl), median_ms=result["step_ms"], rates=False
    )
    return replace(
        row,
        outcome=result["outcome"],
        steps=len(curve),
        tokens_per_s=result["tokens_per_s"],
        peak_gib=result["peak_gib"],
        loss_first=curve[0] if curve else None,
        loss_last=curve[-1] if curve else None,
    )


def _version(impl: str) -> str:
    return {"flashgen": flashgen.__version__, "sdpa-cudnn": cudnn_version()}.get(impl, torch_version())


def _in_a_process(jobs: Sequence[Job], limit_s: float, options: argparse.Namespace) -> Iterator[Result]:
    """See `Trainer`; what the process prints beside its results is passed on."""
    command = [sys.executable, "-m", "benchmarks.training_worker", *map(str, jobs)]
    command += ["--steps", str(options.steps), "--compiled-steps", str(options.compiled_steps)]
    command += ["--run-seconds", str(options.run_seconds), "--limit-seconds", str(limit_s)]
    longest = options.run_seconds + START_SECONDS
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


def _ended_after(seconds: float, process: subprocess.Popen[str]) -> threading.Timer:
    """A run that hangs costs no more than this."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("runs", nargs="*", metavar="SEQLEN[:ATTENTION,...[:MODE]]", help="default: all")
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=200, help="without torch.compile, 0 for none (%(default)s)")
    parser.add_argument("--compiled-steps", type=int, default=200, help="with it, 0 for none (%(default)s)")
    parser.add_argument(
        "--run-seconds", type=float, default=25.0, help="longest run, behind its first step (%(default)s)"
    )
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no run that would end later")
    parser.add_argument("--db", type=Path, help="tuning database above the shipped ones (default: the shipped alone)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
