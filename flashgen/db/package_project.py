"""The project of a package of records (`flashgen.db.packages`): what `pip` and `build` need, a database, and a CSV."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flashgen._version import __version__
from flashgen.core.errors import DatabaseError
from flashgen.core.folders import scratch_beside
from flashgen.core.record import TuningRecord
from flashgen.db.exchange import export_records
from flashgen.db.files import present
from flashgen.db.packages import FILE, GROUP
from flashgen.db.store import Store

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,3}((a|b|rc|\.post|\.dev)[0-9]+)?")
MAX_NAME = 40

SCRATCH_PREFIX = ".flashgen-package-"
"""Of the folders in which a project is written before it gets its name."""


def write_project(name: str, path: Path | str, folder: Path | str | None = None, *, version: str = "1.0.0") -> Path:
    """Write a project that installs the records of `path` as the package `flashgen_records_<name>`.

    Args:
        name: of small letters, digits and underscores.
        path: a tuning database; every row must be valid.
        folder: the new folder; `flashgen-records-<name>` in the present one by default.
        version: the version of the project.

    Returns:
        The folder.

    Raises:
        DatabaseError: the name or the version is none, the database is not one, holds a bad row or no records, or the
            folder exists or cannot be written.
    """
    if not NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise DatabaseError(f"a package's name is of at most {MAX_NAME} letters a-z, digits and _, got {name[:60]!a}")
    if not VERSION.fullmatch(version):
        raise DatabaseError(f"a package's version is like 1.0.0, got {version[:60]!a}")
    with Store.open(path, read_only=True) as store:
        store.check()
        records = store.all_records()
    if not records:
        raise DatabaseError(f"a package needs records; {path} has none")
    folder = Path(folder or project_name(name))
    if present(folder):
        raise DatabaseError(f"a project is written to a new folder; {folder} exists")
    _write(folder, name, records, version)
    return folder


def project_name(name: str) -> str:
    """How the project is called where it is installed from."""
    return f"flashgen-records-{name.replace('_', '-')}"


def _write(folder: Path, name: str, records: Sequence[TuningRecord], version: str) -> None:
    package = f"flashgen_records_{name}"
    texts = {
        "pyproject.toml": _PROJECT.format(
            project=project_name(name), version=version, name=name, package=package, group=GROUP, flashgen=__version__
        ),
        "README.md": _readme(name, records),
        f"{package}/__init__.py": f'"""Tuned records for flashgen, in {FILE}; there is no code."""\n',
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_beside(folder, SCRATCH_PREFIX) as scratch:
            draft = scratch / "project"
            export_records(records, draft / package / FILE)
            for file, text in texts.items():
                (draft / file).write_text(text, encoding="utf-8")
            draft.rename(folder)
    except OSError as error:
        raise DatabaseError(f"a project needs a place that can be written, got {folder}: {error}") from error


_PROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "{project}"
version = "{version}"
description = "Tuned records for flashgen: {name}"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["flashgen>={flashgen}"]

[project.entry-points."{group}"]
{name} = "{package}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""


def _readme(name: str, records: Sequence[TuningRecord]) -> str:
    counts = Counter((record.device.identity, record.provenance) for record in records)
    lines = [f"| {identity} | {kind} | {count} |" for (identity, kind), count in sorted(counts.items())]
    return "\n".join(
        [
            f"# {project_name(name)}",
            "",
            "Tuned records for flashgen. Once this is installed, look-ups ask them after the user's own database and",
            f"before the records that ship with flashgen. `{FILE}` has them, and the CSV beside it is for people.",
            "",
            "| device | records | how many |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )
