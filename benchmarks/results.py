"""The CSV files of the benchmarks: fixed columns, one row per suite, workload and implementation, written at once."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

COLUMNS = (
    "suite",
    "workload",
    "impl",
    "impl_version",
    "median_ms",
    "tflops",
    "gbps",
    "device",
    "torch",
    "triton",
    "commit",
    "date",
)
"""Columns of every file that is not named below."""

RACE_COLUMNS = (*COLUMNS[:4], "timing", *COLUMNS[4:])
"""Columns of `forward.csv`, `backward.csv` and `forward_backward.csv`."""

DATA_COLUMNS = (*COLUMNS[:2], "data", *RACE_COLUMNS[2:])
"""Columns of `data.csv`."""

FUNCTION_COLUMNS = (*COLUMNS[:2], "function", *RACE_COLUMNS[2:])
"""Columns of `functions.csv`."""

MEMORY_COLUMNS = (*COLUMNS[:4], "extra_bytes", *RACE_COLUMNS[4:])
"""Columns of `memory.csv` and `features.csv`."""

OUTCOME_COLUMNS = (*COLUMNS[:4], "outcome", *RACE_COLUMNS[4:])
"""Columns of `models.csv`, which has a row for what could not run, too."""

TRAINING_NUMBERS = ("steps", "tokens_per_s", "peak_gib", "loss_first", "loss_last")
TRAINING_COLUMNS = (*COLUMNS[:4], "outcome", "median_ms", *TRAINING_NUMBERS, *COLUMNS[7:])
"""Columns of `training.csv`."""

WHOLE_MODEL_COLUMNS = (*COLUMNS[:4], "outcome", "median_ms", "tokens_per_s", "peak_gib", *COLUMNS[7:])
"""Columns of `models_transformers.csv`."""

SPREAD_NUMBERS = (
    "repeats",
    "differing",
    "spread_max",
    "spread_mean",
    "error_max",
    "error_mean",
    "ulps_max",
    "ulps_mean",
    "others_differing",
)
SPREAD_COLUMNS = (*COLUMNS[:4], *SPREAD_NUMBERS, *COLUMNS[7:])
"""Columns of `spread.csv`."""

ACCURACY_COLUMNS = (*COLUMNS[:2], "data", *COLUMNS[2:4], "relative_error", "worst_row", *COLUMNS[7:])
"""Columns of `accuracy.csv`."""

IO_NUMBERS = ("hbm_read_bytes", "hbm_write_bytes", "l2_bytes", "kernels")
IO_COLUMNS = (*COLUMNS[:4], *IO_NUMBERS, "median_ms", *COLUMNS[7:])
"""Columns of `io.csv`."""

RESULTS = Path(__file__).resolve().parent / "results"
"""Where results live: one folder per device, named by its slug."""

FORMATS = {
    "median_ms": ".6g",
    "tflops": ".1f",
    "gbps": ".1f",
    "extra_bytes": "d",
    "steps": "d",
    "tokens_per_s": ".0f",
    "peak_gib": ".2f",
    "loss_first": ".5f",
    "loss_last": ".5f",
    "repeats": "d",
    "differing": ".4g",
    "spread_max": ".3g",
    "spread_mean": ".3g",
    "error_max": ".3g",
    "error_mean": ".3g",
    "ulps_max": ".4g",
    "ulps_mean": ".3g",
    "others_differing": "d",
    "relative_error": ".4g",
    "worst_row": ".4g",
    **dict.fromkeys(IO_NUMBERS, "d"),
}
"""How numbers are written; the other columns are text."""


J = TypeVar("J")

Subject = tuple[str, ...]
"""Suite, workload and implementation, and behind them the kind of data where a file has several."""


def subject_of(suite: str, workload: str, impl: str, data: str = "") -> Subject:
    """What a row of these measures; `data` is the kind of data, or the function of the caller."""
    return (suite, workload, impl, data) if data else (suite, workload, impl)


def left_of(jobs: Iterable[J], subjects_of: Callable[[J], Iterable[Subject]], done: Collection[Subject]) -> list[J]:
    """The jobs of which no row is there: rows that are compared come from one race, so one is enough to skip it."""
    return [job for job in jobs if not any(subject in done for subject in subjects_of(job))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result. `median_ms` is the median over windows; `tflops` and `gbps` follow from it; None is an empty cell.

    Of a run of training, `median_ms` is the median step, `tokens_per_s` follows from it, `peak_gib` is the most memory
    that was allocated, and `outcome` says whether it came to its end. In no file are `loss_deviation`, the mean
    distance from the losses of the run that it is compared with, and `loss_mean` and `accuracy` of its last steps:
    `training_tables` finds them in the curves. Of a race, `outcome` is the reason why an implementation has no time,
    `timing` says how its time was taken, `graph` or `queue`, `data` is the kind of data where a file has several
    (`flashgen.measure.data_kinds`), and `function` what a call has beside its workload (`functions_cases`).
    What repeats of one call differ by is explained in `spread.Spread`, and distances from float64 in
    `accuracy.Distance`. Of a call under the profiler, `hbm_read_bytes`,
    `hbm_write_bytes` and `l2_bytes` (between L2 and the SMs) are what its `kernels` moved, and `median_ms` is their
    time. `device`, `torch`, `triton`, `commit` and `date` (UTC) say what a row was measured on and with.
    """

    suite: str
    workload: str
    data: str = ""
    function: str = ""
    impl: str
    impl_version: str
    extra_bytes: int | None = None
    timing: str = ""
    median_ms: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    outcome: str = ""
    steps: int | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    loss_deviation: float | None = None
    loss_mean: float | None = None
    accuracy: float | None = None
    repeats: int | None = None
    differing: float | None = None
    spread_max: float | None = None
    spread_mean: float | None = None
    error_max: float | None = None
    error_mean: float | None = None
    ulps_max: float | None = None
    ulps_mean: float | None = None
    others_differing: int | None = None
    relative_error: float | None = None
    worst_row: float | None = None
    hbm_read_bytes: int | None = None
    hbm_write_bytes: int | None = None
    l2_bytes: int | None = None
    kernels: int | None = None
    device: str
    torch: str
    triton: str
    commit: str
    date: str

    @property
    def subject(self) -> Subject:
        """What was measured."""
        return subject_of(self.suite, self.workload, self.impl, self.data or self.function)

    @property
    def version(self) -> str:
        """The version of the implementation."""
        return self.impl_version.partition(" ")[0]

    @property
    def variant(self) -> str:
        """Which of its variants was the fastest, behind its version; empty for what has one way alone."""
        return self.impl_version.partition(" ")[2]

    def cells(self, columns: Sequence[str]) -> list[str]:
        """The text of each column."""
        values = ((name, getattr(self, name)) for name in columns)
        return ["" if value is None else format(value, FORMATS.get(name, "")) for name, value in values]

    @classmethod
    def of_cells(cls, columns: Sequence[str], cells: Sequence[str]) -> Row:
        """The row that `cells` wrote.

        Raises:
            ValueError: the number of cells is wrong, or a number cannot be read.
        """
        if len(cells) != len(columns):
            raise ValueError(f"a row has {len(columns)} cells, got {len(cells)}: {','.join(cells)[:80]}")
        return cls(**{name: _value(name, cell) for name, cell in zip(columns, cells, strict=True)})  # type: ignore[arg-type]


