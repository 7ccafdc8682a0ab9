"""Packages of records: projects that others install, each with one database, which look-ups ask like a shipped one.

A package names itself in the entry point group `flashgen.databases`; the value is the name of a top-level package with
a file `records.sqlite3` in it. Nothing of such a package is imported. `flashgen db package` writes one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

GROUP = "flashgen.databases"
FILE = "records.sqlite3"

MAX_ENTRY_POINTS_BYTES = 65536
"""Of the file in which an installed project lists its entry points; it is a few lines."""


def installed(paths: list[str] | None = None) -> dict[str, Path]:
    """The database of each installed package of records, by the name of its entry point and in the order of names.

    The metadata of all installed projects are looked through as `importlib.metadata` does, which would parse every one
    of them: that takes milliseconds of each process's first call. Of a name that is there twice the first one counts.

    Args:
        paths: folders of installed projects instead of those of `sys.path`.
    """
    found: dict[str, Path] = {}
    for folder in dict.fromkeys(sys.path if paths is None else paths):
        for text in _entry_points(folder or os.curdir):
            for name, package in _of_group(text):
                found.setdefault(name, Path(folder or os.curdir).absolute() / package / FILE)
    return dict(sorted(found.items()))


def _entry_points(folder: str) -> Iterator[str]:
    """The texts of the projects in a folder that speak of the group."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
    except OSError:  # an archive, or nothing
        return
    for name in names:
        try:
            with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                content = file.read(MAX_ENTRY_POINTS_BYTES)
        except OSError:  # most have none
            continue
        if GROUP.encode() in content:
            yield content.decode("utf-8", "replace")


def _of_group(text: str) -> Iterator[tuple[str, str]]:
    import configparser  # few processes have such a package

    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign] # names keep their case
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    for name, package in parser.items(GROUP) if parser.has_section(GROUP) else ():
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", package):
            yield name, package
