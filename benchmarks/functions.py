"""Functions of the caller, and built-in features that train: writes `results/<device>/functions.csv`.

python -m benchmarks.functions [--only 'documents*'] [--suite functions_backward] [--flex default] [--prepare 8]
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import flashgen
from benchmarks.forward import add_race_arguments, say
from benchmarks.functions_cases import BACKWARD, BOTH, FORWARD, Case, cases
from benchmarks.functions_impls import PEERS, impls_of, options_of
from benchmarks.impls import IMPLS, Impl, flashgen_features
from benchmarks.opened import opened, usage_of
from benchmarks.prepared import add_prepare_arguments, call_once, prepare, release
from benchmarks.provenance import Provenance, add_arguments, serve_generated
from benchmarks.race import Pace, Result, attempt, race_on
from benchmarks.results import FUNCTION_COLUMNS, ResultsFile, Row, Subject, left_of, subject_of
from benchmarks.time_limit import TimeLimit
from benchmarks.work_off import Outcome, outcome_of, work_off
from flashgen.launch.gpu import current_device
from flashgen.measure import gpu
from flashgen.measure.inputs import rotation_copies
from flashgen.measure.timing import CudaStopwatch
from flashgen.tuning.shards import Shard

SUITES = (FORWARD, BOTH, BACKWARD)
DEFAULT_SUITES = (FORWARD, BOTH)

Impls = Callable[[Case], tuple[Impl, ...]]
Racer = Callable[[Case, Sequence[Impl]], list[Result]]


def main(arguments: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    """Run; 0 is done, 4 if flashgen has no row where it should have one, 3 stopped at the time limit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    names = options.impls.split(",")
    if unknown := set(names) - set(PEERS):
        parser.error(f"an implementation is one of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    impls, limit = _kept(names, options.flex), TimeLimit(options.limit_seconds, clock)
    with tempfile.TemporaryDirectory() as scratch:
        serve_generated(options.db, Path(scratch))
        with usage_of(parser):
            shard = Shard.parse(options.shard)
            wanted = chosen(options.suite or DEFAULT_SUITES, options.only)[shard.index :: shard.count]
            provenance, file = opened(options, "functions", FUNCTION_COLUMNS)
        left = undone(wanted, impls, file.done(provenance.commit))
        if (part := options.compile_part) is not None:
            return compile_all(left[part.index :: part.count], impls, torch.device("cuda", 0))
        if left:
            prepare("functions", arguments, options.prepare, say)
        say(f"{provenance.device}, torch {provenance.torch}, triton {provenance.triton}, commit {provenance.commit}")
        return run(wanted, impls, file, provenance, racer_of(options), limit)


def chosen(suites: Sequence[str], patterns: Sequence[str]) -> tuple[Case, ...]:
    """The cases of suites whose `function/workload` fits one of the patterns; all of them if there is none."""
    return tuple(
        case
        for case in cases(*suites)
        if not patterns or any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)
    )


def undone(wanted: Sequence[Case], impls: Impls, done: Collection[Subject]) -> list[Case]:
    """The cases of which no implementation has a row."""
    return left_of(wanted, lambda case: [_subject(case, impl.name) for impl in impls(case)], done)


def run(
    wanted: Sequence[Case],
    impls: Impls,
    file: ResultsFile,
    provenance: Provenance,
    racer: Racer,
    limit: TimeLimit,
) -> int:
    """Race every case of which no implementation has a row yet, and write its rows together."""
    left = undone(wanted, impls, file.done(provenance.commit))

    def one(case: Case) -> Outcome:
        row, told = partial(row_of, case, provenance=provenance), partial(line_of, case)
        return outcome_of(racer(case, impls(case)), row, told)

    return work_off(left, one, file, limit, say, lambda case: f"{case.suite} {case.name}")


