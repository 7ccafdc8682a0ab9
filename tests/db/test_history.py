"""Nothing is overwritten without a trace: what was replaced, when, why and by what, and who made a record."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError, MeasureError
from flashgen.core.history import MAX_RUNNERS_UP, UNKNOWN, Origin, Replaced, RunnerUp
from flashgen.core.record import Baseline, moment, timestamp
from flashgen.db import reader
from flashgen.db.comparison import compare
from flashgen.db.exchange import export_records, import_records
from flashgen.db.layers import Layers
from flashgen.db.merging import Side, merged
from flashgen.db.past import exported, whole
from flashgen.db.reading import MAX_TEXT
from flashgen.db.store import Store
from flashgen.db.writing import Incoming
from tests.db.samples import (
    CAUSAL,
    CONFIG,
    FORMER,
    H100,
    H200,
    MEASURED,
    ORIGIN,
    PREDICTED,
    REPLACED,
    SHORT,
    hard,
    timed,
)

FASTER = timed(MEASURED, 1.0, 1.01, config=CONFIG.replace(num_warps=4), created="2026-11-21T12:00:00+00:00")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("history") / "original.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED, ORIGIN)
        store.put_replaced([REPLACED])
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A database with a record, its origin and one that it replaced."""
    return Path(shutil.copyfile(original, tmp_path / "mine.sqlite3"))


# --- replacing -------------------------------------------------------------------------------------------------------


def test_a_search_that_replaces_a_record_leaves_the_old_one(path: Path) -> None:
    other = replace(ORIGIN, run="another", seed=None, runners_up=())
    before = moment(timestamp())
    with Store.open(path) as store:
        store.put_record(hard(FASTER, 2.0, 2.1), other, Incoming(source="run another"))
        past = store.past(CAUSAL, H200)
    assert past.records == ((hard(FASTER, 2.0, 2.1), other),)
    last, first = past.replaced
    assert first == REPLACED
    assert last == Replaced(record=MEASURED, origin=ORIGIN, moment=last.moment, reason="search", source="run another")
    assert before <= moment(last.moment) <= moment(timestamp())


def test_every_field_of_a_record_survives_its_replacement(path: Path) -> None:
    full = hard(FORMER, 3.0, baselines=(Baseline(impl="b", median_ms=2.0), Baseline(impl="a", median_ms=1.0)))
    with Store.open(path) as store:
        for record in (full, MEASURED, replace(PREDICTED, created=""), PREDICTED):
            store.put_record(record)
        assert [each.record for each in store.past(CAUSAL).replaced] == [
            replace(PREDICTED, created=""),
            full,
            MEASURED,
            FORMER,
        ]


def test_what_is_stored_again_is_not_lost(path: Path) -> None:
    with Store.open(path) as store:
        store.put_record(MEASURED, replace(ORIGIN, run="again"))
        past = store.past(CAUSAL)
    assert [origin.run for _, origin in past.records] == ["again"]
    assert past.replaced == (REPLACED,)


