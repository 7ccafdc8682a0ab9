"""Old files stay readable, a new file equals a migrated one, and reading never changes a file."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from flashgen.db import files
from flashgen.db.layout import SCHEMA_VERSION, TABLES
from flashgen.db.schema import Base
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, FAILED, H200, MEASURED, PREDICTED, TRIAL
from tests.db.schemas import DATA, first_knobs, structure, with_first_knobs

OLD_FILES = sorted(DATA.glob("schema_*.sqlite3"))


def migrated(path: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        files.migrate(connection)
    return engine


def test_the_newest_revision_is_the_schema_version() -> None:
    scripts = ScriptDirectory(str(files.MIGRATIONS))
    assert scripts.get_heads() == [SCHEMA_VERSION]
    revisions = [script.revision for script in scripts.walk_revisions()]
    assert revisions == [f"{number:04d}" for number in range(int(SCHEMA_VERSION), 0, -1)]
    assert [path.stem for path in OLD_FILES] == sorted(f"schema_{revision}" for revision in revisions)


def test_readers_and_the_schema_name_the_same_tables() -> None:
    assert set(Base.metadata.tables) == TABLES


def test_a_new_file_equals_a_migrated_one(tmp_path: Path) -> None:
    migrated(tmp_path / "migrated.sqlite3").dispose()
    Store.open(tmp_path / "new.sqlite3").close()
    new, old = (sqlite3.connect(tmp_path / f"{name}.sqlite3") for name in ("new", "migrated"))
    assert structure(new) == structure(old)
    new.close()
    old.close()


def test_the_tables_equal_the_migrated_schema(tmp_path: Path) -> None:
    engine = migrated(tmp_path / "migrated.sqlite3")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


@pytest.mark.parametrize("old", OLD_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("how", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_the_file_of_every_schema_version_still_opens(old: Path, how: dict[str, bool], tmp_path: Path) -> None:
    path = tmp_path / old.name
    shutil.copyfile(old, path)
    # the knobs that a family declares may change; this is about the tables
    with Store.open(path, **how, validate=first_knobs) as store:
        assert store.records() == [with_first_knobs(record) for record in (MEASURED, PREDICTED)]
        assert store.trials(CAUSAL, H200) == [with_first_knobs(trial) for trial in (TRIAL, FAILED)]
    if how:
        assert path.read_bytes() == old.read_bytes()
