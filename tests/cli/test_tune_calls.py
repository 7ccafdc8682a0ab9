"""`flashgen tune --from-calls`: the longest share first, until the budget ends, and what was gained, as measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flashgen.codegen.families import default_config, usual
from flashgen.codegen.family import Sizes
from flashgen.core.calls import CallRecord, add_calls
from flashgen.core.config import Config
from flashgen.core.workload import Workload
from flashgen.tuning import request as request_module
from flashgen.tuning import tune as tune_module
from flashgen.tuning.from_calls import by_share
from tests.cli.conftest import Invoke, Measure
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200, FakeExecutor, true_ms

LONG = Workload.parse("b1-h20-hk5-s4096-d128-causal")
SHORT = Workload.parse("b1-h20-hk5-s512-d128-causal")
RARE = Workload.parse("b1-h32-hk8-s512-d64")


def served(workload: Workload) -> Config:
    """What serves a workload without any record."""
    spec = workload.specialization
    return usual(default_config(spec, H200), spec, Sizes.of(workload), H200)


def called(workload: Workload, calls: int, call_ms: float | None, server: str | None = None) -> CallRecord:
    config: Config | None = served(workload)
    if server is not None:
        config = None
    name = server if config is None else config.family
    return CallRecord(
        workload=workload,
        device=H200.identity,
        rung=8,
        server=name or "",
        config=config,
        calls=calls,
        call_ms=call_ms,
        time_from="rate" if call_ms else "",
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calls.json"
    add_calls(path, [called(RARE, 1, 0.01), called(LONG, 10, 1.0), called(SHORT, 1000, 0.05)])
    return path


@EXHAUSTIVE
def test_the_longest_share_is_tuned_and_what_was_gained_is_said(
    invoke: Invoke,
    measure: Measure,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tune_module, "LEAST_S", 0.8)
    monkeypatch.setattr(request_module, "LEAST_S", 0.8)
    measure(FakeExecutor())
    result = invoke("tune", "--from-calls", file, "--budget", "1s", "--finals-rounds", 1)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert said.index(SHORT.key) < said.index("The time ended before")
    total = re.search(r"Attention of these calls: (\S+) ms before, (\S+) ms now, (\S+)x", said)
    assert total is not None
    assert float(total[1]) == pytest.approx(1000 * true_ms(SHORT, served(SHORT)), rel=0.05)
    assert float(total[1]) / float(total[2]) == pytest.approx(float(total[3]), abs=0.01)
    monkeypatch.setattr(tune_module, "LEAST_S", 5.0)
    again = invoke("tune", "--from-calls", file, "--budget", "1s", "--json")
    *_, finished, gains = [json.loads(line) for line in again.stdout.splitlines()]
    assert [one["status"] for one in finished["outcomes"]] == ["skipped"]
    assert (gains["event"], gains["workloads"]) == ("gains", [])


def test_an_interrupted_run_blames_no_budget(
    invoke: Invoke,
    measure: Measure,
    file: Path,
) -> None:
    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    measure(FakeExecutor(on_evaluate=interrupt))
    result = invoke("tune", "--from-calls", file)
    assert result.exit_code == 130
    assert "Interrupted; the same command goes on" in result.stdout
    assert "The time ended" not in result.stdout


def test_a_plan_takes_no_longer_than_the_budget_for_all(invoke: Invoke, file: Path) -> None:
    arguments = ("tune", "--from-calls", file, "--target", "h100", "--dry-run")
    assert "3 workloads, budget 30 s each, about 2 min in all" in invoke(*arguments).stdout
    assert "about 45 s in all" in invoke(*arguments, "--budget", "45s").stdout


def test_a_budget_within_which_no_search_begins_is_refused(invoke: Invoke, file: Path) -> None:
    result = invoke("tune", "--from-calls", file, "--budget", "4s")
    assert result.exit_code == 2
    assert "all workloads have at least 5 s" in result.stderr


def test_a_file_of_calls_says_alone_what_is_tuned(invoke: Invoke, file: Path) -> None:
    for others in (("--shape", "b1-h1-s64-d64"), ("--deterministic",), ("--ray", "local")):
        result = invoke("tune", "--from-calls", file, *others)
        assert result.exit_code == 2
        assert f"no {others[0]}" in " ".join(result.output.split())
    assert "a time for all workloads" in " ".join(invoke("tune", "--from-calls", file, "--budget", "40").output.split())
    assert invoke("tune", "--from-calls", file.with_name("none.json")).exit_code == 2


def test_time_on_other_devices_does_not_count() -> None:
    slow = called(RARE, 10, 1e6)
    elsewhere = CallRecord(workload=RARE, device="sm80-108sm-40gb", rung=8, server="x", calls=10, call_ms=1e6)
    assert by_share([slow, called(LONG, 10, 1.0)], H200) == (RARE, LONG)
    assert by_share([elsewhere, called(LONG, 10, 1.0)], H200) == (LONG, RARE)
