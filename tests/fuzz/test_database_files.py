"""Random files for the database: damaged ones, and ones of a grammar of schemas and rows.

Whatever a file holds, a look-up is served by the next layer, everything else is an error of flashgen's, nothing takes
long, and what comes back is possible. `make fuzz` runs more cases of another seed; a failure names the seed and the
case, which are run again with FUZZ_SEED and FUZZ_FIRST.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import FlashgenError
from flashgen.core.peak import least_ms
from flashgen.core.record import Measurement, TuningRecord
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.db import layers as module
from flashgen.db.exchange import export_records, import_records
from flashgen.db.layers import Layers
from flashgen.db.past import audited, whole
from flashgen.db.schema import Base
from flashgen.db.store import Store
from flashgen.db.trials import search_json, search_logs
from tests.db.samples import (
    CAUSAL,
    FAILED,
    FINALISTS,
    H200,
    KNOWN_TRIAL,
    MEASURED,
    ORIGIN,
    PREDICTED,
    PREDICTION,
    REPLACED,
    SEARCH,
    SHORT,
    TRIAL,
    on_profiles,
    timed,
)
from tests.tiers import first

CASES = int(os.environ.get("FUZZ_CASES", "40"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
NUMBERS = range(FIRST, FIRST + CASES)
CASE_S = 10.0
"""Processor time of one case, of which the slowest take a second."""

DATA = Path(__file__).parents[1] / "db" / "data"
SHIPPED = timed(MEASURED, 1.9)
COLUMNS = {table.name: tuple(column.name for column in table.columns) for table in Base.metadata.sorted_tables}
COLUMNS["alembic_version"] = ("version_num",)
TABLES = tuple(COLUMNS)
VALUES: tuple[object, ...] = (
    *(
        None,
        0,
        1,
        -1,
        2**31,
        2**63 - 1,
        -(2**63),
        0.0,
        -0.5,
        5e-324,
        1e308,
        float("inf"),
        "",
        "0",
        "x",
        "\0",
        "\x1b[2J",
    ),
    *(
        "[]",
        "{}",
        "[1.5]",
        "[5e-324]",
        "[1e999]",
        "[NaN]",
        "[null]",
        "[[1]]",
        "[" * 4000,
        f"[1{'0' * 400}]",
        f"1{'0' * 5000}",
    ),
    *(
        b"",
        b"\xff" * 9,
        b"\0" * 100_000,
        "y" * 20_000,
        "z" * 400_000,
        "9999-12-31T23:59:59-23:59",
        "2026-01-01",
        "0001-01-01",
    ),
    *(
        "0000",
        "0001",
        "0003",
        "0005",
        "0006",
        "9999",
        "measured",
        "predicted",
        "portable_forward",
        "hopper_forward",
        "sm90",
        "sm999",
    ),
    *(
        '{"ramp":[1.5,1.5,1.5],"tail":[1.5,1.5,1.5]}',
        '{"ramp":[5e-324]}',
        '{"":[]}',
        '{"one":[168,0,98304,2]}',
        '{"one":[1e999,true,"2",null]}',
        '{"power_limit_w":1e999}',
        "ramp",
        "near",
        "last",
    ),
    *("gfx90a", "fp32", "keys", "full", "backward", "\ud7ff\uffff", "\u0660\u0660\u0660\u0665"),
)
EXPRESSIONS = (
    "1",
    "hex(zeroblob(100000))",
    "randomblob(9)",
    "key || key",
    "id",
    "length(knobs)",
    "nosuch(1)",
    "a'",
    "(",
    "NULL",
)


def damaged(path: Path, chance: random.Random) -> None:
    """Flip bits, cut, move or erase parts of the file."""
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 1, 3, 20))):
        kind = chance.randrange(7)
        at = chance.choice(
            (chance.randrange(len(content)), chance.randrange(min(len(content), 4096)), chance.randrange(100))
        )
        if kind <= 2:
            content[at % len(content)] ^= 1 << chance.randrange(8)
        elif kind == 3:
            content[at : at + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", chance.randbytes(4)))
        elif kind == 4:
            size = chance.choice((1, 16, 512, 4096))
            other = chance.randrange(len(content))
            content[at : at + size] = content[other : other + size]
        elif kind == 5:
            del content[at : at + chance.choice((1, 100, 4096))]
        else:
            del content[max(chance.randrange(len(content) + 1), 1) :]
        content = content or bytearray(b"S")
    path.write_bytes(content)


def rewritten(path: Path, chance: random.Random) -> None:
    """Change the schema and the rows by statements of a grammar, those that SQLite accepts."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("ignore_check_constraints = ON", "writable_schema = ON", "foreign_keys = OFF", "synchronous = OFF"):
        connection.execute(f"PRAGMA {pragma}")
    for _ in range(chance.choice((1, 2, 4, 12))):
        statement, values = _row(chance) if chance.random() < 0.7 else (_schema(chance), ())
        with contextlib.suppress(sqlite3.Error, sqlite3.Warning):
            connection.execute(statement, values)
    connection.close()


