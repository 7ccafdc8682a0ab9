"""`ServerStore` against a real PostgreSQL: what a file keeps, several writers at once, and clear refusals."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from flashgen.core.checks import MAX_INTEGER
from flashgen.core.config import Config
from flashgen.core.errors import DatabaseError
from flashgen.core.record import Failure
from flashgen.core.settings import settings
from flashgen.db import server, urls
from flashgen.db.server import ServerStore
from flashgen.db.store import Store
from flashgen.tuning import runs
from tests.cli.conftest import Invoke
from tests.db import postgres
from tests.db.samples import CAUSAL, FAILED, H100, H200, MEASURED, PREDICTED, PREDICTION, SEARCH, SHORT, TRIAL, timed
from tests.db.samples import ORIGIN as MADE
from tests.tuning.fakes import Clock, FakeCompiler, FakeExecutor

pytestmark = [
    pytest.mark.xdist_group("postgres"),
    pytest.mark.skipif(bool(postgres.why_none()), reason=postgres.why_none() or "there is one"),
    pytest.mark.skipif(importlib.util.find_spec("psycopg") is None, reason="the extra postgres is not installed"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres.server() as found:
        engine = sa.create_engine(found)
        until = time.monotonic() + 30
        while True:
            try:
                engine.connect().close()
                break
            except sa.exc.OperationalError:
                assert time.monotonic() < until
                time.sleep(0.05)
        engine.dispose()
        yield found


@pytest.fixture
def store(url: str) -> Iterator[ServerStore]:
    """Tables without rows."""
    with ServerStore.open(url) as opened:
        yield opened
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


def new_database(url: str, name: str, options: str = "") -> str:
    """The URL of another database of the server."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} {options}")
    engine.dispose()
    return sa.make_url(url).set(database=name).render_as_string()


def test_a_server_keeps_what_a_file_keeps(store: ServerStore) -> None:
    store.put_record(PREDICTED)
    assert store.record(CAUSAL, H200) == PREDICTED
    store.put_record(MEASURED, MADE)
    assert store.record(CAUSAL, H200) == MEASURED
    assert store.record(CAUSAL, H200, provenance="predicted") == PREDICTED
    assert store.record(CAUSAL, H100) is None
    assert store.records(specialization=CAUSAL.specialization.workload_class) == [MEASURED, PREDICTED]
    assert store.records(arch="sm80") == []
    assert store.made(provenance="measured") == [(MEASURED, MADE)]
    for trial in (TRIAL, FAILED, replace(TRIAL, source="sampler")):
        store.put_trial(trial)
    store.put_prediction(PREDICTION)  # of a config that was measured
    store.put_prediction(replace(PREDICTION, workload=SHORT))
    assert store.trials(CAUSAL, H200) == [FAILED, replace(TRIAL, source="sampler")]
    assert store.predictions(CAUSAL, H200) == []
    assert store.predictions(SHORT, H200) == [replace(PREDICTION, workload=SHORT)]


def test_a_record_that_is_replaced_goes_to_the_history(store: ServerStore) -> None:
    store.put_record(MEASURED)
    store.put_record(timed(MEASURED, 0.5), MADE)
    counts = store.counts()
    assert (counts["records"], counts["history"], counts["origins"]) == (1, 1, 1)


def test_a_reason_may_have_characters_that_postgresql_refuses(store: ServerStore) -> None:
    store.put_trial(replace(FAILED, outcome=Failure(stage="build", reason="a\0b")))
    (trial,) = store.trials(FAILED.workload, FAILED.device)
    assert isinstance(trial.outcome, Failure)
    assert trial.outcome.reason == "a\\x00b"


def test_a_database_without_an_encoding_keeps_texts_too(url: str) -> None:
    failed = replace(FAILED, outcome=Failure(stage="build", reason="\N{GREEK SMALL LETTER MU}s"))
    with ServerStore.open(new_database(url, "ascii", "ENCODING 'SQL_ASCII' TEMPLATE template0")) as opened:
        opened.put_trial(failed)
        assert opened.trials(FAILED.workload, FAILED.device) == [failed]
        assert opened.counts()["trials"] == 1


def test_an_integer_has_64_bits(store: ServerStore) -> None:
    origin, search = replace(MADE, seed=MAX_INTEGER), replace(SEARCH, seed=MAX_INTEGER)
    store.put_search(search)
    store.put_record(MEASURED, origin)
    store.put_record(timed(MEASURED, 0.5))
    store.put_record(timed(MEASURED, 0.46), origin)
    assert store.searches(SEARCH.workload, SEARCH.device) == [search]
    assert store.made() == [(timed(MEASURED, 0.46), origin)]


@pytest.mark.parametrize("has_tables", [False, True])
def test_a_study_in_the_database_of_the_store_is_refused_and_spoils_nothing(
    url: str, invoke: Invoke, has_tables: bool
) -> None:
    own = new_database(url, f"both_{has_tables}".lower())
    if has_tables:
        ServerStore.open(own).close()
    result = invoke("tune", "--shape", CAUSAL.key, "--store", own, "--study", own)
    assert result.exit_code == 2
    assert "a study has a database of its own" in result.stderr
    with ServerStore.open(own) as opened:
        opened.put_trial(TRIAL)


EXPORT = """
import sys
from flashgen.tuning.studies import export_studies
from tests.db.samples import FAILED, TRIAL

assert export_studies([TRIAL], sys.argv[1]) == (1, 1)
assert export_studies([TRIAL, FAILED], sys.argv[1]) == (1, 2)
"""


