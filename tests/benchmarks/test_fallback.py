"""The race of what serves shapes without a record: its shapes, that a stopped run goes on, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fallback
from benchmarks.exit_codes import STOPPED
from benchmarks.fallback import DEFAULT, NEAREST, RULE, TUNED, UNSEEN, Checks, Ways, page
from benchmarks.search_bench import Bench
from benchmarks.search_files import read
from flashgen.core.config import Config
from flashgen.core.record import Failure
from flashgen.core.workload import Workload
from flashgen.db.layers import Layers
from flashgen.db.store import Store
from flashgen.runtime.lookup.ladder import NEAREST_HERE
from flashgen.runtime.lookup.records import Records
from flashgen.runtime.lookup.rules import Expected, Leaf, Rule
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from tests.tuning.fakes import H200, Clock, FakeCompiler, FakeExecutor

SHAPES = [Workload.parse(key) for key in ("bwd-b2-h24-s3072-d128-causal", "bwd-b5-h24-s3072-d64")]


def checks(bench: Bench, store: Store, rules: dict[str, Rule]) -> Checks:
    options = Options(families=("hopper_backward_fused",))  # a small space
    ours = replace(bench, compiler=FakeCompiler())
    return Checks(bench=ours, store=store, rules=rules, budget=Budget(trials=8), options=options)


def other(layers: Layers) -> Config:
    """What won somewhere in the class, and is not what the nearest record has."""
    workload = SHAPES[0]
    nearest = Ways.of(workload, H200, *(Records(layers, lambda _: {}) for _ in range(2))).nearest.config
    found = layers.records(specialization=workload.specialization.workload_class, device=H200)
    return next(record.config for record, _ in found if record.config != nearest)


def test_the_shapes_have_no_record_but_a_class_with_some(layers: Layers) -> None:
    workloads = [Workload.parse(key) for key in UNSEEN]
    assert len({workload.key for workload in workloads}) == len(UNSEEN) >= 24
    assert sum(workload.direction == "backward" for workload in workloads) >= 8
    ruled, unruled = Records(layers), Records(layers, lambda _: {})
    for workload in workloads:
        ways = Ways.of(workload, H200, ruled, unruled)
        assert ways.rule.rung == ways.nearest.rung == NEAREST_HERE
    seen = next(record.workload for record, _ in layers.records(device=H200) if not record.workload.has_profiles)
    with pytest.raises(ValueError, match="has one in shipped/nvidia_h200"):
        Ways.of(seen, H200, ruled, unruled)


def test_every_way_races_and_a_stopped_run_goes_on(
    bench: Callable[[FakeExecutor], Bench], layers: Layers, tmp_path: Path
) -> None:
    named = other(layers)
    leaf = Leaf(config=named, expected=Expected(mean=1.004, worst=1.02, workloads=5, timed=1))
    rules = {SHAPES[0].specialization.workload_class: Rule(tree=leaf, nearest=None, why="")}
    executor = FakeExecutor(clock=Clock())
    ours = bench(executor)
    with Store.open(tmp_path / "fallback.sqlite3") as store:
        assert not checks(ours, store, rules).run(SHAPES, until=14.0), "room for one of them"
        first = read(ours.path)
        assert {row["workload"] for row in first} == {SHAPES[0].key}
        assert checks(ours, store, rules).run(SHAPES, until=1e6)
        races = len(executor.races)
        assert checks(ours, store, rules).run(SHAPES, until=0.0), "nothing is left"
        assert len(executor.races) == races
    rows = read(ours.path)
    assert rows[: len(first)] == first
    assert [(row["workload"], row["way"]) for row in rows] == [
        (workload.key, way) for workload in SHAPES for way in (RULE, NEAREST, DEFAULT, TUNED)
    ]
    by_rule = rows[0]
    assert Config.from_json(by_rule["family"], by_rule["knobs"]) == named
    assert (by_rule["expected"], by_rule["rung"]) == ("1.0040", "5")
    for workload in SHAPES:
        times = {row["way"]: float(row["ms"]) for row in rows if row["workload"] == workload.key}
        ratios = {row["way"]: float(row["ratio"]) for row in rows if row["workload"] == workload.key}
        assert min(ratios.values()) == pytest.approx(1, rel=1e-3), "the least median may not be the least of all rounds"
        for way, ms in times.items():
            assert ratios[way] == pytest.approx(ms / min(times.values()), rel=0.02)
    text = page(rows)
    assert text.count("| forward | 0 |") == text.count("| backward | 2 |") == text.count("| all | 2 |") == 1
    last = executor.races[-1]
    assert len(set(last.configs)) == len(last.configs)


def test_a_config_that_fails_in_the_race_has_no_time(
    bench: Callable[[FakeExecutor], Bench], layers: Layers, tmp_path: Path
) -> None:
    failing = Ways.of(SHAPES[0], H200, *(Records(layers, lambda _: {}) for _ in range(2))).default
    executor = FakeExecutor(
        clock=Clock(), broken_in_race=lambda c: Failure(stage="verify", reason="planted") if c == failing else None
    )
    ours = bench(executor)
    with Store.open(tmp_path / "fallback.sqlite3") as store:
        assert checks(ours, store, {}).run(SHAPES[:1], until=1e6)
    row = next(row for row in read(ours.path) if row["way"] == DEFAULT)
    assert (row["ms"], row["ratio"], row["outcome"]) == ("", "", "verify: planted")
    assert "| backward | 1 |" in page(read(ours.path))


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
        SHAPES[1].key,
        "--budget",
        "2",
    ]
    assert fallback.main([*common, "--limit-seconds", "0"]) == STOPPED
    assert fallback.main(common) == 0
    assert "The goal of the rule is 1.01 and 1.05" in capsys.readouterr().out.replace("\n", " ")
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"version": 1}))
    for wrong in (["--rules", str(rules)], ["--workload", "b1"], ["--budget", "soon"]):
        with pytest.raises(SystemExit, match="2"):
            fallback.main([*common, *wrong])
