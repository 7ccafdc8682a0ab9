"""What a stranger's file may do: cost its own layer or its own row, a warning, and no more."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.families import validate
from flashgen.core.config import Config
from flashgen.core.errors import DatabaseError, FlashgenError
from flashgen.core.peak import least_ms
from flashgen.core.record import Measurement, TuningRecord
from flashgen.core.workload import Workload
from flashgen.db import connection as module
from flashgen.db import layers as layers_module
from flashgen.db import reader
from flashgen.db.connection import Deadline, connect, retry
from flashgen.db.exchange import better, export_records, import_records
from flashgen.db.layers import Layers
from flashgen.db.reader import Reader
from flashgen.db.store import Store
from tests.db.privileges import no_privileges
from tests.db.samples import CAUSAL, FAILED, H100, H200, MEASURED, PREDICTED, PREDICTION, SHORT, TRIAL, hard, timed

OTHER = replace(MEASURED, workload=SHORT)
needs_limits = pytest.mark.skipif(not module.HAS_LIMITS, reason="Python 3.10 cannot set SQLite's limits")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good records, a trial and a failed one, in a file without a WAL, of which each test has a copy."""
    folder = tmp_path_factory.mktemp("stranger")
    with Store.open(folder / "draft.sqlite3") as store:
        store.put_records([MEASURED, OTHER])
        store.put_trial(TRIAL)
        store.put_trial(FAILED)
    connection = sqlite3.connect(folder / "draft.sqlite3")
    connection.execute("VACUUM INTO ?", (str(folder / "stranger.sqlite3"),))
    connection.close()
    return folder / "stranger.sqlite3"


@pytest.fixture
def path(stranger: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(stranger, tmp_path))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The layer below, which serves where the stranger's does not."""
    folder = tmp_path / "shipped"
    export_records([timed(MEASURED, 1.9)], folder / "nvidia_h200" / "records.sqlite3")
    monkeypatch.setattr(layers_module, "shipped", lambda _: folder)
    return folder


def execute(path: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        connection.execute(statement, values if "?" in statement else ())
    connection.close()


def asked(path: Path) -> tuple[object, object]:
    """What a look-up over this file and the shipped one finds."""
    with Layers.open([path]) as layers:
        return layers.record(CAUSAL, H200), layers.tried(CAUSAL, H200)


def next_layer_serves(path: Path, rule: str) -> None:
    with pytest.warns(UserWarning, match=rule) as caught:
        found, tried = asked(path)
    assert (found, tried) == ((timed(MEASURED, 1.9), "shipped/nvidia_h200"), ([], []))
    assert [str(path) in str(each.message) for each in caught] == [True]


# --- whatever happens costs one layer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version",
    ["0000", "", "0", "00005", "-001", "\u0660\u0660\u0660\u0665", "head", "0005\n", None, 5, b"0005", "9" * 10**6],
)
def test_a_schema_version_that_is_none_costs_the_layer(path: Path, shipped: Path, version: object) -> None:
    execute(path, "DROP TABLE alembic_version", "CREATE TABLE alembic_version (version_num)")
    execute(path, "INSERT INTO alembic_version VALUES (?)", values=(version,))
    next_layer_serves(path, "four digits|too big")


def flipped(name: str) -> bytes:
    """A name of the schema, one bit of which is another one, so that it is no UTF-8."""
    return name.encode()[:-1] + bytes([name.encode()[-1] | 0x80])


@pytest.mark.parametrize(
    "name", ["records", "workloads", "alembic_version", "times_ms", "version_num", "uq_devices_identity"]
)
def test_a_flipped_bit_in_a_name_costs_the_layer(path: Path, shipped: Path, name: str) -> None:
    path.write_bytes(path.read_bytes().replace(name.encode(), flipped(name)))
    if name.startswith("uq_"):  # the name of a constraint, which nothing asks for
        with Store.open(path, read_only=True) as store:
            assert store.all_records() == [MEASURED, OTHER]
        return
    next_layer_serves(path, "is not used")


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("deep"), KeyError("table"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")]
)
def test_any_error_of_a_look_up_costs_the_layer(
    path: Path, shipped: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: Reader, where: str, values: tuple[str, ...], bad: list[object]) -> object:
        if self.path == path:
            raise error
        return real(self, where, values, bad)  # type: ignore[arg-type]

    real = Reader._read
    monkeypatch.setattr(Reader, "_read", ask)
    next_layer_serves(path, "is not used")


