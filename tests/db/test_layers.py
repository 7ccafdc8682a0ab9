"""The user's file over the shipped ones: the first that knows serves, and a bad file stops nobody."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.settings import settings
from flashgen.db import files
from flashgen.db import layers as module
from flashgen.db.exchange import export_records
from flashgen.db.layers import Layers
from flashgen.db.layout import SCHEMA_VERSION
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, H100, H200, MEASURED, PREDICTED, SHORT, WIDE, timed
from tests.db.schemas import execute

USERS = timed(MEASURED, 1.1)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped files that knows three workloads on the H200."""
    folder = tmp_path / "shipped"
    export_records(
        [replace(MEASURED, workload=w) for w in (CAUSAL, SHORT, WIDE)], folder / "nvidia_h200" / "records.sqlite3"
    )
    monkeypatch.setattr(module, "shipped", lambda name: {"tuning_db": folder}[name])
    return folder


@pytest.fixture
def user(tmp_path: Path) -> Path:
    path = tmp_path / "user.sqlite3"
    with Store.open(path) as store:
        store.put_record(USERS)
    return path


def test_the_first_layer_that_knows_serves(shipped: Path, user: Path) -> None:
    with Layers.open([user]) as layers:
        assert layers.record(CAUSAL, H200) == (USERS, str(user))
        assert layers.record(SHORT, H200) == (replace(MEASURED, workload=SHORT), "shipped/nvidia_h200")
        assert layers.record(SHORT, H100) is None
        assert [layer.name for layer in layers.layers] == [str(user), "shipped/nvidia_h200"]


def test_a_prediction_never_hides_a_measurement(shipped: Path, user: Path) -> None:
    with Layers.open([user]) as layers:
        layers.writable.put_record(replace(PREDICTED, workload=SHORT))
        measured = (replace(MEASURED, workload=SHORT), "shipped/nvidia_h200")
        assert layers.record(SHORT, H200) == measured
        assert layers.record(SHORT, H200, provenance="measured") == measured
        assert layers.record(SHORT, H200, provenance="predicted") == (replace(PREDICTED, workload=SHORT), str(user))
        assert layers.record(WIDE, H200, provenance="predicted") is None


def test_records_of_an_earlier_layer_hide_those_of_a_later_one(shipped: Path, user: Path) -> None:
    with Layers.open([user]) as layers:
        causal = layers.records(device=H200, specialization=CAUSAL.specialization.workload_class)
        assert causal == [
            (USERS, str(user)),
            (replace(MEASURED, workload=SHORT), "shipped/nvidia_h200"),
        ]
        assert len(layers.records(arch="sm90")) == 3
        assert layers.records(arch="sm80") == layers.records(provenance="predicted") == []


def test_hidden_records_are_listed_after_the_ones_that_hide_them(shipped: Path, user: Path) -> None:
    with Layers.open([user]) as layers:
        found = layers.of_class(CAUSAL.specialization.workload_class, H200)
        assert [hit for hit in found if hit[0].workload == CAUSAL] == [
            (USERS, str(user)),
            (MEASURED, "shipped/nvidia_h200"),
        ]
        assert {record.workload for record, _ in found} == {CAUSAL, SHORT}
        wide = layers.of_class(WIDE.specialization.workload_class, H200)
        assert wide == [(replace(MEASURED, workload=WIDE), "shipped/nvidia_h200")]


def test_the_environment_names_the_layers(
    shipped: Path, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first.sqlite3"
    monkeypatch.setenv("FLASHGEN_DB", os.pathsep.join((str(first), str(user))))
    settings.cache_clear()
    with Layers.open() as layers:
        assert layers.record(CAUSAL, H200) == (USERS, str(user))
        assert not first.exists()  # a look-up creates nothing
        layers.writable.put_record(timed(MEASURED, 0.9))
        assert layers.record(CAUSAL, H200) == (timed(MEASURED, 0.9), str(first))
        assert layers.writable is layers.writable


BAD = {
    "text": lambda path: path.write_text("not a database at all"),
    "foreign": lambda path: execute(path, "CREATE TABLE bookmarks (url TEXT)"),
    "truncated": lambda path: path.write_bytes(_valid(path)[:3000]),
    "newer": lambda path: (_valid(path), execute(path, "UPDATE alembic_version SET version_num = '0999'")),
    "directory": lambda path: path.mkdir(),
    "empty": lambda path: path.touch(),
}


def _valid(path: Path) -> bytes:
    with Store.open(path):
        pass
    return path.read_bytes()


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_layer_is_left_out_with_one_warning(kind: str, shipped: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.sqlite3"
    BAD[kind](bad)
    with pytest.warns(UserWarning, match="is not used") as caught:
        layers = Layers.open([bad])
    assert len(caught) == 1
    assert str(bad) in str(caught[0].message)
    assert layers.record(CAUSAL, H200) == (MEASURED, "shipped/nvidia_h200")
    if kind != "empty":
        with pytest.raises(DatabaseError, match=bad.name):
            _ = layers.writable
    layers.close()


def test_a_bad_shipped_file_stops_nobody(shipped: Path, user: Path) -> None:
    (shipped / "broken").mkdir()
    (shipped / "broken" / "records.sqlite3").write_text("?" * 5000)
    with pytest.warns(UserWarning, match=r"shipped/broken is not used"), Layers.open([user]) as layers:
        assert layers.record(WIDE, H200) == (replace(MEASURED, workload=WIDE), "shipped/nvidia_h200")


def test_damage_found_by_a_look_up_takes_the_layer_out_with_one_warning(shipped: Path, user: Path) -> None:
    with Layers.open([user]) as layers:
        content = bytearray(user.read_bytes())
        for page in range(1, len(content) // 4096):
            content[page * 4096 : page * 4096 + 200] = b"\xff" * 200
        user.write_bytes(content)
        with pytest.warns(UserWarning, match="is not used") as caught:
            assert layers.record(CAUSAL, H200) == (MEASURED, "shipped/nvidia_h200")
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert layers.record(CAUSAL, H200) == (MEASURED, "shipped/nvidia_h200")


def test_a_bad_row_of_the_user_lets_the_shipped_one_serve(shipped: Path, user: Path) -> None:
    execute(user, "UPDATE records SET knobs = replace(knobs, '128', '\"import os\"')")
    with Layers.open([user]) as layers, pytest.warns(UserWarning, match="records 1 is ignored.*import os"):
        assert layers.record(CAUSAL, H200) == (MEASURED, "shipped/nvidia_h200")


def test_every_shipped_database_holds_valid_rows_only() -> None:
    for path in module.shipped_databases().values():
        assert files.read_version(path, "shipped") == SCHEMA_VERSION  # nobody's first look-up waits for a migration
        with Store.open(path, shipped=True) as store:
            records = store.all_records()
            assert records
            assert path.with_suffix(".csv").is_file()
            assert {record.device.folder for record in records} == {path.parent.name}
        assert not path.with_name(path.name + "-wal").exists()
