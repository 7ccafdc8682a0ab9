"""Files of races with rows of their own among the results of a device: `from_nothing.csv`, `fallback.csv` and others.

A row ends with what it was measured on and with, as all results do; all rows of a file are of one commit.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.provenance import ROOT, commit_of
from flashgen.measure.protocol import HostInfo

FALLBACK, FROM_NOTHING, REPEATABILITY, REVERIFY = (
    f"{name}.csv" for name in ("fallback", "from_nothing", "repeatability", "reverify")
)
FILES = (FALLBACK, FROM_NOTHING, REPEATABILITY, REVERIFY)

STAMP = ("device", "torch", "triton", "commit", "date")
"""The last columns of every row."""


def of_others(rows: Sequence[Mapping[str, str]]) -> str:
    """Words on whose the records of rows are, where they are not the GPU's that was measured on."""
    others = sorted({row["record_of"] for row in rows if row["record_of"]} - {row.get("device", "") for row in rows})
    return f" of {', '.join(others)}, timed on this GPU" if others else ""


def stamp_of(host: HostInfo, commit: str | None) -> dict[str, str]:
    """The last columns of the rows of today.

    Raises:
        ValueError: the commit is not given and not known.
    """
    versions = host.versions
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    cells = (host.device.name, versions.torch, versions.triton, commit or commit_of(ROOT), today)
    return dict(zip(STAMP, cells, strict=True))


def file_of(results: Path, host: HostInfo, name: str, stamp: dict[str, str]) -> Path:
    """The file of that name among the results of a device, whose folder is made.

    Raises:
        ValueError: it has rows of another commit.
    """
    path = results / host.device.slug / name
    others = {row.get("commit", "") for row in read(path)} - {stamp["commit"]}
    if others:
        raise ValueError(f"rows of a file are of one commit; {path} has some of {', '.join(sorted(others)) or 'none'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none where there is none."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def join(paths: Sequence[Path]) -> list[dict[str, str]]:
    """The rows of the files that several GPUs wrote of one benchmark, in the order of the files.

    Raises:
        ValueError: they differ in their columns, devices, versions or commits, or two have one workload.
    """
    found: list[dict[str, str]] = []
    for path in paths:
        rows = read(path)
        twice = {row["workload"] for row in rows} & {row["workload"] for row in found}
        if twice:
            raise ValueError(f"a workload of {path.name} is in one folder alone, got {min(twice)} twice")
        found += rows
    for what, different in {
        "columns": {",".join(row) for row in found},
        **{name: {row[name] for row in found} for name in STAMP if name != "date"},
    }.items():
        if len(different) > 1:
            raise ValueError(f"all rows of {paths[0].name} have one {what}, got {' and '.join(sorted(different))}")
    return found


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """The whole file anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    add_rows(path, list(rows[0]) if rows else [], rows)


def add_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Add all rows of a workload at once."""
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
