"""The race of what a search finds by itself: its workloads, that a stopped run goes on, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import from_nothing
from benchmarks.exit_codes import STOPPED
from benchmarks.from_nothing import HELD_OUT, RECORD, WINNER, Searches, page
from benchmarks.search_bench import Bench
from benchmarks.search_files import STAMP, read
from benchmarks.search_synthetic import synthetic
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.learned_cost import LearnedCost
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import GH200, H200, Clock, FakeExecutor, true_ms

WORKLOADS = [Workload.parse(key) for key in HELD_OUT if key.startswith("bwd-")][:2]


def searches(bench: Bench, store: Store, *lessons: SearchLog) -> Searches:
    budget, learned = Budget(trials=30), LearnedCost(lessons)
    return Searches(bench=bench, store=store, budget=budget, marks=(2.0, 5.0), learned=learned)


def test_each_workload_has_a_record_of_both_passes_and_all_widths(layers: Layers) -> None:
    workloads = [Workload.parse(key) for key in HELD_OUT]
    assert all(layers.record(workload, H200, provenance="measured") for workload in workloads)
    assert len(set(workloads)) == 8
    assert sum(workload.direction == "backward" for workload in workloads) >= 3
    assert {workload.head_dim for workload in workloads} == {64, 128, 256}


@EXHAUSTIVE
def test_what_was_known_at_each_mark_races_the_record_and_a_stopped_run_goes_on(
    bench: Callable[[FakeExecutor], Bench], layers: Layers, tmp_path: Path
) -> None:
    ours = bench(FakeExecutor(clock=Clock()))
    with Store.open(tmp_path / "own.sqlite3") as store:
        assert not searches(ours, store).run(WORKLOADS, until=13.0), "room for one of them"
        first = read(ours.path)
        assert {row["workload"] for row in first} == {WORKLOADS[0].key}
        assert searches(ours, store).run(WORKLOADS, until=1e6)
        sources = {trial.source for trial in store.trials(WORKLOADS[0], H200)}
        trials = store.trials(WORKLOADS[0], H200)
    rows = read(ours.path)
    assert rows[: len(first)] == first
    assert [row["way"] for row in rows] == [RECORD, "2 s", "5 s", WINNER] * 2
    assert sources <= {"learned", "random", "local", "sampler"}
    assert "learned" in sources
    found = {row["way"]: row for row in first}
    record = layers.record(WORKLOADS[0], H200)
    assert record is not None
    assert Config.from_json(found[RECORD]["family"], found[RECORD]["knobs"]) == record[0].config
    assert float(found[RECORD]["ratio"]) == 1
    counts = [int(found[way]["trials"]) for way in ("2 s", "5 s", WINNER)]
    assert counts == [sum((t.elapsed_s or 0) <= mark for t in trials) for mark in (2, 5)] + [30]
    assert 0 < counts[0] < counts[1]
    text = page(rows)
    assert "| backward | 2 |" in text
    assert "| forward | 0 | - | - | - |" in text
    ratios = [float(found[way]["ratio"]) for way in ("2 s", "5 s", WINNER)]
    cells = " | ".join(f"{count} | {ratio:.3f}" for count, ratio in zip(counts, ratios, strict=True))
    assert f"| `{WORKLOADS[0].key}` | {cells} |" in text
    assert "A search knew its own trials alone." in text


@EXHAUSTIVE
def test_a_gpu_without_a_record_has_that_of_another_one_which_its_rows_name(
    bench: Callable[[FakeExecutor], Bench], layers: Layers, tmp_path: Path
) -> None:
    stamped = replace(bench(FakeExecutor(clock=Clock(), device=GH200)), stamp={"device": GH200.name})
    assert layers.record(WORKLOADS[0], GH200) is None
    with Store.open(tmp_path / "own.sqlite3") as store:
        assert searches(stamped, store).run(WORKLOADS[:1], until=1e6)
    rows = read(stamped.path)
    (whose,) = {row["record_of"] for row in rows}
    assert whose == "NVIDIA H100 80GB HBM3"
    assert {row["lessons"] for row in rows} == {"0"}
    records = [each for each, _ in layers.records() if each.workload == WORKLOADS[0]]
    config = next(each.config for each in records if each.device.name == whose)
    assert Config.from_json(rows[0]["family"], rows[0]["knobs"]) == config
    assert float(rows[0]["ms"]) == pytest.approx(true_ms(WORKLOADS[0], config), rel=0.1), "its own race"
    assert f"the shipped record of {whose}, timed on this GPU, in one race" in page(rows)
    own = [{**row, "device": whose} for row in rows]
    assert "the shipped record, in one race" in page(own)


@EXHAUSTIVE
def test_lessons_count_what_other_devices_taught(bench: Callable[[FakeExecutor], Bench], tmp_path: Path) -> None:
    h100 = find_device("h100")
    log = synthetic(WORKLOADS[0], h100, families=("hopper_backward_fused",), most=20)
    with Store.open(tmp_path / "own.sqlite3") as store:
        for device, lessons in ((H200, "20"), (h100, "0")):
            ours = replace(bench(FakeExecutor(clock=Clock(), device=device)), path=tmp_path / f"{device.slug}.csv")
            assert searches(ours, store, log).run(WORKLOADS[:1], until=1e6)
            rows = read(ours.path)
            assert {row["lessons"] for row in rows} == {lessons}
            assert ("had taught it 20 trials" in page(rows)) is (device == H200)


def test_a_workload_without_a_record_is_refused(bench: Callable[[FakeExecutor], Bench], tmp_path: Path) -> None:
    with (
        Store.open(tmp_path / "own.sqlite3") as store,
        pytest.raises(ValueError, match=r"no sm90 has one of fwd-bf16-b1-h1-hk1-sq7-sk7-d64"),
    ):
        searches(bench(FakeExecutor(clock=Clock())), store).run([Workload.parse("b1-h1-s7-d64")], until=1e6)


@EXHAUSTIVE
@pytest.mark.usefixtures("here")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [
        "--out",
        str(tmp_path / "out"),
        "--results",
        str(tmp_path / "results"),
        "--commit",
        "0123456789ab",
        "--workload",
        WORKLOADS[0].key,
        "--seconds",
        "1",
        "--sampler",
    ]
    assert from_nothing.main([*common, "--limit-seconds", "0"]) == STOPPED
    assert from_nothing.main([*common, "--mark", "0.5"]) == 0
    assert "| pass | workloads | 0.5 s | winner |" in capsys.readouterr().out
    path = tmp_path / "results" / "nvidia_h200" / from_nothing.FILE
    (row, *_) = read(path)
    assert {name: row[name] for name in STAMP[:-1]} == {
        "device": "NVIDIA H200",
        "torch": "2.11",
        "triton": "3.6.0",
        "commit": "0123456789ab",
    }
    assert from_nothing.main([*common, "--workload", WORKLOADS[1].key, "--shard", "1/2", "--mark", "0.5"]) == 0
    assert {row["workload"] for row in read(path)} == {each.key for each in WORKLOADS}
    for wrong in (["--shard", "2"], ["--workload", "b1"], ["--seconds", "0"], ["--commit", "ba9876543210"]):
        with pytest.raises(SystemExit, match="2"):
            from_nothing.main([*common, *wrong])
    said = capsys.readouterr().err
    assert "a budget" in said
    assert "rows of a file are of one commit" in said
