"""Files of each schema version: where they lie, what is in them, and what is left of a revision that is taken back."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig

from flashgen.core.config import Config
from flashgen.core.record import Trial, TuningRecord
from flashgen.db import files
from tests.db.samples import FIRST_KNOBS

DATA = Path(__file__).parent / "data"

V = TypeVar("V", TuningRecord, Trial)


def structure(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(kind, name, "".join((sql or "").split())) for kind, name, sql in rows}


def first_knobs(config: Config) -> Config:
    return Config.of(config.family, {name: value for name, value in config.knobs if name in FIRST_KNOBS})


def with_first_knobs(value: V) -> V:
    return replace(value, config=first_knobs(value.config))


def contents(path: Path) -> tuple[set[tuple[str, str, str]], list[tuple[object, ...]]]:
    connection = sqlite3.connect(path)
    found = structure(connection), connection.execute("SELECT * FROM workloads").fetchall()
    connection.close()
    return found


def taken_back(path: Path, upgrade: str, downgrade: str) -> tuple[set[tuple[str, str, str]], list[tuple[object, ...]]]:
    """What a file holds after going up one revision and down again."""
    engine = sa.create_engine(f"sqlite:///{path}")
    config = AlembicConfig()
    config.set_main_option("script_location", str(files.MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, upgrade)
        command.downgrade(config, downgrade)
    engine.dispose()
    return contents(path)


def copy_of(version: str, folder: Path) -> Path:
    """A copy of the file that flashgen wrote with a version of the schema."""
    return Path(shutil.copyfile(DATA / f"schema_{version}.sqlite3", folder / "before.sqlite3"))


def execute(path: Path, statement: str, *values: object) -> None:
    """Run a statement on a file behind the back of its store."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def version_in(path: Path) -> str:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    connection.close()
    return version
