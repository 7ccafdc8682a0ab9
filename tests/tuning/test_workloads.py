"""Presets are facts of public model configs; files have the same form and errors that name the entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashgen.core.errors import WorkloadError
from flashgen.core.workload import Workload
from flashgen.tuning.workloads import collect, load_file, preset, presets


def test_all_presets_fit_the_shipping_run() -> None:
    workloads = collect(models=["all"])
    assert len(workloads) == sum(len(p.workloads) for p in presets()) <= 60
    assert {p.name for p in presets()} == {"gpt2", "llama-3.1-8b", "flux", "sdxl", "paper"}
    assert all(p.source and p.title for p in presets())


def test_presets_match_the_models_configs() -> None:
    heads = {
        name: {(w.nheads, w.nheads_k, w.head_dim, w.causal) for w in preset(name).workloads}
        for name in ("gpt2", "llama-3.1-8b", "flux", "sdxl")
    }
    assert heads["gpt2"] == {(12, 12, 64, True)}
    assert heads["llama-3.1-8b"] == {(32, 8, 128, True)}
    assert heads["flux"] == {(24, 24, 128, False)}
    assert heads["sdxl"] == {(10, 10, 64, False), (20, 20, 64, False)}
    assert 4608 in {w.seqlen_q for w in preset("flux").workloads}
    assert {(w.nheads, w.seqlen_q) for w in preset("sdxl").workloads} == {(10, 4096), (20, 1024)}
    assert max(w.seqlen_q for w in preset("gpt2").workloads) == 1024


def test_paper_grid_holds_tokens_and_hidden_size() -> None:
    grid = preset("paper").workloads
    assert len(grid) == 36
    assert {w.batch * w.seqlen_q for w in grid} == {16384}
    assert {w.nheads * w.head_dim for w in grid} == {2048}
    assert {(w.head_dim, w.seqlen_q, w.causal) for w in grid} == {
        (d, 2**n, c) for d in (64, 128, 256) for n in range(9, 15) for c in (False, True)
    }


def test_collect_keeps_the_order_and_drops_repeats() -> None:
    shape = "b1-h12-s512-d64-causal"
    assert collect(shapes=[shape, shape], models=["gpt2"]) == preset("gpt2").workloads
    assert collect(shapes=["b2-h4-s128-d64"]) == (Workload(batch=2, nheads=4, seqlen_q=128, head_dim=64),)


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_files_have_the_form_of_presets(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"mine.{kind}"
    body = {
        "mine": {
            "common": {"nheads": 8, "head_dim": 128},
            "workloads": ["b1-h2-s64-d64", {"batch": [1, 2], "seqlen_q": 4096, "causal": True}],
        }
    }
    in_yaml = """
mine:
  common: {nheads: 8, head_dim: 128}
  workloads:
    - b1-h2-s64-d64
    - {batch: [1, 2], seqlen_q: 4096, causal: true}
"""
    path.write_text(json.dumps(body) if kind == "json" else in_yaml)
    (group,) = load_file(path)
    assert [w.key for w in group.workloads] == [
        "fwd-bf16-b1-h2-hk2-sq64-sk64-d64",
        "fwd-bf16-b1-h8-hk8-sq4096-sk4096-d128-causal",
        "fwd-bf16-b2-h8-hk8-sq4096-sk4096-d128-causal",
    ]
    assert collect(paths=[path]) == group.workloads


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[1]", ["maps names to groups"]),
        ("a: {workloads: []}", ["a:", "at least one entry"]),
        ("a: {workload: [x]}", ["a:", "'workload'"]),
        ("a: {workloads: [b1-h1-s4]}", ["a: entry 1", "lacks ['head_dim']"]),
        (
            "a: {workloads: [b1-h1-s4-d8, {batch: 1, nheads: 3, nheads_k: 2, seqlen_q: 1, head_dim: 8}]}",
            ["a: entry 2", "multiple of nheads_k"],
        ),
        ("a: {workloads: [{batch: 1, nheads: 3, seqlen: 1, head_dim: 8}]}", ["a: entry 1", "'seqlen'"]),
        ("a: {workloads: [{batch: 1, seqlen_q: 1, head_dim: 8}]}", ["a: entry 1", "missing ['nheads']"]),
        (
            "a: {workloads: [{batch: true, nheads: 1, seqlen_q: 1, head_dim: 8}]}",
            ["a: entry 1", "batch must be of type int, got True"],
        ),
        (
            "a: {workloads: [{batch: 1, nheads: 1, seqlen_q: 1.5, head_dim: 8}]}",
            ["a: entry 1", "seqlen_q must be of type int, got 1.5"],
        ),
        (
            "a: {workloads: [{batch: 1, nheads: 1, seqlen_q: 1, head_dim: 8, causal: 1}]}",
            ["causal must be of type bool"],
        ),
        ("a: {workloads: [{batch: [], nheads: 1, seqlen_q: 1, head_dim: 8}]}", ["a: entry 1", "1 to 10000"]),
        (
            "a: {common: {dtype: int4}, workloads: [{batch: 1, nheads: 1, seqlen_q: 1, head_dim: 8}]}",
            ["a: entry 1", "dtype is one of"],
        ),
        ("a: {workloads: [1]}", ["a: entry 1", "mapping"]),
        ("a: [", ["YAML or JSON"]),
    ],
)
def test_errors_name_the_entry_and_the_rule(tmp_path: Path, text: str, names: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError) as error:
        load_file(path)
    assert all(name in str(error.value) for name in [str(path), *names]), str(error.value)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(WorkloadError, match="a model is one of gpt2, "):
        collect(models=["gpt5"])
    with pytest.raises(WorkloadError, match="readable text"):
        load_file(Path("nowhere.yaml"))