def test_an_error_while_a_layer_is_opened_costs_the_layer(
    path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(cls: type[Reader], found: Path, **flags: object) -> Reader:
        if found == path:
            raise LookupError("no such thing\x1b[2J")
        return real(found, **flags)  # type: ignore[arg-type]

    real = Reader.open
    monkeypatch.setattr(Reader, "open", classmethod(opened))
    next_layer_serves(path, r"LookupError: no such thing\\x1b\[2J")


@pytest.mark.parametrize(
    ("error", "rule"), [(MemoryError(), "fit into memory"), (OverflowError("too large"), "integers of 64 bits")]
)
def test_what_sqlite_cannot_hold_is_an_error_of_the_file(path: Path, error: Exception, rule: str) -> None:
    def action() -> None:
        raise error

    with pytest.raises(DatabaseError, match=rule) as caught:
        retry(path, action)
    assert str(path) in str(caught.value)


# --- nothing in a file is computed -----------------------------------------------------------------------------------

HUGE = "hex(zeroblob(300000000))"
COMPUTED = {
    "virtual column": [f"ALTER TABLE records ADD COLUMN extra TEXT GENERATED ALWAYS AS ({HUGE})"],
    "column of workloads": ["ALTER TABLE workloads ADD COLUMN extra TEXT AS (key || key)"],
    "stored column": [
        "CREATE TABLE twin (a, b AS (a) STORED)",
        "DROP TABLE anchors",
        "ALTER TABLE twin RENAME TO anchors",
    ],
    "column in place of ours": [
        "ALTER TABLE records DROP COLUMN hard_times_ms",
        f"ALTER TABLE records ADD COLUMN hard_times_ms TEXT AS ({HUGE})",
    ],
    "column of the history": [f"ALTER TABLE history ADD COLUMN extra TEXT AS ({HUGE})"],
    "column of the origins": ["ALTER TABLE origins ADD COLUMN extra TEXT AS (run || host)"],
    "trigger on the history": ["CREATE TRIGGER extra AFTER INSERT ON history BEGIN DELETE FROM history; END"],
    "view in place of the history": ["DROP TABLE history", "CREATE VIEW history AS SELECT * FROM records"],
    "column of the version": [f"ALTER TABLE alembic_version ADD COLUMN extra AS ({HUGE})"],
    "view": [f"CREATE VIEW extra AS SELECT {HUGE}"],
    "view in place of a table": ["ALTER TABLE anchors RENAME TO twin", "CREATE VIEW anchors AS SELECT * FROM twin"],
    "trigger": ["CREATE TRIGGER extra AFTER INSERT ON records BEGIN DELETE FROM records; END"],
    "virtual table": ["CREATE VIRTUAL TABLE extra USING fts5(text)"],
    "index of an expression": ["CREATE INDEX extra ON records (hex(zeroblob(9)))"],
    "partial index": ["CREATE INDEX extra ON records (family) WHERE length(knobs) > 3"],
    "view that says it is a table": [
        "CREATE VIEW extra AS SELECT 1",
        "UPDATE sqlite_master SET type = 'table', rootpage = 2 WHERE name = 'extra'",
    ],
    "many tables": [f"CREATE TABLE t{number} (a)" for number in range(70)],
    "long statement": [
        f"CREATE TABLE extra ({', '.join(f'column_{number}' for number in range(120))}, z DEFAULT '{'x' * 9000}')"
    ],
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_a_file_computes_is_refused(path: Path, shipped: Path, kind: str) -> None:
    started = time.thread_time()
    try:
        execute(path, *COMPUTED[kind])
    except sqlite3.Error as error:  # an SQLite without it
        pytest.skip(str(error))
    next_layer_serves(path, "holds plain tables|no columns that are computed|holds at most|a text of at most|malformed")
    for flags in ({}, {"read_only": True}, {"shipped": True}):
        with pytest.raises(DatabaseError, match=path.name):
            Store.open(path, **flags)
    assert time.thread_time() - started < 5


@pytest.mark.parametrize("kind", ["view", "trigger", "virtual column"])
def test_what_is_added_after_opening_is_refused_as_well(path: Path, shipped: Path, kind: str) -> None:
    with Layers.open([path]) as layers, Store.open(path, read_only=True) as store:
        execute(path, *COMPUTED[kind])
        with pytest.warns(UserWarning, match="is not used"):
            assert layers.record(CAUSAL, H200) == (timed(MEASURED, 1.9), "shipped/nvidia_h200")
        with pytest.raises(DatabaseError, match=r"plain tables|are computed"):
            store.trials(CAUSAL, H200)


@pytest.mark.parametrize("access", ["write", "read", "shipped"])
def test_a_connection_bounds_what_an_expression_costs(path: Path, access: module.Access) -> None:
    connection = connect(path, access)
    assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)
    if module.HAS_LIMITS:
        with pytest.raises(sqlite3.Error, match="too big"):
            connection.execute(f"SELECT {HUGE}")
    Deadline(0.2).bind(connection)
    started = time.thread_time()
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        connection.execute(endless)
    assert time.thread_time() - started < 5
    connection.close()


def test_a_question_that_takes_too_long_costs_the_layer(
    path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Layers.open([path]) as layers:
        monkeypatch.setattr(reader, "Deadline", lambda: Deadline(-1.0 if asked.pop() == path else 30.0))
        asked = [Path("shipped"), path]
        with pytest.warns(UserWarning, match="at most -1 s of processor time"):
            assert layers.record(CAUSAL, H200) == (timed(MEASURED, 1.9), "shipped/nvidia_h200")


def test_a_transaction_that_writes_has_no_deadline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(path) as store:
        monkeypatch.setattr(module, "STEPS", 1)
        monkeypatch.setattr("flashgen.db.store.Deadline", lambda: Deadline(-1.0))
        store.put_record(PREDICTED)
        with pytest.raises(DatabaseError, match="interrupted"):
            store.trials(CAUSAL, H200)


def test_ctrl_c_is_not_lost_while_sqlite_works(path: Path) -> None:
    """Python calls the handlers of signals in ours, of which SQLite hides what they raise."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest-xdist ignore it
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            module.use(path, "read", lambda connection: connection.execute(endless).fetchone())
    finally:
        timer.join()
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("flags", [{}, {"read_only": True}, {"shipped": True}], ids=["write", "read", "shipped"])
def test_what_is_no_ordinary_file_is_refused(tmp_path: Path, kind: str, flags: dict[str, bool]) -> None:
    path = tmp_path / "odd.sqlite3"
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    with pytest.raises(DatabaseError, match=r"ordinary file|a file, got the directory"):
        Store.open(path, **flags)


# --- a bad row costs that row ----------------------------------------------------------------------------------------

LONG = "x" * 2_000_000
ROWS = [
    ("records", "times_ms", f"[1{'0' * 400}]", "finite"),
    ("records", "times_ms", f"[1{'0' * 5000}]", "JSON list"),
    ("records", "times_ms", "[1e999]", "finite"),
    ("records", "times_ms", f"[{'1.5,' * 5000}1.5]", "printable characters"),
    ("records", "hard_times_ms", f"[1.5, 1.5, 1{'0' * 400}]", "finite"),
    ("records", "knobs", f'{{"block_m": 1{"0" * 5000}}}', "JSON object"),
    ("records", "created", "9999-12-31T23:59:59+00:00", "years 2020 to 2099"),
    ("records", "created", "0001-01-01T00:00:00+23:59", "years 2020"),
    ("records", "created", "9999-12-31T23:59:59-23:59", "years 2020"),
    ("records", "driver_version", "5" * 513, "512 printable"),
    ("devices", "name", "H" * 513, "512 printable"),
    ("devices", "num_sms", "9" * 400, "type int"),
    ("devices", "arch", "sm" + "9" * 300, "arch is like"),
    pytest.param("records", "knobs", LONG, "too long", marks=needs_limits),
    pytest.param("workloads", "key", LONG, "too long", marks=needs_limits),
    pytest.param("workloads", "batch", LONG, "too long", marks=needs_limits),
    pytest.param("devices", "l2_bytes", b"\0" * 2_000_000, "too long", marks=needs_limits),
]


@pytest.mark.parametrize(("table", "column", "value", "rule"), ROWS, ids=itertools.count())
def test_a_row_that_cannot_be_read_costs_itself(path: Path, table: str, column: str, value: object, rule: str) -> None:
    execute(path, f"UPDATE {table} SET {column} = ? WHERE id = 1", values=(value,))
    left = [] if table == "devices" else [OTHER]
    with Store.open(path, read_only=True) as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert store.records() == left
        assert [rule in str(each.message) for each in caught] == [True]


@pytest.mark.parametrize("error", [KeyError("knob"), TypeError("no len()"), RecursionError("deep"), MemoryError()])
def test_whatever_a_row_makes_fail_costs_itself(path: Path, error: Exception) -> None:
    def checked(config: Config) -> Config:
        if config == FAILED.config:
            raise error
        return validate(config)

    execute(path, "UPDATE records SET knobs = (SELECT knobs FROM trials WHERE id = 2) WHERE id = 1")
    with Store.open(path, read_only=True, validate=checked) as store:
        with pytest.warns(UserWarning, match=f"records 1 is ignored: {type(error).__name__}"):
            assert store.records() == [OTHER]
        with pytest.warns(UserWarning, match=f"trials 2 is ignored: {type(error).__name__}"):
            assert store.trials(CAUSAL, H200) == [TRIAL]


@pytest.mark.parametrize("column", ["reason", "knobs", "times_ms", "stage"])
@needs_limits
def test_a_trial_that_is_too_long_costs_itself(path: Path, column: str) -> None:
    execute(path, f"UPDATE trials SET {column} = ? WHERE id = 2", values=(LONG,))
    with (
        Store.open(path, read_only=True) as store,
        pytest.warns(UserWarning, match="trials 2 is ignored: a cell is too"),
    ):
        assert store.trials(CAUSAL, H200) == [TRIAL]


def test_a_text_too_long_is_not_read_where_sqlite_has_no_limits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_ROW", reader.select_row(limited=False))
    with Store.open(path, read_only=True) as store:
        assert store.all_records() == [MEASURED, OTHER]
        execute(path, "UPDATE records SET knobs = ? WHERE id = 1", values=("x" * 100_000,))
        with pytest.warns(UserWarning, match="knobs must be at most 16384"):
            assert store.records() == [OTHER]


def test_a_record_has_few_times_of_others(path: Path) -> None:
    execute(path, *(f"INSERT INTO anchors (record_id, impl, median_ms) VALUES (1, 'i{n}', 2.0)" for n in range(70)))
    with Store.open(path, read_only=True) as store, pytest.warns(UserWarning, match="at most 64 times"):
        assert store.records() == [OTHER]


# --- what is claimed must be possible --------------------------------------------------------------------------------

LEAST = least_ms(CAUSAL, H200)


def changed(**measured: object) -> TuningRecord:
    assert MEASURED.measurement is not None
    return replace(MEASURED, measurement=replace(MEASURED.measurement, **measured))


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        (timed(MEASURED, 1e-6), "takes at least"),
        (timed(MEASURED, 1.5, 0.9 * LEAST), "takes at least"),
        (timed(MEASURED, 1.01 * LEAST), ""),
        (hard(MEASURED, 1.5, 1.5, 0.9 * LEAST), "takes at least"),
        (replace(PREDICTED, predicted_ms=0.9 * LEAST), "takes at least"),
        (replace(timed(MEASURED, 1e-6), workload=CAUSAL.with_shape(seqlen_q=1, seqlen_k=1)), "takes at least 0.0005"),
        # the device's own figures are the stranger's
        (replace(timed(MEASURED, 1e-3), device=replace(H200, peak_tflops=1e30, bandwidth_gbs=1e30)), "takes at least"),
        (changed(max_error=-1.0, mean_error=-1.0), "errors are 0 or more"),
        (changed(max_error=1e-3, mean_error=-1e-9), "errors are 0 or more"),
        (changed(max_error=1e-5, mean_error=1e-3), "the mean at most"),
        (changed(sm_clock_mhz=-1.0), "sm_clock_mhz"),
        (changed(sm_clock_mhz=1e9), "sm_clock_mhz"),
        (replace(MEASURED, created="9999-01-01T00:00:00+00:00"), "years 2020"),
        (replace(MEASURED, created="2090-01-01T00:00:00+00:00"), "after it was made"),
        (replace(MEASURED, created="2090-01-01"), "after it was made"),
    ],
)
def test_a_record_that_nothing_measured_is_not_imported(
    tmp_path: Path, path: Path, record: TuningRecord, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.db.rows.checked_record", lambda record, _: record)  # as a stranger's tool writes it
    export_records([record], tmp_path / "theirs.sqlite3")
    monkeypatch.undo()
    with Store.open(path) as store:
        before = store.records()
        if not rule:
            assert import_records(store, tmp_path / "theirs.sqlite3").replaced == 1
            return
        with pytest.raises(FlashgenError, match=rule):
            import_records(store, tmp_path / "theirs.sqlite3")
        assert store.records() == before
    if "after" not in rule:  # nor served where it is a layer
        with Store.open(tmp_path / "theirs.sqlite3", read_only=True) as other, pytest.warns(UserWarning, match=rule):
            assert other.records() == []


def test_what_a_mask_hides_takes_no_time() -> None:
    assert least_ms(replace(CAUSAL, mask="keys"), H200) < 1e-3 < LEAST
    assert least_ms(replace(CAUSAL, direction="backward"), H200) == pytest.approx(2.5 * LEAST)
    assert least_ms(CAUSAL, replace(H200, arch="sm200")) < LEAST, "nothing is known of it"
    assert least_ms(replace(CAUSAL, seqlen_q=1, causal=False), H100) > 0.001, "keys and values are read"


PACKED = Workload.parse("b8-h32-hk8-tq8192-tk65536-sq2048-sk16384-d128-causal-varlen")


def packed(share: float, **shares: float) -> TuningRecord:
    """A record of packed sequences with times that are shares of the least ones, of all alike and of other profiles."""
    first, *others = ((each.lengths, least_ms(each, H200)) for each in PACKED.profiles)
    profiles = tuple((name, (shares.get(name, 1.01) * least,)) for name, least in others)
    measurement = Measurement(times_ms=(share * first[1],), max_error=1e-3, mean_error=1e-5, profile_times_ms=profiles)
    return replace(MEASURED, workload=PACKED, measurement=measurement, baselines=())


def test_packed_sequences_take_as_long_as_their_pairs(path: Path) -> None:
    assert least_ms(PACKED, H200) > 0.1
    with Store.open(path) as store:
        store.put_record(packed(1.01))
        for made_up in (packed(0.99), packed(0.002), packed(1.01, tail=0.99), packed(1.01, ramp=0.1)):
            with pytest.raises(DatabaseError, match="takes at least"):
                store.put_record(made_up)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("key", [f"b{2**31 - 1}-h1-tq{2**31 - 1}-s64-d64-varlen", f"dec-b{2**31 - 1}-h1-sk64-d64-ramp"])
def test_a_batch_whose_lengths_fill_the_memory_is_refused(path: Path, key: str) -> None:
    with Store.open(path) as store, pytest.raises(DatabaseError, match="at most 131072 sequences"):
        store.put_record(replace(MEASURED, workload=Workload.parse(key)))


@pytest.mark.parametrize("ours", ["2090-01-01T00:00:00+00:00", "9999-01-01T00:00:00+00:00"])
def test_a_date_of_the_future_wins_nothing(ours: str) -> None:
    assert better(MEASURED, replace(MEASURED, created=ours))
    assert not better(replace(MEASURED, created=ours), MEASURED)
    assert better(replace(MEASURED, created="2026-11-20T12:00:00-01:00"), MEASURED), "an hour later, in another zone"


def test_a_stored_prediction_of_nothing_costs_its_row(path: Path) -> None:
    with Store.open(path) as store:
        other = replace(PREDICTION, config=FAILED.config.replace(num_stages=2))
        store.put_prediction(other)
        execute(path, "UPDATE trials SET times_ms = '[1e-6]' WHERE source = 'predicted'")
        with pytest.warns(UserWarning, match="takes at least"):
            assert store.predictions(CAUSAL, H200) == []
        with pytest.raises(DatabaseError, match="takes at least"):
            store.put_trial(replace(TRIAL, outcome=changed(times_ms=(1e-6,)).measurement))


def test_a_damaged_file_is_not_imported(tmp_path: Path, path: Path) -> None:
    """Not even where its records can be read: the damage is in an index that reading them needs none of."""
    connection = sqlite3.connect(path)
    (page,) = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'ix_workloads_specialization'"
    ).fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = bytes(size)
    path.write_bytes(content)
    with Store.open(path, read_only=True) as store:
        assert store.all_records() == [MEASURED, OTHER]
    with Store.open(tmp_path / "ours.sqlite3") as store, pytest.raises(DatabaseError, match="must be whole") as refused:
        import_records(store, path)
    assert "\n" not in str(refused.value)


# --- who may write is said at opening --------------------------------------------------------------------------------


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that this process may write to, even as root without what makes it root: others' files it may not."""
    with tempfile.TemporaryDirectory() as name:  # the one of pytest lets nobody else in
        folder = Path(name)
        folder.chmod(0o777)
        with no_privileges():
            yield folder


def test_a_wal_file_that_cannot_be_written_says_so_at_opening(unprivileged: Path) -> None:
    path = unprivileged / "wal.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
    path.chmod(0o444)
    assert not os.access(path, os.W_OK, effective_ids=True)
    with pytest.raises(DatabaseError, match="readonly"):
        Store.open(path)
    with Store.open(path, read_only=True) as store:
        assert store.records() == [MEASURED]


def test_a_connection_that_only_reads_is_no_writer(tmp_path: Path) -> None:
    from flashgen.db.files import _become_writer

    path = tmp_path / "wal.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            _become_writer(connection)
        connection.close()
