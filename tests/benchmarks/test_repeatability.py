"""Tuning twice: its workloads, that neither search knows the record, that a stopped run goes on, and what is said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import repeatability
from benchmarks.exit_codes import STOPPED
from benchmarks.repeatability import RECORD, WORKLOADS, Repeats, apart, nine_in_ten, page
from benchmarks.search_bench import Bench
from benchmarks.search_files import read
from flashgen.core.config import Config
from flashgen.core.record import Failure
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import GH200, H200, Clock, FakeExecutor

SHAPES = [Workload.parse(key) for key in WORKLOADS if key.startswith("bwd-")][:2]


@pytest.fixture
def repeats(bench: Callable[[FakeExecutor], Bench], tmp_path: Path) -> Iterator[Callable[[FakeExecutor], Repeats]]:
    with contextlib.ExitStack() as stack:
        stores = {seed: stack.enter_context(Store.open(tmp_path / f"{seed}.sqlite3")) for seed in (0, 1)}

        def made(executor: FakeExecutor) -> Repeats:
            options = Options(families=("hopper_backward_fused",))  # a small space
            budget = Budget(trials=12)
            return Repeats(bench=bench(executor), stores=stores, budget=budget, learned=None, options=options)

        yield made


def test_there_are_ten_workloads_of_both_passes_which_have_records(layers: Layers) -> None:
    workloads = [Workload.parse(key) for key in WORKLOADS]
    assert len(set(workloads)) == 10
    assert all(layers.record(workload, H200, provenance="measured") for workload in workloads)
    assert sum(workload.direction == "backward" for workload in workloads) >= 3
    assert {workload.head_dim for workload in workloads} == {64, 128, 256}


def test_both_winners_race_beside_the_record_and_a_stopped_run_goes_on(
    repeats: Callable[[FakeExecutor], Repeats], layers: Layers
) -> None:
    executor = FakeExecutor(clock=Clock())
    assert not repeats(executor).run(SHAPES, until=13.0), "room for one of them"
    first = read(repeats(executor).bench.path)
    assert {row["workload"] for row in first} == {SHAPES[0].key}
    assert repeats(executor).run(SHAPES, until=1e6)
    races = len(executor.races)
    assert repeats(executor).run(SHAPES, until=0.0), "nothing is left"
    assert len(executor.races) == races
    rows = read(repeats(executor).bench.path)
    assert rows[: len(first)] == first
    assert [row["way"] for row in rows] == ["0", "1", RECORD] * 2
    for workload in SHAPES:
        own = {row["way"]: row for row in rows if row["workload"] == workload.key}
        found = layers.record(workload, H200)
        assert found is not None
        assert Config.from_json(own[RECORD]["family"], own[RECORD]["knobs"]) == found[0].config
        assert float(own["0"]["ratio"]) == 1
        assert float(own["1"]["ratio"]) == pytest.approx(float(own["1"]["ms"]) / float(own["0"]["ms"]), rel=0.02)
        assert own["0"]["trials"] == own["1"]["trials"] == "12"
        assert own[RECORD]["trials"] == ""


def test_a_search_is_not_told_of_the_record(repeats: Callable[[FakeExecutor], Repeats]) -> None:
    made = repeats(FakeExecutor(clock=Clock()))
    made.run(SHAPES[:1], until=1e6)
    for seed, store in made.stores.items():
        trials = store.trials(SHAPES[0], H200)
        assert "incumbent" not in {trial.source for trial in trials}
        assert {each.seed for each in store.searches(SHAPES[0], H200)} == {seed}


@EXHAUSTIVE
def test_a_gpu_without_the_record_names_whose_it_is(repeats: Callable[[FakeExecutor], Repeats]) -> None:
    made = repeats(FakeExecutor(clock=Clock(), device=GH200))
    made = replace(made, bench=replace(made.bench, stamp={"device": GH200.name}))
    assert made.run(SHAPES[:1], until=1e6)
    rows = read(made.bench.path)
    (whose,) = {row["record_of"] for row in rows}
    assert whose == "NVIDIA H100 80GB HBM3"
    assert f"of the record's config of {whose}, timed on this GPU" in " ".join(page(rows).split())


@EXHAUSTIVE
def test_what_has_no_time_is_said(repeats: Callable[[FakeExecutor], Repeats]) -> None:
    executor = FakeExecutor(clock=Clock(), broken_in_race=lambda config: Failure(stage="verify", reason="planted"))
    made = repeats(executor)
    assert made.run(SHAPES[:1], until=1e6)
    rows = read(made.bench.path)
    assert [row["outcome"] for row in rows] == ["nothing was found", "nothing was found", "verify: planted"]
    assert apart(rows) == {SHAPES[0].key: None}
    assert f"| `{SHAPES[0].key}` | the same | - | - | - |" in page(rows)


def told(workload: str, *ratios: str) -> list[dict[str, str]]:
    ways = ("0", "1", RECORD)
    shared = {"workload": workload, "family": "f", "record_of": "", "device": ""}
    return [{**shared, "way": way, "ratio": ratio, "knobs": ratio} for way, ratio in zip(ways, ratios, strict=True)]


def test_the_page_counts_who_agrees() -> None:
    rows = [row for number in range(9) for row in told(f"w{number}", "1.0000", "1.0000", "1.0000")]
    rows += told("w9", "1.0000", "0.9500", "0.9000")
    text = page(rows)
    assert "| `w0` | the same | 1.000 | 1.000 | 1.000 |" in text
    assert "| `w9` | another | 1.053 | 1.111 | 1.056 |" in text
    assert "9 of 10 agree within 2%; nine in ten within 0.0% (p90)." in text
    assert nine_in_ten([1.0, 3.0, 2.0]) == 3.0
    assert nine_in_ten([float(number) for number in range(20)]) == 17.0


@pytest.mark.usefixtures("here")
@EXHAUSTIVE
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(repeatability, "learned_from", lambda layers: None)
    common = ["--out", str(tmp_path / "out"), "--results", str(tmp_path / "results"), "--commit", "0123456789ab"]
    common += ["--workload", SHAPES[0].key, "--workload", SHAPES[1].key, "--budget", "3"]
    assert repeatability.main([*common, "--limit-seconds", "0"]) == STOPPED
    assert repeatability.main([*common, "--shard", "1/2"]) == 0
    assert "1 of 1 agree" in capsys.readouterr().out
    rows = read(tmp_path / "results" / "nvidia_h200" / repeatability.FILE)
    assert {row["workload"] for row in rows} == {SHAPES[1].key}
    for wrong in (["--shard", "2/2"], ["--workload", "b1"], ["--budget", "soon"]):
        with pytest.raises(SystemExit, match="2"):
            repeatability.main([*common, *wrong])