def _row(chance: random.Random) -> tuple[str, tuple[object, ...]]:
    table = chance.choice(TABLES)
    column, value = chance.choice(COLUMNS[table]), chance.choice(VALUES)
    where = chance.choice(("", "WHERE id = 1", "WHERE id = 2"))
    kind = chance.randrange(6)
    if kind == 0:
        return f"DELETE FROM {table} {where}", ()
    if kind == 1:
        others = ", ".join(name for name in COLUMNS[table] if name not in ("id", column))
        return f"INSERT OR REPLACE INTO {table} ({column}, {others}) SELECT ?, {others} FROM {table}", (value,)
    return f"UPDATE OR REPLACE {table} SET {column} = ? {where}", (value,)


def _schema(chance: random.Random) -> str:
    table, other = chance.choice(TABLES), chance.choice((*TABLES, "extra", 'ex"tra', "sqlite_stat1"))
    column = chance.choice(COLUMNS[table])
    expression = chance.choice(EXPRESSIONS)
    edited = chance.choice(("x", f"{column} AS (1)", "é", "?"))
    return chance.choice(
        (
            f"DROP TABLE {table}",
            f'ALTER TABLE {table} RENAME TO "{other}"',
            f"ALTER TABLE {table} DROP COLUMN {column}",
            f"ALTER TABLE {table} RENAME COLUMN {column} TO {chance.choice(('extra', 'id', 'KEY'))}",
            f"ALTER TABLE {table} ADD COLUMN extra {chance.choice(('INT', 'TEXT', 'BLOB', 'ANY', ''))}",
            f"ALTER TABLE {table} ADD COLUMN extra AS ({expression})",
            f"ALTER TABLE {table} ADD COLUMN extra DEFAULT ({expression})",
            f"CREATE TABLE extra AS SELECT * FROM {table}",
            f"CREATE VIEW extra AS SELECT {expression} AS a FROM {table}",
            f"CREATE TRIGGER extra AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END",
            f"CREATE INDEX extra ON {table} ({expression})",
            f"CREATE INDEX extra ON {table} ({column}) WHERE {expression}",
            "CREATE VIRTUAL TABLE extra USING fts5(text)",
            f"CREATE TABLE extra (a REFERENCES {table}, CHECK ({expression}))",
            f"UPDATE sqlite_master SET sql = replace(sql, '{column}', '{edited}')",
            f"UPDATE sqlite_master SET rootpage = {chance.randrange(9)} WHERE name = '{table}'",
            f"UPDATE sqlite_master SET name = CAST(x'ff' AS TEXT) WHERE name = '{table}'",
            f"PRAGMA user_version = {chance.randrange(99)}",
            f"PRAGMA application_id = {chance.randrange(2)}",
            "ANALYZE",
        )
    )


