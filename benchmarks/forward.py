"""Forward pass beside other implementations, sustained: writes `results/<device>/forward.csv`.

python -m benchmarks.forward [--suite forward] [--only '*-d128-causal'] [--impls flashgen,flex] [--append]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

import flashgen
from benchmarks.flex_variants import CHOICES, FLEX, with_flex
from benchmarks.impls import IMPLS, Impl, flashgen_features
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import Say, add_prepare_arguments, prepared
from benchmarks.problems import forward_of
from benchmarks.provenance import Provenance, add_arguments, add_db_argument, add_shard_argument, serve_generated
from benchmarks.race import Pace, Result, race
from benchmarks.results import RACE_COLUMNS, ResultsFile, Row, Subject, left_of, subject_of
from benchmarks.suites import FP16_SUITE, SUITES, select, work_of
from benchmarks.time_limit import TimeLimit
from benchmarks.work_off import Outcome, outcome_of, work_off
from flashgen.core.workload import Workload
from flashgen.launch.gpu import current_device
from flashgen.measure import gpu
from flashgen.measure.data_kinds import NORMAL
from flashgen.measure.inputs import make_inputs
from flashgen.measure.timing import CudaStopwatch, median_clock
from flashgen.tuning.shards import Shard

DEFAULT_SUITES = ("forward", FP16_SUITE)

WHOLE = Shard(index=0, count=1)

REASON_LENGTH = 160
"""Of a reason in a file; some projects explain at length."""

Racer = Callable[[Workload, Sequence[Impl]], list[Result]]


class DataRacer(Protocol):
    """A racer that is told the kind of data, too."""

    def __call__(self, workload: Workload, wanted: Sequence[Impl], /, *, data: str = NORMAL) -> list[Result]:
        """Race on `data`, a name of `flashgen.measure.data_kinds`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One race. `data` is what its rows say of their data: nothing in files whose rows are all of normal data."""

    suite: str
    workload: Workload
    data: str = ""

    def __str__(self) -> str:
        return f"{self.workload.key} {self.data}".rstrip()

    def subject(self, impl: str) -> Subject:
        """That of the row of an implementation."""
        return subject_of(self.suite, self.workload.key, impl, self.data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with usage_of(parser):
        impls = with_flex(chosen(options.impls), options.flex)
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, "forward", RACE_COLUMNS)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(options.db, Path(scratch))
        runs = [(name, select(SUITES[name](), options.only)) for name in options.suite or DEFAULT_SUITES]
        seconds = prepared("forward", arguments, options, runs, impls, shard, file.done(provenance.commit), say)
        if seconds is None:
            return 0
        racer, limit_s = racer_of(options, provenance), options.limit_seconds - seconds
        return run(runs, impls, file, provenance, racer, shard=shard, limit_s=limit_s, say=say)


def racer_of(options: argparse.Namespace, provenance: Provenance) -> DataRacer:
    """Races on this process's first GPU, as the options say; prints once a workload what serves flashgen's call."""
    device = current_device()
    pace = Pace(warm_ms=1e3 * options.warm, window_ms=1e3 * options.window, rounds=options.rounds)
    stopwatch, where = CudaStopwatch(gpu.sm_clock_mhz), torch.device("cuda", 0)
    say(f"{device.name}, torch {provenance.torch}, triton {provenance.triton}, commit {provenance.commit}")
    for other in gpu.other_processes():
        say(f"warning: another process uses this GPU: {other}")
    said: set[Workload] = set()

    def racer(workload: Workload, wanted: Sequence[Impl], /, *, data: str = NORMAL) -> list[Result]:
        if workload not in said and any(impl.name == "flashgen" for impl in wanted):
            said.add(workload)
            say(f"  {served_by(workload)}")
        found = race(workload, wanted, device=device, where=where, stopwatch=stopwatch, pace=pace, data=data)
        torch.cuda.empty_cache()
        return found

    return racer


def run(
    suites: Sequence[tuple[str, Sequence[Workload]]],
    impls: Sequence[Impl],
    file: ResultsFile,
    provenance: Provenance,
    racer: Racer,
    *,
    reasons: bool = False,
    shard: Shard = WHOLE,
    limit_s: float = float("inf"),
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Race every workload of the shard that the file does not have yet, as `run_jobs` does."""
    jobs = [Job(suite=suite, workload=workload) for suite, workloads in suites for workload in workloads]
    return run_jobs(
        jobs[shard.index :: shard.count],
        impls,
        file,
        provenance,
        lambda job, wanted: racer(job.workload, wanted),
        reasons=reasons,
        limit_s=limit_s,
        say=say,
        clock=clock,
    )


