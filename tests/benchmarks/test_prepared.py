"""Compiling beforehand: processes with a part each, which call everything once and write nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import backward, features, forward, models, prepared
from benchmarks.impls import IMPLS, Call, Impl
from benchmarks.prepared import add_prepare_arguments, call_once, compile_part, prepare
from benchmarks.provenance import Provenance
from benchmarks.results import ResultsFile
from flashgen.core.workload import Workload
from flashgen.measure.inputs import Inputs, make_inputs
from flashgen.tuning.shards import Shard
from tests.benchmarks.rows import SHARED

CPU = torch.device("cpu")
WORKLOADS = [Workload.parse(f"b1-h2-s{rows}-d16") for rows in (32, 48, 64)]


def impl_of(name: str, calls: list[tuple[str, int]], *, refuses: int = 0, breaks: int = 0) -> Impl:
    """One that notes what it is called with; it refuses a length, and breaks at another one."""

    def ready(workload: Workload, inputs: Inputs) -> Call:
        def run(n: int) -> torch.Tensor:
            calls.append((name, workload.seqlen_q))
            if workload.seqlen_q == breaks:
                raise RuntimeError("ptxas says no")
            return inputs.q[n]

        return Call(run=run)

    reason = lambda workload: "not this length" if workload.seqlen_q == refuses else None  # noqa: E731
    return replace(IMPLS[0], name=name, unsupported=reason, prepare=ready)


def test_processes_get_a_part_each_and_end_as_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked, said = subprocess.Popen, list[list[str]](), list[str]()

    def started(command: list[str], **options: Any) -> Any:
        asked.append(command[2:])
        return real([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(prepared.subprocess, "Popen", started)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    assert prepare("forward", ["--only", "x"], 2, said.append) > 0
    assert asked == [["benchmarks.forward", "--only", "x", "--compile-part", part] for part in ("0/2", "1/2")]
    assert "ended with [3, 3]" in said[0]
    assert prepare("forward", [], 0, said.append) == 0.0
    assert len(asked) == 2, "nobody asked for it"


def test_one_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, said = subprocess.Popen, list[str]()
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(prepared.subprocess, "Popen", lambda command, **options: real(hangs))
    monkeypatch.setattr(prepared, "PREPARING_SECONDS", 0.2)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    assert prepare("forward", [], 1, said.append) < 30
    assert "ended with [-9]" in said[0]


def test_parts_share_what_is_called_and_a_failure_costs_nothing_else() -> None:
    calls, said = list[tuple[str, int]](), list[str]()
    impls = [impl_of("slow", calls), impl_of("broken", calls, breaks=48, refuses=64)]
    twice = [*WORKLOADS, *WORKLOADS]
    for index in range(2):
        compile_part(Shard(index=index, count=2), twice, impls, CPU, said.append)
    assert sorted(calls) == [("broken", 32), ("broken", 48), ("slow", 32), ("slow", 48), ("slow", 64)]
    assert f"{WORKLOADS[1].key} broken: RuntimeError: ptxas says no" in said
    assert f"{WORKLOADS[2].key} broken: not this length" in said
    assert sum(line.endswith(": compiled") for line in said) == 4


def test_a_backward_pass_is_called_with_what_it_starts_from() -> None:
    found: list[Inputs] = []

    def ready(workload: Workload, inputs: Inputs) -> Call:
        found.append(inputs)
        return Call(run=lambda n: inputs.q[n])

    impl = replace(IMPLS[0], unsupported=lambda workload: None, prepare=ready)
    compile_part(Shard(index=0, count=1), [Workload.parse("bwd-b1-h2-s32-d16")], [impl], CPU, print)
    assert hasattr(found[0], "dout")


def test_every_variant_is_called() -> None:
    calls: list[tuple[str, int]] = []

    class Variants:
        def next(self, workload: Workload, seen: dict[str, float]) -> Impl | None:
            name = str(len(seen))
            return replace(impl_of(name, calls), version=lambda: name) if len(seen) < 2 else None

    both = replace(impl_of("both", calls), variants=Variants())
    inputs = make_inputs(WORKLOADS[0], copies=1, seed=0, device=CPU)
    assert call_once(both, WORKLOADS[0], inputs) == "compiled"
    assert [name for name, _ in calls] == ["0", "1"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Shard, list[str], list[str]]]:
    """What parts were compiled: of which share, which workloads and implementations."""
    found: list[tuple[Shard, list[str], list[str]]] = []

    def noted(part: Shard, workloads: Sequence[Workload], impls: Sequence[Impl], *rest: object) -> None:
        found.append((part, [workload.key for workload in workloads], [impl.name for impl in impls]))

    monkeypatch.setattr(prepared, "compile_part", noted)
    for module in (forward, backward, features, models):
        monkeypatch.setattr(module, "serve_generated", lambda *given: None)
        monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
        monkeypatch.setattr(module, "run", lambda *given, **named: pytest.fail("a part races nothing"))
    return found


@pytest.mark.parametrize("module", [forward, backward, features, models])
def test_a_process_with_a_part_compiles_its_share_of_the_shard_and_races_nothing(
    module: Any, compiled: list[tuple[Shard, list[str], list[str]]], tmp_path: Path
) -> None:
    every = ["--results", str(tmp_path), "--impls", "flashgen,fa4", "--compile-part", "1/3"]
    assert module.main(every) == 0
    assert module.main([*every, "--shard", "1/2"]) == 0
    (part, workloads, names), (_, half, _) = compiled
    assert (part, names) == (Shard(index=1, count=3), ["flashgen", "fa4"])
    assert half == workloads[1::2]
    assert len(workloads) > 30


@pytest.mark.parametrize("module", [forward, backward, features, models])
def test_what_has_a_row_is_not_compiled_again(
    module: Any, compiled: list[tuple[Shard, list[str], list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ["--results", str(tmp_path), "--impls", "flashgen,fa4", "--compile-part", "0/1"]
    assert module.main(every) == 0
    workloads = compiled[-1][1]
    done: set[tuple[str, ...]] = set()
    monkeypatch.setattr(ResultsFile, "done", lambda self, commit: done)
    suites = ("forward", "forward_fp16", "backward", "features", "window", *models.MODELS)
    done |= {(suite, workloads[0], "fa4") for suite in suites} | {(suite, workloads[1], "fa3") for suite in suites}
    assert module.main(every) == 0
    assert compiled[-1][1] == [key for key in workloads if key != workloads[0]], "a row of fa3 is of another race"
    done |= {(suite, key, "flashgen") for suite in suites for key in workloads}
    monkeypatch.setattr(prepared, "prepare", lambda *given: pytest.fail("nothing is left to compile"))
    monkeypatch.setattr(module, "run", lambda *given, **named: 0)
    monkeypatch.setattr(module, "racer_of", lambda *given: None, raising=False)
    assert module.main([*every[:-2], "--prepare", "4"]) == 0


def test_a_part_is_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_prepare_arguments(parser)
    assert parser.parse_args(["--compile-part", "2/8"]).compile_part == Shard(index=2, count=8)
    with pytest.raises(SystemExit):
        parser.parse_args(["--compile-part", "8/8"])
    assert "--compile-part" in capsys.readouterr().err


def test_the_time_of_compiling_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: list[float] = []
    monkeypatch.setattr(forward, "serve_generated", lambda *given: None)
    monkeypatch.setattr(forward, "racer_of", lambda *given: None)
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    monkeypatch.setattr(prepared, "prepare", lambda *given: 40.0)
    monkeypatch.setattr(forward, "run", lambda *given, limit_s, **named: limits.append(limit_s) or 0)
    assert forward.main(["--results", str(tmp_path), "--limit-seconds", "100", "--prepare", "4"]) == 0
    assert limits == [60.0]
