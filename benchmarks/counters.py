"""Hardware counters of a program's kernels, as Nsight Compute (`ncu`) reads them.

Caches are left as they are between kernels (`--cache-control none`), because the kernels of one call hand each other
what is still in L2; who calls decides what is there before the first one. A kernel that is run again for a second pass
of metrics would find other caches. So all metrics are to be of one pass; where a device cannot do that, the whole
program is run again for each pass.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HBM_READ, HBM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_SECTORS = "lts__t_sectors_srcunit_tex.sum"
"""Sectors of L2 that SMs ask for: loads, stores and atomics, through L1 or by TMA."""

DURATION = "gpu__time_duration.sum"
METRICS = (HBM_READ, HBM_WRITE, L2_SECTORS, DURATION)
NEEDED = (HBM_READ, HBM_WRITE, DURATION)
"""What every device with these counters has; L2 is counted in other units on some."""

SECTOR_BYTES = 32
TO_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": float(SECTOR_BYTES)}
TO_MS = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0}
"""Units as `ncu` names them in its versions; it is asked for base units, but a report may be printed otherwise."""

ABSENT = ("", "n/a", "nan")
"""Values of a metric that the device does not have."""

PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
"""Where `ncu` is if it is not on the PATH."""

FLAGS = (
    "--csv",
    *("--page", "raw"),
    *("--print-units", "base"),
    *("--clock-control", "none"),
    *("--cache-control", "none"),
    *("--profile-from-start", "off"),
    *("--target-processes", "all"),
)


class CountersError(Exception):
    """The counters of this machine cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What one launch moved and how long it ran.

    `l2_bytes` are those between L2 and the SMs, in both directions; None where the device does not count them.
    """

    name: str
    hbm_read_bytes: int
    hbm_write_bytes: int
    l2_bytes: int | None
    ms: float


def find_ncu(given: str | None = None) -> str:
    """The path of `ncu`.

    Raises:
        CountersError: it is not installed.
    """
    found = shutil.which(given or "ncu")
    if found is None and given is None:
        places = (str(path) for place in PLACES for path in sorted(Path("/").glob(place[1:])))
        found = next((path for path in places if shutil.which(path)), None)
    if found is None:
        raise CountersError(f"hardware counters are read by Nsight Compute; {given or 'ncu'} is not installed here")
    return found


def counted(
    ncu: str, program: Sequence[str], *, trial: Sequence[str], log: Path, cwd: Path, timeout_s: float
) -> list[Kernel]:
    """Run a program and read the counters of the kernels that it launches between cudaProfilerStart and -Stop.

    Args:
        ncu: path of Nsight Compute.
        program: the command line.
        trial: a short program that is run first, to see whether one pass is enough: to repeat a kernel, `ncu` would
            save all memory that it writes, which is minutes for the scores of a long sequence.
        log: a file for the output of `ncu`, which is overwritten.
        cwd: the folder that the programs run in.
        timeout_s: the most seconds that each of them may take.

    Raises:
        CountersError: the counters cannot be read, or the program failed or took too long.
    """
    text = _printed(ncu, (), trial, log, cwd, timeout_s)
    parse(text)
    mode = ("--replay-mode", "application") if passes(text) > 1 else ()
    return parse(_printed(ncu, mode, program, log, cwd, timeout_s))


def passes(text: str) -> int:
    """How often `ncu` says that it ran a kernel, the most of any."""
    found = re.findall(r" - (\d+) pass(?:es)?\s*$", text, re.MULTILINE)
    return max(map(int, found), default=1)


def parse(text: str) -> list[Kernel]:
    """The kernels in what `ncu --csv --page raw` printed, in the order of their launches.

    Raises:
        CountersError: `ncu` reports an error, counted nothing, or a metric or its unit is missing.
    """
    lines = text.splitlines()
    errors = _errors(lines)
    if errors:
        raise CountersError(f"Nsight Compute cannot read the counters: {' '.join(errors)}")
    table = [line for line in lines if line.startswith('"')]
    if not table:
        raise CountersError("Nsight Compute counted no kernel")
    return list(_kernels(table))


def _printed(ncu: str, more: Sequence[str], program: Sequence[str], log: Path, cwd: Path, timeout_s: float) -> str:
    """What `ncu` wrote to its log."""
    flags = (*FLAGS, *more, "--metrics", ",".join(METRICS), "--force-overwrite", "--log-file", str(log))
    try:
        done = subprocess.run(
            [ncu, *flags, *program], cwd=cwd, timeout=timeout_s, capture_output=True, text=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CountersError(f"{ncu}: {error}") from error
    text = log.read_text(errors="replace") if log.is_file() else ""
    if done.returncode:
        said = [*_errors(text.splitlines()), *(done.stderr or done.stdout).strip().splitlines()[-3:]]
        raise CountersError(f"{ncu} ended with {done.returncode}: {' '.join(said)}")
    return text


def _errors(lines: Iterable[str]) -> list[str]:
    return [line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")]


def _kernels(table: Sequence[str]) -> Iterator[Kernel]:
    """One row a kernel below the row of units."""
    rows = csv.DictReader(table)
    named = rows.fieldnames or ()
    missing = [metric for metric in NEEDED if metric not in named]
    if missing:
        raise CountersError(f"Nsight Compute gave no {', '.join(missing)}")
    units = next(rows)
    for row in rows:
        has_l2 = L2_SECTORS in named and row[L2_SECTORS] not in ABSENT
        yield Kernel(
            name=row["Kernel Name"],
            hbm_read_bytes=round(_number(row, units, HBM_READ, TO_BYTES)),
            hbm_write_bytes=round(_number(row, units, HBM_WRITE, TO_BYTES)),
            l2_bytes=round(_number(row, units, L2_SECTORS, TO_BYTES)) if has_l2 else None,
            ms=_number(row, units, DURATION, TO_MS),
        )


def _number(row: dict[str, str], units: dict[str, str], metric: str, scale: dict[str, float]) -> float:
    """A value in bytes or ms; thousands may be separated."""
    unit, text = units[metric], row[metric].replace(",", "")
    if unit not in scale:
        raise CountersError(f"the unit of {metric} is one of {', '.join(scale)}, got {unit!r}")
    try:
        return float(text) * scale[unit]
    except ValueError as error:
        raise CountersError(f"{metric} of {row['Kernel Name'][:60]} is no number: {text!r}") from error