def packed_record() -> TuningRecord:
    """One with totals of rows, and times on profiles of them."""
    workload = Workload.parse("b8-h32-hk8-tq8192-tk65536-sq2048-sk16384-d128-causal-varlen")
    others = tuple((profile.lengths, (3.0,)) for profile in workload.profiles[1:])
    measurement = Measurement(times_ms=(3.0,), max_error=1e-3, mean_error=1e-5, profile_times_ms=others)
    return replace(MEASURED, workload=workload, measurement=measurement, baselines=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good file to start from, in `good`, and the shipped one below it, in `shipped`."""
    folder = tmp_path_factory.mktemp("fuzz")
    with Store.open(folder / "draft.sqlite3") as store:
        store.put_record(MEASURED, ORIGIN)
        store.put_records([PREDICTED, timed(MEASURED, 1.4, workload=SHORT)])
        store.put_replaced([REPLACED])
        store.put_trial(TRIAL)
        store.put_trial(FAILED)
        store.put_prediction(PREDICTION)
        store.put_records([on_profiles(MEASURED), packed_record()])
        store.put_search(SEARCH)
        store.put_trial(KNOWN_TRIAL)
        store.put_finalists(FINALISTS)
    connection = sqlite3.connect(folder / "draft.sqlite3")
    connection.execute("VACUUM INTO ?", (str(folder / "good.sqlite3"),))
    connection.close()
    export_records([SHIPPED], folder / "shipped" / "nvidia_h200" / "records.sqlite3")
    return folder


def quietly(action: Callable[[], object]) -> None:
    with contextlib.suppress(FlashgenError):
        action()


def possible(record: TuningRecord) -> bool:
    return record.time_ms is None or record.time_ms >= least_ms(record.workload, record.device)


def looked_up(path: Path) -> None:
    """A look-up never fails, and says in warnings of flashgen what it does without."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Layers.open([path]) as layers:
            hit = layers.record(CAUSAL, H200, provenance="measured")
            found = [*layers.of_class(SHIPPED.workload.specialization.workload_class, H200), *layers.records()]
            trials, predictions = layers.tried(CAUSAL, H200)
            past = [each for each, _ in layers.past(CAUSAL)]
            searches = [log for log, _ in layers.searches(workload=CAUSAL, device=H200)]
    assert hit is not None
    assert SHIPPED in [record for record, _ in found]
    assert all(possible(record) for record, _ in found)
    assert all(possible(replaced.record) for each in past for replaced in each.replaced)
    assert {trial.workload for trial in trials} | {each.workload for each in predictions} <= {CAUSAL}
    assert {finalist.workload for log in searches for finalist in log.finalists} <= {CAUSAL}
    for each in caught:
        assert issubclass(each.category, UserWarning)
        assert str(path) in str(each.message)
        assert str(each.message).replace("\n", " ").replace("\t", " ").isprintable()


def used(path: Path, scratch: Path) -> None:
    """A file that somebody opens, imports or writes to works, or is an error of flashgen's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(FlashgenError), Store.open(path, read_only=True) as store:
            for question in (store.devices, store.workloads, store.counts, store.check, store.all_records):
                quietly(question)
            quietly(lambda: whole(store.reader))
            quietly(lambda: audited(store.reader))
            quietly(store.audited)
            quietly(lambda: [search_json(log) for log in search_logs(store, store.workloads(), store.devices())])
        with Store.open(scratch / "ours.sqlite3") as ours:
            quietly(lambda: import_records(ours, path))
            assert all(possible(record) for record in ours.records())
        with contextlib.suppress(FlashgenError), Store.open(path) as store:
            quietly(lambda: store.put_record(timed(MEASURED, 1.3), ORIGIN))
            quietly(store.prune_history)
            quietly(lambda: store.put_trial(TRIAL))
            quietly(lambda: store.put_search(SEARCH))
            quietly(lambda: store.put_finalists(FINALISTS))


@pytest.mark.parametrize("number", NUMBERS if "FUZZ_CASES" in os.environ else first(16, NUMBERS))
def test_no_file_stops_a_look_up(number: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shipped", lambda _: folder / "shipped")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    chance = random.Random(SEED * 1_000_003 + number)
    path = tmp_path / "stranger.sqlite3"
    older = sorted(DATA.glob("schema_*.sqlite3"))
    shutil.copyfile(chance.choice(older) if number % 10 == 9 else folder / "good.sqlite3", path)
    for change in chance.choice(((damaged,), (rewritten,), (rewritten,), (rewritten, damaged))):
        change(path, chance)
    started = time.thread_time()
    looked_up(path)
    if number % 4 == 0:
        used(path, tmp_path)
    assert time.thread_time() - started < CASE_S
    settings.cache_clear()
