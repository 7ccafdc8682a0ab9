"""`flashgen db history`, `prune` and `export --history`: what records took the place of."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from flashgen.core.settings import settings
from flashgen.db.store import Store
from tests.cli.conftest import Invoke
from tests.db.samples import CAUSAL, MEASURED, ORIGIN, REPLACED, SHORT, WIDE, timed

HERE = "--device", "h200"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's database, in which a record took the place of another one; nothing ships."""
    monkeypatch.setattr("flashgen.db.layers.shipped", lambda name: tmp_path / "none")
    path = settings().db_layers[0]
    with Store.open(path) as store:
        store.put_record(MEASURED, ORIGIN)
        store.put_replaced([REPLACED])
    return path


def test_a_history_is_listed(invoke: Invoke, path: Path) -> None:
    shown = invoke("db", "history", CAUSAL.key, *HERE).stdout
    for text in (
        *(MEASURED.created, REPLACED.moment, "search", REPLACED.source, ORIGIN.run, REPLACED.origin.run, "gpu-7"),
        *("20 s", "2, the best 1.136x", "triton 3.6.0, torch 2.11.0, driver 580.95.05", str(path)),
    ):
        assert text in shown
    assert shown.index(MEASURED.created) < shown.index(REPLACED.moment)


def test_a_history_as_json(invoke: Invoke, path: Path) -> None:
    now, then = json.loads(invoke("db", "history", CAUSAL.key, "--json").stdout)
    assert (now["time_ms"], now["replaced"], now["layer"]) == (1.25, None, str(path))
    assert now["origin"]["run"] == ORIGIN.run
    assert (now["origin"]["host"], now["origin"]["seed"], now["origin"]["budget"]) == ("gpu-7", 3, "20 s")
    (first, second) = now["origin"]["runners_up"]
    assert (first["median_ms"], first["times_ms"], first["hard_times_ms"]) == (1.31, [1.3, 1.31, 1.35], [2.5, 2.1, 2.4])
    assert (first["over_winner"], second["over_winner"]) == (None, pytest.approx(1.1364, rel=1e-3))
    assert (first["knobs"]["num_warps"], second["knobs"]["num_stages"]) == (4, 2)
    assert (then["time_ms"], then["versions"]["torch"]) == (1.5, "2.11.0")
    assert then["replaced"] == {"moment": REPLACED.moment, "reason": "search", "source": REPLACED.source}


def test_what_has_no_history_says_so(invoke: Invoke, path: Path) -> None:
    for arguments, code, rule in (
        (["history", WIDE.key], 1, "has none"),
        (["history", "b4-h32"], 2, "a shape needs"),
        (["history", CAUSAL.key, "--device", "abacus"], 2, "a target is one of"),
        (["prune"], 2, "--history"),
        (["prune", "--history", "--keep", "-1"], 2, "--keep"),
    ):
        result = invoke("db", *arguments)
        assert (result.exit_code, rule in result.stderr) == (code, True), result.stderr


def test_a_history_is_exported_and_pruned(invoke: Invoke, path: Path, tmp_path: Path) -> None:
    plain, full = tmp_path / "plain.sqlite3", tmp_path / "full.sqlite3"
    assert invoke("db", "export", plain).exit_code == 0
    assert invoke("db", "export", full, "--history").exit_code == 0
    assert plain.with_suffix(".csv").read_bytes() == full.with_suffix(".csv").read_bytes()
    assert [counts(each) for each in (plain, full)] == [(1, 0, 0), (1, 1, 1)]
    verified = invoke("db", "verify", full)
    assert (verified.exit_code, "1 replaced ones, 0 tried configs, 0 bad rows" in verified.stdout) == (0, True)
    assert invoke("db", "diff", plain, full).stdout == "no difference\n"
    assert "1 replaced record forgotten" in invoke("db", "prune", "--history").stdout
    assert counts(path) == (1, 1, 0)


def test_pruning_makes_no_database(invoke: Invoke) -> None:
    assert "0 replaced records forgotten" in invoke("db", "prune", "--history").stdout
    assert not settings().db_layers[0].exists()


def test_a_merged_file_has_the_history_of_both(invoke: Invoke, path: Path, tmp_path: Path) -> None:
    theirs, both = tmp_path / "theirs.sqlite3", tmp_path / "both.sqlite3"
    with Store.open(theirs) as store:
        store.put_records([timed(MEASURED, 1.0), timed(MEASURED, 1.1, workload=SHORT)])
    assert invoke("db", "merge", path, theirs, "-o", both, "--no-measure").exit_code == 0
    assert counts(both) == (2, 0, 2)
    with Store.open(both, read_only=True) as store:
        last, first = store.past(CAUSAL).replaced
    assert first == REPLACED
    assert (last.record, last.origin, last.reason, last.source) == (MEASURED, ORIGIN, "merge", "theirs.sqlite3")


def test_a_bad_row_of_the_history_is_found(invoke: Invoke, path: Path, tmp_path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE history SET host = ?", ("\x1b[2J",))
        connection.execute("UPDATE origins SET seed = 'many'")
    connection.close()
    done = invoke("db", "verify", path)
    assert done.exit_code == 1
    assert "1 records (1 of kernels that have changed), 0 replaced ones, 0 tried configs, 2 bad rows" in done.stdout
    assert "history 1: host must be" in done.stdout
    assert "origins 1: seed must be" in done.stdout
    assert "\x1b" not in done.stdout
    assert invoke("db", "merge", path, path, "-o", tmp_path / "c.sqlite3").exit_code == 1


def counts(path: Path) -> tuple[int, int, int]:
    """Records, origins and replaced records."""
    with Store.open(path, read_only=True) as store:
        found = store.counts()
    return found["records"], found["origins"], found["history"]


def test_a_merge_takes_what_is_signed(
    invoke: Invoke, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = pytest.importorskip("tests.fakes.minisign").Signer()
    both = tmp_path / "both.sqlite3"
    copies = [tmp_path / "a.sqlite3", tmp_path / "b.sqlite3"]
    for copy in copies:
        copy.write_bytes(path.read_bytes())
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    monkeypatch.setenv("FLASHGEN_TRUSTED_KEYS", str(signer.publish(tmp_path / "ours.pub")))
    settings.cache_clear()
    signer.sign(copies[0])
    for command in (["merge", *copies, "-o", both], ["import", copies[1]]):
        refused = invoke("db", *command)
        assert (refused.exit_code, "b.sqlite3.minisig is missing" in refused.stderr) == (1, True), refused.stderr
    assert not both.exists()
    signer.sign(copies[1])
    assert invoke("db", "merge", *copies, "-o", both).exit_code == 0
