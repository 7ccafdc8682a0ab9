"""`Store` keeps what it is given, in one file, and says clearly what it will not open."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.core.config import Config
from flashgen.core.errors import ConfigError, DatabaseError
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.core.peak import least_ms
from flashgen.core.record import Baseline
from flashgen.core.workload import BROADCASTS, DTYPE_BYTES, Workload
from flashgen.db import files
from flashgen.db.layout import APPLICATION_ID, SCHEMA_VERSION
from flashgen.db.store import Store
from tests.db.privileges import no_privileges
from tests.db.samples import (
    CAUSAL,
    CONFIG,
    FAILED,
    H100,
    H200,
    HARD_TIMES,
    MEASURED,
    PREDICTED,
    PREDICTION,
    RTX_4090,
    SHORT,
    TRIAL,
    WIDE,
    hard,
    timed,
)
from tests.db.schemas import execute


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "tuning.sqlite3"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store


def test_a_record_comes_back_equal(store: Store, path: Path) -> None:
    store.put_record(MEASURED)
    assert store.record(CAUSAL, H200) == MEASURED
    for flags in ({"read_only": True}, {"shipped": True}):
        store.close()
        with Store.open(path, **flags) as reader:
            assert reader.record(CAUSAL, H200) == MEASURED


def test_a_record_has_the_times_of_both_kinds_of_data(store: Store, path: Path) -> None:
    store.put_records([hard(MEASURED, *HARD_TIMES), replace(MEASURED, workload=SHORT)])
    found, without = store.record(CAUSAL, H200), store.record(SHORT, H200)
    assert found == hard(MEASURED, *HARD_TIMES)
    assert (found.time_ms, found.hard_ms) == (1.25, 2.4)
    assert without is not None
    assert without.hard_ms is None
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT hard_times_ms FROM records").fetchall() == [("[2.5, 2.0, 2.4]",), (None,)]
    connection.close()


def test_a_measured_record_is_found_before_a_predicted_one(store: Store) -> None:
    store.put_record(PREDICTED)
    assert store.record(CAUSAL, H200) == PREDICTED
    store.put_record(MEASURED)
    assert store.record(CAUSAL, H200) == MEASURED
    assert store.record(CAUSAL, H200, provenance="predicted") == PREDICTED
    assert store.record(SHORT, H200) is None
    assert store.record(CAUSAL, H100) is None


def test_the_identity_of_a_device_counts_and_its_name_does_not(store: Store) -> None:
    store.put_record(MEASURED)
    renamed = replace(H200, name="another label", bandwidth_gbs=1.0)
    assert store.record(CAUSAL, renamed) == MEASURED
    store.put_record(replace(PREDICTED, device=renamed))
    assert [device.name for device in store.devices()] == ["another label"]


def test_a_new_record_replaces_the_old_one_with_its_baselines(store: Store) -> None:
    store.put_record(MEASURED)
    faster = timed(
        MEASURED, 1.0, baselines=(Baseline(impl="sdpa-flash", median_ms=1.8),), config=CONFIG.replace(num_stages=2)
    )
    store.put_record(faster)
    assert store.records() == [faster]
    held = {"devices": 1, "workloads": 1, "records": 1, "trials": 0, "anchors": 1}
    assert store.counts() == {**held, "origins": 0, "history": 1, "searches": 0, "finalists": 0}


def test_records_are_narrowed_and_ordered(store: Store) -> None:
    everything = [
        timed(MEASURED, 2.0, device=device, workload=workload)
        for device in (RTX_4090, H200, H100)
        for workload in (WIDE, SHORT, CAUSAL)
    ]
    store.put_records(everything)
    assert store.records() == sorted(everything, key=lambda record: (record.device.identity, record.workload.key))
    assert {record.workload for record in store.records(device=H200)} == {WIDE, SHORT, CAUSAL}
    causal = store.records(device=H200, specialization=CAUSAL.specialization.workload_class)
    assert {record.workload for record in causal} == {SHORT, CAUSAL}
    assert {record.device for record in store.records(arch="sm90")} == {H100, H200}
    assert store.records(arch="sm90", provenance="predicted") == []
    assert store.workloads() == sorted((WIDE, SHORT, CAUSAL), key=lambda workload: workload.key)


def test_several_records_are_stored_all_or_not_at_all(store: Store) -> None:
    bad = replace(MEASURED, workload=SHORT, config=CONFIG.replace(num_warps=7))
    with pytest.raises(ConfigError, match="num_warps"):
        store.put_records([MEASURED, bad])
    assert store.records() == []


def test_trials_come_back_in_order_with_their_failures(store: Store) -> None:
    store.put_trial(TRIAL)
    store.put_trial(FAILED)
    store.put_trial(replace(TRIAL, workload=SHORT))
    assert store.trials(CAUSAL, H200) == [TRIAL, FAILED]
    assert store.trials(CAUSAL, H100) == []
    assert len(store.trials(SHORT, H200)) == 1


def test_a_trial_of_the_same_config_replaces_the_earlier_one(store: Store) -> None:
    store.put_trial(TRIAL)
    store.put_trial(replace(FAILED, config=CONFIG))
    assert store.trials(CAUSAL, H200) == [replace(FAILED, config=CONFIG)]


def test_predictions_and_trials_are_told_apart(store: Store) -> None:
    failed = replace(PREDICTION, config=FAILED.config, outcome=FAILED.outcome)
    for prediction in (PREDICTION, failed, replace(PREDICTION, outcome=1.5)):
        store.put_prediction(prediction)
    assert store.predictions(CAUSAL, H200) == [failed, replace(PREDICTION, outcome=1.5)]
    assert store.trials(CAUSAL, H200) == store.predictions(CAUSAL, H100) == []


def test_a_trial_takes_the_place_of_a_prediction_and_keeps_it(store: Store) -> None:
    store.put_prediction(PREDICTION)
    store.put_trial(TRIAL)
    store.put_prediction(PREDICTION)
    assert (store.trials(CAUSAL, H200), store.predictions(CAUSAL, H200)) == ([TRIAL], [])
    with pytest.raises(DatabaseError, match="a trial's source is what proposed it"):
        store.put_trial(replace(TRIAL, source="predicted"))
    with pytest.raises(DatabaseError, match="one time, and times are from 1e-09"):
        store.put_prediction(replace(PREDICTION, outcome=-1.0))


def test_a_compilers_coloured_message_is_stored_plain_and_short(store: Store) -> None:
    reason = "\x1b[31merror\x1b[0m: " + "x" * 100_000
    store.put_trial(replace(FAILED, outcome=replace(FAILED.outcome, reason=reason)))
    (trial,) = store.trials(CAUSAL, H200)
    assert trial.outcome.reason.startswith(" [31merror [0m: xxx")
    assert len(trial.outcome.reason) < 20_000


def test_what_could_not_be_read_back_is_not_written(store: Store) -> None:
    with pytest.raises(ConfigError, match="unknown_family"):
        store.put_record(replace(MEASURED, config=replace(CONFIG, family="unknown_family")))
    with pytest.raises(DatabaseError, match="ISO 8601"):
        store.put_record(replace(MEASURED, created="yesterday"))
    with pytest.raises(ConfigError):
        store.put_trial(replace(TRIAL, config=Config.of("portable_forward", {})))
    assert store.counts()["records"] == store.counts()["trials"] == 0


def test_a_reader_writes_nothing(store: Store, path: Path) -> None:
    with Store.open(path, read_only=True) as reader, pytest.raises(DatabaseError, match="open for writing"):
        reader.put_record(MEASURED)


def test_a_reader_sees_what_is_written_later(store: Store, path: Path) -> None:
    with Store.open(path, read_only=True) as reader:
        assert reader.record(CAUSAL, H200) is None
        store.put_record(MEASURED)
        assert reader.record(CAUSAL, H200) == MEASURED


def test_the_file_is_marked_versioned_and_in_wal_mode(store: Store, path: Path) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(SCHEMA_VERSION,)]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_workload_survives_the_round_trip(data: st.DataObject) -> None:
    optional = st.none() | st.integers(0, 4096)
    workload = Workload(
        direction=data.draw(st.sampled_from(("forward", "backward"))),
        dtype=data.draw(st.sampled_from(sorted(DTYPE_BYTES))),
        batch=data.draw(st.integers(0, 1024)),
        nheads=8 * data.draw(st.integers(1, 16)),
        nheads_k=data.draw(st.sampled_from((1, 2, 4, 8))),
        seqlen_q=data.draw(st.integers(0, 2**20)),
        seqlen_k=data.draw(st.integers(0, 2**20)),
        head_dim=data.draw(st.integers(1, 512)),
        head_dim_v=data.draw(st.integers(1, 512)),
        window_left=data.draw(optional),
        window_right=data.draw(optional),
        page_size=data.draw(st.none() | st.integers(1, 256)),
        bias=data.draw(st.sampled_from(BROADCASTS)),
        mask=data.draw(st.sampled_from(BROADCASTS)),
        **{
            name: data.draw(st.booleans()) for name in ("causal", "softcap", "alibi", "sink", "varlen", "deterministic")
        },
    )
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "x.sqlite3") as store:
        record = timed(MEASURED, 2 * least_ms(workload, H200), workload=workload)
        store.put_record(record)
        assert store.record(workload, H200) == record


# --- files that are not opened ----------------------------------------------------------------------------------


def refused(path: Path, rule: str, **flags: bool) -> None:
    """Opening `path` fails with the rule and names the file, however it is opened."""
    for how in [flags] if flags else [{}, {"read_only": True}, {"shipped": True}]:
        with pytest.raises(DatabaseError, match=rule) as caught:
            Store.open(path, **how)
        assert str(path) in str(caught.value)


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite3"
    path.write_text("dear diary, " * 1000)
    refused(path, "not a database")
    assert path.read_text() == "dear diary, " * 1000


def test_a_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "directory")


def test_a_missing_file_is_refused_for_reading(tmp_path: Path) -> None:
    for flags in ({"read_only": True}, {"shipped": True}):
        refused(tmp_path / "missing.sqlite3", "must exist", **flags)
    assert list(tmp_path.iterdir()) == []


def test_what_a_deleted_file_has_left_is_no_part_of_a_new_one(tmp_path: Path) -> None:
    path, wal = tmp_path / "tuning.sqlite3", tmp_path / "tuning.sqlite3-wal"
    with Store.open(path) as store:
        store.put_record(MEASURED)
        content = wal.read_bytes()
    path.unlink()
    wal.write_bytes(content)
    with Store.open(path) as store:
        assert store.records() == []
        store.put_record(MEASURED)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_where_files_cannot_be_linked_one_is_made_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unknown)
    path = tmp_path / "tuning.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_new_files_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    for name in ("old", "busy"):
        (tmp_path / f"{files.SCRATCH_PREFIX}{name}.tmp").mkdir()
    then = time.time() - 2 * ABANDONED_SECONDS
    os.utime(tmp_path / f"{files.SCRATCH_PREFIX}old.tmp", (then, then))
    Store.open(tmp_path / "tuning.sqlite3").close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{files.SCRATCH_PREFIX}busy.tmp", "tuning.sqlite3"]


def test_an_empty_file_is_filled_but_not_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite3"
    path.touch()
    refused(path, "empty file", read_only=True)
    with Store.open(path) as store:
        assert store.records() == []


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "foreign.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = path.read_bytes()
    refused(path, "made by something else")
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_by_name(store: Store, path: Path) -> None:
    execute(path, "UPDATE alembic_version SET version_num = '0999'")
    store.close()
    refused(path, f"up to schema {SCHEMA_VERSION}.*has schema 0999.*upgrade flashgen")


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE alembic_version SET version_num = 'abc'", "four digits"),
        ("DELETE FROM alembic_version", "one schema version"),
        ("DROP TABLE alembic_version", "alembic_version"),
        ("DROP TABLE anchors", "lacks .*anchors"),
        ("CREATE VIEW extra AS SELECT 1", "views or triggers"),
        (
            "CREATE TRIGGER extra AFTER INSERT ON records BEGIN DELETE FROM records; END",
            "views or triggers",
        ),
    ],
)
def test_a_file_with_another_structure_is_refused(store: Store, path: Path, statement: str, rule: str) -> None:
    store.close()
    execute(path, statement)
    refused(path, rule)


def test_a_truncated_file_is_refused_or_its_look_ups_fail(store: Store, path: Path) -> None:
    store.put_record(MEASURED)
    store.close()
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DatabaseError, match=path.name):
        Store.open(path).record(CAUSAL, H200)


def test_a_damaged_page_fails_the_look_up_that_meets_it(store: Store, path: Path) -> None:
    store.put_record(MEASURED)
    store.close()
    content = bytearray(path.read_bytes())
    for page in range(1, len(content) // 4096):
        content[page * 4096 : page * 4096 + 200] = b"\xff" * 200
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match=path.name):
        Store.open(path, read_only=True).record(CAUSAL, H200)


def test_a_place_that_cannot_be_written_is_named() -> None:
    refused(Path("/proc/flashgen/tuning.sqlite3"), "place that can be used", read_only=False)
    refused(Path("/proc/tuning.sqlite3"), "unable to open", read_only=False)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that this process may not write to, even where the tests run as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Store.open(folder / "wal.sqlite3") as store:
            store.put_record(MEASURED)
        for path in folder.iterdir():
            path.chmod(0o444)
        folder.chmod(0o555)
        try:
            with no_privileges():
                yield folder
        finally:
            folder.chmod(0o755)


def test_a_read_only_folder_is_read_and_refused_for_writing(unprivileged: Path) -> None:
    refused(unprivileged / "new.sqlite3", "unable to open", read_only=False)
    path = unprivileged / "wal.sqlite3"
    with pytest.raises(DatabaseError, match="readonly database"):
        Store.open(path)
    for flags in ({"read_only": True}, {"shipped": True}):
        with Store.open(path, **flags) as store:
            assert store.record(CAUSAL, H200) == MEASURED


def test_records_over_pages_are_of_the_class_of_their_size_in_rows_of_any_age(store: Store, path: Path) -> None:
    """Before sizes of pages had classes, a row of a pass over pages of 24 keys named that size."""
    workload = Workload.parse("b8-h32-hk8-tq8192-s4096-d128-causal-varlen-page24")
    record = replace(MEASURED, workload=workload)
    store.put_record(record)
    with contextlib.closing(sqlite3.connect(path)) as rows:
        _rename_class(rows, 24)
        assert store.records() == [record], "nothing of it is doubted"
        store.put_record(record)
        assert store.records(specialization="fwd-bf16-d128-page16-causal-varlen") == [record]
        _rename_class(rows, 32)
    with pytest.warns(UserWarning, match="a workload's key must be the one of its fields"):
        assert store.records() == []


def _rename_class(rows: sqlite3.Connection, page: int) -> None:
    assert rows.execute("SELECT specialization FROM workloads").fetchone() == ("fwd-bf16-d128-page16-causal-varlen",)
    rows.execute("UPDATE workloads SET specialization = ?", (f"fwd-bf16-d128-page{page}-causal-varlen",))
    rows.commit()
