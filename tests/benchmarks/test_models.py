"""The benchmark of models without a GPU: its workloads, its rows with reasons, and the tables of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import model_tables
from benchmarks.forward import run
from benchmarks.impls import Impl
from benchmarks.model_tables import model_parts, visible_blocks
from benchmarks.models import NAMES, PEERS
from benchmarks.race import Result
from benchmarks.results import OUTCOME_COLUMNS, ResultsFile, Row, read_rows
from benchmarks.suites import MODELS, model_workloads
from flashgen.codegen.families import applicable
from flashgen.core.device import find_device
from flashgen.core.workload import Workload
from flashgen.measure.timing import Window
from tests.benchmarks.rows import SHARED, row

ROOT = Path(__file__).resolve().parents[2]
EVERY = [workload for name in MODELS for workload in model_workloads(name)]
FULL, WINDOWED = (Workload.parse(f"b1-h16-hk8-s8192-d256-causal-softcap{more}") for more in ("", "-wl4095"))


def racer(workload: Workload, impls: Sequence[Impl]) -> list[Result]:
    """flashgen takes 1 ms, FA4 2 ms; the others refuse."""
    times = {"flashgen": 1.0, "fa4": 2.0}
    return [
        Result(impl=impl, windows=(Window(ms=times[impl.name]),))
        if impl.name in times
        else Result(impl=impl, reason='not, "here"' + "!" * 1000)
        for impl in impls
    ]


def test_workloads_are_those_that_models_run() -> None:
    assert 35 <= len(EVERY) == len(set(EVERY)) <= 45
    llama = model_workloads("llama-3.1-8b")
    assert {w.seqlen_q for w in llama} == {2**n for n in range(9, 16)}
    assert {w.batch for w in llama} == {1, 4, 8, 16}
    assert {(4250, 4250), (4096, 77)} < {(w.seqlen_q, w.seqlen_k) for w in EVERY}
    assert {(w.head_dim, w.head_dim_v) for w in EVERY} == {(64, 64), (128, 128), (192, 128), (256, 256)}
    assert any(w.sink and w.window_left for w in EVERY)
    assert any(w.softcap and w.window_left for w in EVERY)
    device = find_device("h200")
    assert all(applicable(spec, device) for spec in {w.specialization for w in EVERY})


def test_the_command_that_tunes_them_names_every_model() -> None:
    text = (ROOT / "benchmarks/README.md").read_text()
    assert f"flashgen tune {' '.join(f'--model {name}' for name in MODELS)}\n" in text


def test_what_cannot_run_has_a_row_with_its_reason(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "models.csv", OUTCOME_COLUMNS)
    jobs = [("gemma-2-9b", [FULL, WINDOWED])]
    assert run(jobs, PEERS, file, SHARED, racer, reasons=True, say=print) == 0
    rows = read_rows(file.path, OUTCOME_COLUMNS)
    assert [(r.workload, r.impl) for r in rows] == [(w.key, impl.name) for w in (FULL, WINDOWED) for impl in PEERS]
    assert {r.impl for r in rows} == set(NAMES)
    for found in rows:
        timed = found.impl in ("flashgen", "fa4")
        assert (found.median_ms is not None, found.tflops is not None, not found.outcome) == (timed,) * 3
        assert len(found.outcome) <= 160
    again = ResultsFile(file.path, OUTCOME_COLUMNS, append=True)
    assert run(jobs, PEERS, again, SHARED, lambda *_: pytest.fail("everything is done"), reasons=True, say=print) == 0


@pytest.mark.parametrize("tokens", ["s300-causal", "s300-wl40-causal", "sq70-sk200-wl16-wr8", "sq200-sk70-wl5-causal"])
def test_visible_blocks_are_those_with_a_visible_score(tokens: str) -> None:
    w, block = Workload.parse(f"b1-h1-d64-{tokens}"), 32
    seen = set()
    for i, j in itertools.product(range(w.seqlen_q), range(w.seqlen_k)):
        distance = i + w.seqlen_k - w.seqlen_q - j
        left, right = w.window_left, 0 if w.causal else w.window_right
        if (left is None or distance <= left) and (right is None or -distance <= right):
            seen.add((i // block, j // block))
    assert visible_blocks(w, block) == len(seen)


def some_rows() -> list[Row]:
    """Gemma-2 with and without its window, one row of ViT where flashgen is alone, and one of another suite."""
    speeds = {"flashgen": 600.0, "flex": 300.0, "fa3": 500.0, "fa4": 400.0}
    rows = [row(FULL, impl, speed, suite="gemma-2-9b") for impl, speed in speeds.items()]
    rows += [
        row(WINDOWED, impl, speed, suite="gemma-2-9b") for impl, speed in {"flashgen": 480.0, "flex": 300.0}.items()
    ]
    refused = row(WINDOWED, "fa3", 1.0, suite="gemma-2-9b")
    rows.append(replace(refused, median_ms=None, tflops=None, gbps=None, outcome="this build has <no> windows."))
    return [*rows, row(EVERY[-1], "flashgen", 500.0, suite="flux"), row(FULL, "flashgen", 1.0, suite="forward")]


def test_the_section_has_means_rows_and_reasons() -> None:
    parts = model_parts(some_rows())
    lines = "\n".join(parts).splitlines()
    head = "| flashgen against, geometric mean | rows | the best of them | lowest | FlexAttention | FA3 | FA4 |"
    at = lines.index(head)
    assert lines[at + 2 : at + 5] == [
        "| Gemma-2 9B | 2 | 1.39 | 1.20 | 1.79 | 1.20 | 1.50 |",
        "| FLUX.1 | 1 | - | - | - | - | - |",
        "| all | 3 | 1.39 | 1.20 | 1.79 | 1.20 | 1.50 |",
    ]
    assert "| Gemma-2 9B | causal, softcap | 1 | 16/8 | 256 | 8192 | 600 | 300 | 500 | 400 | 1.20 |" in lines
    assert "| Gemma-2 9B | causal, window 4095/0, softcap | 1 | 16/8 | 256 | 8192 | 480 | 300 | - | - | 1.60 |" in lines
    assert "cannot run the row: FA3: this build has no windows (1)." in parts[1]
    assert "commit 0123456789ab" in parts[1]


def test_a_window_costs_what_its_visible_blocks_cost() -> None:
    lines = model_parts(some_rows())[-1].splitlines()
    blocks = visible_blocks(WINDOWED) / visible_blocks(FULL)
    mine, flex = WINDOWED.flops / 480 / (FULL.flops / 600), WINDOWED.flops / FULL.flops
    assert lines[-1] == (f"| Gemma-2 9B | 4095 | 8192 | {blocks:.1%} | {mine:.1%} | {mine / blocks:.2f} | {flex:.1%} |")


def test_readme_says_nothing_of_what_was_not_measured() -> None:
    assert model_parts([]) == model_parts([row(FULL, "flashgen", 1.0)]) == []
    alone = [each for each in some_rows() if each.workload == WINDOWED.key]
    assert "sliding window" not in "".join(model_parts(alone))
    assert set(model_tables.PEERS) == set(NAMES) - {"flashgen"}
