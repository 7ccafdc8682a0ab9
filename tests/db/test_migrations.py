"""Old files stay readable, a new file equals a migrated one, and reading never changes a file."""

from __future__ import annotations

import shutil
import sqlite3
import textwrap
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from flashgen.core.settings import settings
from flashgen.db import files
from flashgen.db.layers import Layers
from flashgen.db.schema import SCHEMA_VERSION, Base
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, FAILED, H200, MEASURED, PREDICTED, TRIAL

DATA = Path(__file__).parent / "data"
OLD_FILES = sorted(DATA.glob("schema_*.sqlite3"))


def structure(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(kind, name, "".join((sql or "").split())) for kind, name, sql in rows}


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
    with Store.open(path, **how, validate=lambda config: config) as store:
        assert store.records() == [MEASURED, PREDICTED]
        assert store.trials(CAUSAL, H200) == [TRIAL, FAILED]
    if how:
        assert path.read_bytes() == old.read_bytes()


# --- a schema version that does not exist yet ---------------------------------------------------------------------


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A flashgen whose schema is one revision newer: `records` has a column more."""
    scripts = tmp_path / "migrations"
    shutil.copytree(files.MIGRATIONS, scripts)
    version = f"{int(SCHEMA_VERSION) + 1:04d}"
    text = f'''
        """One column more. Reason: a test."""

        import sqlalchemy as sa
        from alembic import op

        revision = "{version}"
        down_revision = "{SCHEMA_VERSION}"


        def upgrade():
            with op.batch_alter_table("records") as table:
                table.add_column(sa.Column("rating", sa.Integer(), nullable=True))
        '''
    (scripts / "versions" / f"v{version}_rating.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr(files, "MIGRATIONS", scripts)
    monkeypatch.setattr(files, "SCHEMA_VERSION", version)
    return version


@pytest.fixture
def older(tmp_path: Path) -> Path:
    path = tmp_path / "older.sqlite3"
    shutil.copyfile(DATA / f"schema_{SCHEMA_VERSION}.sqlite3", path)
    return path


def version_in(path: Path) -> str:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    connection.close()
    return version


def test_an_older_file_is_migrated_in_place_when_it_may_be_written(next_version: str, older: Path) -> None:
    with Store.open(older) as store:
        assert store.records() == [MEASURED, PREDICTED]
    assert version_in(older) == next_version


@pytest.mark.parametrize("how", [{"read_only": True}, {"shipped": True}], ids=["read", "shipped"])
def test_an_older_layer_is_migrated_in_a_copy_made_once(next_version: str, older: Path, how: dict[str, bool]) -> None:
    before = older.read_bytes()
    for _ in range(2):
        with Store.open(older, **how) as store:
            assert store.records() == [MEASURED, PREDICTED]
        (copy,) = (settings().cache_dir / "databases").iterdir()
        assert version_in(copy) == next_version
    assert older.read_bytes() == before


def test_an_older_layer_serves(next_version: str, older: Path, tmp_path: Path) -> None:
    with Layers.open([older]) as layers:
        assert layers.record(CAUSAL, H200) == (MEASURED, str(older))


def test_a_failed_migration_leaves_the_file_as_it_was(next_version: str, older: Path) -> None:
    script = files.MIGRATIONS / "versions" / f"v{next_version}_rating.py"
    script.write_text(script.read_text() + "    raise RuntimeError('power cut')\n")
    before = sqlite3.connect(older)
    expected = structure(before)
    before.close()
    with pytest.raises(RuntimeError, match="power cut"):
        Store.open(older)
    after = sqlite3.connect(older)
    assert structure(after) == expected
    after.close()
    assert version_in(older) == SCHEMA_VERSION
