"""Bytes that attention reads and writes, by the hardware's counters: writes `results/<device>/io.csv`.

    python -m benchmarks.io [--suite io_blocks] [--append]

The figure of the FlashAttention paper on IO complexity: flashgen, FlashAttention-2 and standard attention over the
length, and the portable forward kernel over its block sizes. Needs Nsight Compute and the right to read the counters.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.counters import CountersError, Kernel, counted, find_ncu
from benchmarks.exit_codes import MISSING
from benchmarks.forward import say
from benchmarks.io_cases import BLOCKS_SUITE, SUITES, Case, block_config, blocks_of, cases, version_of
from benchmarks.io_worker import DONE, SWEEP_BYTES, sweep_l2
from benchmarks.provenance import ROOT, Provenance, add_arguments, serve_generated
from benchmarks.results import IO_COLUMNS, ResultsFile, Row
from benchmarks.spread import compile_ahead
from flashgen.cli.kernels import explanation_of
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError
from flashgen.launch.gpu import current_device

SWEEP = sweep_l2.__name__
SWEEP_TOLERANCE = 0.25
"""What of a sweep is still in L2 from the one before is not read again."""

Count = Callable[[Sequence[str], Sequence[str], Path], list[Kernel]]
"""Runs a program and gives its kernels, after a short program of the same kind; with a file for what is printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 1 if the counters cannot be read, 4 if flashgen has no row where it should have one."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        provenance, ncu = Provenance.here(options.commit), find_ncu(options.ncu)
        path = options.results / provenance.slug / "io.csv"
        file = ResultsFile(path, IO_COLUMNS, append=True, commit=provenance.commit) if options.append else None
    except (CountersError, FlashgenError, ValueError) as error:
        parser.error(str(error))
    done = file.done(provenance.commit) if file else set()
    wanted = [case for case in cases(options.suite or SUITES) if case.subject not in done]

    def count(program: Sequence[str], trial: Sequence[str], log: Path) -> list[Kernel]:
        return counted(ncu, program, trial=trial, log=log, cwd=ROOT, timeout_s=options.limit_seconds)

    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        serve_generated(None, Path(temporary))
        device = current_device()
        compile_ahead([(case.workload, config_of(case, device)) for case in wanted if _is_ours(case)], device)
        try:
            calls = calls_counted(wanted, count, scratch)
        except CountersError as error:
            say(f"no rows: {error}")
            return 1
    # a file is not begun before: what is there stays if nothing could be counted
    return written(calls, file or ResultsFile(path, IO_COLUMNS), provenance)


def config_of(case: Case, device: Device) -> Config:
    """The config that serves a case of flashgen on a device."""
    if case.suite == BLOCKS_SUITE:
        return block_config(*blocks_of(case.impl))
    return explanation_of(case.workload, case.workload.specialization, device).served.config


def calls_counted(wanted: Sequence[Case], count: Count, scratch: Path) -> dict[Case, list[Kernel] | str]:
    """The kernels of every case, from one run of the worker; or the reason why a case was not counted.

    Raises:
        CountersError: the counters cannot be read, or there are other kernels than the worker reports.
    """
    if not wanted:
        return {}
    folder = scratch.resolve()
    kernels = count(_program(wanted, folder, "report"), _program(wanted[:1], folder, "trial"), folder / "ncu.csv")
    report = folder / "report"
    outcomes = dict(line.split("\t", 1) for line in report.read_text().splitlines())
    found = calls_of([case for case in wanted if outcomes.get(str(case)) == DONE], kernels)
    return {
        case: found[case] if case in found else outcomes.get(str(case), "the worker did not reach it")
        for case in wanted
    }


def _program(some: Sequence[Case], folder: Path, report: str) -> list[str]:
    """The command line of the worker for these cases."""
    todo = folder / f"{report}.cases"
    todo.write_text("".join(f"{case}\n" for case in some))
    return [sys.executable, "-m", "benchmarks.io_worker", str(todo), str(folder / report)]


