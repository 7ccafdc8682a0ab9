"""Put together what several GPUs measured of the same benchmarks, a folder of results each, into one.

python -m benchmarks.merge /tmp/gpu0 /tmp/gpu1 --into benchmarks/results

Each folder is one that a benchmark was given with --results. Files of one name become one file, in the order of the
suites (those of races of searches in the order of the folders), and nothing is written unless everything fits. Rows of
an implementation that a file has so far are not lost unless `--without` names it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from benchmarks import curves, search_files
from benchmarks.accuracy import SUITE as ACCURACY_SUITE
from benchmarks.accuracy import accuracy_grid
from benchmarks.decode_cases import GRID, MORE, MORE_SUITE
from benchmarks.decode_cases import SUITE as DECODE_SUITE
from benchmarks.memory import MEMORY_SUITE, TRAINING_SUITE, memory_grid, training_grid
from benchmarks.regressions import WORKLOADS as REGRESSIONS
from benchmarks.results import RESULTS, ResultsFile, Row, Subject, header_of, read_rows
from benchmarks.speedup import SPEEDUP_SUITE, speedup_grid
from benchmarks.suites import (
    BACKWARD_SUITE,
    BOTH_PASSES,
    DATA_SUITE,
    MODELS,
    SUITES,
    backward_grid,
    data_grid,
    features_grid,
    model_workloads,
    window_grid,
)
from benchmarks.training_tasks import TASKS
from benchmarks.varlen_cases import PACKS, PAGED_SUITE
from benchmarks.varlen_cases import SUITE as PACKED_SUITE
from benchmarks.varlen_cases import TRAINING_SUITE as PACKED_TRAINING_SUITE
from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import DATA_KINDS


def training_workloads(suite: str) -> tuple[Workload, ...]:
    """Those of the tasks of a suite, one for each length that GPT-2 is trained with."""
    return tuple(task.workload for task in TASKS.values() if suite in task.suites.values())


def packed_workloads(suite: str) -> tuple[Workload, ...]:
    """The batches of packed sequences of a suite, each on a profile of lengths."""
    return tuple(pack.workload for pack in PACKS if pack.suite == suite)


GRIDS: Mapping[str, Callable[[], Sequence[Workload]]] = {
    **SUITES,
    BACKWARD_SUITE: backward_grid,
    BOTH_PASSES: backward_grid,
    **{name: partial(model_workloads, name) for name in MODELS},
    "features": features_grid,
    "window": window_grid,
    DATA_SUITE: data_grid,
    ACCURACY_SUITE: accuracy_grid,
    **{name: partial(tuple[Workload, ...], workloads) for name, workloads in REGRESSIONS.items()},
    DECODE_SUITE: lambda: [step.workload for step in GRID],
    MORE_SUITE: lambda: [step.workload for step in MORE],
    MEMORY_SUITE: memory_grid,
    TRAINING_SUITE: training_grid,
    SPEEDUP_SUITE: speedup_grid,
    **{suite: partial(packed_workloads, suite) for suite in (PACKED_SUITE, PACKED_TRAINING_SUITE, PAGED_SUITE)},
    **{
        suite: partial(training_workloads, suite)
        for suite in dict.fromkeys(suite for task in TASKS.values() for suite in task.suites.values())
    },
}
"""The workloads of each suite that several GPUs may share, both in the order of the files. A suite that is not here is
taken as it is."""

KINDS: Mapping[str, Sequence[str]] = dict.fromkeys((DATA_SUITE, ACCURACY_SUITE), tuple(DATA_KINDS))
"""The kinds of data of a suite that has each of its workloads on several. Rows of packed sequences
and of decoding name the profile of their workload, and those of all others nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 is done, 2 if the folders do not fit together."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder that one process wrote into")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument(
        "--without", action="append", default=[], metavar="IMPL", help="implementation whose rows are lost; repeatable"
    )
    options = parser.parse_args(arguments)
    try:
        merge(options.folders, options.into, options.without, print)
    except ValueError as error:
        parser.error(str(error))
    return 0


