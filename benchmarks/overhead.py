"""Host time of one call on a small shape: writes `results/<device>/overhead.csv`.

    python -m benchmarks.overhead [--calls 100] [--loops 20]

A loop makes some calls without waiting for any, few enough for the launch queue to hold them all, so the host never
waits for the device. The loops of all cases of a group take turns; flashgen's come first, the slowest peer last. First
calls are timed in processes of their own, at the end (`benchmarks.first_call`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import flashgen
from benchmarks import first_call
from benchmarks.exit_codes import MISSING
from benchmarks.opened import opened, usage_of
from benchmarks.overhead_cases import HOPPER, Arguments, Case, cases_of, compiled_cases, peer_cases, training_cases
from benchmarks.overhead_decode import decode_cases
from benchmarks.provenance import Provenance, add_arguments, serve_generated
from benchmarks.results import ResultsFile
from flashgen.measure.turns import orders

SUITE = "overhead"
MOST_CALLS = 256
"""A quarter of the launches that the driver holds before the host has to wait."""

MOST_LOOPS = 90
"""The cases with new lengths have no more of them."""

CASE_SECONDS, FEWEST_LOOPS = 1.0, 5
"""A case of slow calls has fewer loops: none more after so much time, once it has a few."""

Loop = Callable[[Case, Sequence[Arguments]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of host time per call: over all loops of one case, or the reason why there are none."""

    case: Case
    loops_us: tuple[float, ...] = ()
    reason: str | None = None

    @property
    def median_us(self) -> float:
        """The median over the loops."""
        return statistics.median(self.loops_us)

    @property
    def best_us(self) -> float:
        """The fastest loop."""
        return min(self.loops_us)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 4 if a case of flashgen failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0 < options.calls <= MOST_CALLS:
        parser.error(f"--calls is 1 to {MOST_CALLS}, so that the launch queue never fills, got {options.calls}")
    if not 0 < options.loops <= MOST_LOOPS:
        parser.error(f"--loops is 1 to {MOST_LOOPS}, got {options.loops}")
    with usage_of(parser):
        provenance, file = opened(options, "overhead")
    failed = 0
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        serve_generated(None, Path(folder))
        # made one after the other, because each of flashgen's groups is served from a database of its own
        for make in (
            partial(cases_of, "descriptor", Path(folder)),
            partial(cases_of, "pointer", Path(folder)),
            partial(cases_of, HOPPER, Path(folder)),
            partial(_served_as_shipped, Path(folder), training_cases),
            partial(_served_as_shipped, Path(folder), decode_cases),
            peer_cases,
            compiled_cases,
        ):
            done = file.done(provenance.commit)
            cases = [case for case in make() if (SUITE, case.workload.key, case.name) not in done]
            for timing in time_cases(cases, timed_loop, calls=options.calls, loops=options.loops):
                failed += _report(timing, file, provenance)
        done = file.done(provenance.commit)
        for case in first_call.CASES:
            if (SUITE, case.workload.key, case.name) not in done:
                failed += _report(_first_calls(case, options.first_calls), file, provenance)
    print(f"{file.path}: {len(file.rows)} rows")
    return MISSING if failed else 0


def _served_as_shipped(folder: Path, make: Callable[[], list[Case]]) -> list[Case]:
    serve_generated(None, folder)
    flashgen.reload()
    return make()


def _first_calls(case: Case, processes: int) -> Timing:
    """The first calls of some new processes, each a loop of one call."""
    try:
        return Timing(case=case, loops_us=tuple(ms * 1e3 for ms in first_call.times_ms(case.name, processes)))
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.strip()] or ["nothing"]
        return Timing(case=case, reason=f"the process said {said[-1]}")


def time_cases(cases: Sequence[Case], loop: Loop, *, calls: int, loops: int) -> list[Timing]:
    """Let the cases take turns, `loops` times each, after one loop that does not count.

    A case whose first loop fails gets a reason instead of times, one of slow calls gets fewer loops.
    """
    reasons: dict[str, str] = {}
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for case in cases:
        try:
            loop(case, case.arguments(0, min(calls, case.most_calls)))
        except Exception as error:  # noqa: BLE001, PERF203 - whatever another project raises is why a row is missing
            reasons[case.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    runners = [case for case in cases if case.name not in reasons]
    gc.collect()
    gc.freeze()  # what there is now is never looked through again, which would take longer than the loops
    for number, order in enumerate(orders(len(runners), loops), start=1):
        for case in (runners[turn] for turn in order):
            taken, count = times[case.name], min(calls, case.most_calls)
            if len(taken) < FEWEST_LOOPS or sum(taken) * count < CASE_SECONDS * 1e6:
                taken.append(loop(case, case.arguments(number, count)))
    gc.unfreeze()
    return [Timing(case=c, loops_us=tuple(times[c.name]), reason=reasons.get(c.name)) for c in cases]


def timed_loop(case: Case, arguments: Sequence[Arguments]) -> float:
    """Microseconds of host time per call of one loop that starts and ends with an idle device."""
    call = case.call
    outputs: list[object] = [None] * len(arguments)
    with case.context(), _no_garbage_collection():
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        if case.keeps_outputs:
            for n, (q, k, v) in enumerate(arguments):
                outputs[n] = call(q, k, v)
        else:
            for q, k, v in arguments:
                call(q, k, v)
        elapsed = time.perf_counter_ns() - start
        torch.cuda.synchronize()
    return elapsed / 1e3 / len(arguments)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """As timeit does: a collection in one loop of thirty is no property of a call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _report(timing: Timing, file: ResultsFile, provenance: Provenance) -> bool:
    """Write and print one case; whether it is one of flashgen's and failed."""
    case = timing.case
    if timing.reason is not None:
        print(f"{case.name:38} no row: {timing.reason}", flush=True)
        return case.name.startswith("flashgen")
    ms = timing.median_us / 1e3
    file.write([provenance.row(SUITE, case.workload, case.name, case.version, median_ms=ms, rates=False)])
    print(f"{case.name:38} median {timing.median_us:8.2f} us, best {timing.best_us:8.2f} us", flush=True)
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--calls", type=int, default=100, help="calls of a loop (%(default)s)")
    parser.add_argument("--loops", type=int, default=20, help="loops of a case (%(default)s)")
    parser.add_argument("--first-calls", type=int, default=3, help="new processes of a first call (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