def test_a_row_that_breaks_a_rule_of_today_leaves_its_trace(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("""UPDATE records SET knobs = '{"of_before":3}', family = 'gone', source_digest = 'theirs'""")
    connection.commit()
    connection.close()
    with Store.open(path) as store:
        store.put_record(FASTER)
        last, _ = store.past(CAUSAL).replaced
    assert (last.record.config.family, last.record.config.knobs) == ("gone", (("of_before", 3),))
    assert (last.record.source_digest, last.origin) == ("theirs", ORIGIN)


def test_workloads_and_devices_have_a_history_of_their_own(path: Path) -> None:
    with Store.open(path) as store:
        for record in (replace(MEASURED, device=H100), replace(FASTER, device=H100), replace(MEASURED, workload=SHORT)):
            store.put_record(record)
        assert [each.record.device for each in store.past(CAUSAL, H100).replaced] == [H100]
        assert [each.record.device for each in store.past(CAUSAL).replaced] == [H100, H200]
        assert store.past(SHORT).replaced == ()
        assert store.past(CAUSAL.with_shape(batch=99)).records == ()


def test_a_transaction_that_fails_leaves_no_history(path: Path) -> None:
    with Store.open(path) as store:
        with pytest.raises(DatabaseError, match="takes at least"):
            store.put_records([FASTER, timed(replace(MEASURED, workload=SHORT), 1e-6)])
        assert store.past(CAUSAL).replaced == (REPLACED,)


def test_a_reason_is_one_of_four() -> None:
    with pytest.raises(DatabaseError, match="search, import, merge, retime, got 'whim'"):
        Incoming(reason="whim")
    with pytest.raises(MeasureError, match="got 'whim'"):
        replace(REPLACED, reason="whim")


def test_a_runner_up_is_as_far_behind_as_the_race_was_decided_by(path: Path) -> None:
    """Faster on the first profile, slower on all of them together, which is what its race was decided by."""
    profiled = replace(MEASURED.measurement, times_ms=(1.0, 1.2), profile_times_ms=(("ramp", (1.0, 1.2)),))  # type: ignore[type-var]
    rival = RunnerUp(config=FASTER.config, times_ms=(0.9, 1.08, 1.0), profile_times_ms=(("ramp", (1.3, 1.56, 1.0)),))
    assert rival.over(profiled) == pytest.approx(1.1)
    assert replace(rival, profile_times_ms=()).over(profiled) is None, "it is from before, and one profile decides not"
    hard = replace(MEASURED.measurement, times_ms=(1.0,), hard_times_ms=(2.0,))  # type: ignore[type-var]
    both = RunnerUp(config=FASTER.config, times_ms=(1.21,), hard_times_ms=(2.0,))
    assert (both.over(hard), both.over(profiled)) == (pytest.approx(1.1), None)
    with Store.open(path) as store:
        store.put_record(MEASURED, Origin(runners_up=(rival, both)))
        ((_, origin),) = store.past(CAUSAL).records
    assert origin.runners_up == (rival, both)
    for profiles, rule in ((("noon", (1.0,) * 3),), "one of"), ((("ramp", (1.0,)),), "same rounds"):
        with pytest.raises(MeasureError, match=rule):
            replace(rival, profile_times_ms=profiles)


def test_runners_up_are_bounded(path: Path) -> None:
    rival = RunnerUp(config=CONFIG, times_ms=(1.23456789012345,) * 100)
    with pytest.raises(MeasureError, match="at most 16 runners-up, got 17"):
        Origin(runners_up=(rival,) * (MAX_RUNNERS_UP + 1))
    with pytest.raises(MeasureError, match="at least one time"):
        RunnerUp(config=CONFIG, times_ms=())
    with Store.open(path) as store:  # of more than a text may hold the slowest are left out
        store.put_record(MEASURED, Origin(host="h" * 9000 + "\x1b", runners_up=(rival,) * MAX_RUNNERS_UP))
        ((_, origin),) = store.past(CAUSAL).records
    assert 0 < len(origin.runners_up) < MAX_RUNNERS_UP
    assert (len(origin.host), origin.host[-5:]) == (512, "h\\x1b")


def test_a_history_is_pruned_by_hand_alone(path: Path) -> None:
    with Store.open(path) as store:
        for number in range(3):
            store.put_record(timed(MEASURED, 2.0 + number))
            store.put_record(replace(PREDICTED, predicted_ms=2.0 + number))
        assert store.counts()["history"] == 6
        assert store.prune_history(keep=2) == 2
        kept = [(each.record.provenance, each.record.time_ms) for each in store.past(CAUSAL).replaced]
        assert kept == [("predicted", 3.0), ("measured", 3.0), ("predicted", 2.0), ("measured", 2.0)]
        assert store.prune_history() == 4
        assert store.past(CAUSAL).replaced == ()
        assert len(store.records()) == 2
        with pytest.raises(DatabaseError, match="at least 0"):
            store.prune_history(-1)


# --- other files -----------------------------------------------------------------------------------------------------


def test_an_import_says_what_it_replaced_and_brings_who_made_it(path: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.sqlite3"
    other = replace(ORIGIN, host="their-host")
    before = replace(REPLACED, record=timed(FORMER, 1.7))
    export_records([FASTER], theirs, origins={FASTER.identity: other}, replaced=[before])
    with Store.open(path) as store:
        assert import_records(store, theirs).replaced == 1
        past = store.past(CAUSAL)
        assert past.records == ((FASTER, other),)
        last, first = past.replaced
        assert (last.record, last.origin, last.reason, last.source) == (MEASURED, ORIGIN, "import", "theirs.sqlite3")
        assert first == REPLACED, "the history of the other file stays there"
        assert import_records(store, theirs).kept == 1
        assert len(store.past(CAUSAL).replaced) == 2


def test_an_export_has_a_history_only_if_asked(path: Path, tmp_path: Path) -> None:
    with Layers.open([path]) as layers:
        found = [hit for hit in layers.records() if hit[1] == str(path)]
        origins, replaced = exported(layers.layers, found)
    export_records([MEASURED], tmp_path / "plain.sqlite3")
    export_records([MEASURED], tmp_path / "full.sqlite3", origins=origins, replaced=replaced)
    with Store.open(tmp_path / "plain.sqlite3", shipped=True) as store:
        assert store.past(CAUSAL).records == ((MEASURED, UNKNOWN),)
        assert store.past(CAUSAL).replaced == ()
    assert b"gpu-7" not in (tmp_path / "plain.sqlite3").read_bytes()
    with Store.open(tmp_path / "full.sqlite3", shipped=True) as store:
        assert store.past(CAUSAL).records == ((MEASURED, ORIGIN),)
        assert store.past(CAUSAL).replaced == (REPLACED,)


def test_the_same_history_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "first.sqlite3", tmp_path / "second.sqlite3"]
    for path in paths:
        export_records([MEASURED], path, origins={MEASURED.identity: ORIGIN}, replaced=[REPLACED])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def side(path: Path) -> Side:
    with Store.open(path, read_only=True) as store:
        return Side(path=path, known=whole(store.reader))


def test_a_merge_keeps_the_loser_and_both_histories(path: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.sqlite3"
    older = replace(REPLACED, record=timed(FORMER, 1.7), moment="2026-11-19T12:00:00+00:00")
    only = replace(MEASURED, workload=SHORT)
    export_records([FASTER, only], theirs, origins={only.identity: ORIGIN}, replaced=[older, REPLACED])
    first, second = side(path), side(theirs)
    pairs = compare(first.known, second.known)
    found = merged(first, second, [(pair, pair) for pair in pairs])
    assert found.records == (FASTER, only)
    assert found.origins == {only.identity: ORIGIN}
    *before, last = found.replaced
    assert before == [older, REPLACED], "once, although both sides have it"
    assert (last.record, last.origin, last.reason, last.source) == (MEASURED, ORIGIN, "merge", "theirs.sqlite3")


def test_a_race_replaces_the_records_of_both_sides(path: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.sqlite3"
    export_records([FASTER], theirs)
    first, second = side(path), side(theirs)
    (stored,) = compare(first.known, second.known)
    today = [timed(record, 1.4, 1.5, created="2026-11-22T12:00:00+00:00") for record in (MEASURED, FASTER)]
    decided = replace(stored, first=today[0], second=today[1], verdict="first")
    found = merged(first, second, [(stored, decided)], run="r", host="h")
    assert found.records == (today[0],)
    rival = RunnerUp(config=FASTER.config, times_ms=(1.4, 1.5))
    assert found.origins == {MEASURED.identity: Origin(run="r", host="h", runners_up=(rival,))}
    assert [(each.record, each.reason, each.source) for each in found.replaced] == [
        (FORMER, "search", REPLACED.source),
        (MEASURED, "retime", "race r on h"),
        (FASTER, "retime", "race r on h"),
    ]


def test_what_did_not_run_in_a_race_is_no_runner_up(path: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.sqlite3"
    export_records([FASTER], theirs)
    first, second = side(path), side(theirs)
    (stored,) = compare(first.known, second.known)
    decided = replace(stored, second=timed(FASTER, 1.4), verdict="second")
    found = merged(first, second, [(stored, decided)], run="r", host="h")
    assert found.origins == {MEASURED.identity: Origin(run="r", host="h")}


def test_a_difference_of_histories_is_none(path: Path, tmp_path: Path) -> None:
    export_records([MEASURED], tmp_path / "plain.sqlite3")
    (pair,) = compare(side(path).known, side(tmp_path / "plain.sqlite3").known)
    assert pair.verdict == "same"


# --- look-ups --------------------------------------------------------------------------------------------------------


def test_a_look_up_reads_no_history(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its rows nor its code: the first call of a process pays for none of it."""
    read: list[str] = []

    def watched(path: Path, access: reader.Access) -> sqlite3.Connection:
        connection = real(path, access)

        def seen(action: int, first: str | None, *others: object) -> int:
            if action == sqlite3.SQLITE_READ and first is not None:
                read.append(first)
            return sqlite3.SQLITE_OK

        connection.set_authorizer(seen)
        return connection

    real = reader.connect
    with Layers.open([path]) as layers:
        monkeypatch.setattr(reader, "connect", watched)
        assert layers.record(CAUSAL, H200) == (MEASURED, str(path))
        assert layers.records(specialization=CAUSAL.specialization.workload_class)
        assert {"records", "workloads", "devices", "anchors"} <= set(read)
        assert not {"history", "origins"} & set(read)
        layers.past(CAUSAL)
        assert {"history", "origins"} <= set(read)


# --- files of others -------------------------------------------------------------------------------------------------


def tamper(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute(statement, values).rowcount == 1
    connection.commit()
    connection.close()


def columns_of(path: Path, table: str) -> list[str]:
    connection = sqlite3.connect(path)
    names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    connection.close()
    return names


LONG = "x" * 2_000_000
ROWS = [
    ("history", "reason", "whim", "search, import, merge, retime"),
    ("history", "reason", "\x1b[2J", "printable"),
    ("history", "moment", "soon", "moment must be an ISO 8601"),
    ("history", "moment", "9999-01-01", "years 2020"),
    ("history", "source", "\x1b]0;title\x07", "printable"),
    ("history", "source", "s" * 600, "512 printable"),
    ("history", "knobs", "[]", "JSON object"),
    ("history", "knobs", "[" * 5000, "JSON object"),
    ("history", "knobs", f'{{"a": 1{"0" * 5000}}}', "JSON object"),
    ("history", "times_ms", "[1e-6]", "takes at least"),
    ("history", "anchors", "[1]", "anchors must be a JSON object"),
    ("history", "anchors", '{"sdpa": "fast"}', "type float"),
    ("history", "anchors", '{"sdpa": 1e308}', "times are from 1e-09"),
    ("history", "anchors", '{"\\u001b[2J": 1.0}', "printable"),
    ("history", "anchors", json.dumps({f"i{number}": 1 for number in range(65)}), "at most 64"),
    ("history", "runners_up", "{}", "JSON list of at most 16"),
    ("history", "runners_up", f"[{','.join(['{}'] * 17)}]", "JSON list of at most 16"),
    ("history", "runners_up", '[{"family": "x"}]', "a runner-up has"),
    (
        "history",
        "runners_up",
        '[{"family":"x","knobs":{},"times_ms":[1],"hard_times_ms":[],"profile_times_ms":[]}]',
        "JSON",
    ),
    ("history", "device_id", 999, "point to its device"),
    ("history", "seed", "many", "seed must be of type int"),
    ("history", "host", b"\x00", "type str"),
    ("history", "provenance", "certified", "provenance is one of"),
    ("history", "predicted_ms", -1.0, "times are from 1e-09"),
    pytest.param("history", "runners_up", LONG, "too long", marks=pytest.mark.skipif(not reader.HAS_LIMITS, reason="")),
    ("history", "runners_up", "z" * (MAX_TEXT + 1), "16384 printable"),
    ("origins", "run", b"\x07", "run must be of type str"),
    ("origins", "seed", LONG, "type int|too long|too big"),
    ("origins", "seed", 0.5, "seed must be of type int"),
    ("origins", "runners_up", LONG, "16384 printable|too long"),
    ("origins", "runners_up", '[{"family":"x","knobs":{},"times_ms":[1e999],"hard_times_ms":[]}]', "finite"),
    ("origins", "runners_up", '[{"family":"x","knobs":{"a":[1]},"times_ms":[1],"hard_times_ms":[]}]', "must be an int"),
    ("origins", "host", "\x1b[2J", "printable"),
]


@pytest.mark.parametrize(("table", "column", "value", "rule"), ROWS, ids=range(len(ROWS)))
def test_a_bad_row_of_the_history_costs_itself(
    path: Path, table: str, column: str, value: object, rule: str, tmp_path: Path
) -> None:
    twin = ", ".join(name for name in columns_of(path, "history") if name != "id")
    tamper(path, f"INSERT INTO history ({twin}) SELECT {twin} FROM history")
    tamper(path, f"UPDATE {table} SET {column} = ? WHERE id = 1", value)
    with Store.open(path, read_only=True) as store:
        assert store.records() == [MEASURED]
        with pytest.warns(UserWarning, match=rule) as caught:
            past = store.past(CAUSAL)
        assert [str(path) in str(each.message) for each in caught] == [True]
        assert past.replaced == (REPLACED,) * (1 if table == "history" else 2)
        assert past.records == ((MEASURED, UNKNOWN if table == "origins" else ORIGIN),)
        with pytest.raises(DatabaseError, match=rule):
            whole(store.reader)
    if table == "origins":
        with Store.open(tmp_path / "ours.sqlite3") as ours, pytest.raises(DatabaseError, match=rule):
            import_records(ours, path)


def test_a_bad_history_of_another_file_stays_there(path: Path, tmp_path: Path) -> None:
    tamper(path, "UPDATE history SET workload_id = 999, knobs = '['")
    with Store.open(path, read_only=True) as store:
        assert store.past(CAUSAL).replaced == ()
        with pytest.raises(DatabaseError, match="point to its workload"):
            whole(store.reader)
    with Store.open(tmp_path / "ours.sqlite3") as ours:
        assert import_records(ours, path).added == 1
        assert ours.past(CAUSAL).records == ((MEASURED, ORIGIN),)


def test_a_flood_is_listed_to_its_last_thousand(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = sqlite3.connect(path)
    columns = [name for name in columns_of(path, "history") if name != "id"]
    row = f"SELECT {', '.join(columns)} FROM history WHERE id = 1"
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1500)"
    connection.execute(f"INSERT INTO history ({', '.join(columns)}) {numbers} SELECT h.* FROM n, ({row}) h")
    connection.commit()
    connection.close()
    with Store.open(path, read_only=True) as store:
        assert len(store.past(CAUSAL).replaced) == 1000
