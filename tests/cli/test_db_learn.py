"""`flashgen db learn`: what it prints and writes, and what it cannot learn from."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.search_synthetic import synthetic
from flashgen.core.errors import DatabaseError, TuningError
from flashgen.core.settings import settings
from flashgen.core.workload import Workload
from flashgen.db.log_files import read_log, write_log
from flashgen.db.store import Store
from flashgen.runtime.lookup.rules import read_rules
from flashgen.tuning import learned_files
from flashgen.tuning.seed_lists import read_lists
from tests.cli.conftest import Invoke
from tests.db.samples import H100, MEASURED
from tests.disk import full_disk

WORKLOAD = Workload.parse("b4-h16-s4096-d256")


def table(folder: Path) -> Path:
    path = folder / f"{WORKLOAD.key}.jsonl.gz"
    write_log(synthetic(WORKLOAD, H100, families=("hopper_forward",), most=20), path)
    return path


def records(count: int) -> None:
    best = synthetic(WORKLOAD, H100, families=("hopper_forward",), most=20).trials
    with Store.open(settings().db_layers[0]) as store:
        for number in range(count):
            rows = 1024 * (number + 1)
            workload = WORKLOAD.with_shape(seqlen_q=rows, seqlen_k=rows)
            config = best[number % 3].config
            slow = tuple(50.0 * ms for ms in MEASURED.measurement.times_ms)  # type: ignore[union-attr]
            measurement = replace(MEASURED.measurement, times_ms=slow)  # type: ignore[type-var]
            store.put_record(
                replace(MEASURED, workload=workload, device=H100, config=config, baselines=(), measurement=measurement)
            )


def test_files_are_written_that_searches_and_look_ups_read(invoke: Invoke, nothing_ships: None, tmp_path: Path) -> None:
    records(7)
    out = tmp_path / "learned"
    done = invoke("db", "learn", table(tmp_path), "-o", out, "--device", "h100", "--commit", "abc")
    assert done.exit_code == 0, done.output
    assert "fwd-16bit-d256-full" in done.stdout
    assert "fwd-bf16-d256" in done.stdout
    lists, (identity, rules) = read_lists(out / "seed_configs.json"), read_rules(out / "fallback.json", every=True)
    assert lists.identity == identity == H100.identity
    assert rules["fwd-bf16-d256"].nearest is not None
    origin = json.loads((out / "seed_configs.json").read_text())["learned_from"]
    assert (origin["commit"], origin["records"], origin["tables"][0]["configs"]) == ("abc", 7, 20)
    rows = list(csv.DictReader((out / "seed_configs.csv").read_text().splitlines()))
    assert {row["class"] for row in rows} == {"fwd-16bit-d256-full"}
    assert sum(int(row["timed_configs"]) for row in rows) == 20
    assert sorted(path.name for path in out.iterdir()) == [
        "fallback.csv",
        "fallback.json",
        "seed_configs.csv",
        "seed_configs.json",
    ]
    again = tmp_path / "again"
    assert invoke("db", "learn", table(tmp_path), "-o", again, "--device", "h100", "--commit", "abc").exit_code == 0
    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_searches_of_a_database_are_learned_from_once_exported(
    invoke: Invoke, nothing_ships: None, tmp_path: Path
) -> None:
    records(7)
    log = synthetic(WORKLOAD, H100, families=("hopper_forward",), most=20)
    assert log.search is not None
    search = replace(log.search, run="../../a run", settings=())
    unknown = replace(log.trials[0], run="", workload=WORKLOAD.with_shape(batch=2))
    with Store.open(settings().db_layers[0]) as store:
        store.put_search(search)
        for trial in log.trials:
            store.put_trial(replace(trial, run=search.run))
        store.put_trial(unknown)
    done = invoke("db", "export", tmp_path / "tables", "--format", "tables")
    assert done.exit_code == 0, done.output
    assert "1 search written" in done.stdout
    assert "1 searches are without their settings" in done.stdout
    (path,) = (tmp_path / "tables" / H100.folder).iterdir()
    assert path.name == f"{WORKLOAD.key}-______a_run-{sha256(b'../../a run').hexdigest()[:8]}.jsonl.gz"
    assert len(read_log(path).trials) == 20
    out = tmp_path / "learned"
    assert invoke("db", "learn", path, "-o", out, "--device", "h100").exit_code == 0
    origin = json.loads((out / "fallback.json").read_text())["learned_from"]
    assert (origin["tables"], origin["searches"]) == ([], {"count": 1, "trials": 20})
    with (out / "seed_configs.csv").open() as file:
        assert sum(int(row["timed_configs"]) for row in csv.DictReader(file)) == 20


def test_older_files_stay_where_new_ones_cannot_be_finished(tmp_path: Path) -> None:
    path, learned = table(tmp_path), tmp_path / "fallback.json"
    before = path.read_bytes()
    learned_files.write(learned, "what was learned before")
    longer = synthetic(WORKLOAD, H100, families=("hopper_forward",), most=21)
    with full_disk(), pytest.raises(DatabaseError, match="a place that can be written"):
        write_log(longer, path)
    with full_disk(), pytest.raises(TuningError, match="a place that can be written"):
        learned_files.write(learned, "what was learned since then")
    assert (path.read_bytes(), learned.read_text()) == (before, "what was learned before")
    assert {*tmp_path.iterdir()} >= {path, learned}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("form", "name"), [("t4", "T4"), ("tables", "tables"), ("optuna", "Optuna")])
def test_a_format_of_trials_refuses_a_database_without_any(
    invoke: Invoke, nothing_ships: None, tmp_path: Path, form: str, name: str
) -> None:
    records(1)
    done = invoke("db", "export", tmp_path / "out", "--format", form, "--all")
    assert (done.exit_code, f"an export to {name} needs" in done.output) == (1, True)
    of_a_run = invoke("db", "export", tmp_path / "out", "--format", form, "--run", "nobody")
    assert (of_a_run.exit_code, "none of run 'nobody' is stored here" in of_a_run.output) == (1, True)
    assert not (tmp_path / "out").exists()


def test_tables_refuse_trials_of_which_no_settings_are_known(
    invoke: Invoke, nothing_ships: None, tmp_path: Path
) -> None:
    with Store.open(settings().db_layers[0]) as store:
        store.put_trial(synthetic(WORKLOAD, H100, families=("hopper_forward",), most=1).trials[0])
    done = invoke("db", "export", tmp_path / "out", "--format", "tables")
    assert (done.exit_code, "1 searches are without their settings" in done.output) == (1, True)


def test_figures_are_printed_for_machines(invoke: Invoke, nothing_ships: None) -> None:
    records(2)
    done = invoke("db", "learn", "--device", "h100", "--json")
    found = json.loads(done.stdout)
    (one,) = found["lists"]
    assert (one["class"], one["workloads"]) == ("fwd-16bit-d256-full", 2)
    assert [each["class"] for each in found["rules"]] == ["fwd-bf16-d256"]


def test_of_several_devices_one_is_named(invoke: Invoke) -> None:
    records(1)
    several = invoke("db", "learn")
    assert (several.exit_code, "--device says which of" in several.output) == (2, True)


def test_what_is_no_table_of_the_device_and_no_place_is_an_error(
    invoke: Invoke, nothing_ships: None, tmp_path: Path
) -> None:
    records(1)
    other = invoke("db", "learn", table(tmp_path), "--device", "h200")
    assert (other.exit_code, "tables to learn from are of" in other.output) == (1, True)
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no table")
    assert invoke("db", "learn", tmp_path / "bad.jsonl.gz", "--device", "h100").exit_code == 1
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = invoke("db", "learn", table(tmp_path), "-o", blocked / "below", "--device", "h100")
    assert (done.exit_code, "a place that can be written" in done.output) == (1, True)
