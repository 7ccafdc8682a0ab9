"""Every feature beside the peers that can run it, with the memory each holds: writes `results/<device>/features.csv`.

python -m benchmarks.features [--suite features] [--suite window] [--only '*softcap*'] [--append]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.forward import chosen, line_of, say, served_by
from benchmarks.impls import Impl
from benchmarks.memory import extra_bytes
from benchmarks.provenance import Provenance, add_arguments, serve_generated
from benchmarks.race import Pace, Result, race
from benchmarks.results import MEMORY_COLUMNS, ResultsFile
from benchmarks.suites import features_grid, select, window_grid
from flashgen.core.errors import FlashgenError
from flashgen.core.workload import Workload
from flashgen.measure import gpu
from flashgen.measure.bench import INPUT_SEED
from flashgen.measure.inputs import make_inputs
from flashgen.measure.timing import CudaStopwatch

PEERS = ("flashgen", "flex", "sdpa-masked", "fa3")
SUITES: dict[str, Callable[[], tuple[Workload, ...]]] = {"features": features_grid, "window": window_grid}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done (or stopped at the time limit), 1 if flashgen has no row where it should have one."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        impls, provenance = chosen(options.impls), Provenance.here(options.commit)
        path = options.results / provenance.slug / "features.csv"
        file = ResultsFile(path, MEMORY_COLUMNS, append=options.append)
    except (FlashgenError, ValueError) as error:
        parser.error(str(error))
    pace = Pace(warm_ms=1e3 * options.warm, window_ms=1e3 * options.window, rounds=options.rounds)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        serve_generated(options.db, Path(scratch))
        names = options.suite or list(SUITES)
        jobs = [(name, workload) for name in names for workload in select(SUITES[name](), options.only)]
        return run(jobs, impls, file, provenance, partial(measure, pace=pace), limit_s=options.limit_seconds)


Measured = tuple[list[Result], dict[str, int]]
"""The result of every implementation, and the bytes beside inputs and output of those that could run."""


def run(
    jobs: Sequence[tuple[str, Workload]],
    impls: Sequence[Impl],
    file: ResultsFile,
    provenance: Provenance,
    measurer: Callable[[Workload, Sequence[Impl]], Measured],
    *,
    limit_s: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measure every workload that the file does not have yet; its rows are written together."""
    started, longest, missing = clock(), 0.0, 0
    done = file.done(provenance.commit)
    jobs = [(s, w) for s, w in jobs if not any((s, w.key, impl.name) in done for impl in impls)]
    for number, (suite, workload) in enumerate(jobs):
        begun = clock()
        if begun - started + longest > limit_s:
            say(f"stopped at the time limit, {len(jobs) - number} workloads left: run again with --append")
            break
        say(f"[{number + 1}/{len(jobs)}] {workload.key}  ({begun - started:.0f} s)")
        results, held = measurer(workload, impls)
        file.write(
            provenance.row(
                suite,
                workload,
                result.impl.name,
                result.impl.version(),
                median_ms=result.median_ms,
                extra_bytes=held.get(result.impl.name),
            )
            for result in results
            if result.reason is None
        )
        for result in results:
            size = held.get(result.impl.name)
            say(f"  {line_of(workload, result)}" + ("" if size is None else f", {size / 2**20:.1f} MiB"))
            missing += result.impl.name == "flashgen" and result.reason is not None
        longest = max(longest, clock() - begun)
    say(f"{file.path}: {len(file.rows)} rows")
    return 1 if missing else 0


def measure(workload: Workload, impls: Sequence[Impl], *, pace: Pace) -> Measured:
    """Race the implementations, then call those that ran once more for their memory."""
    where = torch.device("cuda", 0)
    say(f"  {served_by(workload)}")
    results = race(
        workload,
        impls,
        device=gpu.current_device(),
        where=where,
        stopwatch=CudaStopwatch(gpu.sm_clock_mhz),
        pace=pace,
    )
    torch.cuda.empty_cache()
    inputs = make_inputs(workload, copies=1, seed=INPUT_SEED, device=where)
    held = {}
    for impl in (result.impl for result in results if result.reason is None):
        held[impl.name] = extra_bytes(impl.prepare(workload, inputs))
        torch.cuda.empty_cache()
    return results, held


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--suite", action="append", choices=sorted(SUITES), help="default: all")
    parser.add_argument("--only", action="append", default=[], help="pattern of workload keys, e.g. '*softcap*'")
    parser.add_argument("--impls", default=",".join(PEERS), help="default: %(default)s")
    parser.add_argument("--warm", type=float, default=0.1, help="seconds of a visit before its window (%(default)s)")
    parser.add_argument("--window", type=float, default=0.25, help="seconds of a window (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="visits of each implementation (%(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no race that would end later")
    parser.add_argument("--db", type=Path, help="tuning database above the shipped ones (default: the shipped alone)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
