"""Brings the shipped databases to the newest schema, and writes the CSV and the page beside each of them again.

`make databases` runs it after a schema revision: a test fails while a shipped file is older, since its users would pay
for the migration at their first look-up. A file of the newest schema keeps its bytes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flashgen.core.errors import DatabaseError
from flashgen.db import exchange, files
from flashgen.db.layout import SCHEMA_VERSION
from flashgen.db.store import Store
from scripts import device_pages

FOLDER = Path(__file__).parents[1] / "tuning_db"


def main(arguments: Sequence[str] | None = None) -> int:
    """Renew every file of a folder; 1 if one is refused, which is then left as it is."""
    parser = argparse.ArgumentParser(prog="scripts/databases.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: %(default)s")
    folder = parser.parse_args(arguments).folder
    paths = sorted(folder.rglob("*.sqlite3"))
    refused = [path for path in paths if not _said(path)]
    return int(bool(refused))


def _said(path: Path) -> bool:
    """Renew a file and print what became of it; False if it is refused."""
    try:
        version = renew(path)
    except DatabaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    print(
        f"{path.parent.name}/{path.name}: schema {version}"
        + (f" to {SCHEMA_VERSION}" if version != SCHEMA_VERSION else "")
    )
    return True


def renew(path: Path) -> str:
    """Migrate one file, and write its CSV and the page of its device again; returns the schema version that it had.

    All is made beside the file and takes its place at the end, so that one that is refused stays as it was.

    Raises:
        DatabaseError: the file is no tuning database, or newer, or a row breaks a rule, or the folder of a device has
            records of another one.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        draft, packed, table = (Path(scratch) / name for name in ("draft.sqlite3", "packed.sqlite3", "table.csv"))
        shutil.copyfile(path, draft)
        version = files.read_version(draft)
        if version is None:
            raise DatabaseError(f"a shipped database must hold flashgen's tables, got the empty file {path}")
        with Store.open(draft) as store:
            exchange.to_csv(store.all_records(), table)
        if version != SCHEMA_VERSION:
            files.pack(draft, packed)
            packed.replace(path)
        table.replace(path.with_suffix(".csv"))
    if path.name == device_pages.RECORDS:
        device_pages.write(path)
    return version


if __name__ == "__main__":
    sys.exit(main())
