"""The benchmark of functions of the caller without a GPU: all compute the same, what a row says, and the table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
from benchmarks import functions, functions_impls, report
from benchmarks.exit_codes import MISSING, STOPPED
from benchmarks.functions_cases import (
    BACKWARD,
    BOTH,
    FORWARD,
    FUNCTIONS,
    TABLE,
    Case,
    cases,
    document_lengths,
    half_of_the_keys,
)
from benchmarks.functions_impls import PEERS, impls_of
from benchmarks.functions_tables import TITLES, function_parts
from benchmarks.impls import Impl
from benchmarks.provenance import Provenance
from benchmarks.race import Pace, Result, race_on
from benchmarks.results import FUNCTION_COLUMNS, ResultsFile, Row, read_rows
from benchmarks.time_limit import TimeLimit
from flashgen import reference
from flashgen.codegen.score_mod_gradient import why_no_gradient
from flashgen.core.workload import Workload
from flashgen.measure.timing import Window
from flashgen.runtime.ops.mods import score_mods
from tests.benchmarks.races import CPU, FakeGpu
from tests.benchmarks.rows import SHARED
from tests.tiers import EXHAUSTIVE, first, only

SMALL = Workload(batch=1, nheads=4, nheads_k=2, seqlen_q=96, head_dim=16)
NEVER = TimeLimit(float("inf"), lambda: 0.0)
UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
SUITES = (FORWARD, BOTH, BACKWARD)


def small(name: str, suite: str) -> Case:
    batch = 3 if name == "key-mask" else 1
    return Case(suite=suite, function=FUNCTIONS[name], sizes=replace(SMALL, batch=batch))


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Any, k: Any, v: Any, *, block_mask: object = None, **options: Any) -> torch.Tensor:
        assert block_mask in (None, "blocks")
        out = reference.attention(q, k, v, **options)
        assert isinstance(out, torch.Tensor)
        return out

    monkeypatch.setattr(flashgen, "attention", attention, raising=False)
    monkeypatch.setattr(flashgen, "block_mask", lambda mask_mod, **sizes: "blocks", raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def named(name: str, suite: str, *peers: str) -> tuple[Impl, ...]:
    return impls_of(suite, FUNCTIONS[name], peers, "default")


def raced(case: Case, impls: Sequence[Impl]) -> dict[str, str | None]:
    with torch.set_grad_enabled(case.suite != FORWARD):
        pace = Pace(warm_ms=0.0, window_ms=1.0, rounds=1, settle_ms=0.0)
        found = race_on(lambda: case.problem(1, CPU), case.twin, impls, stopwatch=TickingGpu(), pace=pace)
    return {result.impl.name: result.reason for result in found}


class TickingGpu(FakeGpu):
    """Every window takes 3 ms, whatever runs in it, so that calls are queued."""

    def elapsed_ms(self, warm: Any, measured: Any) -> float:
        warm()
        measured()
        return 3.0


def test_about_24_calls_with_every_function_and_heads_that_share_keys() -> None:
    forward, both = cases(FORWARD), cases(BOTH)
    assert [case.sizes for case in both[: len(forward)]] == [case.sizes for case in forward]
    assert (len(forward), len(both)) == (17, 24)
    assert {case.function.name for case in both} == set(FUNCTIONS) == set(TITLES)
    assert len({(case.name, case.suite) for case in cases(*SUITES)}) == len(cases(*SUITES))
    assert {(w.nheads, w.nheads_k, w.head_dim) for w in (case.sizes for case in forward)} == {
        (16, 16, 128),
        (32, 32, 64),
        (32, 8, 128),
    }
    assert {case.sizes.head_dim for case in both if case.function.name == "softcap"} == {64, 128, 256}
    assert all(case.workload == Workload.parse(case.workload.key) for case in cases(*SUITES))
    assert max(case.sizes.seqlen_q for case in both if case.function.name == "relative-bias") <= TABLE // 2 - 256
    assert [case.name for case in functions.chosen([FORWARD], ["prefix*-d64"])] == [
        "prefix-lm/fwd-bf16-b1-h32-hk32-sq8192-sk8192-d64"
    ]


@UNFUSED
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", first(1, [name for name in FUNCTIONS if not FUNCTIONS[name].is_built_in]))
def test_functions_in_both_languages_compute_what_a_built_in_feature_does(name: str) -> None:
    assert raced(small(name, FORWARD), named(name, FORWARD, "flashgen", "flex")) == {"flashgen": None, "flex": None}
    for suite in (BOTH, BACKWARD):  # FlexAttention has no backward pass on a CPU
        assert raced(small(name, suite), named(name, suite, "flashgen")) == {"flashgen": None}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", only([name for name in FUNCTIONS if FUNCTIONS[name].is_built_in], "alibi"))
def test_built_in_features_train_beside_torch(name: str) -> None:
    for suite in (BOTH, BACKWARD):
        found = raced(small(name, suite), named(name, suite, "flashgen", "sdpa-masked"))
        assert found["flashgen"] is None
        assert (found["sdpa-masked"] is None) == (name != "softcap")


@pytest.mark.usefixtures("on_the_cpu")
@EXHAUSTIVE
def test_what_computes_something_else_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashgen, "attention", lambda q, k, v, **options: reference.attention(q, k, v), raising=False)
    for name in set(FUNCTIONS) - {"softcap", "softcap-mod"}:
        (reason,) = raced(small(name, BOTH), named(name, BOTH, "flashgen")).values()
        assert "computes something else" in str(reason), name


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_pairs_are_those_that_a_mask_leaves(name: str) -> None:
    case = small(name, FORWARD)
    w, function = case.twin, case.function
    i, j = torch.arange(96)[:, None], torch.arange(96)[None, :]
    seen = (i >= j) if function.causal else torch.ones(96, 96, dtype=torch.bool)
    if function.flex_mask is not None:
        seen = seen & function.flex_mask(function.aux(w, CPU))(torch.tensor(0), 0, i, j)
    masks = half_of_the_keys(w, CPU)[:, 0] & seen if name == "key-mask" else seen[None]
    assert int(masks.sum()) == function.pairs(w)
    assert small(name, BOTH).flops == int(3.5 * case.flops)
    assert small(name, BACKWARD).flops == int(2.5 * case.flops)
    if not function.pairs.__name__.endswith("_dense_pairs"):
        return
    assert case.flops == case.workload.flops


def test_documents_end_inside_of_blocks_and_half_of_the_keys_are_padding() -> None:
    lengths = document_lengths(16384)
    assert (sum(lengths), len(lengths), len(set(lengths))) == (16384, 8, 8)
    assert all(end % 64 for end in list(itertools.accumulate(lengths))[:-1])
    mask = half_of_the_keys(Workload(batch=32, nheads=16, seqlen_q=512, head_dim=64), CPU)
    assert mask.shape == (32, 1, 1, 512)
    assert mask.float().mean() == 0.5
    assert 0.4 < mask[0].float().mean() < 0.6


@UNFUSED
@pytest.mark.usefixtures("on_the_cpu")
def test_flex_races_as_a_variant_and_keeps_its_near_ones() -> None:
    names = [
        variant.version().removeprefix(torch.__version__).strip()
        for variant in tried(
            impls_of(FORWARD, FUNCTIONS["documents"], ["flex"], "triton")[0], small("documents", FORWARD)
        )
    ]
    assert names == ["TMA 64x64 3s 4w", "TMA 64x64 3s 4w mask 64x64", "TMA 128x64 3s 8w", ""]
    both = small("relative-bias", BOTH)
    found = tried(impls_of(BOTH, FUNCTIONS["relative-bias"], ["flex"], "triton")[0], both)
    assert [variant.version().rpartition("w ")[2] for variant in found][1] == "bwd 64x64"
    kept = functions._kept(PEERS, "best")
    assert kept(both) is kept(replace(both, sizes=replace(SMALL, seqlen_q=64)))
    assert [impl.name for impl in kept(both)] == ["flashgen", "flex", "fa4"]
    assert "in training" in str(kept(both)[2].unsupported(both.workload))
    assert [impl.name for impl in kept(small("alibi", BOTH))] == [*PEERS]


def tried(impl: Impl, case: Case) -> list[Impl]:
    """All variants, where each is as fast as the others."""
    seen: dict[str, float] = {}
    found = []
    assert impl.variants is not None
    while (variant := impl.variants.next(case.twin, seen)) is not None:
        seen[variant.version()] = 1.0
        found.append(variant)
    return found


def test_arguments_of_flashgens_call(on_the_cpu: None) -> None:
    listed = functions_impls.options_of(FUNCTIONS["documents"], SMALL, CPU)
    assert (listed["block_mask"], listed["mask_mod"].__name__) == ("blocks", "documents")
    plain = functions_impls.options_of(FUNCTIONS["documents-unlisted"], SMALL, CPU)
    assert "block_mask" not in plain
    score = functions_impls.options_of(FUNCTIONS["relative-bias"], replace(SMALL, causal=True), CPU)
    assert (score["causal"], score["aux"][0].shape, "mask_mod" in score) == (True, (4, TABLE), False)


@pytest.mark.usefixtures("on_the_cpu")
def test_what_serves_a_call_is_said_of_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def explain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, direction: str, **options: Any) -> Any:
        asked.append(options)
        if direction == "backward":
            raise ValueError("no\nway")
        return SimpleNamespace(served=SimpleNamespace(rung=3, config="a config"))

    monkeypatch.setattr(flashgen, "explain", explain, raising=False)
    assert functions.served_by(small("documents", FORWARD), CPU) == "forward rung 3: a config"
    assert asked[0].keys() == {"causal", "aux", "mask_mod", "block_mask"}
    assert functions.served_by(small("softcap", BOTH), CPU) == "forward rung 3: a config; ValueError: no"
    assert (asked[-1]["softcap"], asked[-1]["causal"]) == (50.0, True)
    functions.served_by(small("softcap-mod", FORWARD), CPU)
    assert "softcap" not in asked[-1]


# --- rows, going on, and the table -----------------------------------------------------------------------------------


def racer(case: Case, impls: Sequence[Impl]) -> list[Result]:
    """flashgen takes 1 ms and FlexAttention 2, which has no backward pass; others refuse."""
    times = {"flashgen": 1.0, "flex": 2.0} if case.suite != BACKWARD else {"flex": 2.0}
    return [
        Result(impl=impl, windows=(Window(ms=times[impl.name]),), timing="graph")
        if impl.name in times
        else Result(impl=impl, reason="no")
        for impl in impls
    ]


@pytest.fixture
def file(tmp_path: Path) -> ResultsFile:
    return ResultsFile(tmp_path / SHARED.slug / "functions.csv", FUNCTION_COLUMNS)


def test_rows_are_written_race_by_race_and_a_run_goes_on(file: ResultsFile) -> None:
    wanted, impls, now = cases(FORWARD, BOTH), functions._kept(PEERS, "default"), itertools.count(0.0, 10.0)
    limit = TimeLimit(100.0, lambda: next(now))
    assert functions.run(wanted, impls, file, SHARED, racer, limit) == STOPPED
    some = len(read_rows(file.path, FUNCTION_COLUMNS))
    assert 0 < some < 2 * len(wanted)
    again = ResultsFile(file.path, FUNCTION_COLUMNS, append=True, commit=SHARED.commit)
    assert functions.run(wanted, impls, again, SHARED, racer, NEVER) == 0
    rows = read_rows(file.path, FUNCTION_COLUMNS)
    assert len(rows) == 2 * len(wanted)
    first = rows[0]
    assert (first.suite, first.workload, first.function) == (
        FORWARD,
        "fwd-bf16-b1-h16-hk16-sq8192-sk8192-d128",
        "documents",
    )
    assert first.tflops == pytest.approx(wanted[0].flops / 1e9, rel=0.01)
    assert functions.run(cases(BACKWARD)[:1], impls, again, SHARED, racer, NEVER) == MISSING


def test_a_run_asks_for_a_device_and_known_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Provenance, "here", lambda commit: SHARED)
    monkeypatch.setattr(functions, "serve_generated", lambda *given: None)
    monkeypatch.setattr(functions, "racer_of", lambda options: racer)
    prepared: list[tuple[str, Sequence[str], int]] = []
    monkeypatch.setattr(functions, "prepare", lambda *given: prepared.append(given[:3]))
    command = ["--results", str(tmp_path), "--only", "softcap/*-d256-*", "--flex", "default", "--prepare", "3"]
    assert functions.main(command) == 0
    assert prepared == [("functions", command, 3)]
    rows = read_rows(tmp_path / SHARED.slug / "functions.csv", FUNCTION_COLUMNS)
    assert [(row.suite, row.impl) for row in rows] == [(BOTH, "flashgen"), (BOTH, "flex")]
    assert functions.main([*command, "--append"]) == 0
    assert prepared == [("functions", command, 3)], "nothing is left to compile"
    with pytest.raises(SystemExit):
        functions.main(["--impls", "fa2"])
    assert "one of flashgen, flex" in capsys.readouterr().err


@UNFUSED
@pytest.mark.usefixtures("on_the_cpu")
def test_everything_that_may_race_is_called_once(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [small("alibi-mod", FORWARD), small("key-mask", BOTH)]
    assert functions.compile_all(wanted, functions._kept(["flashgen", "sdpa-masked", "fa4"], "default"), CPU) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "functions alibi-mod/fwd-bf16-b1-h4-hk2-sq96-sk96-d16-causal flashgen: compiled" in lines
    assert "functions_training key-mask/bwd-bf16-b3-h4-hk2-sq96-sk96-d16-keymask sdpa-masked: compiled" in lines
    assert any("fa4: " in line and "installed" in line for line in lines)


def test_the_page_has_a_table_for_each_suite_that_was_measured(tmp_path: Path, file: ResultsFile) -> None:
    assert function_parts([]) == []
    impls = functions._kept(PEERS, "default")
    wanted = [case for case in cases(FORWARD, BOTH) if case.sizes.head_dim != 64]
    assert functions.run(wanted, impls, file, SHARED, racer, NEVER) == 0
    (tmp_path / "README.md").write_text(f"{report.START}\n{report.END}\n")
    given = ["--results", str(tmp_path), "--readme", str(tmp_path / "README.md")]
    assert report.main(given) == 0
    lines = (tmp_path / report.PAGE).read_text().splitlines()
    assert "### Functions of the caller, forward pass" in lines
    assert "### Functions of the caller, forward and backward pass" in lines
    rate = f"{wanted[0].flops / 1e9:.0f}"
    half = f"{wanted[0].flops / 2e9:.0f}"
    assert f"| documents | 16 | 128 | 8192 | {rate} | {half} | 2.00 |" in lines
    assert any(line.startswith("| causal documents | 32/8 | 128 | 16384 |") for line in lines)
    assert any(line.startswith("| softcap, built in | 8 | 256 | 4096 |") for line in lines)
    assert report.main([*given, "--check"]) == 0


def test_a_row_without_a_rate_is_no_line() -> None:
    case = cases(FORWARD)[0]
    result = racer(case, named("documents", FORWARD, "flashgen"))[0]
    row: Row = functions.row_of(case, result, SHARED)
    assert function_parts([replace(row, tflops=None, median_ms=None)]) == []
    assert "no row: why" in functions.line_of(case, Result(impl=result.impl, reason="why"))
    assert "1.0000 ms" in functions.line_of(case, result)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if FUNCTIONS[name].score_mod is not None])
def test_every_score_mod_can_be_differentiated(name: str) -> None:
    function = FUNCTIONS[name]
    dtypes = tuple(tensor.dtype for tensor in function.aux(SMALL, CPU))
    found = score_mods(function.score_mod, None, dtypes).score_mod
    assert found is not None
    assert why_no_gradient(found) is None
