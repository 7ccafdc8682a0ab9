"""What timing records again takes: whose records, that a stopped run goes on, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import reverify
from benchmarks.exit_codes import STOPPED
from benchmarks.reverify import Retiming, known, page
from benchmarks.search_bench import Bench
from benchmarks.search_files import read
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.record import Failure
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import GH200, H200, Clock, FakeExecutor

H100 = find_device("h100")


def test_every_workload_has_one_record_its_own_first(layers: Layers) -> None:
    records = known(layers, H100)
    shipped = [record for record, _ in layers.records(arch="sm90")]
    assert len(records) == len({record.workload for record in records}) == len({each.workload for each in shipped})
    own = {record.workload for record in shipped if record.device.identity == H100.identity}
    assert {each.workload for each in records if each.device.identity == H100.identity} == own
    assert own
    assert [each.workload for each in records] == [each.workload for each in known(layers, H100)]
    assert {each.workload.direction for each in records[:20]} > {"forward", "backward"}, "in random order"


@EXHAUSTIVE
def test_the_best_few_of_another_devices_record_race_and_a_stopped_run_goes_on(
    bench: Callable[[FakeExecutor], Bench], layers: Layers, tmp_path: Path
) -> None:
    records = known(layers, GH200)[:3]
    executor = FakeExecutor(clock=Clock(), device=GH200)
    ours = bench(executor)
    with Store.open(tmp_path / "own.sqlite3") as store:
        assert not Retiming(bench=ours, store=store).run(records, until=16.0), "room for one of them"
        first = read(ours.path)
        assert [row["workload"] for row in first] == [records[0].workload.key]
        assert Retiming(bench=ours, store=store).run(records, until=1e6)
        assert Retiming(bench=ours, store=store).run(records, until=0.0), "nothing is left"
    assert not executor.evaluated, "nothing is searched for"
    rows = read(ours.path)
    assert len(executor.races) == len(rows) == 3
    assert rows[:1] == first
    for record, row, job in zip(records, rows, executor.races, strict=True):
        assert job.configs[0] == record.config
        assert 1 <= len(job.configs) == int(row["configs"]) <= 3
        assert row["status"] in ("kept", "tuned")
        assert (Config.from_json(row["family"], row["knobs"]) == record.config) is (row["status"] == "kept")
        assert float(row["seconds"]) > 0
        assert row["record_of"] == record.device.name


def test_a_record_that_works_no_more_has_a_row_with_the_reason(
    bench: Callable[[FakeExecutor], Bench], layers: Layers, tmp_path: Path
) -> None:
    executor = FakeExecutor(
        clock=Clock(), device=H100, broken_in_race=lambda config: Failure(stage="verify", reason="planted")
    )
    ours = bench(executor)
    with Store.open(tmp_path / "own.sqlite3") as store:
        assert Retiming(bench=ours, store=store).run(known(layers, H100)[:1], until=1e6)
    (row,) = read(ours.path)
    assert (row["status"], row["ms"], row["knobs"]) == ("failed", "", "")
    assert "planted" in row["outcome"]


def test_the_page_says_what_the_goals_records_take() -> None:
    rows = [
        {"direction": direction, "status": status, "seconds": seconds}
        for direction, status, seconds in (
            ("forward", "kept", "4.0"),
            ("forward", "tuned", "6.0"),
            ("decode", "failed", "2.0"),
        )
    ]
    text = page(rows)
    assert "| forward | 2 | 5.0 | 5.0 | 6.0 | 1 | 1 | 0 |" in text
    assert "| decode | 1 | 2.0 | 2.0 | 2.0 | 0 | 0 | 1 |" in text
    assert "| all | 3 | 4.0 | 4.0 | 6.0 | 1 | 1 | 1 |" in text
    assert "backward" not in text
    assert "So 258 records take 4 minutes on 4 GPUs; the goal is 15." in text


@EXHAUSTIVE
def test_the_command(layers: Layers, here: FakeExecutor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [record.workload.key for record in known(layers, H200)[:3]]
    common = ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"), "--commit", "0123456789ab"]
    common += [word for key in keys for word in ("--workload", key)]
    assert reverify.main([*common, "--limit-seconds", "0"]) == STOPPED
    assert reverify.main([*common, "--shard", "0/2", "--top", "2"]) == 0
    assert "| all | 2 |" in capsys.readouterr().out
    assert max(len(job.configs) for job in here.races) <= 2
    path = tmp_path / "results" / "nvidia_h200" / reverify.FILE
    assert [row["workload"] for row in read(path)] == keys[::2]
    for wrong in (["--shard", "2/2"], ["--workload", "b1"], ["--top", "0"]):
        with pytest.raises(SystemExit, match="2"):
            reverify.main([*common, *wrong])