def test_a_study_is_kept_in_a_database_without_an_encoding(url: str) -> None:
    studies = new_database(url, "studies", "ENCODING 'SQL_ASCII' TEMPLATE template0")
    # Optuna closes no connection, so in a process of its own
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, studies], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_coordinators_that_write_the_same_rows_at_once_lose_nothing(url: str, store: ServerStore) -> None:
    errors: list[BaseException] = []

    def write(index: int) -> None:
        try:
            with ServerStore.open(url) as own:
                for number in range(6):
                    own.put_trial(replace(TRIAL, source=f"{index}-{number}"))
                    own.put_trial(replace(TRIAL, workload=CAUSAL.with_shape(seqlen_q=64 * (6 * index + number + 1))))
        except BaseException as error:  # noqa: BLE001 - told in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    counts = store.counts()
    assert (counts["devices"], counts["workloads"], counts["trials"]) == (1, 25, 25)


OTHER = MEASURED.config.replace(block_m=64)
BAD_RECORD = "UPDATE records SET times_ms = '[-1.0]' WHERE id = (SELECT min(id) FROM records)"
LONG_TIME = f'[{{"family":"portable_forward","knobs":{{}},"times_ms":[1{"0" * 400}],"hard_times_ms":[]}}]'
BAD_ORIGIN = f"UPDATE origins SET runners_up = '{LONG_TIME}'"


@pytest.mark.parametrize("statement", [BAD_RECORD, BAD_ORIGIN], ids=["record", "origin"])
def test_a_row_that_breaks_a_rule_costs_itself(url: str, store: ServerStore, statement: str) -> None:
    store.put_record(MEASURED, MADE)
    store.put_record(replace(MEASURED, workload=SHORT))
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()
    with pytest.warns(UserWarning, match="records 1 is ignored"):
        assert store.records() == [replace(MEASURED, workload=SHORT)]


def test_a_row_that_cannot_be_built_costs_itself(url: str, store: ServerStore) -> None:
    def validate(config: Config) -> Config:
        if config == OTHER:
            raise OverflowError("int too large to convert to float")
        return config

    store.put_record(MEASURED)
    store.put_record(replace(MEASURED, workload=SHORT, config=OTHER))
    with (
        ServerStore.open(url, validate=validate) as strict,
        pytest.warns(UserWarning, match="records 2 is ignored: OverflowError: int too large"),
    ):
        assert strict.records() == [MEASURED]


def test_a_run_goes_on_where_another_coordinator_stopped_and_hands_its_records_over(
    url: str, store: ServerStore, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_trial(TRIAL)  # of a coordinator that was stopped
    monkeypatch.setattr(runs, "make_executor", lambda index: FakeExecutor())
    monkeypatch.setattr(runs, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))
    arguments = ("--shape", CAUSAL.key, "--budget", 4, "--family", "portable_forward")
    result = invoke("tune", *arguments, "--store", url)
    assert result.exit_code == 0, result.output
    assert "1 tried before" in result.stdout
    assert len(store.trials(CAUSAL, H200)) == 4
    with Store.open(settings().db_layers[0], read_only=True) as file:
        assert file.record(CAUSAL, H200) == store.record(CAUSAL, H200)
        assert file.trials(CAUSAL, H200) == []
        ((_, origin),) = file.past(CAUSAL).records
        assert origin.run


def test_tables_of_another_schema_are_refused(url: str, store: ServerStore) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    engine.dispose()
    with pytest.raises(DatabaseError, match=r"tables on a server have schema [0-9]{4}; .* have '9999'"):
        ServerStore.open(url)


def test_a_server_that_does_not_answer_is_said_without_its_password() -> None:
    with pytest.raises(DatabaseError, match="must answer and take rows") as caught:
        ServerStore.open("postgresql+psycopg://me:secret@/x?host=/nowhere&connect_timeout=1")
    assert "secret" not in str(caught.value)


def test_a_server_that_is_away_for_as_long_as_a_restart_takes_costs_nothing(
    url: str, store: ServerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sa.make_url(url)
    link, folder = tmp_path / "s", str(found.query["host"])
    link.symlink_to(folder)
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 20 and not link.exists():
            link.symlink_to(folder)

    with ServerStore.open(found.update_query_dict({"host": str(link)}).render_as_string()) as own:
        own.put_trial(TRIAL)
        link.unlink()
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) {others}")
        engine.dispose()
        monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
        own.put_trial(FAILED)
    assert store.trials(TRIAL.workload, TRIAL.device) == [TRIAL, FAILED]


def test_a_server_that_accepts_and_says_nothing_is_waited_for_no_longer_than_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(urls.LIBPQ_OPTIONS, "connect_timeout", "2")
    monkeypatch.setattr(server, "OPEN_S", 1.0)
    started = time.monotonic()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DatabaseError, match=r"must answer and take rows.*timeout"),
    ):
        ServerStore.open(f"postgresql+psycopg://me@127.0.0.1:{silent.getsockname()[1]}/x")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "form",
    [
        "postgresql+psycopg://me@/x?host=/nowhere&connect_timeout=1&password=secret",
        "postgresql+psycopg://me:a@secret@db/x",
        "postgresql+psycopg://me:secret/x",
        "nonsense://me:secret@/x?password=secret",
        "sqlite+pysqlcipher://:secret@/x",
        "secret",
    ],
)
def test_no_message_about_a_url_has_its_password(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "OPEN_S", 0.0)
    with pytest.raises(DatabaseError) as caught:
        ServerStore.open(form)
    assert "secret" not in str(caught.value)
