"""Export gives one reproducible file and a CSV; import takes all or nothing and keeps the better record."""

from __future__ import annotations

import contextlib
import csv
import os
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.errors import DatabaseError
from flashgen.core.folders import ABANDONED_SECONDS
from flashgen.core.history import UNKNOWN, Origin, RunnerUp
from flashgen.core.record import Baseline, Measurement, TuningRecord
from flashgen.db.exchange import CSV_COLUMNS, SCRATCH_PREFIX, better, export_records, import_records, to_csv
from flashgen.db.store import Store
from flashgen.db.writing import Merged
from tests.db.samples import (
    CAUSAL,
    H100,
    H200,
    HARD_TIMES,
    MEASURED,
    PREDICTED,
    REPLACED,
    SHORT,
    TRIAL,
    WIDE,
    hard,
    timed,
)
from tests.disk import full_disk

RECORDS = [replace(MEASURED, workload=workload) for workload in (WIDE, SHORT, CAUSAL)] + [PREDICTED]


def test_an_export_is_one_file_that_holds_the_same_records(tmp_path: Path) -> None:
    path = tmp_path / "out" / "nvidia_h200.sqlite3"
    assert export_records(RECORDS, path) == 4
    assert sorted(file.name for file in path.parent.iterdir()) == ["nvidia_h200.csv", "nvidia_h200.sqlite3"]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert connection.execute("SELECT count(*) FROM trials").fetchone() == (0,)
    connection.close()
    with Store.open(path, shipped=True) as store:
        assert sorted(map(repr, store.records())) == sorted(map(repr, RECORDS))


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.sqlite3", tmp_path / "second.sqlite3"
    export_records(RECORDS, first)
    export_records(reversed(RECORDS), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".csv").read_bytes() == second.with_suffix(".csv").read_bytes()
    export_records(RECORDS[:1], first)
    with Store.open(first, shipped=True) as store:
        assert store.records() == RECORDS[:1]


