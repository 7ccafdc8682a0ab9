"""`flashgen tune`: options, displays, exit codes; measured with a fake executor, predicted with the real compiler."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashgen.codegen.render import render_standalone
from flashgen.core.config import Config
from flashgen.core.record import Failure
from flashgen.core.settings import child_environment, settings
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.tuning.workloads import preset
from tests.cli.conftest import ROOT, Invoke, Measure
from tests.tiers import EXHAUSTIVE, only
from tests.tuning.fakes import H200, FakeExecutor

SHAPE = "b1-h32-hk8-s4096-d128-causal"
TINY = "fp32-b1-h1-s128-d16"
TOO_WIDE = "b1-h1-s64-d1024"


def test_a_measured_run_prints_lines_and_a_table_and_stores(invoke: Invoke, measure: Measure) -> None:
    measure(FakeExecutor())
    result = invoke("tune", "--shape", SHAPE, "--budget", "12")
    assert result.exit_code == 0, result.output
    workload = Workload.parse(SHAPE)
    lines = result.stdout.splitlines()
    assert lines[0] == "Tuning 1 workload for NVIDIA H200 (sm90-132sm-141gb)"
    assert lines[1].startswith(f"[1/1] {workload.key}: ")
    assert any("TFLOP/s" in line and "of peak" in line and "candidates tried" in line for line in lines)
    assert any(line.startswith("  finals: ") for line in lines)
    row = next(line for line in lines if line.startswith(workload.key))
    assert "measured" in row
    assert re.search(r"\d\.\d\dx cudnn", row)
    assert re.search(r"\d+%", row)
    with Store.open(settings().db_layers[0], read_only=True) as store:
        record = store.record(workload, H200)
        assert record is not None
        assert record.provenance == "measured"
        assert len(store.trials(workload, H200)) == 12


def test_what_serves_calls_of_padded_heads_is_tuned(invoke: Invoke, measure: Measure) -> None:
    """And what small calls get, which nothing is padded for."""
    executor = measure(FakeExecutor())
    padded, own = (Workload.parse(shape) for shape in ("b1-h32-s4096-d104-causal", "b1-h16-s512-d100"))
    shapes = ("--shape", "b1-h32-s4096-d100-causal", "--shape", own.key, "--shape", padded.key)
    planned = invoke("tune", *shapes, "--budget", "3", "--target", "h200", "--dry-run")
    result = invoke("tune", *shapes, "--budget", "3")
    assert result.exit_code == 0, result.output
    for each in (planned, result):
        assert each.output.count("get copies with rows of multiples of 16 bytes, which are tuned: ") == 1
    assert {workload for workload, _ in executor.evaluated} == {padded, own}


@EXHAUSTIVE
def test_the_same_command_skips_what_is_done_and_retune_does_not(invoke: Invoke, measure: Measure) -> None:
    executor = measure(FakeExecutor())
    assert invoke("tune", "--shape", SHAPE, "--budget", "8").exit_code == 0
    done = len(executor.evaluated)
    again = invoke("tune", "--shape", SHAPE, "--budget", "8")
    assert again.exit_code == 0
    assert "skipped" in again.stdout
    assert len(executor.evaluated) == done
    assert invoke("tune", "--shape", SHAPE, "--budget", "8", "--retune", "--from-nothing").exit_code == 0
    assert len(executor.evaluated) > done
    with Store.open(settings().db_layers[0], read_only=True) as store:
        last = store.trials(Workload.parse(SHAPE), H200)[-8:]
    assert last[0].source == "incumbent"
    # the model learns from tables of other GPUs that ship
    known = {"random", "sampler", "local", "learned"}
    assert {trial.source for trial in last[1:]} <= known, "nobody else names a config"


def test_json_is_one_object_a_line(invoke: Invoke, measure: Measure) -> None:
    measure(FakeExecutor(others=("process 7 (1.0 GB)",)))
    result = invoke("tune", "--shape", SHAPE, "--budget", "12", "--json")
    assert result.exit_code == 0
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {"warning", "run_started", "trial", "finals", "workload_finished", "run_finished"} <= {
        event["event"] for event in events
    }
    assert sum(event["event"] == "trial" for event in events) == 12
    assert events[-1]["outcomes"][0]["status"] == "tuned"


def test_another_process_on_the_gpu_is_warned_about(invoke: Invoke, measure: Measure) -> None:
    measure(FakeExecutor(others=("process 7 (1.0 GB)",)))
    assert "warning: other processes use this GPU" in invoke("tune", "-s", SHAPE, "--budget", "2").stdout


def test_a_workload_without_candidates_gives_exit_code_3_and_the_others_go_on(invoke: Invoke, measure: Measure) -> None:
    measure(FakeExecutor())
    result = invoke("tune", "--shape", TOO_WIDE, "--shape", SHAPE, "--budget", "5")
    assert result.exit_code == 3
    assert f"unsupported: {Workload.parse(TOO_WIDE).key}" in result.stdout
    assert "measured" in result.stdout


def test_failures_of_all_candidates_are_told_with_their_reason(invoke: Invoke, measure: Measure) -> None:
    def broken(config: Config) -> Failure:
        return Failure(stage="verify", reason="every answer is wrong")

    measure(FakeExecutor(broken=broken))
    result = invoke("tune", "--shape", SHAPE, "--budget", "5")
    assert result.exit_code == 3
    assert "every answer is wrong" in result.stdout


def test_ctrl_c_gives_130_and_the_same_command_goes_on(invoke: Invoke, measure: Measure) -> None:
    def interrupt(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    measure(FakeExecutor(on_evaluate=interrupt))
    result = invoke("tune", "--shape", SHAPE, "--budget", "10")
    assert result.exit_code == 130
    assert "the same command goes on" in result.stdout
    measure(FakeExecutor())
    result = invoke("tune", "--shape", SHAPE, "--budget", "10")
    assert result.exit_code == 0
    assert "tried before" in result.stdout
    with Store.open(settings().db_layers[0], read_only=True) as store:
        assert len(store.trials(Workload.parse(SHAPE), H200)) == 10


@EXHAUSTIVE
def test_a_limit_that_ends_before_some_workloads_says_so(invoke: Invoke, measure: Measure) -> None:
    measure(FakeExecutor(on_evaluate=lambda number: time.sleep(2.0)))  # a slow machine has 3 s to begin the first one
    arguments = ("tune", "-s", SHAPE, "-s", "b1-h32-s1024-d64", "--limit-seconds", "8", "--budget", "2", "--retune")
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "The time ended before 1 of 2 workloads; the same command goes on with them." in result.stdout


def test_dry_run_prints_the_plan_and_writes_nothing(invoke: Invoke) -> None:
    result = invoke("tune", "--model", "gpt2", "--target", "h200", "--budget", "20s", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "4 workloads, budget 20 s each, about 80 s in all" in result.stdout
    assert not settings().db_layers[0].exists()
    as_json = json.loads(
        invoke("tune", "-m", "gpt2", "-m", "falcon-7b", "--target", "h200", "--dry-run", "--json").stdout
    )
    assert len(as_json["workloads"]) == 5, "those of both models"
    assert all(row["status"] == "tune" and row["candidates"] > 100 for row in as_json["workloads"])


def test_an_empty_file_is_a_database_to_be_made_and_a_dry_run_leaves_it_so(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite3"
    path.touch()
    result = invoke("tune", "--shape", SHAPE, "--target", "h200", "--db", path, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "1 workload, budget" in result.stdout
    assert [(each.name, each.stat().st_size) for each in tmp_path.glob("empty*")] == [(path.name, 0)]
    path.write_text("mine")
    assert invoke("tune", "--shape", SHAPE, "--target", "h200", "--db", path, "--dry-run").exit_code == 1
    assert path.read_text() == "mine"


def test_models_are_listed(invoke: Invoke) -> None:
    listed = invoke("tune", "--list-models").stdout
    assert all(name in listed for name in ("gpt2", "llama-3.1-8b", "flux", "sdxl", "paper"))
    as_json = json.loads(invoke("tune", "--list-models", "--json").stdout)
    assert len(as_json["paper"]["workloads"]) == 36
    assert (as_json["paper"]["direction"], as_json["paper-backward"]["direction"]) == ("forward", "backward")


@EXHAUSTIVE
def test_a_file_of_workloads_and_a_database_of_choice(invoke: Invoke, measure: Measure, tmp_path: Path) -> None:
    measure(FakeExecutor())
    (tmp_path / "mine.yaml").write_text(f"mine: {{workloads: [{SHAPE}]}}")
    database = tmp_path / "mine.sqlite3"
    result = invoke("tune", "--file", tmp_path / "mine.yaml", "--db", database, "--budget", "3")
    assert result.exit_code == 0, result.output
    assert database.exists()
    assert not settings().db_layers[0].exists()


def test_shards_of_a_list_merge_into_one_database(
    invoke: Invoke, measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [f"b1-h8-s{length}-d64" for length in (512, 1024, 2048)]
    line = ["tune", *(part for shape in shapes for part in ("--shape", shape)), "--budget", "2"]
    for index in range(2):
        measure(FakeExecutor())
        result = invoke(*line, "--shard", f"{index}/2", "--db", tmp_path / f"shard{index}.sqlite3")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(("Tuning 1 workload for", "Tuning 2 workloads for")[index])
    merged = tmp_path / "merged.sqlite3"
    monkeypatch.setenv("FLASHGEN_DB", str(merged))
    settings.cache_clear()
    counts = [invoke("db", "import", tmp_path / f"shard{index}.sqlite3").stdout for index in range(2)]
    assert [int(text.split()[0]) for text in counts] == [1, 2]
    with Store.open(merged, read_only=True) as store:
        assert {record.workload for record in store.records()} == {Workload.parse(shape) for shape in shapes}


def test_a_shard_without_workloads_has_nothing_to_do(invoke: Invoke, measure: Measure) -> None:
    measure(FakeExecutor())
    result = invoke("tune", "--shape", SHAPE, "--shard", "0/2", "--budget", "3")
    assert result.exit_code == 0, result.output
    assert "Tuning 0 workloads" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--model"),
        (("--model", "gpt9"), "did you mean gpt2?"),
        (("--model", "abacus"), "a model is one of"),
        (("--shape", "b1"), "a shape needs"),
        (("--shape", SHAPE, "--target", "h900"), "a target is one of"),
        (("--shape", SHAPE, "--target", "h200s"), "did you mean h200?"),
        (("--shape", SHAPE, "--target", "h100", "--budget", "soon"), "a budget is a time like"),
        (("--shape", SHAPE, "--target", "h100", "--budget", "0"), "a budget has at least 1 trial"),
        (("--shape", SHAPE, "--target", "h100", "--budget", ""), "a budget is a time like 20s, 2m or 1h"),
        (("--from-calls", "calls.json", "--budget", ""), "a budget is a time like"),
        (("--shape", SHAPE, "--db", os.pathsep.join("ab")), "--db is one file whose path has no"),
        (("--file", "nowhere.yaml"), "readable"),
        (("--shape", SHAPE, "--shard", "4/4"), "a shard is i/n"),
        (("--shape", SHAPE, "--direction", "sideways"), "a direction is one of forward, backward, both"),
        (("--shape", SHAPE, "--direction", "backwards"), "did you mean backward?"),
        (("--shape", SHAPE, "--family", "abacus"), "a kernel family is one of"),
        (("--shape", SHAPE, "--until", "soon"), "a share is like 1%"),
        (("--shape", SHAPE, "--top", "3"), "without --reverify a search decides"),
        (("--shape", SHAPE, "--vary", "block_n=64"), "a search varies all knobs"),
        (("--reverify", "--vary", "block_n"), "a variation is knob=value"),
        (("--shape", SHAPE, "--finals-window", "60"), "less than 60 s"),
        (("--shape", SHAPE, "--limit-seconds", "4"), "at least 5 s, with less no search begins, got 4"),
        (("--shape", SHAPE, "--limit-seconds", "nan"), "at least 5 s"),
        (("--shape", SHAPE, "--db", "one.db", "--study", "one.db"), "a study has a file of its own"),
        (("--shape", SHAPE, "--db", "one.db", "--study", "sqlite:///./one.db"), "a study has a file of its own"),
        (
            ("--shape", SHAPE, "--db", "one.db", "--study", "sqlite:///file:./%6fne.db?uri=true"),
            "a study has a file of its own",
        ),
        (("--shape", SHAPE, "--study", "sqlite://"), "one in memory is lost"),
        (("--reverify", "--dry-run"), "--reverify searches for nothing"),
        (("--reverify", "--target", "h100"), "no target"),
        (("--shape", SHAPE, "--deterministic"), "only a backward pass is asked for the same bits"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    invoke: Invoke, arguments: tuple[str, ...], words: str
) -> None:
    result = invoke("tune", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_only_candidates_of_named_families_are_planned(invoke: Invoke) -> None:
    def candidates(*named: str) -> int:
        line = ("tune", "--shape", SHAPE, "--target", "h200", "--dry-run", "--json")
        return json.loads(invoke(*line, *named).stdout)["workloads"][0]["candidates"]

    one, other = ("--family", "portable_forward"), ("--family", "hopper_forward")
    assert candidates(*one) + candidates(*other) == candidates(*one, *other) == candidates()


def test_help_documents_exit_codes(invoke: Invoke) -> None:
    text = " ".join(invoke("tune", "--help").stdout.split())
    for words in ("0 done", "1 an error", "2 wrong usage", "3 some workloads", "130 interrupted"):
        assert words in text


def test_without_a_gpu_the_command_says_what_works(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("tune", "--shape", SHAPE)
    assert result.exit_code == 1
    assert "--target h100" in result.stderr


@pytest.mark.parametrize("target", only(["h100", "sm_86"], "sm_86"))
def test_a_target_is_ranked_and_said_not_to_be_measured(invoke: Invoke, compiles: None, target: str) -> None:
    result = invoke("tune", "--shape", "b1-h12-s1024-d64-causal", "--target", target, "--budget", "2", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert "nothing is measured" in result.stdout
    assert "Rows marked predicted were not measured" in result.stdout
    with Store.open(settings().db_layers[0], read_only=True) as store:
        (record,) = store.records()
        assert record.provenance == "predicted"
        assert record.versions.triton
        assert record.source_digest


def test_a_first_run_without_a_gpu_ends_with_what_it_found_being_used(invoke: Invoke) -> None:
    """What `make tune` does there: of the target's architecture no record ships, so the prediction is what serves."""
    makefile = (ROOT / "Makefile").read_text()
    values = dict(re.findall(r"^(TARGET|SAMPLE|MODEL) \?= (\S+)$", makefile, re.MULTILINE))
    target, sample = values["TARGET"], Workload.parse(values["SAMPLE"])
    assert sample in preset(values["MODEL"]).workloads
    result = invoke("tune", "--shape", sample.key, "--target", target, "--budget", "2", "--jobs", "1")
    assert result.exit_code == 0, result.output
    said, why, kernel = result.stdout.splitlines()[-3:]
    assert said.startswith(f"{sample.key} is now served by rung 7, predicted record: ")
    with Store.open(settings().db_layers[0], read_only=True) as store:
        (record,) = store.records()
    explained = json.loads(invoke(*why.split("flashgen ")[1].split(), "--json").stdout)
    assert (explained["rung"], explained["knobs"]) == (7, dict(record.config.knobs))
    shown = invoke(*kernel.split("flashgen ")[1].split()).stdout
    assert shown == render_standalone(sample.specialization, record.config).text


