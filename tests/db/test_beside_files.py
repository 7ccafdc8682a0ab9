"""What lies beside a database decides nothing but whether it is read: nothing is deleted, written or waited for."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.settings import settings
from flashgen.db.connection import JOURNAL, SHARED_MEMORY, WAL, connect, sizes_beside
from flashgen.db.exchange import importable
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, H200, MEASURED, SHORT

JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
PAGE, SECTOR = 4096, 512
OTHER = replace(MEASURED, workload=SHORT)


@pytest.fixture
def gift(tmp_path: Path) -> Path:
    """A database of somebody else, with a record."""
    path = tmp_path / "gift" / "tuned.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def hot_journal(path: Path, victim: Path | None = None) -> None:
    """A journal of a writer that was stopped; of a transaction of several files, whose list is `victim`."""
    pages = path.stat().st_size // PAGE
    head = (JOURNAL_MAGIC + struct.pack(">IIIII", 0, 0, pages, SECTOR, PAGE)).ljust(SECTOR, b"\0")
    name = b"" if victim is None else os.fsencode(victim)
    end = struct.pack(">I", 2**30 // PAGE + 1) + name + struct.pack(">II", len(name), sum(name)) + JOURNAL_MAGIC
    Path(f"{path}{JOURNAL}").write_bytes(head + (end if name else b""))


WAYS: dict[str, Callable[[Path], object]] = {
    "read": lambda path: Store.open(path, read_only=True),
    "import": importable,
    "connect": lambda path: connect(path, "read"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_journal_deletes_no_file_that_it_names(way: str, gift: Path, tmp_path: Path) -> None:
    victim = tmp_path / "thesis"
    victim.write_text("years")
    hot_journal(gift, victim)
    before = content(gift.parent)
    with pytest.raises(DatabaseError, match="is read once its owner has opened it for writing"):
        WAYS[way](gift)
    assert victim.read_text() == "years"
    assert content(gift.parent) == before
    with pytest.raises(DatabaseError, match="names no other file, which SQLite deletes"):
        Store.open(gift)
    assert victim.exists()


def test_a_writer_undoes_what_a_stopped_one_began(gift: Path) -> None:
    hot_journal(gift)
    with pytest.raises(DatabaseError, match="has one"):
        Store.open(gift, read_only=True)
    with Store.open(gift) as store:
        assert store.record(CAUSAL, H200) == MEASURED
    assert not Path(f"{gift}{JOURNAL}").exists()


@pytest.mark.parametrize("end", [JOURNAL, WAL, SHARED_MEMORY])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
@pytest.mark.parametrize("access", ["read", "write"])
def test_nothing_unusual_is_opened(end: str, kind: str, access: str, gift: Path, tmp_path: Path) -> None:
    """SQLite waits for a pipe, and writes to what a link leads to."""
    beside, victim = Path(f"{gift}{end}"), tmp_path / "thesis"
    victim.write_text("years")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(victim), "folder": os.mkdir}[kind](beside)
    with pytest.raises(DatabaseError, match=rf"ordinary files of SQLite; .*{end} is none"):
        Store.open(gift, read_only=access == "read")
    assert victim.read_text() == "years"
    mine = gift.parent / "mine.sqlite3"
    with pytest.warns(UserWarning, match="is not used"), Layers.open([mine, gift]) as layers:
        assert layers.record(CAUSAL.with_shape(batch=3), H200) is None


@pytest.fixture
def stopped(gift: Path) -> Iterator[Path]:
    """The same with a record more in a WAL that its writer had no time to tidy up."""
    folder = gift.parent / "stopped"
    with Store.open(gift) as store:
        store.put_record(OTHER)
        shutil.copytree(gift.parent, folder, ignore=shutil.ignore_patterns("stopped"))
    return folder / gift.name


def test_a_wal_is_read_and_stays(stopped: Path) -> None:
    before = content(stopped.parent)
    with Store.open(stopped, read_only=True) as store:
        assert {record.workload for record in store.all_records()} == {CAUSAL, SHORT}
    after = content(stopped.parent)
    assert {name: after[name] for name in before if not name.endswith(SHARED_MEMORY)} == {
        name: raw for name, raw in before.items() if not name.endswith(SHARED_MEMORY)
    }


def test_a_wal_beside_the_target_of_a_link_counts(stopped: Path, tmp_path: Path) -> None:
    """What is in it would be missing without a word where nothing can be written."""
    link = tmp_path / "link.sqlite3"
    link.symlink_to(stopped)
    assert sizes_beside(link) == sizes_beside(stopped)
    assert sizes_beside(link)[WAL]


@pytest.mark.parametrize("whose", ["of a group", "of somebody else"])
def test_a_reader_leaves_nothing_beside_a_file_that_others_write(
    whose: str, gift: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it made would be its own, and the writer locked out."""
    with Store.open(gift) as store:
        store.put_record(OTHER)
    gift.chmod(0o664 if whose == "of a group" else 0o644)
    if whose == "of somebody else":
        monkeypatch.setattr(os, "geteuid", lambda: gift.stat().st_uid + 1)
    connection = connect(gift, "read")
    try:
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (2,)
        assert [path.name for path in gift.parent.iterdir()] == [gift.name]
    finally:
        connection.close()


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_what_is_written_to_a_file_that_is_gone_is_an_error(how: str, gift: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other.sqlite3") as other:
        other.put_record(OTHER)
    with Store.open(gift) as store:
        store.put_record(MEASURED)
        if how == "moved":
            gift.rename(tmp_path / "moved.sqlite3")
        elif how == "deleted":
            gift.unlink()
        else:
            (tmp_path / "other.sqlite3").replace(gift)
        with pytest.raises(DatabaseError, match=r"stays in its place as long as it is open .*; .* is now at"):
            store.put_record(OTHER)


def test_a_copy_in_a_cache_that_was_deleted_is_made_again(gift: Path) -> None:
    old = gift.parent / "older.sqlite3"
    shutil.copy(Path(__file__).parent / "data" / "schema_0008.sqlite3", old)
    with Store.open(old, read_only=True) as store:
        before = store.all_records()
        shutil.rmtree(settings().cache_dir)
        assert store.all_records() == before
        shutil.rmtree(settings().cache_dir)
        store.check()  # which does not ask for records
    with Store.open(old, read_only=True) as store:
        assert store.all_records() == before
