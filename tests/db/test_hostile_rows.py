"""A row that breaks a rule is skipped with one warning, whatever it holds; the rows beside it are served."""

from __future__ import annotations

import json
import shutil
import sqlite3
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.config import Config
from flashgen.core.errors import ConfigError, DatabaseError
from flashgen.db.store import Store
from tests.db.samples import CAUSAL, FAILED, H200, MEASURED, SHORT, TRIAL, on_profiles

KNOBS = MEASURED.config.to_json()
CODE = "__import__('os').system('touch /tmp/flashgen-was-here')"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good records with baselines and two good trials: a closed file, of which each test has a copy."""
    path = tmp_path_factory.mktemp("good") / "tuning.sqlite3"
    with Store.open(path) as store:
        store.put_records([MEASURED, replace(MEASURED, workload=SHORT)])
        store.put_trial(TRIAL)
        store.put_trial(FAILED)
    return path


@pytest.fixture
def path(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(good, tmp_path))


def tamper(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    assert connection.execute(statement, values).rowcount == 1
    connection.commit()
    connection.close()


def knobs(**changes: object) -> str:
    return json.dumps({**json.loads(KNOBS), **changes})


RECORD_ROWS = [
    ("knobs", knobs(block_m=CODE), "block_m"),
    ("knobs", knobs(loads=CODE), "loads"),
    ("knobs", knobs(loads="pointer\n{{ 7 * 7 }}"), "loads"),
    ("knobs", knobs(block_m=10**40), "block_m"),
    ("knobs", knobs(block_m=128.0), "block_m"),
    ("knobs", knobs(num_warps=True), "num_warps"),
    ("knobs", knobs(heavy_first=1), "heavy_first"),
    ("knobs", knobs(maxnreg=None), "maxnreg"),
    ("knobs", knobs(block_m=[128]), "block_m"),
    ("knobs", knobs(extra=1), "extra"),
    ("knobs", "{}", "has the knobs"),
    ("knobs", "[]", "JSON object"),
    ("knobs", "[" * 5000, "JSON object"),
    ("knobs", CODE, "JSON object"),
    ("knobs", " " * 100_000, "printable characters"),
    ("knobs", b"\xff\xfe", "type str"),
    ("knobs", 7, "JSON object|type str"),
    ("family", "../../etc/passwd", "kernel family"),
    ("family", "", "kernel family"),
    ("times_ms", "[NaN]", "finite"),
    ("times_ms", "[1.0, Infinity]", "finite"),
    ("times_ms", "[-1.0]", "times are from 1e-09"),
    ("times_ms", "[]", "at least one time"),
    ("times_ms", "[true]", "type float"),
    ("times_ms", '["1.0"]', "type float"),
    ("times_ms", "1.0", "JSON list"),
    ("times_ms", "{", "JSON list"),
    ("times_ms", None, "measured iff"),
    ("hard_times_ms", "[1.0]", "same rounds"),
    ("hard_times_ms", "[1.0, 2.0, 0.0]", "times are from 1e-09"),
    ("hard_times_ms", "[1.0, 2.0, NaN]", "finite"),
    ("hard_times_ms", "{}", "JSON list"),
    ("hard_times_ms", b"[1.0]", "type str"),
    ("hard_times_ms", 1.5, "JSON list|type str"),
    ("profile_times_ms", '{"ramp": [1.0, 1.0, 1.0]}', r"is measured on the profiles \[\], got 'ramp'"),
    ("profile_times_ms", '{"ramp": [1.0]}', "same rounds"),
    ("profile_times_ms", '{"ramp": [1.0, 2.0, NaN]}', "finite"),
    ("profile_times_ms", '{"\x1b[2J": [1.0, 1.0, 1.0]}', "JSON object|printable|profile of lengths"),
    ("profile_times_ms", '{"ramp": 1.0}', "lists of times"),
    ("profile_times_ms", "{}", "name a profile"),
    ("profile_times_ms", "[]", "JSON object"),
    ("profile_times_ms", 7, "JSON object|type str"),
    ("max_error", "small", "type float"),
    ("mean_error", float("inf"), "finite"),
    ("reference_ms", b"1", "type float"),
    ("predicted_ms", -1.0, "times are from 1e-09"),
    ("provenance", "certified", "provenance is one of"),
    ("source_digest", "a\x1b[2J", "printable"),
    ("triton_version", b"3.6", "type str"),
    ("created", "long ago", "ISO 8601"),
    ("workload_id", 999, "point to its workload"),
    ("device_id", 999, "point to its device"),
]


@pytest.mark.parametrize(("column", "value", "rule"), RECORD_ROWS)
def test_a_bad_record_is_skipped_with_one_warning(path: Path, column: str, value: object, rule: str) -> None:
    tamper(path, f"UPDATE records SET {column} = ? WHERE id = 1", value)
    with Store.open(path, read_only=True) as store:
        with pytest.warns(UserWarning, match=rule) as caught:
            assert store.records() == [replace(MEASURED, workload=SHORT)]
        assert len(caught) == 1
        assert str(path) in str(caught[0].message)
        assert "records 1 is ignored" in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it has been said
            assert store.record(CAUSAL, H200) is None
            assert store.record(SHORT, H200) == replace(MEASURED, workload=SHORT)


@pytest.mark.parametrize(
    ("statement", "value", "rule"),
    [
        ("UPDATE workloads SET batch = ? WHERE id = 1", "four", "batch must be of type int"),
        ("UPDATE workloads SET batch = ? WHERE id = 1", -4, "batch must be at least 0"),
        ("UPDATE workloads SET seqlen_q = ? WHERE id = 1", 4095, "key must be the one of its fields"),
        ("UPDATE workloads SET dtype = ? WHERE id = 1", CODE, "dtype is one of"),
        ("UPDATE workloads SET causal = ? WHERE id = 1", 0, "key must be the one of its fields"),
        ("UPDATE workloads SET softcap = ? WHERE id = 1", "maybe", "key must be the one of its fields"),
        ("UPDATE workloads SET bias = ? WHERE id = 1", "full", "key must be the one of its fields"),
        ("UPDATE workloads SET bias = ? WHERE id = 1", "rows", '"full", "keys" or empty, got'),
        ("UPDATE workloads SET bias = ? WHERE id = 1", "keys; --", '"full", "keys" or empty, got'),
        ("UPDATE workloads SET bias = ? WHERE id = 1", 0, '"full", "keys" or empty, got'),  # a text column: "0"
        ("UPDATE workloads SET bias = ? WHERE id = 1", b"", "bias must be of type str"),
        ("UPDATE workloads SET mask = ? WHERE id = 1", "keys", "key must be the one of its fields"),
        ("UPDATE workloads SET mask = ? WHERE id = 1", CODE, '"full", "keys" or empty, got'),
        ("UPDATE workloads SET mask = ? WHERE id = 1", "full\x1b[2J", "printable"),
        ("UPDATE workloads SET mask = ? WHERE id = 1", "keys" * 10_000, "printable characters"),
        ("UPDATE workloads SET lengths = ? WHERE id = 1", "ramp", "lengths of a decode workload"),
        ("UPDATE workloads SET lengths = ? WHERE id = 1", CODE, "lengths of a decode workload"),
        ("UPDATE workloads SET lengths = ? WHERE id = 1", b"", "lengths must be of type str"),
        ("UPDATE workloads SET direction = ? WHERE id = 1", "backward", "key must be the one of its fields"),
        ("UPDATE workloads SET window_left = ? WHERE id = 1", "all", "window_left must be of type int"),
        ("UPDATE workloads SET specialization = ? WHERE id = 1", "x", "key must be the one of its fields"),
        ("UPDATE anchors SET median_ms = ? WHERE id = 1", 0.0, "times are from 1e-09"),
        ("UPDATE anchors SET median_ms = ? WHERE id = 1", "fast", "type float"),
        ("UPDATE anchors SET impl = ? WHERE id = 1", "\x1b]0;title\x07", "printable"),
    ],
)
def test_a_bad_row_beside_it_spoils_a_record(path: Path, statement: str, value: object, rule: str) -> None:
    tamper(path, statement, value)
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match=rule):
        assert store.records() == [replace(MEASURED, workload=SHORT)]


def test_no_step_of_decoding_is_faster_than_its_keys_are_read(path: Path) -> None:
    step = on_profiles(MEASURED)
    with Store.open(path) as store:
        store.put_record(step)
    tamper(
        path, "UPDATE records SET profile_times_ms = ? WHERE id = 3", '{"ramp": [0.9, 0.8, 0.01], "tail": [1, 1, 1]}'
    )
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match="page16-ramp takes at least 0.1"):
        assert store.record(step.workload, H200) is None


def test_a_record_cannot_be_made_to_promise_the_same_bits(path: Path) -> None:
    backward = replace(MEASURED, workload=replace(CAUSAL, direction="backward"))
    with Store.open(path) as store:
        store.put_record(backward)
    tamper(path, "UPDATE workloads SET deterministic = ? WHERE direction = 'backward'", 1)
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match="key must be the one of its field"):
        assert len(store.records()) == 2


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("arch", "sm90; rm -rf /", "arch is like"),
        ("num_sms", 0, "num_sms must be at least 1"),
        ("num_sms", 131, "identity must be the one of its fields"),
        ("bandwidth_gbs", float("inf"), "finite"),
        ("name", b"\x00", "type str"),
    ],
)
def test_a_bad_device_spoils_its_records(path: Path, column: str, value: object, rule: str) -> None:
    tamper(path, f"UPDATE devices SET {column} = ? WHERE id = 1", value)
    with Store.open(path, read_only=True) as store:
        with pytest.warns(UserWarning, match=rule):
            assert store.records() == []
        with pytest.warns(UserWarning, match=rule):
            assert store.devices() == []


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("stage", "explode", "stage is one of"),
        ("reason", None, "type str"),
        ("knobs", knobs(block_m=CODE), "block_m"),
        ("source", b"\x07", "type str"),
        ("times_ms", "[null]", "type float"),
    ],
)
def test_a_bad_trial_is_skipped(path: Path, column: str, value: object, rule: str) -> None:
    tamper(path, f"UPDATE trials SET {column} = ? WHERE id = 2", value)
    with Store.open(path) as store, pytest.warns(UserWarning, match=rule):
        assert store.trials(CAUSAL, H200) == [TRIAL]


def test_a_text_that_is_not_utf8_spoils_its_own_row_only(path: Path) -> None:
    tamper(path, "UPDATE records SET created = CAST(x'ff3230' AS TEXT) WHERE id = 1")
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match="ISO 8601"):
        assert store.records() == [replace(MEASURED, workload=SHORT)]


def test_a_table_without_ids_is_read_past(path: Path) -> None:
    connection = sqlite3.connect(path)
    columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(records)")]
    connection.execute("ALTER TABLE records RENAME TO original")
    connection.execute(f"CREATE TABLE records ({', '.join(columns)})")
    connection.execute("INSERT INTO records SELECT * FROM original")
    connection.execute("UPDATE records SET id = NULL WHERE id = 1")
    connection.commit()
    connection.close()
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match="it has no id"):
        assert [record.workload for record in store.records()] == [SHORT]


def test_many_bad_rows_give_one_warning(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE records SET family = 'nobody'")
    connection.commit()
    connection.close()
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match="and 1 more") as caught:
        assert store.records() == []
    assert len(caught) == 1


def test_a_strict_reading_names_the_bad_row(path: Path) -> None:
    tamper(path, "UPDATE records SET family = 'nobody' WHERE id = 2")
    with Store.open(path, read_only=True) as store, pytest.raises(DatabaseError, match=r"1 bad: records 2: .*nobody"):
        store.all_records()


def test_a_good_record_replaces_a_bad_row_and_mends_its_workload(path: Path) -> None:
    tamper(path, "UPDATE records SET knobs = '{}' WHERE id = 1")
    tamper(path, "UPDATE workloads SET batch = 'four' WHERE id = 1")
    with Store.open(path) as store:
        store.put_record(MEASURED)
        assert store.record(CAUSAL, H200) == MEASURED


def test_the_check_of_configs_can_be_narrowed(path: Path) -> None:
    def refuse(config: Config) -> Config:
        raise ConfigError("no config is good enough")

    with Store.open(path, read_only=True, validate=refuse) as store, pytest.warns(UserWarning, match="good enough"):
        assert store.records() == []
