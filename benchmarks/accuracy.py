"""How far outputs are from float64, on every kind of data: writes `results/<device>/accuracy.csv`.

python -m benchmarks.accuracy [--only 'fwd-fp16-*'] [--data std8] [--impls flashgen,fa3] [--append]

All of them round q, k, v and the output to 16 bits, and weights between the two products; where they differ is what a
weight is divided by.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.data import NAMES, PEERS, add_data_argument, data_jobs
from benchmarks.forward import Job, chosen, say
from benchmarks.impls import Impl, results_of
from benchmarks.opened import opened, usage_of
from benchmarks.problems import Problem, problem
from benchmarks.provenance import Provenance, add_arguments, add_db_argument, add_shard_argument, serve_generated
from benchmarks.race import attempt
from benchmarks.results import ACCURACY_COLUMNS, ResultsFile, Row, left_of
from benchmarks.suites import data_grid, select
from benchmarks.time_limit import TimeLimit
from benchmarks.work_off import Outcome, work_off
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS
from flashgen.tuning.shards import Shard

SUITE = "accuracy"
SEQLEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Of an output from the float64 one, of the last head of the first batch element.

    Attributes:
        relative_error: norm of the difference over the norm of the right output.
        worst_row: the same of the row that is furthest off.
    """

    relative_error: float
    worst_row: float


Measured = Callable[[Job, Sequence[Impl]], "list[Distance | str]"]
"""A distance for each implementation, or the reason why it has none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with usage_of(parser):
        impls = chosen(options.impls, PEERS)
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, "accuracy", ACCURACY_COLUMNS)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(options.db, Path(scratch))
        jobs = data_jobs(select(accuracy_grid(), options.only), options.data or DATA_KINDS, shard, SUITE)
        measure = partial(measured, where=torch.device("cuda", 0))
        return run(jobs, impls, file, provenance, measure, options.limit_seconds)


def accuracy_grid() -> tuple[Workload, ...]:
    """The shapes of `data.csv` at one length: errors hardly depend on it, and float64 takes its time."""
    return tuple(workload for workload in data_grid() if workload.seqlen_k == SEQLEN)


def measured(job: Job, impls: Sequence[Impl], *, where: torch.device) -> list[Distance | str]:
    """Call each implementation once on the same tensors."""
    task = problem(job.workload, copies=1, where=where, data=job.data)
    found = [impl.unsupported(job.workload) or attempt(partial(_distance, impl, job.workload, task)) for impl in impls]
    torch.cuda.empty_cache()
    return found


def _distance(impl: Impl, workload: Workload, task: Problem) -> Distance | str:
    call = impl.prepare(workload, task.inputs)
    with call.context():
        (out, *_), (right, *_) = results_of(call.run(0)), task.expected
    if not bool(torch.isfinite(out).all()):
        return "its output is not finite everywhere"
    whole, rows = (replace(task, every_row=each).distance(out, right) for each in (False, True))
    return Distance(relative_error=whole, worst_row=rows)


def run(
    jobs: Sequence[Job],
    impls: Sequence[Impl],
    file: ResultsFile,
    provenance: Provenance,
    measure: Measured,
    limit_s: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measure what no implementation has a row of yet, and write the rows of a workload and its data together."""
    left = left_of(jobs, lambda job: [job.subject(impl.name) for impl in impls], file.done(provenance.commit))

    def one(job: Job) -> Outcome:
        found = list(zip(impls, measure(job, impls), strict=True))
        return Outcome(
            rows=[_row(job, impl, each, provenance) for impl, each in found if isinstance(each, Distance)],
            lines=[f"{impl.name:12} {_told(each)}" for impl, each in found],
            reasons={impl.name: each for impl, each in found if isinstance(each, str)},
        )

    return work_off(left, one, file, TimeLimit(limit_s, clock), say)


def _row(job: Job, impl: Impl, found: Distance, provenance: Provenance) -> Row:
    row = provenance.row(job.suite, job.workload, impl.name, impl.version(), data=job.data)
    return replace(row, relative_error=found.relative_error, worst_row=found.worst_row)


def _told(found: Distance | str) -> str:
    return (
        f"no row: {found}"
        if isinstance(found, str)
        else f"{found.relative_error:.2e} (worst row {found.worst_row:.1e})"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    add_data_argument(parser)
    parser.add_argument("--only", action="append", default=[], help="pattern of workload keys, e.g. '*-d128-causal'")
    parser.add_argument("--impls", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start nothing that would end later")
    add_shard_argument(parser)
    add_db_argument(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
