"""Files of races with rows of their own among the results of a device: `from_nothing.csv` and `fallback.csv`.

A row ends with what it was measured on and with, as all results do; all rows of a file are of one commit.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from collections.abc import Sequence
from pathlib import Path

from benchmarks.provenance import ROOT, commit_of
from benchmarks.results import RESULTS
from flashgen.measure.protocol import HostInfo

STAMP = ("device", "torch", "triton", "commit", "date")
"""The last columns of every row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where rows go, and what is measured."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git to ask")


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


def opened(
    parser: argparse.ArgumentParser, options: argparse.Namespace, host: HostInfo, name: str
) -> tuple[Path, dict[str, str]]:
    """The file of that name, and the stamp of the rows that a run adds to it; a command line that is wrong ends it."""
    try:
        stamp = stamp_of(host, options.commit)
        return file_of(options.results, host, name, stamp), stamp
    except ValueError as error:
        parser.error(str(error))


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, none where there is none."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add_rows(path: Path, columns: Sequence[str], rows: Sequence[dict[str, object]]) -> None:
    """Add all rows of a workload at once."""
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
