"""GPT-2 in training with one attention after the other: writes `results/<device>/training.csv` and `training_loss.csv`.

python -m benchmarks.training [--seqlen 4096] [--impls flashgen,sdpa-flash] [--append] [--limit-seconds 560]

Every attention trains `examples/train_gpt2.py` in a process of its own, from the same weights on the same batches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
SEQLENS = (1024, 4096, 16384)
TOKENS, NHEADS, HEAD_DIM = 16384, 12, 64
"""Of a step, and of GPT-2 with 124M parameters."""

REFERENCE, NOISE = "sdpa-flash", "sdpa-cudnn"
"""Losses are compared with those of the first; how far the second is from it is the noise of bf16 kernels that are
both right. The reference is trained first."""

IMPLS = (REFERENCE, NOISE, "flashgen", "standard")

START_SECONDS = 90
"""What a run may take beside its steps: imports, compilation, the first step."""

Result = dict[str, Any]
"""A run as `training_worker` reports it."""

Trainer = Callable[[str, int], list[Result]]
"""Trains with one attention at one length; no run comes back of a process that crashed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done (or stopped at the time limit), 1 if flashgen has no time where it should have one."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        impls, provenance = _chosen(options.impls), Provenance.here(options.commit)
        folder = options.results / provenance.slug
        file = ResultsFile(folder / "training.csv", TRAINING_COLUMNS, append=options.append)
    except (FlashgenError, ValueError) as error:
        parser.error(str(error))
    losses = folder / "training_loss.csv"
    if not file.rows:
        curves.start(losses)
    say(f"{provenance.device}, torch {provenance.torch}, commit {provenance.commit}")
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(options.db, Path(scratch))  # in the environment, which the children inherit
        report = Path(scratch) / "report.jsonl"

        def trainer(impl: str, seqlen: int) -> list[Result]:
            return _in_a_process(impl, seqlen, options, report)

        jobs = [(impl, seqlen) for seqlen in options.seqlen or SEQLENS for impl in impls]
        return run(jobs, trainer, file, losses, provenance, limit_s=options.limit_seconds, say=say)


def run(
    jobs: Sequence[tuple[str, int]],
    trainer: Trainer,
    file: ResultsFile,
    losses: Path,
    provenance: Provenance,
    *,
    limit_s: float = float("inf"),
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train whatever the file does not have yet; the rows and curves of one process are written together.

    No process starts if the longest one so far would end after `limit_s` seconds.
    """
    started, longest, missing = clock(), 0.0, 0
    done = file.done(provenance.commit)
    jobs = [(impl, s) for impl, s in jobs if (EAGER_SUITE, workload_of(s).key, impl) not in done]
    for number, (impl, seqlen) in enumerate(jobs):
        begun = clock()
        if begun - started + longest > limit_s:
            say(f"stopped at the time limit, {len(jobs) - number} runs left: run again with --append")
            break
        say(f"[{number + 1}/{len(jobs)}] {impl} at {seqlen}  ({begun - started:.0f} s)")
        results = trainer(impl, seqlen)
        rows = [_row(result, impl, losses, provenance) for result in results]
        for row, result in zip(rows, results, strict=True):
            curves.append(losses, row.subject, provenance.commit, result["losses"])
        file.write(rows)
        for row in rows:
            say(f"  {line_of(row)}")
        if impl == "flashgen" and not (rows and all(row.tokens_per_s for row in rows)):
            say("  flashgen has a run without a time")
            missing += 1
        longest = max(longest, clock() - begun)
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
    rate = f"{row.tokens_per_s:9.0f} tokens/s, {row.median_ms:.1f} ms a step" if row.tokens_per_s else "no time"
    loss = "" if row.loss_last is None else f", loss {row.loss_first:.4f} to {row.loss_last:.4f}"
    loss += "" if row.loss_deviation is None else f" ({row.loss_deviation:.2g} from {REFERENCE})"
    return f"{row.suite:17} {row.impl:10} {rate}, {row.peak_gib:.1f} GiB{loss}, {row.outcome}"


def _row(result: Result, impl: str, losses: Path, provenance: Provenance) -> Row:
    suite = COMPILED_SUITE if result["compiled"] else EAGER_SUITE
    workload, curve = workload_of(result["seqlen"]), result["losses"]
    reference = curves.read(losses).get((suite, workload.key, REFERENCE), [])
    row = provenance.row(suite, workload, impl, _version(impl), median_ms=result["step_ms"], rates=False)
    return replace(
        row,
        outcome=result["outcome"],
        steps=len(curve),
        tokens_per_s=result["tokens_per_s"],
        peak_gib=result["peak_gib"],
        loss_first=curve[0] if curve else None,
        loss_last=curve[-1] if curve else None,
        loss_deviation=curves.deviation(curve, reference) if impl != REFERENCE else None,
    )


def _version(impl: str) -> str:
    return {"flashgen": flashgen.__version__, "sdpa-cudnn": cudnn_version()}.get(impl, torch_version())


def _in_a_process(impl: str, seqlen: int, options: argparse.Namespace, report: Path) -> list[Result]:
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.training_worker", "--attention", impl, "--seqlen", str(seqlen)]
    command += ["--steps", str(options.steps), "--compiled-steps", str(options.compiled_steps)]
    command += ["--limit-seconds", str(options.run_seconds), "--report", str(report)]
    longest = 2 * (options.run_seconds + START_SECONDS)
    try:
        subprocess.run(command, cwd=ROOT, check=True, timeout=longest)
    except subprocess.CalledProcessError as error:  # what it reported before counts
        say(f"  the process of {impl} at {seqlen} ended with {error.returncode}")
    except subprocess.TimeoutExpired:
        say(f"  the process of {impl} at {seqlen} was ended after {longest:.0f} s")
    if not report.is_file():
        return []
    return [json.loads(line) for line in report.read_text().splitlines() if line.endswith("}")]


def _chosen(names: str) -> tuple[str, ...]:
    unknown = [name for name in names.split(",") if name not in IMPLS]
    if unknown:
        raise ValueError(f"an attention is one of {', '.join(IMPLS)}, got {', '.join(unknown)}")
    return tuple(name for name in IMPLS if name in names.split(","))  # the reference first


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    add_arguments(parser)
    parser.add_argument("--seqlen", type=int, action="append", choices=SEQLENS, help="default: all")
    parser.add_argument("--impls", default=",".join(IMPLS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="without torch.compile (%(default)s)")
    parser.add_argument("--compiled-steps", type=int, default=40, help="with it, 0 for none (%(default)s)")
    parser.add_argument("--run-seconds", type=float, default=30.0, help="longest run (%(default)s)")
    parser.add_argument(
        "--limit-seconds", type=float, default=float("inf"), help="start no process that would end later"
    )
    parser.add_argument("--db", type=Path, help="tuning database above the shipped ones (default: the shipped alone)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