def merge(
    folders: Sequence[Path], into: Path, without: Sequence[str] = (), say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write what the folders have together into `into`, in place of its files of the same names, and return the paths.

    In the end, `say` is told the paths and which rows of the files before are lost.

    Raises:
        ValueError: a folder has nothing, files of one name differ in their columns, commits, devices or versions, a
            row is there twice, a workload of a suite is nowhere, or an implementation of a file in `into` that is not
            in `without`. Nothing has been written.
    """
    found: dict[Path, list[Path]] = {}
    for folder in folders:
        paths = sorted(folder.glob("*/*.csv"))
        if not paths:
            raise ValueError(f"a folder of results has a folder of CSV files for its device, got {folder}")
        for path in paths:
            found.setdefault(path.relative_to(folder), []).append(path)
    _refuse_several("device of all folders", (name.parent.name for name in found))
    drawn = {name: paths for name, paths in found.items() if header_of(paths[0])[:-1] == curves.COLUMNS}
    searched = {name: search_files.join(paths) for name, paths in found.items() if name.name in search_files.FILES}
    tables = {name: _rows(paths) for name, paths in found.items() if name not in drawn and name not in searched}
    lost = {name: _lost(into / name, rows, without) for name, rows in tables.items()}
    joined = {name: curves.join(paths, _place) for name, paths in drawn.items()}
    for name, rows in tables.items():
        ResultsFile(into / name, header_of(found[name][0])).write(rows)
    for name, lines in joined.items():
        curves.write(into / name, lines, header_of(found[name][0])[-1])
    for name, own in searched.items():
        search_files.write(into / name, own)
    for name in sorted(found):
        say(str(into / name))
        if gone := lost.get(name):
            say(f"  {len(gone)} rows that it had are in no folder: {'; '.join(map(' '.join, gone))}")
    return [into / name for name in sorted(found)]


def _rows(paths: Sequence[Path]) -> list[Row]:
    """The rows of all of these files, in order, once they have been found to belong together."""
    columns = header_of(paths[0])
    rows = [row for path in paths for row in read_rows(path, columns)]
    name = paths[0].name
    for field in ("commit", "device", "torch", "triton"):
        _refuse_several(f"{field} of all rows of {name}", (getattr(row, field) for row in rows))
    for impl in {row.impl for row in rows}:
        _refuse_several(f"version of {impl} in {name}", (row.version for row in rows if row.impl == impl))
    seen: set[Subject] = set()
    for row in rows:
        if row.subject in seen:
            raise ValueError(f"a row of {name} is in one folder alone, got {' '.join(row.subject)} twice")
        seen.add(row.subject)
    _refuse_missing(name, rows)
    return sorted(rows, key=lambda row: (_place(row.suite, row.workload), _place_of_kind(row)))


def _refuse_several(what: str, values: Iterable[str]) -> None:
    different = sorted(set(values))
    if len(different) > 1:
        raise ValueError(f"the {what} is one and the same, got {' and '.join(different)}")


def _refuse_missing(name: str, rows: Sequence[Row]) -> None:
    for suite in {row.suite for row in rows} & GRIDS.keys():
        there = {(row.workload, row.data) for row in rows if row.suite == suite}
        wanted = ((each.key, kind) for each in GRIDS[suite]() for kind in KINDS.get(suite, (each.lengths,)))
        missing = [f"{key} {kind}".rstrip() for key, kind in wanted if (key, kind) not in there]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{name} has every workload of the suite {suite}; no folder has {missing[0]}{more}")


def _lost(path: Path, rows: Sequence[Row], without: Collection[str]) -> list[Subject]:
    """What has a row in the file so far alone; a peer that was not installed leaves no other trace."""
    before = read_rows(path) if path.exists() else []
    if lost := sorted({row.impl for row in before} - {row.impl for row in rows} - {*without}):
        flags = " ".join(f"--without {impl}" for impl in lost)
        raise ValueError(f"{path.name} has rows of {', '.join(lost)}, and no folder has: {flags} loses them")
    return sorted({row.subject for row in before} - {row.subject for row in rows})


def _place(suite: str, workload: str) -> tuple[int, int]:
    """Where rows of a workload stand in a file; those of unknown suites stay behind, in the order of the folders."""
    if suite not in GRIDS:
        return len(GRIDS), 0
    keys = _keys(suite)
    return list(GRIDS).index(suite), keys.index(workload) if workload in keys else len(keys)


def _place_of_kind(row: Row) -> int:
    kinds = KINDS.get(row.suite, ())
    return kinds.index(row.data) if row.data in kinds else len(kinds)


@cache
def _keys(suite: str) -> list[str]:
    return [workload.key for workload in GRIDS[suite]()]


if __name__ == "__main__":
    sys.exit(main())
