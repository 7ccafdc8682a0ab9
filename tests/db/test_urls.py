"""URLs of SQLAlchemy: the file of SQLite that one names, as SQLite says it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import sqlalchemy as sa

from flashgen.db.urls import is_same_database, parse_url, sqlite_file, to_connect, without_secrets


@pytest.mark.parametrize(
    "form",
    [
        *("sqlite:///{}", "sqlite:///{}?timeout=1", "sqlite:///{}?mode=memory", "sqlite:///{}?uri=true"),
        *("sqlite:///file:/x.db", "sqlite:///file:{}?uri=true", "sqlite:///%2e/x.db"),
        *("sqlite:///x%2edb", "sqlite:///file:x%2edb?uri=true", "sqlite:///file:x%20%23.db?uri=true"),
        *("sqlite:///file:./x.db#a?uri=true", "sqlite:///file:x.db%2500y?uri=true", "sqlite:///file:///{}?uri=true"),
        *("sqlite:///file://localhost{}?uri=true", "sqlite:///file:{}?mode=rwc&cache=shared&uri=true"),
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///:memory:?uri=true", "sqlite:///?uri=true"),
        *(
            "sqlite:///file::memory:?uri=true",
            "sqlite:///file:x?mode=memory&uri=true",
            "sqlite:///x.db?mode=rw&uri=true",
        ),
        *("sqlite:///file:?uri=true", "sqlite:///file:%3amemory%3a?uri=true"),
    ],
)
def test_the_file_is_the_one_that_sqlite_opens(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file:").mkdir()
    (tmp_path / "%2e").mkdir()
    url = form.format(tmp_path / "one.db")
    file = sqlite_file(parse_url(url))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that have no effect, or another one in SQLAlchemy's future
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            opened = connection.exec_driver_sql("PRAGMA database_list").one()[2]
        engine.dispose()
    assert file is not None
    assert opened == (str(Path(file).resolve()) if file else "")


def test_other_databases_have_no_file() -> None:
    for url in ("postgresql+psycopg://me@db/x", "nonsense://x", "sqlite://me@host/x.db"):
        assert sqlite_file(parse_url(url)) is None


def test_a_url_is_shown_without_its_secrets() -> None:
    url = parse_url("postgresql+psycopg://me:a@db:5/x?sslpassword=b&passfile=c")
    assert without_secrets(url) == "postgresql+psycopg://me:***@db:5/x"


def test_a_connection_to_postgresql_has_a_limit_and_utf8_where_its_url_says_nothing_else() -> None:
    for driver in ("", "+psycopg", "+psycopg2"):
        said = to_connect(parse_url(f"postgresql{driver}://me@db/x?host=a&connect_timeout=3")).query
        assert said == {"host": "a", "connect_timeout": "3", "client_encoding": "utf8"}
    for url in ("postgresql+pg8000://me@db/x", "mysql+pymysql://me@db/x", "sqlite:///x.db"):
        assert to_connect(parse_url(url)) == parse_url(url)


def test_a_database_is_the_same_for_whoever_connects_by_any_driver() -> None:
    one = parse_url("postgresql+psycopg://tuner@db:5/flashgen?host=/run&connect_timeout=3")
    assert is_same_database(one, parse_url("postgresql+psycopg2://me:secret@db:5/flashgen?host=/run"))
    for other in (
        "mysql://db:5/flashgen",
        "postgresql://d:5/flashgen",
        "postgresql://db/flashgen",
        "postgresql://db:5/x",
    ):
        assert not is_same_database(one, parse_url(f"{other}?host=/run"))
    assert not is_same_database(one, parse_url("postgresql://db:5/flashgen?host=/tmp"))