def calls_of(counted_cases: Sequence[Case], kernels: Sequence[Kernel]) -> Mapping[Case, list[Kernel]]:
    """The kernels of each call: those between its two sweeps, and the second sweep itself.

    Of the last one only what it writes counts: it writes nothing of its own, so that is what the call left in L2.

    Raises:
        CountersError: the sweeps are not two a case with kernels between them, or one read other than what it reads.
    """
    found: list[list[Kernel]] = []
    inside = False
    for kernel in kernels:
        if kernel.name != SWEEP:
            if not inside:
                raise CountersError(f"{kernel.name} was counted outside of every call")
            found[-1].append(kernel)
            continue
        if abs(kernel.hbm_read_bytes / SWEEP_BYTES - 1) > SWEEP_TOLERANCE:
            read = kernel.hbm_read_bytes
            raise CountersError(
                f"a sweep reads {SWEEP_BYTES} bytes, the counters say {read}: they are of something else"
            )
        if inside:
            found[-1].append(replace(kernel, hbm_read_bytes=0, l2_bytes=0, ms=0.0))
        else:
            found.append([])
        inside = not inside
    if inside or len(found) != len(counted_cases) or any(len(call) < 2 for call in found):
        raise CountersError(f"{len(counted_cases)} calls should be between sweeps, {len(found)} were found")
    return dict(zip(counted_cases, found, strict=True))


def written(calls: Mapping[Case, list[Kernel] | str], file: ResultsFile, provenance: Provenance) -> int:
    """Write the rows of all cases together; 4 if one of flashgen has none."""
    file.write(row_of(case, found, provenance) for case, found in calls.items() if not isinstance(found, str))
    for case, found in calls.items():
        say(f"{case}: {f'no row: {found}' if isinstance(found, str) else line_of(found)}")
    say(f"{file.path}: {len(file.rows)} rows")
    return MISSING if any(isinstance(found, str) and _is_ours(case) for case, found in calls.items()) else 0


def row_of(case: Case, kernels: Sequence[Kernel], provenance: Provenance) -> Row:
    """The sums over the kernels of a call; `median_ms` is the time of these kernels under the profiler."""
    row = provenance.row(case.suite, case.workload, case.impl, version_of(case), rates=False)
    return replace(
        row,
        hbm_read_bytes=sum(kernel.hbm_read_bytes for kernel in kernels),
        hbm_write_bytes=sum(kernel.hbm_write_bytes for kernel in kernels),
        l2_bytes=l2_bytes(kernels),
        kernels=sum(kernel.name != SWEEP for kernel in kernels),
        median_ms=sum(kernel.ms for kernel in kernels),
    )


def l2_bytes(kernels: Sequence[Kernel]) -> int | None:
    """The sum over kernels; None if one of them was not counted."""
    sizes = [kernel.l2_bytes for kernel in kernels if kernel.l2_bytes is not None]
    return sum(sizes) if len(sizes) == len(kernels) else None


def line_of(kernels: Sequence[Kernel]) -> str:
    """One call for people."""
    read, written = (sum(k.hbm_read_bytes for k in kernels), sum(k.hbm_write_bytes for k in kernels))
    moved = l2_bytes(kernels)
    said = "" if moved is None else f"L2 {moved / 1e9:.3f} GB; "
    return (
        f"HBM {read / 1e9:.3f} GB read, {written / 1e9:.3f} GB written; {said}"
        f"{sum(k.ms for k in kernels):.3f} ms in {len(kernels) - 1} kernels"
    )


def _is_ours(case: Case) -> bool:
    return case.suite == BLOCKS_SUITE or case.impl == "flashgen"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.io", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--ncu", help="path of Nsight Compute (default: found on the PATH or where it is installed)")
    parser.add_argument("--keep", type=Path, help="folder in which what the profiler and the worker wrote is kept")
    parser.add_argument("--limit-seconds", type=float, default=500.0, help="stop the profiler then (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