@EXHAUSTIVE
def test_commands_for_a_database_of_choice_name_it(invoke: Invoke, measure: Measure, tmp_path: Path) -> None:
    measure(FakeExecutor())
    database = tmp_path / "my own.sqlite3"
    result = invoke("tune", "--shape", SHAPE, "--db", database, "--budget", "3")
    said, why, _ = result.stdout.splitlines()[-3:]
    assert "is now served by rung 3, user database, exact: " in said
    assert why.endswith(f"FLASHGEN_DB='{database}' flashgen explain {Workload.parse(SHAPE).key}")


@EXHAUSTIVE
def test_both_passes_are_measured_and_named_in_the_table(invoke: Invoke, measure: Measure) -> None:
    measure(FakeExecutor())
    result = invoke("tune", "--shape", SHAPE, "--direction", "both", "--deterministic", "--budget", "6")
    assert result.exit_code == 0, result.output
    forward = Workload.parse(SHAPE).key
    keys = (forward, forward.replace("fwd-", "bwd-") + "-deterministic")
    rows = [next(row for row in result.stdout.splitlines() if row.startswith(f"{key} ")) for key in keys]
    assert [row.split()[1] for row in rows] == ["forward", "backward"]
    assert "causal, deterministic" in rows[1]
    listed = invoke("db", "list", "--device", "h200").stdout
    assert all(key in listed for key in keys)
    shown = invoke("db", "show", keys[1]).stdout
    assert "features" in shown
    assert "_backward_split(" in shown


@EXHAUSTIVE
def test_a_backward_pass_is_predicted_from_real_compiles(invoke: Invoke) -> None:
    shape = "bwd-b1-h12-s1024-d64-causal"
    result = invoke("tune", "--shape", shape, "--target", "h100", "--budget", "1", "--jobs", "1")
    assert result.exit_code == 0, result.output
    with Store.open(settings().db_layers[0], read_only=True) as store:
        (record,) = store.records()
    assert (record.workload, record.provenance) == (Workload.parse(shape), "predicted")
    assert record.config.family == "hopper_backward_fused"


@EXHAUSTIVE
def test_a_process_that_is_interrupted_ends_with_130_and_leaves_nothing_running(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "flashgen", "tune", "--shape", TINY, "--target", "h100", "--jobs", "2"]
    process = subprocess.Popen(
        [*line, "--budget", "1000"],
        cwd=ROOT,
        env=child_environment(TRITON_CACHE_DIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "candidates tried" not in process.stdout.readline():
        assert process.poll() is None
    children = _children(process.pid)
    assert children
    process.send_signal(signal.SIGTERM if os.name == "posix" else signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in out
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "compile processes must end with the command"
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in listed for child in file.read_text().split()]
