"""A file of an older schema is migrated in place or in a copy of this user's; what is killed or fails loses nothing."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.core.settings import child_environment, settings
from flashgen.db import files
from flashgen.db.layers import Layers
from flashgen.db.layout import SCHEMA_VERSION
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, FAILED, H200, MEASURED, PREDICTED, TRIAL
from tests.db.schemas import DATA, structure, version_in


def test_a_migration_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """The process dies with the new column made and the transaction open; the next one migrates."""
    path = tmp_path / "before.sqlite3"
    shutil.copyfile(DATA / "schema_0004.sqlite3", path)
    script = textwrap.dedent("""
        import os, sys
        from alembic import op
        from flashgen.db.store import Store
        add_column = op.add_column
        op.add_column = lambda *arguments: (add_column(*arguments), os._exit(9))
        Store.open(sys.argv[1])
        """)
    command = [sys.executable, "-c", script, str(path)]
    died = subprocess.run(command, env=child_environment(PYTHONPATH=os.getcwd()), check=False)
    assert died.returncode == 9
    assert version_in(path) == "0004"
    with Store.open(path) as store:
        assert store.records() == [MEASURED, PREDICTED]
        assert store.trials(CAUSAL, H200) == [TRIAL, FAILED]
    assert version_in(path) == SCHEMA_VERSION


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


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_copy_is_of_this_user_alone_whatever_the_umask(next_version: str, older: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Store.open(older, read_only=True).close()
        (copy,) = (settings().cache_dir / "databases").iterdir()
        made = copy.stat()
        Store.open(older, read_only=True).close()
    finally:
        os.umask(before)
    assert (copy.stat().st_ino, copy.stat().st_mode & 0o777) == (made.st_ino, 0o600), "it is made once"
    assert copy.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("plant", ["link", "open", "fifo"])
def test_a_planted_copy_is_not_read(next_version: str, older: Path, tmp_path: Path, plant: str) -> None:
    Store.open(older, read_only=True).close()
    (copy,) = (settings().cache_dir / "databases").iterdir()
    planted = tmp_path / "planted.sqlite3"
    Store.open(planted).close()
    copy.unlink()
    if plant == "link":
        copy.symlink_to(planted)
    elif plant == "fifo":
        os.mkfifo(copy)
    else:
        shutil.copyfile(planted, copy)
        copy.chmod(0o666)
    with Store.open(older, read_only=True) as store:
        assert store.records() == [MEASURED, PREDICTED]
    assert not copy.is_symlink()
    assert copy.stat().st_mode & 0o777 == 0o600


def test_copies_that_were_not_finished_are_deleted(next_version: str, older: Path) -> None:
    folder = settings().cache_dir / "databases"
    for name in ("killed.tmp", "busy.tmp"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half.sqlite3").write_bytes(b"half")
    then = time.time() - 2 * ABANDONED_SECONDS
    os.utime(folder / "killed.tmp", (then, then))
    Store.open(older, read_only=True).close()
    assert sorted(path.suffix for path in folder.iterdir()) == [".sqlite3", ".tmp"]
    assert (folder / "busy.tmp" / "half.sqlite3").exists()


def test_an_older_layer_serves(next_version: str, older: Path, tmp_path: Path) -> None:
    with Layers.open([older]) as layers:
        assert layers.record(CAUSAL, H200) == (MEASURED, str(older))


@pytest.mark.parametrize("how", [{"read_only": True}, {"shipped": True}], ids=["read", "shipped"])
def test_a_failed_migration_of_a_copy_names_the_file_itself(
    next_version: str, older: Path, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "migrate", broken)
    with pytest.raises(DatabaseError) as caught:
        Store.open(older, **how)
    assert str(caught.value) == f"a tuning database must be usable by SQLite; {older}: disk I/O error"


def broken(*asked: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


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
