"""`flashgen db verify`, `diff` and `merge`, from the command line to the files."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.codegen.render import source_digest
from flashgen.core.record import TuningRecord
from flashgen.core.settings import settings
from flashgen.db import files
from flashgen.db.exchange import export_records
from flashgen.db.store import Store
from tests.cli.conftest import Invoke
from tests.db.samples import (
    CAUSAL,
    CONFIG,
    FAILED,
    FINALISTS,
    MEASURED,
    ORIGIN,
    PREDICTED,
    PREDICTION,
    SEARCH,
    SHORT,
    TRIAL,
    timed,
)
from tests.db.schemas import execute
from tests.tuning.fakes import FakeExecutor

OTHER = CONFIG.replace(num_warps=4)


def current(record: TuningRecord) -> TuningRecord:
    return replace(record, source_digest=source_digest(record.workload, record.config))


A = current(MEASURED)
B = current(timed(MEASURED, 1.0, config=OTHER))


@pytest.fixture
def sides(tmp_path: Path) -> tuple[str, str, Path]:
    """Two databases that differ in one workload; the second has one more. And where a merge goes."""
    export_records([A, PREDICTED], tmp_path / "a.sqlite3")
    export_records([B, PREDICTED, current(replace(MEASURED, workload=SHORT))], tmp_path / "b.sqlite3")
    return str(tmp_path / "a.sqlite3"), str(tmp_path / "b.sqlite3"), tmp_path / "c.sqlite3"


def held(path: Path) -> dict[str, TuningRecord]:
    with Store.open(path, read_only=True) as store:
        return {f"{record.workload.key} {record.provenance}": record for record in store.all_records()}


def test_a_difference_is_a_line(invoke: Invoke, sides: tuple[str, str, Path]) -> None:
    first, second, _ = sides
    lines = invoke("db", "diff", first, second).stdout.splitlines()
    assert lines[-1] == "2 B"
    assert [line.split()[-1] for line in lines[1:-1]] == ["newer", "it"]
    (faster, only) = json.loads(invoke("db", "diff", first, second, "--json").stdout)
    assert (faster["verdict"], faster["first"]["time_ms"], faster["second"]["time_ms"]) == ("second", 1.25, 1.0)
    assert (only["first"], only["workload"]) == (None, SHORT.key)
    assert invoke("db", "diff", first, first).stdout == "no difference\n"


def test_a_merge_takes_the_faster_ones_and_overwrites_nothing(invoke: Invoke, sides: tuple[str, str, Path]) -> None:
    first, second, merged = sides
    done = invoke("db", "merge", first, second, "-o", str(merged))
    assert done.exit_code == 0, done.stderr
    assert "3 records written" in done.stderr
    records = held(merged)
    assert set(records.values()) == {B, PREDICTED, current(replace(MEASURED, workload=SHORT))}
    content = merged.read_bytes()
    again = invoke("db", "merge", first, second, "-o", str(merged))
    assert again.exit_code == 1
    assert "overwrites none" in again.stderr
    assert merged.read_bytes() == content


def test_a_merge_overwrites_no_file_that_comes_while_it_races(
    invoke: Invoke, sides: tuple[str, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, target = sides

    def packed(source: Path, path: Path, name: Path) -> None:
        pack(source, path, name)
        target.write_text("of somebody else")

    pack = files.pack
    monkeypatch.setattr(files, "pack", packed)
    done = invoke("db", "merge", first, second, "-o", str(target))
    assert (done.exit_code, "a new file overwrites none" in done.stderr) == (1, True)
    assert target.read_text() == "of somebody else"


def test_a_merge_of_files_with_nothing_in_common_counts_what_each_has(invoke: Invoke, tmp_path: Path) -> None:
    export_records([A], tmp_path / "a.sqlite3")
    export_records([current(replace(MEASURED, workload=SHORT))], tmp_path / "b.sqlite3")
    merged = invoke(
        "db", "merge", str(tmp_path / "a.sqlite3"), str(tmp_path / "b.sqlite3"), "-o", str(tmp_path / "c.sqlite3")
    )
    assert merged.stdout == "1 A, 1 B\n"
    assert "2 records written" in merged.stderr


def test_a_merge_that_cannot_be_written_races_nothing(
    invoke: Invoke, sides: tuple[str, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.cli.db_compare._has_gpu", lambda: True)
    monkeypatch.setattr("flashgen.tuning.runs.make_executor", lambda index: pytest.fail("a race began"))
    first, second, merged = sides
    result = invoke("db", "merge", first, second, "-o", str(merged.with_suffix(".db")))
    assert result.exit_code == 1
    assert "ends in .sqlite3" in result.stderr


def test_a_layer_that_nobody_can_look_at_is_a_problem_of_that_file(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_ships: None
) -> None:
    monkeypatch.setenv("FLASHGEN_DB", str(tmp_path / f"{'a' * 300}.sqlite3"))
    settings.cache_clear()
    result = invoke("db", "verify", "--json")
    assert result.exit_code == 1
    (file,) = json.loads(result.stdout)["files"]
    assert "place that can be used" in file["problem"]


def test_without_a_gpu_times_of_other_versions_are_undecided(invoke: Invoke, sides: tuple[str, str, Path]) -> None:
    first, second, merged = sides
    Path(second).unlink()
    export_records([replace(B, versions=replace(B.versions, torch="2.13.0"))], second)
    done = invoke("db", "merge", first, second, "-o", str(merged))
    assert "1 undecided" in done.stdout
    assert "keeps the record of the first database" in done.stderr
    assert held(merged)[f"{CAUSAL.key} measured"] == A


@pytest.mark.parametrize("faster", [CONFIG, OTHER])
def test_with_a_gpu_a_race_decides(
    faster: object, invoke: Invoke, sides: tuple[str, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeExecutor(time_ms=lambda workload, config: 1.5 if config == faster else 2.0)
    monkeypatch.setattr("flashgen.cli.db_compare._has_gpu", lambda: True)
    monkeypatch.setattr("flashgen.tuning.runs.make_executor", lambda index: gpu)
    first, second, merged = sides
    assert invoke("db", "merge", first, second, "-o", str(merged)).exit_code == 0
    (job,) = gpu.races
    assert (job.workload, job.configs, job.baselines, job.hard) == (CAUSAL, (CONFIG, OTHER), True, True)
    winner = held(merged)[f"{CAUSAL.key} measured"]
    assert winner.config == faster
    assert winner.versions.torch == "2.11"
    unmeasured = merged.with_name("d.sqlite3")
    assert invoke("db", "merge", first, second, "-o", str(unmeasured), "--no-measure").exit_code == 0
    assert len(gpu.races) == 1


def test_a_whole_file_is_verified(invoke: Invoke, sides: tuple[str, str, Path]) -> None:
    first, second, _ = sides
    done = invoke("db", "verify", first, second)
    assert done.exit_code == 0
    lines = [line for line in done.stdout.splitlines() if "not current" not in line]
    assert "  2 not current: measured with triton 3.6.0, and " in done.stdout
    assert lines == [
        f"{first}: whole, 2 records (1 of kernels that have changed), 0 replaced ones, 0 tried configs, 0 bad rows",
        f"{second}: whole, 3 records (1 of kernels that have changed), 0 replaced ones, 0 tried configs, 0 bad rows",
    ]
    (entry,) = json.loads(invoke("db", "verify", "--json", first).stdout)["files"]
    reasons = entry.pop("not_current")
    assert any(reason.startswith("measured with triton 3.6.0, and ") for reason in reasons)
    none = dict.fromkeys(("replaced", "trials", "searches", "finalists"), 0)
    assert entry == {
        "path": first,
        "problem": None,
        "records": 2,
        "stale": 1,
        **none,
        "bad_rows": [],
        "foreign_tables": [],
    }
    assert invoke("db", "verify", "--top", "3").exit_code == 2


def test_a_bad_row_and_a_damaged_file_are_found(invoke: Invoke, sides: tuple[str, str, Path]) -> None:
    first, second, _ = sides
    connection = sqlite3.connect(first)
    connection.execute("UPDATE records SET times_ms = '[1e-6]' WHERE provenance = 'measured'")
    connection.commit()
    connection.close()
    Path(second).write_bytes(Path(second).read_bytes()[:9000])
    done = invoke("db", "verify", first, second)
    assert done.exit_code == 1
    assert "1 records (1 of kernels that have changed), 0 replaced ones, 0 tried configs, 1 bad rows" in done.stdout
    assert "takes at least" in done.stdout
    assert f"{second}: a tuning database must be" in done.stdout
    for command in (["diff", first, second], ["merge", first, second, "-o", f"{first}.new.sqlite3"]):
        refused = invoke("db", *command)
        assert refused.exit_code == 1
        assert "every row must be valid" in refused.stderr


DAMAGES = [
    ("trials", "times_ms = 'nonsense' WHERE stage IS NULL AND source <> 'predicted'", "times_ms must be a JSON list"),
    ("trials", "reason = x'00' WHERE stage IS NOT NULL", "reason must be of type str"),
    ("trials", "times_ms = '[-1.0]' WHERE source = 'predicted'", "a prediction has one time, and times are from"),
    ("searches", "settings = '['", "searches 1: knobs must be a JSON object"),
    ("finalists", "race = 0", "race must be in"),
    ("workloads", "batch = 3 WHERE id = (SELECT workload_id FROM searches)", "the one of its fields"),
    ("devices", "arch = 'x' WHERE id = (SELECT device_id FROM searches)", "arch is like"),
]


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """A file without records, but with what searches write down."""
    path = tmp_path / "searched.sqlite3"
    with Store.open(path) as store:
        for trial in (TRIAL, FAILED):
            store.put_trial(trial)
        store.put_prediction(replace(PREDICTION, workload=SHORT))
        store.put_search(SEARCH)
        store.put_finalists(FINALISTS[2:])
    return path


def test_rows_of_searches_are_verified(invoke: Invoke, searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.db.store.AUDITED_AT_ONCE", 1)
    done = invoke("db", "verify", searched)
    assert (done.exit_code, done.stdout.splitlines()[0].split(": ")[1]) == (
        0,
        "whole, 0 records (0 of kernels that have changed), 0 replaced ones, 3 tried configs, 0 bad rows",
    )
    (entry,) = json.loads(invoke("db", "verify", "--json", searched).stdout)["files"]
    assert (entry["trials"], entry["searches"], entry["finalists"]) == (3, 1, 1)


@pytest.mark.parametrize(("table", "damage", "rule"), DAMAGES)
def test_a_damaged_row_of_a_search_is_found(invoke: Invoke, searched: Path, table: str, damage: str, rule: str) -> None:
    connection = sqlite3.connect(searched)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    assert connection.execute(f"UPDATE {table} SET {damage}").rowcount == 1
    connection.commit()
    connection.close()
    done = invoke("db", "verify", searched)
    assert done.exit_code == 1
    assert f"  {table} " in done.stdout
    assert rule in done.stdout


def test_tables_of_another_program_are_named(invoke: Invoke, searched: Path) -> None:
    execute(searched, "CREATE TABLE studies (study_id INTEGER PRIMARY KEY)")
    execute(searched, 'CREATE TABLE "trial \x1b[2J" (number INTEGER)')
    done = invoke("db", "verify", searched)
    assert done.exit_code == 0, done.output
    assert "  tables of another program, which no look-up reads: studies, trial  [2J\n" in done.stdout
    (entry,) = json.loads(invoke("db", "verify", "--json", searched).stdout)["files"]
    assert entry["foreign_tables"] == ["studies", "trial  [2J"]


def test_rows_that_point_to_nothing_are_found_once(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "orphans.sqlite3"
    with Store.open(path) as store:
        store.put_record(MEASURED, ORIGIN)
        store.put_trial(TRIAL)
    execute(path, "DELETE FROM records")
    execute(path, "UPDATE trials SET device_id = 7")
    done = invoke("db", "verify", path)
    assert done.exit_code == 1
    bad = [line.strip() for line in done.stdout.splitlines()[1:] if "not current" not in line]
    assert [line.partition(":")[0] for line in bad] == ["trials 1", "anchors 1", "anchors 2", "origins 1"]
    assert [line for line in bad if "points to no row of records" in line] == bad[1:]


def test_without_arguments_all_that_serves_is_verified(
    invoke: Invoke, sides: tuple[str, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "site"
    (project / "theirs").mkdir(parents=True)
    (project / "theirs-1.0.dist-info").mkdir()
    (project / "theirs-1.0.dist-info" / "entry_points.txt").write_text("[flashgen.databases]\ntheirs = theirs\n")
    packaged = project / "theirs" / "records.sqlite3"
    packaged.write_bytes(Path(sides[0]).read_bytes())
    monkeypatch.syspath_prepend(str(project))
    shipped = tmp_path / "h200.sqlite3"  # in the place of those of all devices, which takes seconds
    shipped.write_bytes(packaged.read_bytes())
    monkeypatch.setattr("flashgen.db.layers.shipped_databases", lambda: {"h200": shipped})
    files = json.loads(invoke("db", "verify", "--json").stdout)["files"]
    for path in (packaged, shipped):
        (entry,) = [entry for entry in files if entry["path"] == str(path)]
        assert (entry["problem"], entry["records"]) == (None, 2)
    monkeypatch.setenv("FLASHGEN_SIGNATURES", "required")
    settings.cache_clear()
    done = invoke("db", "verify")
    assert done.exit_code == 1
    assert f"{packaged}: " in done.stdout
    assert "FLASHGEN_SIGNATURES" in done.stdout


def test_records_are_measured_again(
    invoke: Invoke, sides: tuple[str, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeExecutor(time_ms=lambda workload, config: 1.3 if config == CONFIG else 1.9)
    monkeypatch.setattr("flashgen.tuning.runs.make_executor", lambda index: gpu)
    first, second, _ = sides
    done = invoke("db", "verify", "--retime", first)
    assert done.exit_code == 0, done.stdout
    assert f"kept    {CAUSAL.key}: 1.25 ms then" in done.stdout
    assert "1 of 2 records are of sm90-132sm-141gb" in done.stderr
    broken = invoke("db", "verify", "--retime", "--top", "1", second)
    assert broken.exit_code == 1
    assert f"BROKEN  {CAUSAL.key}: 1 ms then" in broken.stdout
    (entry,) = json.loads(invoke("db", "verify", "--retime", "--top", "1", "--json", second).stdout)["retimed"]
    assert (entry["kept"], entry["failure"], entry["then_ms"]) == (False, None, 1.0)