def racer_of(options: argparse.Namespace) -> Racer:
    """Races on this process's first GPU; prints what serves flashgen's call."""
    device, where = current_device(), torch.device("cuda", 0)
    pace = Pace(warm_ms=1e3 * options.warm, window_ms=1e3 * options.window, rounds=options.rounds)
    stopwatch = CudaStopwatch(gpu.sm_clock_mhz)
    for other in gpu.other_processes():
        say(f"warning: another process uses this GPU: {other}")

    def racer(case: Case, impls: Sequence[Impl]) -> list[Result]:
        say(f"  {served_by(case, where)}")
        copies = rotation_copies(case.workload, device.l2_bytes)
        with _autograd(case):
            found = race_on(lambda: case.problem(copies, where), case.twin, impls, stopwatch=stopwatch, pace=pace)
        release()
        return found

    return racer


def served_by(case: Case, where: torch.device) -> str:
    """Which family and rung serve flashgen's call, in both directions where it trains."""
    inputs = case.inputs(1, where)
    given = inputs.q[0], inputs.k[0], inputs.v[0]
    options = options_of(case.function, case.twin, where)
    options |= flashgen_features(inputs.features[0]) if case.function.is_built_in else {}

    def told(direction: str) -> str:
        served = flashgen.explain(*given, direction=direction, **options).served
        return f"{direction} rung {served.rung}: {served.config}"

    directions = ("forward",) if case.suite == FORWARD else ("forward", "backward")
    return "; ".join(attempt(partial(told, direction)) for direction in directions)


def compile_all(wanted: Sequence[Case], impls: Impls, where: torch.device) -> int:
    """Call everything that may race once, so that its kernels are in the caches on the disk."""
    for case in wanted:
        with _autograd(case):
            inputs = case.inputs(1, where)
            for impl in impls(case):
                say(f"{case.suite} {case.name} {impl.name}: {call_once(impl, case.twin, inputs)}")
        del inputs
        release()
    return 0


def row_of(case: Case, result: Result, provenance: Provenance) -> Row:
    """The row of an implementation; `tflops` counts the visible pairs of all passes that are timed."""
    impl, ms = result.impl, result.median_ms
    row = provenance.row(
        case.suite, case.workload, impl.name, impl.version(), median_ms=ms, timing=result.timing, rates=False
    )
    return replace(row, function=case.function.name, tflops=case.flops / ms / 1e9)


def line_of(case: Case, result: Result) -> str:
    """One implementation's result for people."""
    if result.reason is not None:
        return f"{result.impl.name:12} no row: {result.reason}"
    tail = f", {result.timing}" + (f": {result.queued_because}" if result.queued_because else "")
    rate = case.flops / result.median_ms / 1e9
    return f"{result.impl.name:12} {result.median_ms:9.4f} ms {rate:6.1f} TFLOP/s, spread {result.spread:.1%}{tail}"


def _subject(case: Case, impl: str) -> tuple[str, ...]:
    return subject_of(case.suite, case.workload.key, impl, case.function.name)


def _kept(names: Sequence[str], flex: str) -> Impls:
    """The implementations of a case: the same ones for all calls of a function in a suite."""
    made: dict[tuple[str, str], tuple[Impl, ...]] = {}

    def impls(case: Case) -> tuple[Impl, ...]:
        key = case.suite, case.function.name
        if key not in made:
            made[key] = impls_of(case.suite, case.function, names, flex)
        return made[key]

    return impls


@contextlib.contextmanager
def _autograd(case: Case) -> Iterator[None]:
    """A forward pass alone keeps nothing for a backward pass."""
    with contextlib.nullcontext() if case.suite != FORWARD else torch.no_grad():
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.functions", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--suite", action="append", choices=SUITES, help=f"default: {' and '.join(DEFAULT_SUITES)}")
    add_race_arguments(parser, [impl for impl in IMPLS if impl.name in PEERS])
    parser.set_defaults(warm=0.04, window=0.08, rounds=2)
    add_prepare_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
