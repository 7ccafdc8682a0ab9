"""A replay table measured on a GPU, gone on with and replayed, and what a search leaves of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.search_replay import Table
from flashgen.core.record import Failure, Measurement
from flashgen.core.settings import child_environment
from flashgen.db.log_files import read_log
from flashgen.db.store import Store
from flashgen.db.trials import search_logs

pytestmark = pytest.mark.gpu

KEY = "fwd-bf16-b2-h8-hk8-sq1024-sk1024-d64"


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=child_environment(PYTHONPATH=os.pathsep.join(sys.path), **environment),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.alone
def test_a_table_is_measured_gone_on_with_and_read(tmp_path: Path) -> None:
    for configs in ("4", "6"):
        done = run("benchmarks.replay_tables", "--workload", KEY, "--configs", configs, "--out", str(tmp_path))
        assert done.returncode == 0, done.stderr
    log = read_log(tmp_path / f"{KEY}.jsonl.gz")
    assert log.search is not None
    assert log.search.versions.triton
    assert len({trial.config for trial in log.trials}) == len(log.trials) == 6
    timed = [trial for trial in log.trials if isinstance(trial.outcome, Measurement)]
    assert len(timed) >= 3
    for trial in timed:
        assert trial.compiled is not None
        assert trial.compiled.registers > 0
        assert trial.compiled.compile_ms > 0
        assert 0 < trial.evaluate_s < 60  # type: ignore[operator]
    table = Table.of(log)
    assert table.best_ms <= min(trial.outcome.median_ms for trial in timed) * 1.2  # type: ignore[union-attr]


def test_a_search_leaves_all_of_itself(tmp_path: Path) -> None:
    database = tmp_path / "user.sqlite3"
    done = run("flashgen", "tune", "--shape", KEY, "--budget", "12", "--from-nothing", FLASHGEN_DB=str(database))
    assert done.returncode == 0, done.stderr
    with Store.open(database, read_only=True) as store:
        (log,) = search_logs(store, store.workloads(), store.devices())
    assert log.search is not None
    assert log.search.host
    assert [trial.number for trial in log.trials] == list(range(1, 13))
    # of another GPU than the one whose tables ship, these are learned from
    assert {trial.source for trial in log.trials} <= {"random", "sampler", "local", "finals", "learned"}
    assert {each.stage for each in log.finalists} <= {"near", "last"}
    raced = [each for each in log.finalists if not isinstance(each.outcome, Failure)]
    assert all(each.outcome.times_ms for each in raced)  # type: ignore[union-attr]
    assert raced