def run_jobs(
    jobs: Sequence[Job],
    impls: Sequence[Impl],
    file: ResultsFile,
    provenance: Provenance,
    racer: Callable[[Job, Sequence[Impl]], list[Result]],
    *,
    reasons: bool = False,
    limit_s: float = float("inf"),
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run every race that the file does not have yet, and write its rows together.

    A race is skipped as soon as one of the wanted implementations has a row of this commit: rows that are compared
    come from one race. No new race starts if the longest one so far would end after `limit_s` seconds. With `reasons`,
    an implementation that has no time has a row as well.
    """
    left = left_of(jobs, lambda job: [job.subject(impl.name) for impl in impls], file.done(provenance.commit))

    def one(job: Job) -> Outcome:
        row_of, told = partial(_row, provenance, job), partial(line_of, job.workload, suite=job.suite)
        return outcome_of(racer(job, impls), row_of, told, reasons=reasons)

    return work_off(left, one, file, TimeLimit(limit_s, clock), say)


def _row(provenance: Provenance, job: Job, result: Result) -> Row:
    timed = result.reason is None
    return provenance.row(
        job.suite,
        job.workload,
        result.impl.name,
        result.impl.version(),
        median_ms=result.median_ms if timed else None,
        extra_bytes=result.extra_bytes,
        outcome=(result.reason or "")[:REASON_LENGTH],
        timing=result.timing,
        data=job.data,
    )


def line_of(workload: Workload, result: Result, suite: str = "") -> str:
    """One implementation's result for people."""
    if result.reason is not None:
        return f"{result.impl.name:12} no row: {result.reason}"
    clock = median_clock(result.windows)
    tail = f" at {clock:.0f} MHz" if clock else ""
    tail += f", {result.timing}" if result.timing else ""
    tail += f": {result.queued_because}" if result.queued_because else ""
    tail += "" if result.extra_bytes is None else f", {result.extra_bytes / 2**20:.1f} MiB"
    rate = work_of(suite, workload)[0] / result.median_ms / 1e9
    windows = " ".join(f"{window.ms:.4g}" for window in result.windows)
    spread = f"spread {result.spread:.1%} ({windows})"
    return f"{result.impl.name:12} {result.median_ms:9.4f} ms {rate:6.1f} TFLOP/s, {spread}{tail}"


def served_by(workload: Workload) -> str:
    """Which rung of the ladder serves this workload, so that an untuned row does not pass for a tuned one."""
    inputs = make_inputs(forward_of(workload), copies=1, seed=0, device="cuda")
    options = flashgen_features(inputs.features[0])
    if workload.direction == "backward":
        options |= {"direction": "backward", "deterministic": workload.deterministic}
    found = flashgen.explain(inputs.q[0], inputs.k[0], inputs.v[0], causal=workload.causal, **options)
    tail = "" if found.served.is_exact else "  (NOT tuned for exactly this workload)"
    return f"rung {found.served.rung}: {found.served.config}{tail}"


def chosen(names: str, among: Sequence[Impl] = IMPLS) -> tuple[Impl, ...]:
    """Implementations by name, separated by commas.

    Raises:
        ValueError: a name is unknown.
    """
    known = {impl.name: impl for impl in among}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ValueError(f"an implementation is one of {', '.join(known)}, got {', '.join(unknown)}")
    return tuple(known[name] for name in names.split(","))


def say(line: str) -> None:
    """Progress, at once."""
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument(
        "--suite", action="append", choices=sorted(SUITES), help=f"default: {' and '.join(DEFAULT_SUITES)}"
    )
    add_race_arguments(parser, IMPLS)
    add_prepare_arguments(parser)
    return parser


def add_race_arguments(parser: argparse.ArgumentParser, impls: Sequence[Impl]) -> None:
    """The options of benchmarks that race implementations on workloads."""
    parser.add_argument("--only", action="append", default=[], help="pattern of workload keys, e.g. '*-d128-causal'")
    parser.add_argument("--impls", default=",".join(impl.name for impl in impls), help="default: %(default)s")
    if any(impl.name == FLEX for impl in impls):
        variants = "variants of FlexAttention (%(default)s)"
        parser.add_argument("--flex", choices=CHOICES, default=CHOICES[0], help=variants)
    parser.add_argument("--warm", type=float, default=0.08, help="seconds of a visit before its window (%(default)s)")
    parser.add_argument("--window", type=float, default=0.2, help="seconds of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="visits of each implementation (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no race that would end later")
    add_shard_argument(parser)
    add_db_argument(parser)


if __name__ == "__main__":
    sys.exit(main())
