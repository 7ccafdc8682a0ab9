"""Trials in the T4 format: the fields that its schema and the tools of that community read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.core.compiled import Compiled
from flashgen.core.errors import DatabaseError
from flashgen.core.record import STAGES, Failure, Measurement, Versions
from flashgen.core.search_log import SearchLog, SearchRun
from flashgen.db.t4 import INVALIDITY, export_t4
from tests.db.samples import CAUSAL, CONFIG, H100, H200, SHORT, TRIAL
from tests.disk import full_disk

INVALID = {"timeout", "compile", "runtime", "correctness", "constraints"}
COMPILED = Compiled(registers=168, spills=0, shared_bytes=98304, occupancy=1, compile_ms=812.5)
FIRST = replace(
    TRIAL,
    run="a",
    outcome=Measurement(times_ms=(1.5, 1.25, 1.75), reference_ms=2.5),
    compiled=COMPILED,
    evaluate_s=0.5,
)
OTHER = CONFIG.replace(block_n=64)


def written(folder: Path, *trials: object, versions: Versions | None = None) -> dict[str, dict[str, object]]:
    asked = SearchRun(workload=CAUSAL, device=H200, run="a", versions=versions or Versions())
    logs = [SearchLog(search=asked, trials=trials)]  # type: ignore[arg-type]
    return {path.name: json.loads(path.read_text()) for path in export_t4(logs, folder / "t4")}


def test_a_measured_trial_has_what_kernel_tuner_reads(tmp_path: Path) -> None:
    (document,) = written(tmp_path, FIRST, versions=Versions(triton="3.7.1")).values()
    assert document["schema_version"] == "1.0.0"
    metadata, (result,) = document["metadata"], document["results"]  # type: ignore[misc]
    assert metadata["timeunit"] == "milliseconds"  # type: ignore[index]
    assert metadata["versions"] == {"triton": ["3.7.1"]}  # type: ignore[index]
    assert 64 in metadata["parameters"]["block_n"]  # type: ignore[index]
    assert result["configuration"] == dict(CONFIG.knobs)
    assert result["times"] == {
        "compilation_time": 812.5,
        "compilation": 812.5,
        "runtimes": [1.5, 1.25, 1.75],
        "framework": 495.5,
        "search_algorithm": 0.0,
        "validation": 0.0,
    }
    assert (result["invalidity"], result["correctness"], result["objectives"]) == ("correct", 1, ["time"])
    measured = {each["name"]: (each["value"], each["unit"]) for each in result["measurements"]}
    assert measured["time"] == (1.5, "ms")
    assert measured["reference_time"] == (2.5, "ms")
    assert measured["registers"] == (168, "")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_of_a_failure_has_a_word_there(stage: str, tmp_path: Path) -> None:
    failed = replace(FIRST, outcome=Failure(stage=stage, reason="no"), compiled=None, evaluate_s=None)
    (document,) = written(tmp_path, failed).values()
    (result,) = document["results"]  # type: ignore[misc]
    assert result["invalidity"] == INVALIDITY[stage]
    assert result["invalidity"] in INVALID
    assert result["correctness"] == (0 if stage == "verify" else 1)
    time = next(each["value"] for each in result["measurements"] if each["name"] == "time")
    assert time in ("InvalidConfig", "CompilationFailedConfig", "RuntimeFailedConfig")
    assert result["times"]["runtimes"] == []


def test_a_search_space_is_a_file_and_of_a_config_the_last_trial_counts(tmp_path: Path) -> None:
    again = replace(FIRST, run="b", outcome=Measurement(times_ms=(1.0,)))
    elsewhere = replace(FIRST, device=H100, workload=SHORT)
    found = written(tmp_path, FIRST, replace(FIRST, config=OTHER), again, elsewhere)
    assert sorted(found) == [
        f"{CAUSAL.key}_nvidia_h200_portable_forward_T4.json",
        f"{SHORT.key}_nvidia_h100_portable_forward_T4.json",
    ]
    results = found[f"{CAUSAL.key}_nvidia_h200_portable_forward_T4.json"]["results"]
    assert [each["times"]["runtimes"] for each in results] == [[1.5, 1.25, 1.75], [1.0]]  # type: ignore[attr-defined]


def test_an_older_file_stays_where_a_new_one_cannot_be_finished(tmp_path: Path) -> None:
    before = written(tmp_path, FIRST)
    with full_disk(), pytest.raises(DatabaseError, match="a folder that can be written"):
        export_t4([SearchLog(search=None, trials=(FIRST, replace(FIRST, config=OTHER)))], tmp_path / "t4")
    assert {path.name: json.loads(path.read_text()) for path in (tmp_path / "t4").iterdir()} == before


def test_nothing_to_write_and_nowhere_to_write_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="needs trials"):
        export_t4([], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseError, match="a folder that can be written"):
        export_t4([SearchLog(search=None, trials=(FIRST,))], tmp_path / "file")
