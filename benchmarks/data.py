"""Forward pass on every kind of data, sustained, beside other implementations: writes `results/<device>/data.csv`.

python -m benchmarks.data [--only 'fwd-fp16-*'] [--data rising] [--impls flashgen,fa3] [--append]

A kernel of online softmax may be slower where scores are large, peaked or rising: normal random numbers never show it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.forward import Job, add_race_arguments, chosen, racer_of, run_jobs, say
from benchmarks.impls import IMPLS
from benchmarks.opened import opened, usage_of
from benchmarks.provenance import add_arguments, serve_generated
from benchmarks.results import DATA_COLUMNS
from benchmarks.suites import DATA_SUITE, data_grid, select
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS
from flashgen.tuning.shards import Shard

NAMES = ("flashgen", "sdpa-cudnn", "sdpa-flash", "fa3", "fa4")
PEERS = tuple(impl for impl in IMPLS if impl.name in NAMES)

PACE = {"warm": 0.045, "window": 0.07, "rounds": 4}
"""Shorter visits than in `forward`: five times as many races, of which each compares kernels of one workload."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with usage_of(parser):
        impls = chosen(options.impls, PEERS)
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, "data", DATA_COLUMNS)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(options.db, Path(scratch))
        jobs = data_jobs(select(data_grid(), options.only), options.data or DATA_KINDS, shard)
        racer = racer_of(options, provenance)
        return run_jobs(
            jobs,
            impls,
            file,
            provenance,
            lambda job, wanted: racer(job.workload, wanted, data=job.data),
            limit_s=options.limit_seconds,
            say=say,
        )


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """The option of which kinds of data."""
    parser.add_argument("--data", action="append", choices=list(DATA_KINDS), help="a kind of data; default: all")


def data_jobs(workloads: Sequence[Workload], kinds: Iterable[str], shard: Shard, suite: str = DATA_SUITE) -> list[Job]:
    """Every kind of data of each workload of the shard: one card measures them all, with kernels compiled once."""
    names = tuple(kinds)
    return [
        Job(suite=suite, workload=workload, data=name)
        for workload in workloads[shard.index :: shard.count]
        for name in names
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    add_data_argument(parser)
    add_race_arguments(parser, PEERS)
    parser.set_defaults(**PACE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
