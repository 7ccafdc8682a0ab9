"""`flashgen db`: what is printed is what is stored, for people and for machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.settings import settings
from flashgen.db.store import Store
from tests.cli.conftest import Invoke, own
from tests.db.samples import (
    CAUSAL,
    CONFIG,
    FAILED,
    H200,
    HARD_TIMES,
    MEASURED,
    PROFILE_TIMES,
    RTX_4090,
    SHORT,
    WIDE,
    hard,
    on_profiles,
    timed,
)
from tests.db.schemas import execute
from tests.tiers import every


def test_list_shows_a_line_for_each_record(invoke: Invoke, tuned: Path) -> None:
    lines = [line for line in invoke("db", "list").stdout.splitlines() if str(tuned) in line]
    assert len(lines) == 3
    (measured,) = [line for line in lines if CAUSAL.key in line and " measured " in line]
    assert f"{MEASURED.tflops:.4g}" in measured
    assert "1.25" in measured
    assert "sdpa-cudnn 1.12x" in measured


def test_list_says_that_nothing_is_known(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.db.layers.shipped", lambda name: tmp_path / "none")
    assert invoke("db", "list").stdout == "no records\n"
    assert invoke("db", "list", "--json").stdout == "[]\n"


def test_list_as_json_and_narrowed(invoke: Invoke, tuned: Path) -> None:
    rows = own(invoke("db", "list", "--json").stdout)
    assert [(row["workload"], row["provenance"]) for row in rows] == [
        (CAUSAL.key, "measured"),
        (CAUSAL.key, "predicted"),
        (SHORT.key, "measured"),
    ]
    assert rows[0]["knobs"] == dict(CONFIG.knobs)
    assert rows[0]["times_ms"] == [1.25, 1.2, 1.3]
    assert rows[0]["anchors"] == {"sdpa-cudnn": 1.4, "sdpa-flash": 1.9}
    assert rows[0]["layer"] == str(tuned)
    assert len(own(invoke("db", "list", "--json", "--provenance", "predicted").stdout)) == 1
    assert own(invoke("db", "list", "--json", "--device", "a100").stdout) == []
    for wrong, rule in (
        (["list", "--provenance", "measurd"], "did you mean measured?"),
        (["list", "--device", "abacus"], "a target is one of"),
        (["show", "b4-h32"], "a shape needs"),
    ):
        result = invoke("db", *wrong)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert rule in result.stderr


LAPTOP = replace(RTX_4090, name="NVIDIA GeForce RTX 4090 Laptop GPU", num_sms=76, memory_gb=16)
TRIED = replace(LAPTOP, name="NVIDIA GeForce RTX 4080 Laptop GPU", num_sms=58)


@pytest.fixture
def laptops(tuned: Path) -> Path:
    """The user database with two GPUs that the catalogue lacks: a record of one, and trials of the other."""
    with Store.open(tuned) as store:
        store.put_record(replace(timed(MEASURED, 20.0), device=LAPTOP))
        store.put_trial(replace(FAILED, device=TRIED))
    return tuned


@pytest.mark.parametrize(
    "arguments",
    every(
        3,
        map(
            pytest.param,
            [
                ("db", "show", CAUSAL.key, "--device"),
                ("db", "list", "--device"),
                ("db", "history", CAUSAL.key, "--device"),
                ("explain", CAUSAL.key, "--target"),
                ("render", CAUSAL.key, "--target"),
                ("db", "export", "laptop.sqlite3", "--device"),
                ("report", "--output", "laptop.html", "--device"),
                ("db", "learn", "--device"),
            ],
        ),
    ),
    ids=" ".join,
)
def test_commands_take_a_gpu_that_only_a_database_knows(
    invoke: Invoke, laptops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, LAPTOP.name)
    assert result.exit_code == 0, result.output
    result = invoke(*arguments, "RTX 4091")
    assert result.exit_code == 2
    assert f"{LAPTOP.identity} ('{LAPTOP.name}')" in result.stderr


def test_a_gpu_of_which_there_are_trials_alone_has_a_name(invoke: Invoke, laptops: Path) -> None:
    shown = invoke("db", "trials", "--device", TRIED.name).stdout
    assert shown.count(TRIED.identity) == 1
    assert H200.identity not in shown


def test_show_tells_everything_of_a_workload(invoke: Invoke, tuned: Path) -> None:
    shown = invoke("db", "show", "b4-h32-hk8-s4096-d128-causal", "--device", "h200").stdout
    for text in (
        CAUSAL.key,
        "NVIDIA H200 (sm90-132sm-141gb)",
        str(CONFIG),
        "1.25, 1.2, 1.3 ms (spread 8.0%)",
        "sdpa-flash  1.9 ms",
        "triton 3.6.0, torch 2.11.0, driver 580.95.05",
        MEASURED.source_digest,
        "2 (1 failed in launch)",
        str(tuned),
    ):
        assert text in shown
    rows = own(invoke("db", "show", CAUSAL.key, "--json").stdout)
    assert [row["provenance"] for row in rows] == ["measured", "predicted"]


def test_show_has_the_time_on_hard_data_where_it_was_measured(invoke: Invoke, tuned: Path) -> None:
    asked = ("db", "show", CAUSAL.key, "--device", "h200")
    assert "on hard data           -\n" in invoke(*asked).stdout
    with Store.open(tuned) as store:
        store.put_record(hard(MEASURED, *HARD_TIMES))
    assert "2.4 ms, 1.92 of that on normal data" in invoke(*asked).stdout
    measured, _ = own(invoke(*asked, "--json").stdout)
    assert (measured["hard_ms"], measured["hard_times_ms"]) == (2.4, list(HARD_TIMES))


def test_show_says_how_sure_a_race_was_or_that_it_was_not(invoke: Invoke, tuned: Path) -> None:
    asked = ("db", "show", CAUSAL.key, "--device", "h200")
    for confidence, said, decided in (
        (0.97, "97.0% that no rival of the last race is faster by 2%", True),
        (0.0, "undecided, 3 rounds: not sure that no rival of the last race is faster by 2%", False),
    ):
        with Store.open(tuned) as store:
            store.put_record(replace(MEASURED, measurement=replace(MEASURED.measurement, confidence=confidence)))  # type: ignore[type-var]
        assert said in invoke(*asked).stdout
        measured, _ = own(invoke(*asked, "--json").stdout)
        assert (measured["confidence"], measured["decided"]) == (confidence, decided)


def test_show_has_the_times_of_a_step_of_decoding_on_each_profile(invoke: Invoke, tuned: Path) -> None:
    step = on_profiles(MEASURED)
    with Store.open(tuned) as store:
        store.put_record(step)
    shown = invoke("db", "show", step.workload.key, "--device", "h200").stdout
    assert f"1.25 ms, {step.workload.cache_bytes / 1.25e6:.4g} GB/s of keys and values" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("on ")] == [
        ["on", "ramp", "0.8", "ms"],
        ["on", "tail", "0.2", "ms"],
    ]
    (row,) = own(invoke("db", "show", step.workload.key, "--json").stdout)
    assert row["profile_times_ms"] == {name: list(times) for name, times in PROFILE_TIMES}


def test_show_of_an_unknown_workload_is_an_error(invoke: Invoke, tuned: Path) -> None:
    result = invoke("db", "show", "b3-h3-s333-d64")
    assert result.exit_code == 1
    assert "must have a record" in result.stderr


def test_export_and_import_move_records_between_machines(
    invoke: Invoke, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "given" / "h200.sqlite3"
    result = invoke("db", "export", file, "--device", "h200", "--provenance", "measured")
    assert result.stdout == f"2 records written to {file} and {file.with_suffix('.csv')}\n"
    assert file.with_suffix(".csv").read_text().count("\n") == 3

    other = tmp_path / "other.sqlite3"
    monkeypatch.setenv("FLASHGEN_DB", str(other))
    settings.cache_clear()
    assert invoke("db", "import", file).stdout == f"2 added, 0 replaced, 0 kept as they were in {other}\n"
    assert invoke("db", "import", file).stdout == f"0 added, 0 replaced, 2 kept as they were in {other}\n"
    with Store.open(other, read_only=True) as store:
        assert store.record(CAUSAL, H200) == MEASURED
        assert store.record(WIDE, H200) is None


def test_an_export_of_nothing_is_an_error(invoke: Invoke, tuned: Path, tmp_path: Path) -> None:
    result = invoke("db", "export", tmp_path / "x.sqlite3", "--device", "a100")
    assert result.exit_code == 1
    assert "an export needs records" in result.stderr
    assert not (tmp_path / "x.sqlite3").exists()


@pytest.mark.parametrize("option", [("--with-helpers",), ("--jobs", "2")])
def test_what_is_about_a_bundle_needs_one(invoke: Invoke, tuned: Path, tmp_path: Path, option: tuple[str, ...]) -> None:
    result = invoke("db", "export", tmp_path / "x.sqlite3", *option)
    assert result.exit_code == 2
    assert "--with-binaries" in result.stderr
    assert not (tmp_path / "x.sqlite3").exists()


def test_an_export_leaves_the_databases_that_serve_alone(invoke: Invoke, tuned: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite3"
    link.symlink_to(tuned)
    for path in (tuned, link):
        result = invoke("db", "export", path, "--provenance", "predicted")
        assert result.exit_code == 1
        assert "an export is another file than the databases that serve" in result.stderr
    with Store.open(tuned, read_only=True) as store:
        assert (store.counts()["records"], store.counts()["trials"]) == (3, 2)


def test_an_import_of_a_foreign_file_is_an_error_and_changes_nothing(
    invoke: Invoke, tuned: Path, tmp_path: Path
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary " * 500)
    result = invoke("db", "import", file)
    assert result.exit_code == 1
    assert str(file) in result.stderr
    assert "not a database" in result.stderr
    assert len(own(invoke("db", "list", "--json").stdout)) == 3


def test_an_import_that_is_refused_makes_no_database(
    invoke: Invoke, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "own.sqlite3"
    monkeypatch.setenv("FLASHGEN_DB", str(target))
    settings.cache_clear()
    execute(tuned, "UPDATE records SET knobs = '[' WHERE id = 1")
    for path in (tmp_path / "missing.sqlite3", tuned):
        assert invoke("db", "import", path).exit_code == 1
        assert not target.parent.exists()