def test_the_csv_is_readable(tmp_path: Path) -> None:
    to_csv([MEASURED, PREDICTED], tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        measured, predicted = csv.DictReader(file)
    assert tuple(measured) == CSV_COLUMNS
    assert measured["workload"] == CAUSAL.key
    assert "block_m=128 block_n=" in measured["knobs"]
    assert measured["median_ms"] == "1.25"
    assert measured["hard_ms"] == ""
    assert measured["windows"] == "3"
    assert float(measured["tflops"]) == pytest.approx(MEASURED.tflops, rel=1e-5)
    assert measured["anchors"] == "sdpa-cudnn=1.4 sdpa-flash=1.9"
    assert measured["triton"] == "3.6.0"
    assert (predicted["median_ms"], predicted["predicted_ms"]) == ("", "1.5")


def test_times_on_hard_data_travel_with_a_record(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite3"
    export_records([hard(MEASURED, *HARD_TIMES)], path)
    with Store.open(tmp_path / "ours.sqlite3") as store:
        import_records(store, path)
        assert store.records() == [hard(MEASURED, *HARD_TIMES)]
    with path.with_suffix(".csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["median_ms"], row["hard_ms"]) == ("1.25", "2.4")


def test_drafts_of_killed_exports_are_cleared_away(tmp_path: Path) -> None:
    old, new, foreign = (
        tmp_path / f"{name}.tmp" for name in (f"{SCRATCH_PREFIX}old", f"{SCRATCH_PREFIX}new", "tmpold")
    )
    long_ago = time.time() - 2 * ABANDONED_SECONDS
    for folder in (old, new, foreign):
        folder.mkdir()
        (folder / "draft.sqlite3").write_bytes(b"half")
        if folder is not new:
            os.utime(folder, (long_ago, long_ago))
    export_records(RECORDS, tmp_path / "out.sqlite3")
    assert (old.exists(), new.exists(), foreign.exists()) == (False, True, True)


@pytest.mark.parametrize("name", ["out.txt", "."])
def test_an_export_needs_a_name_of_its_kind(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatabaseError, match=r"ends in \.sqlite3"):
        export_records(RECORDS, tmp_path / name)


def test_an_export_that_cannot_be_finished_names_its_place_and_not_its_draft(tmp_path: Path) -> None:
    path = tmp_path / "out.sqlite3"
    export_records([MEASURED], path)
    before = path.read_bytes()
    with full_disk(), pytest.raises(DatabaseError) as caught:
        export_records([PREDICTED], path)
    assert f"{path}: " in str(caught.value)
    assert SCRATCH_PREFIX not in str(caught.value)
    assert path.read_bytes() == before


def test_an_export_to_nowhere_is_refused() -> None:
    with pytest.raises(DatabaseError, match="place that can be written"):
        export_records(RECORDS, "/proc/nowhere/out.sqlite3")


def test_an_export_takes_the_place_of_no_database_with_trials(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite3"
    with Store.open(path) as store:
        store.put_trial(TRIAL)
    with pytest.raises(DatabaseError, match="has 1 tried configs"):
        export_records(RECORDS, path)
    with Store.open(path, read_only=True) as store:
        assert store.trials(TRIAL.workload, TRIAL.device) == [TRIAL]


def test_an_export_takes_the_place_of_no_database_that_was_written_to(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
    with pytest.raises(DatabaseError, match="is a database that was written to"):
        export_records([PREDICTED], path)
    with Store.open(path, read_only=True) as store:
        assert store.records() == [MEASURED]
    assert not path.with_suffix(".csv").exists()


def test_an_export_forgets_no_history(tmp_path: Path) -> None:
    """Where a file system has no WAL, a database in use is not to be told from an export that has a history."""
    path = tmp_path / "tuned.sqlite3"
    export_records([MEASURED], path, replaced=[REPLACED])
    with pytest.raises(DatabaseError, match="1 replaced records that this lacks"):
        export_records([MEASURED], path)
    export_records([MEASURED, PREDICTED], path, replaced=[REPLACED])
    with Store.open(path, read_only=True) as store:
        assert (len(store.records()), store.counts()["history"]) == (2, 1)


def test_an_export_takes_the_place_of_no_csv_of_others(tmp_path: Path) -> None:
    path = tmp_path / "out.sqlite3"
    table = path.with_suffix(".csv")
    table.write_text("date,what\n")
    with pytest.raises(DatabaseError, match=r"CSV of an export alone, which .*out\.csv is not"):
        export_records(RECORDS, path)
    assert (table.read_text(), path.exists()) == ("date,what\n", False)
    table.unlink()
    table.mkdir()
    with pytest.raises(DatabaseError, match="CSV of an export alone"):
        export_records(RECORDS, path)
    assert not path.exists()


def test_an_export_takes_the_place_of_the_csv_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "out.sqlite3"
    path.with_suffix(".csv").write_text(",".join((*CSV_COLUMNS[:8], "a_former_column")) + "\n")
    export_records(RECORDS, path)
    assert "a_former_column" not in path.with_suffix(".csv").read_text()


def test_an_export_takes_the_place_of_no_file_of_others(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    content = path.read_bytes()
    with pytest.raises(DatabaseError, match="made by something else"):
        export_records(RECORDS, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("is_there", [True, False])
def test_an_export_is_not_read_with_the_journal_of_another_database(tmp_path: Path, is_there: bool) -> None:
    """Pages of such a WAL would stand in for those of the export, which SQLite then calls malformed."""
    path = tmp_path / "out.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED)
        if not is_there:
            path.unlink()
        with pytest.raises(DatabaseError, match="no other database is in use"):
            export_records([PREDICTED], path)
        assert path.exists() == is_there


def test_an_export_to_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="place that can be used"):
        export_records(RECORDS, tmp_path / f"{'a' * 300}.sqlite3")


def test_an_import_adds_replaces_and_keeps(tmp_path: Path) -> None:
    theirs = [timed(MEASURED, 1.0), replace(MEASURED, workload=SHORT), timed(MEASURED, 9.0, device=H100)]
    export_records(theirs, tmp_path / "theirs.sqlite3")
    ours = [MEASURED, timed(MEASURED, 5.0, device=H100), PREDICTED]
    with Store.open(tmp_path / "ours.sqlite3") as store:
        store.put_records(ours)
        store.put_trial(TRIAL)
        assert import_records(store, tmp_path / "theirs.sqlite3") == Merged(added=1, replaced=1, kept=1)
        assert store.record(CAUSAL, H200) == theirs[0]
        assert store.record(SHORT, H200) == theirs[1]
        assert store.record(CAUSAL, H100) == ours[1]
        assert store.record(CAUSAL, H200, provenance="predicted") == PREDICTED
        assert store.trials(CAUSAL, H200) == [TRIAL]
        assert import_records(store, tmp_path / "theirs.sqlite3") == Merged(added=0, replaced=0, kept=3)


def test_a_record_of_a_kernel_of_today_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    stale, current = timed(MEASURED, 1.0), timed(replace(MEASURED, source_digest="today"), 1.5)

    def is_current(record: TuningRecord) -> bool:
        return record.source_digest == "today"

    for theirs, ours, merged in (
        (current, stale, Merged(added=0, replaced=1, kept=0)),
        (stale, current, Merged(added=0, replaced=0, kept=1)),
    ):
        export_records([theirs], tmp_path / "theirs.sqlite3")
        with Store.open(tmp_path / f"{ours.source_digest}.sqlite3") as store:
            store.put_record(ours)
            assert import_records(store, tmp_path / "theirs.sqlite3", is_current) == merged
            assert store.record(CAUSAL, H200) == current


def test_one_bad_row_and_nothing_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite3"
    export_records([replace(MEASURED, workload=w) for w in (CAUSAL, SHORT, WIDE)], path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE records SET knobs = replace(knobs, '128', '\"import os\"') WHERE id = 2")
    connection.commit()
    connection.close()
    with Store.open(tmp_path / "ours.sqlite3") as store:
        with pytest.raises(DatabaseError, match=r"theirs\.sqlite3 has 1 bad: records 2: .*import os"):
            import_records(store, path)
        assert set(store.counts().values()) == {0}


def test_a_foreign_file_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite3"
    path.write_text("hello " * 1000)
    with Store.open(tmp_path / "ours.sqlite3") as store, pytest.raises(DatabaseError, match=r"notes\.sqlite3"):
        import_records(store, path)


NEWER = "2026-11-21T00:00:00+00:00"


@pytest.mark.parametrize(
    ("theirs", "ours", "wins"),
    [
        (timed(MEASURED, 1.0), MEASURED, True),  # 25% faster
        (timed(MEASURED, 1.5), MEASURED, False),
        (timed(MEASURED, 1.24), MEASURED, False),  # within the noise, and not newer
        (timed(MEASURED, 1.26, created=NEWER), MEASURED, True),  # within the noise, and newer
        (timed(MEASURED, 1.5, created=NEWER), MEASURED, False),
        (replace(PREDICTED, created=NEWER), PREDICTED, True),
        (PREDICTED, PREDICTED, False),
        (MEASURED, MEASURED, False),
    ],
)
def test_the_better_record_wins(theirs: object, ours: object, wins: bool) -> None:
    assert better(theirs, ours) is wins  # type: ignore[arg-type]


RIVAL = timed(MEASURED, 1.0, config=MEASURED.config.replace(num_warps=4))
"""25% faster than MEASURED, as its own race said."""


def raced(rival: TuningRecord, *times_ms: float) -> Origin:
    """Of a record with three windows of 1.25 ms."""
    return Origin(runners_up=(RunnerUp(config=rival.config, times_ms=times_ms),))


def test_a_race_that_had_both_configs_decides() -> None:
    won = raced(RIVAL, 1.3, 1.3, 1.3)
    assert better(MEASURED, RIVAL, won)
    assert not better(RIVAL, MEASURED, UNKNOWN, won)
    assert not better(MEASURED, RIVAL, raced(RIVAL, 1.2, 1.2, 1.2)), "it stayed, and the other was ahead"
    assert not better(MEASURED, RIVAL, raced(replace(RIVAL, config=RIVAL.config.replace(num_warps=2)), 1.3))
    hard_rival = hard(RIVAL, 1.0)
    assert better(hard_rival, MEASURED, UNKNOWN, raced(hard_rival, 1.3)), "that race had normal data alone"


@pytest.mark.parametrize(("created", "wins"), [(NEWER, True), (MEASURED.created, False)])
def test_the_newer_of_two_such_races_decides(created: str, wins: bool) -> None:
    theirs = replace(MEASURED, created=created)
    assert better(theirs, RIVAL, raced(RIVAL, 1.3), raced(theirs, 1.1)) is wins


def test_an_import_reads_both_races(tmp_path: Path) -> None:
    """Of what it takes and of what is there, also where the row of a race breaks a rule."""
    paths = [tmp_path / name for name in ("theirs.sqlite3", "none.sqlite3")]
    for path, origins in zip(paths, ({MEASURED.identity: raced(RIVAL, 1.3)}, {}), strict=True):
        export_records([MEASURED], path, origins=origins)
    export_records([RIVAL], tmp_path / "rival.sqlite3")
    replaced, kept = Merged(added=0, replaced=1, kept=0), Merged(added=0, replaced=0, kept=1)
    with Store.open(tmp_path / "ours.sqlite3") as store:
        store.put_record(RIVAL)
        assert import_records(store, paths[1]) == kept
        assert import_records(store, paths[0]) == replaced
        assert import_records(store, tmp_path / "rival.sqlite3") == kept
    connection = sqlite3.connect(tmp_path / "ours.sqlite3")
    connection.execute("UPDATE origins SET runners_up = 'none'")
    connection.commit()
    connection.close()
    with Store.open(tmp_path / "ours.sqlite3") as store:
        assert import_records(store, tmp_path / "rival.sqlite3") == replaced


def both(normal_ms: float, hard_ms: float | None, reference_ms: float = 2.5, created: str = NEWER) -> TuningRecord:
    record = timed(MEASURED, normal_ms, created=created)
    assert record.measurement is not None
    record = replace(record, measurement=replace(record.measurement, reference_ms=reference_ms))
    return record if hard_ms is None else hard(record, hard_ms)


@pytest.mark.parametrize(
    ("one", "other", "wins"),
    [
        (both(1.03, 1.05), both(1.0, 2.0), True),  # 3% slower on normal data, and even
        (both(1.0, 2.0), both(1.03, 1.05), False),
        (both(1.0, 1.0), both(1.2, 0.9), True),  # by the geometric mean
        (both(1.03, 1.05), both(1.0, None), True),  # nobody knows what the other does to hard data
        (both(1.0, None), both(1.03, 1.05), False),
        (both(1.15, 1.15), both(1.0, None), False),  # more than being even may cost
        (both(1.0, None), both(1.15, 1.15), True),
        (both(1.3, 1.4, 3.2), both(1.25, 1.25), True),  # of a cooler card, by the reference of the same round
        (both(1.3, 2.6, 3.2), both(1.25, 1.25), False),
    ],
)
def test_a_record_wins_by_both_of_its_times(one: TuningRecord, other: TuningRecord, wins: bool) -> None:
    assert better(one, other) is wins


def test_an_import_keeps_what_was_measured_on_hard_data(tmp_path: Path) -> None:
    export_records([both(1.0, None)], tmp_path / "old.sqlite3")
    with Store.open(tmp_path / "ours.sqlite3") as store:
        store.put_record(both(1.03, 1.05, created=MEASURED.created))
        assert import_records(store, tmp_path / "old.sqlite3") == Merged(added=0, replaced=0, kept=1)


def test_speeds_are_compared_by_the_reference_of_the_same_round() -> None:
    def record(time_ms: float, reference_ms: float | None, *ran: str) -> TuningRecord:
        measurement = Measurement(times_ms=(time_ms,), reference_ms=reference_ms)
        baselines = tuple(Baseline(impl=impl, median_ms=2.0) for impl in ran)
        return replace(MEASURED, measurement=measurement, baselines=baselines)

    # a slower absolute time of a cooler card: the reference kernel was slower still
    assert better(record(1.3, 3.0, "sdpa-flash"), record(1.25, 2.5, "sdpa-flash"))
    assert not better(record(1.2, 2.2, "sdpa-flash"), record(1.25, 2.5, "sdpa-flash"))
    assert better(record(1.2, None, "sdpa-flash"), record(1.25, 2.5, "sdpa-flash"))
    # the reference was the default config of two versions, or another backend
    assert better(record(1.0, 1.0), record(1.66, 1.9))
    assert better(record(1.0, 1.0, "sdpa-efficient"), record(1.66, 1.9, "sdpa-flash"))
