"""Every feature beside the peers that can run it, with the memory each holds: writes `results/<device>/features.csv`.

python -m benchmarks.features [--suite features] [--suite window] [--only '*softcap*'] [--append]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.flex_variants import CHOICES, with_flex
from benchmarks.forward import chosen, run, say, served_by
from benchmarks.impls import Impl
from benchmarks.memory import extra_bytes
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import add_prepare_arguments, prepared
from benchmarks.provenance import add_arguments, add_db_argument, add_shard_argument, serve_generated
from benchmarks.race import Pace, Result, race
from benchmarks.results import MEMORY_COLUMNS
from benchmarks.suites import features_grid, select, window_grid
from flashgen.core.workload import Workload
from flashgen.launch.gpu import current_device
from flashgen.measure import gpu
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.inputs import Inputs, make_inputs
from flashgen.measure.timing import CudaStopwatch
from flashgen.tuning.shards import Shard

PEERS = ("flashgen", "flex", "sdpa-masked", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4")
SUITES: dict[str, Callable[[], tuple[Workload, ...]]] = {"features": features_grid, "window": window_grid}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with usage_of(parser):
        impls = with_flex(chosen(options.impls), options.flex)
        shard = Shard.parse(options.shard)
        provenance, file = opened(options, "features", MEMORY_COLUMNS)
    pace = Pace(warm_ms=1e3 * options.warm, window_ms=1e3 * options.window, rounds=options.rounds)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(options.db, Path(scratch))
        suites = [(name, select(SUITES[name](), options.only)) for name in options.suite or SUITES]
        seconds = prepared("features", arguments, options, suites, impls, shard, file.done(provenance.commit), say)
        if seconds is None:
            return 0
        racer, limit_s = partial(measure, pace=pace), options.limit_seconds - seconds
        return run(suites, impls, file, provenance, racer, shard=shard, limit_s=limit_s, say=say)


def measure(workload: Workload, impls: Sequence[Impl], *, pace: Pace) -> list[Result]:
    """Race the implementations, then call those that ran once more for their memory."""
    where = torch.device("cuda", 0)
    say(f"  {served_by(workload)}")
    results = race(
        workload,
        impls,
        device=current_device(),
        where=where,
        stopwatch=CudaStopwatch(gpu.sm_clock_mhz),
        pace=pace,
    )
    torch.cuda.empty_cache()
    inputs = make_inputs(workload, copies=1, seed=INPUT_SEED, device=where)
    return [result if result.reason is not None else _with_memory(result, workload, inputs) for result in results]


def _with_memory(result: Result, workload: Workload, inputs: Inputs) -> Result:
    held = extra_bytes(result.impl.prepare(workload, inputs))
    torch.cuda.empty_cache()
    return replace(result, extra_bytes=held)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--suite", action="append", choices=sorted(SUITES), help="default: all")
    parser.add_argument("--only", action="append", default=[], help="pattern of workload keys, e.g. '*softcap*'")
    parser.add_argument("--impls", default=",".join(PEERS), help="default: %(default)s")
    parser.add_argument("--flex", choices=CHOICES, default=CHOICES[0], help="variants of FlexAttention (%(default)s)")
    parser.add_argument("--warm", type=float, default=0.1, help="seconds of a visit before its window (%(default)s)")
    parser.add_argument("--window", type=float, default=0.25, help="seconds of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="visits of each implementation (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no race that would end later")
    add_shard_argument(parser)
    add_prepare_arguments(parser)
    add_db_argument(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