def _value(name: str, cell: str) -> str | int | float | None:
    if name not in FORMATS:
        return cell
    if not cell:
        return None
    return int(cell) if FORMATS[name] == "d" else float(cell)


class ResultsFile:
    """One CSV file that grows group by group; every group is on the disk before the next measurement starts.

    All of its rows are of one commit: what stands in one table was measured with one state of the code.
    """

    def __init__(
        self, path: Path, columns: Sequence[str] = COLUMNS, *, append: bool = False, commit: str | None = None
    ) -> None:
        """Start the file anew, or go on with it.

        Args:
            path: the file.
            columns: what its header names.
            append: go on with it.
            commit: of the rows to come; None is seen when they are written.

        Raises:
            ValueError: the file to go on with has other columns, a damaged row, or rows of another commit.
        """
        self.path = path
        self._columns = tuple(columns)
        self.rows = read_rows(path, columns) if append and path.is_file() else []
        self._refuse_others(commit, self.rows)
        if not self.rows:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_lines([self._columns]), newline="")

    def done(self, commit: str) -> set[Subject]:
        """The subjects that have a row of this commit."""
        return {row.subject for row in self.rows if row.commit == commit}

    def write(self, rows: Iterable[Row]) -> None:
        """Append a group of rows in one write.

        Raises:
            ValueError: they are not all of the commit of the rows that are there.
        """
        group = list(rows)
        if not group:
            return
        for commit in {row.commit for row in group}:
            self._refuse_others(commit, (*self.rows, *group))
        with self.path.open("a", newline="") as file:
            file.write(_lines(row.cells(self._columns) for row in group))
            file.flush()
            os.fsync(file.fileno())
        self.rows += group

    def _refuse_others(self, commit: str | None, rows: Iterable[Row]) -> None:
        theirs = sorted({row.commit for row in rows} - {commit})
        if commit is not None and theirs:
            raise ValueError(
                f"all rows of a results file are of one commit: {self.path} has rows of {', '.join(theirs)}, "
                f"not of {commit}; measure it anew without --append"
            )


def header_of(path: Path) -> tuple[str, ...]:
    """The columns that a file names in its first line."""
    with path.open(newline="") as file:
        return tuple(next(csv.reader(file), ()))


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a file, in its order.

    Raises:
        ValueError: its columns are not those expected (None: any subset of the known ones), a row is damaged, or two
            rows have one subject.
    """
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    header = lines[0] if lines else []
    known = [field.name for field in fields(Row)]
    if (columns is not None and header != list(columns)) or not header or not set(header) <= set(known):
        raise ValueError(f"{path} must have the columns {','.join(columns or known)}, got {','.join(header)}")
    rows = [Row.of_cells(header, cells) for cells in lines[1:]]
    twice = [subject for subject, count in Counter(row.subject for row in rows).items() if count > 1]
    if twice:
        raise ValueError(
            "a results file has one row for each suite, workload, implementation and kind of data; "
            f"{path} has more for {twice[0]}"
        )
    return rows


def _lines(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
