"""Where a policy asks for signatures: layers, imports and merges take what a trusted key signed, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from flashgen.core.errors import DatabaseError
from flashgen.core.settings import settings
from flashgen.db import layers as layers_module
from flashgen.db import packages
from flashgen.db.exchange import export_records, import_records
from flashgen.db.layers import Layers
from flashgen.db.past import past_of
from flashgen.db.reader import Reader
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, H200, MEASURED, SHORT, timed
from tests.fakes.minisign import Signer

OURS, OTHERS = Signer(1), Signer(2)
THEIRS = timed(MEASURED, 1.0)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("signed") / "theirs.sqlite3"
    export_records([THEIRS], path)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of others, not signed, under the policy; nothing ships."""
    monkeypatch.setattr(layers_module, "shipped", lambda _: tmp_path / "none")
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    monkeypatch.setenv("FLASHGEN_TRUSTED_KEYS", str(OURS.publish(tmp_path / "keys" / "ours.pub").parent))
    settings.cache_clear()
    yield Path(shutil.copyfile(original, tmp_path / "theirs.sqlite3"))
    settings.cache_clear()


def served(*paths: Path) -> object:
    with Layers.open(paths) as layers:
        return layers.record(CAUSAL, H200)


def test_an_import_takes_what_is_signed(path: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "mine.sqlite3") as store:
        for sign, rule in ((None, "minisig is missing"), (OTHERS, "0202020202020202")):
            if sign is not None:
                sign.sign(path)
            with pytest.raises(DatabaseError, match=rule):
                import_records(store, path)
            assert store.records() == []
        OURS.sign(path)
        assert import_records(store, path).added == 1
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(DatabaseError, match="was changed since"):
            import_records(store, path)
        store.put_record(timed(MEASURED, 1.2))
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        OURS.sign(path)
        import_records(store, path)
        assert past_of(store.reader, CAUSAL).replaced[0].source == "theirs.sqlite3", "not the copy"


def test_what_is_signed_and_no_database_is_named_by_its_own_path(path: Path) -> None:
    path.write_bytes(b"dear diary " * 500)
    OURS.sign(path)
    with pytest.raises(DatabaseError) as caught:
        Reader.open(path, foreign=True)
    assert str(caught.value) == f"a tuning database must be usable by SQLite; {path}: file is not a database"


def test_a_layer_of_others_serves_if_it_is_signed(path: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.sqlite3"
    with Store.open(own) as store:
        store.put_record(timed(MEASURED, 1.5, workload=SHORT))
    with pytest.warns(UserWarning, match=r"theirs\.sqlite3 is not used: FLASHGEN_SIGNATURES=required: .* is missing"):
        assert served(own, path) is None
    OURS.sign(path)
    assert served(own, path) == (THEIRS, str(path))
    path.write_bytes(b"SQLite format 3\0")
    with pytest.warns(UserWarning, match="was changed since key 0101010101010101 signed it"):
        assert served(own, path) is None


def test_what_is_written_to_needs_no_signature(path: Path) -> None:
    assert served(path) == (THEIRS, str(path))


def test_a_signed_layer_is_what_was_signed_whatever_becomes_of_it(path: Path, tmp_path: Path) -> None:
    with Store.open(path) as store:
        OURS.sign(path)
        store.put_record(timed(MEASURED, 0.9))  # into its WAL, which nobody signed
        assert served(tmp_path / "none.sqlite3", path) == (THEIRS, str(path))
    OURS.sign(path)
    with Layers.open([tmp_path / "none.sqlite3", path]) as layers:
        path.unlink()  # an export takes the place of no database that was written to
        export_records([timed(MEASURED, 0.8)], path)
        assert layers.record(CAUSAL, H200) == (timed(MEASURED, 0.9), str(path))


def test_an_older_file_that_is_signed_is_migrated(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(Path(__file__).parent / "data" / "schema_0005.sqlite3", path)
    OURS.sign(path)
    with Layers.open([tmp_path / "none.sqlite3", path]) as layers:
        assert len(layers.records()) == 2


def test_a_package_serves_if_it_is_signed(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda: {"vendor": path})
    own = tmp_path / "mine.sqlite3"
    with pytest.warns(UserWarning, match="packaged/vendor is not used: FLASHGEN_SIGNATURES=required"):
        assert served(own) is None
    OURS.sign(path)
    assert served(own) == (THEIRS, "packaged/vendor")


def test_without_the_policy_nobody_asks(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_SIGNATURES")
    settings.cache_clear()
    OTHERS.sign(path)
    assert served(tmp_path / "none.sqlite3", path) == (THEIRS, str(path))
    assert not (settings().cache_dir / "signed").exists()
