"""Presets are facts of public model configs; files have the same form and errors that name the entry."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import suites
from flashgen.core.errors import WorkloadError
from flashgen.core.workload import Workload
from flashgen.tuning.workloads import Preset, collect, load_file, preset, presets


def test_all_presets_fit_the_shipping_run() -> None:
    workloads = collect(models=["all"])
    directions = Counter(workload.direction for workload in workloads)
    assert 110 <= directions["forward"] <= 240
    assert 60 <= directions["backward"] <= 90
    assert 30 <= directions["decode"] <= 40
    assert set(workloads) == {workload for p in presets() for workload in p.workloads}
    assert all(p.source and p.title for p in presets())


def test_only_models_with_the_same_heads_share_shapes() -> None:
    owners: dict[Workload, list[str]] = {}
    for p in presets():
        for workload in p.workloads:
            owners.setdefault(workload, []).append(p.name)
    shared = {tuple(names) for names in owners.values() if len(names) > 1}
    assert shared == {("llama-3.1-8b", "qwen3-8b"), ("llama-3.1-70b", "qwen3-32b")}


FORWARD_GRIDS = {"paper", "paper-fp16", "heads-of-96", "features"}
GRIDS = {*FORWARD_GRIDS, "paper-backward", "features-backward", "deterministic"}

HEADS = {
    # nheads, nheads_k, head_dim, head_dim_v, causal, as the models' configs have them
    "gpt2": {(12, 12, 64, 64, True)},
    "bert-large": {(16, 16, 64, 64, False)},
    "llama-3.1-8b": {(32, 8, 128, 128, True)},
    "llama-3.1-70b": {(64, 8, 128, 128, True)},
    "qwen2.5-7b": {(28, 4, 128, 128, True)},
    "falcon-7b": {(71, 1, 64, 64, True)},
    "qwen3-8b": {(32, 8, 128, 128, True)},
    "qwen3-32b": {(64, 8, 128, 128, True)},
    "gemma-2-9b": {(16, 8, 256, 256, True)},
    "gemma-3-4b": {(8, 4, 256, 256, True)},
    "gemma-3-12b": {(16, 8, 256, 256, True)},
    "gemma-3-27b": {(32, 16, 128, 128, True)},
    "gemma-4-26b": {(16, 2, 512, 512, True)},
    "gpt-oss-20b": {(64, 8, 64, 64, True)},
    "mistral-7b": {(32, 8, 128, 128, True)},
    "deepseek-v3": {(128, 128, 192, 128, True)},
    "phi-3-mini": {(32, 32, 96, 96, True)},
    "vit-l": {(16, 16, 64, 64, False)},
    "siglip": {(16, 16, 72, 72, False)},
    "sd15": {(8, 8, d, d, False) for d in (40, 80, 160)},
    "sdxl": {(10, 10, 64, 64, False), (20, 20, 64, 64, False)},
    "flux": {(24, 24, 128, 128, False)},
    "whisper-large-v3": {(20, 20, 64, 64, causal) for causal in (False, True)},
    "bloom-7b1": {(32, 32, 128, 128, True)},
    "flan-t5-large": {(16, 16, 64, 64, causal) for causal in (False, True)},
    "masked-gqa": {(32, 8, 128, 128, causal) for causal in (False, True)},
    "single-precision": {(16, 16, d, d, causal) for d in (64, 128) for causal in (False, True)}
    | {(16, 4, 128, 128, True)},
    "gpt2-training": {(12, 12, 64, 64, True), (16, 16, 64, 64, True)},
    "bert-large-training": {(16, 16, 64, 64, False)},
    "qwen2.5-7b-training": {(28, 4, 128, 128, True)},
    "llama-3-8b-training": {(32, 8, 128, 128, True)},
    "vit-l-training": {(16, 16, 64, 64, False)},
    "gemma-training": {(8, 4, 256, 256, True), (16, 8, 256, 256, True)},
}
PACKED = [p for p in presets() if all(w.is_packed for w in p.workloads)]
PASSES = [p for p in presets() if p.direction != "decode" and p not in PACKED]
STEPS = [p for p in presets() if p.direction == "decode"]


def test_every_model_is_checked_against_its_config() -> None:
    assert {p.name for p in PASSES} == HEADS.keys() | GRIDS


@pytest.mark.parametrize("p", STEPS, ids=lambda p: p.name)
def test_presets_of_serving_have_their_models_heads_and_features(p: Preset) -> None:
    model = preset(p.name.removesuffix("-decode"))

    def traits(w: Workload) -> tuple[object, ...]:
        return w.nheads, w.nheads_k, w.head_dim, w.head_dim_v, w.softcap, w.alibi, w.sink

    windows = {w.window_left for w in model.workloads}
    assert {traits(w) for w in p.workloads} == {traits(w) for w in model.workloads}
    assert all(w.window_left in windows and not w.lengths and w.causal == (w.seqlen_q > 1) for w in p.workloads)


def test_presets_of_packed_sequences_have_their_models_heads() -> None:
    for p in PACKED:
        model = preset(p.name.rpartition("-")[0])
        heads = {(w.nheads, w.nheads_k, w.head_dim, w.causal) for w in model.workloads}
        assert {(w.nheads, w.nheads_k, w.head_dim, w.causal) for w in p.workloads} == heads, p.name
        assert {w.lengths for w in p.workloads} == {"mixed" if p.name.endswith("-mixed") else ""}, p.name
        assert all((w.total_q or 0) < w.batch * w.seqlen_q for w in p.workloads), p.name
    found = collect(models=["packed"])
    assert found == tuple(w for w in collect(models=["all"]) if w.is_packed)
    assert {w.total_q for w in found if w.direction == "backward"} == {8192, 16384, 32768}
    both = collect(models=["llama-3.1-8b-prefill"], direction="both")
    assert [w.direction for w in both[:2]] == ["forward", "backward"]
    assert {w.page_size for w in both} == {None, 16, 64}
    assert {w.page_size for w in both if w.direction == "backward"} == {None}, "there is no gradient over pages"


def test_serving_stands_for_all_steps_of_decoding() -> None:
    found = collect(models=["serving"])
    assert found == tuple(w for w in collect(models=["all"]) if w.direction == "decode")
    assert collect(models=["serving"], direction="both") == found, "which have no passes"
    assert {w.page_size for w in found} == {None, 16, 64}
    assert {w.seqlen_q for w in found} == {1, 4, 8, 16}


@pytest.mark.parametrize("name", HEADS)
def test_presets_match_the_models_configs(name: str) -> None:
    found = {(w.nheads, w.nheads_k, w.head_dim, w.head_dim_v, w.causal) for w in preset(name).workloads}
    assert found == HEADS[name]


FEATURES = {
    # the features of a model's layers: window_left, softcap, alibi, sink, bias, mask
    "bert-large": {(None, False, False, False, "", ""), (None, False, False, False, "", "keys")},
    "bert-large-training": {(None, False, False, False, "", ""), (None, False, False, False, "", "keys")},
    "gemma-2-9b": {(None, True, False, False, "", ""), (4095, True, False, False, "", "")},
    "gemma-3-4b": {(None, False, False, False, "", ""), (1023, False, False, False, "", "")},
    "gemma-3-12b": {(None, False, False, False, "", ""), (1023, False, False, False, "", "")},
    "gemma-3-27b": {(None, False, False, False, "", ""), (1023, False, False, False, "", "")},
    "gpt-oss-20b": {(None, False, False, True, "", ""), (127, False, False, True, "", "")},
    "mistral-7b": {(4095, False, False, False, "", "")},
    "phi-3-mini": {(None, False, False, False, "", ""), (2046, False, False, False, "", "")},
    "bloom-7b1": {(None, False, True, False, "", "")},
    "flan-t5-large": {(None, False, False, False, "full", "")},
    "masked-gqa": {(None, False, False, False, "", "full"), (None, False, False, False, "", "keys")},
    "gemma-training": {
        (None, False, False, False, "", ""),
        (1023, False, False, False, "", ""),
        (None, True, False, False, "", ""),
    },
}
FEATURE_GRIDS = ("features", "features-backward")


@pytest.mark.parametrize("p", [p for p in PASSES if p.name not in FEATURE_GRIDS], ids=lambda p: p.name)
def test_presets_have_their_models_features(p: Preset) -> None:
    found = {(w.window_left, w.softcap, w.alibi, w.sink, w.bias, w.mask) for w in p.workloads}
    assert found == FEATURES.get(p.name, {(None, False, False, False, "", "")})
    assert all(w.window_right is None and not w.varlen and w.page_size is None for w in p.workloads)


def test_a_window_of_a_preset_hides_something() -> None:
    windowed = [w for p in presets() if p.name not in FEATURE_GRIDS for w in p.workloads if w.window_left is not None]
    assert windowed
    for workload in windowed:
        without = dataclasses.replace(workload, window_left=None, window_right=None)
        assert workload.visible_pairs < without.visible_pairs


def test_every_row_of_the_features_benchmark_is_tuned_exactly() -> None:
    grid = {*suites.features_grid(), *suites.window_grid()}
    named = {workload for p in presets() for workload in p.workloads}
    # the widest window hides nothing: it is there to show that it costs what a causal mask does
    assert {w.window_left for w in grid - named} <= {suites.TOKENS - 1}


def test_every_row_of_the_forward_and_the_data_benchmark_is_tuned_exactly() -> None:
    named = {workload for p in presets() for workload in p.workloads}
    assert {*suites.paper_grid(), *suites.fp16_grid(), *suites.data_grid()} <= named


def test_every_row_of_the_backward_benchmark_is_tuned_exactly() -> None:
    assert set(suites.backward_grid()) == set(preset("paper-backward").workloads)


def test_lengths_are_the_models_own() -> None:
    lengths = {p.name: {(w.seqlen_q, w.seqlen_k) for w in p.workloads} for p in PASSES}
    assert max(lengths["gpt2"]) == (1024, 1024)
    assert {(4250, 4250), (4608, 4608)} < lengths["flux"]
    assert lengths["sdxl"] == {(4096, 4096), (1024, 1024), (4096, 77), (1024, 77)}
    assert lengths["vit-l"] == {(197, 197), (577, 577)}
    assert lengths["siglip"] == {(729, 729)}
    assert lengths["whisper-large-v3"] == {(1500, 1500), (448, 1500), (448, 448)}
    assert max(max(both) for name in lengths for both in lengths[name]) == 32768
    assert {w.dtype for w in preset("single-precision").workloads} == {"fp32", "tf32"}


@pytest.mark.parametrize("name", ["paper", "paper-fp16", "paper-backward"])
def test_paper_grid_holds_tokens_and_hidden_size(name: str) -> None:
    grid = preset(name).workloads
    assert len(grid) == 36
    assert {w.batch * w.seqlen_q for w in grid} == {16384}
    assert {w.nheads * w.head_dim for w in grid} == {2048}
    assert {(w.head_dim, w.seqlen_q, w.causal) for w in grid} == {
        (d, 2**n, c) for d in (64, 128, 256) for n in range(9, 15) for c in (False, True)
    }


def test_training_presets_are_backward_passes_and_the_others_forward() -> None:
    training = {p.name for p in presets() if p.is_training}
    assert training == {name for name in HEADS if name.endswith("-training")} | GRIDS - FORWARD_GRIDS | {
        p.name for p in PACKED if p.name.endswith("-packed")
    }
    assert {p.direction for p in PASSES} == {"forward", "backward"}
    passes = {w for p in PACKED if p.is_training for w in p.workloads}
    every = collect(models=["all"])
    assert collect(models=["training"]) == tuple(w for w in every if w.direction == "backward" or w in passes)
    grids = (preset("paper").workloads, preset("paper-backward").workloads)
    assert {dataclasses.replace(w, direction="backward") for w in grids[0]} == set(grids[1])


def test_training_presets_are_what_is_trained() -> None:
    assert {w.batch * w.seqlen_q for w in preset("gpt2-training").workloads} == {16384}
    assert [w.mask for w in preset("bert-large-training").workloads] == ["", "keys", ""]
    assert {w.seqlen_q for w in preset("llama-3-8b-training").workloads} == {4096, 8192}
    assert all(w.seqlen_q % 2 for w in preset("vit-l-training").workloads)
    assert {(w.head_dim, w.seqlen_q) for w in preset("deterministic").workloads} == {
        (d, s) for d in (64, 128) for s in (2048, 8192)
    }
    for p in presets():
        assert all(w.deterministic == (p.name == "deterministic") for w in p.workloads)


def test_every_feature_has_a_backward_pass_among_the_presets() -> None:
    found = preset("features-backward").workloads
    for name in ("softcap", "alibi", "sink", "window_left", "window_right"):
        assert any(getattr(w, name) for w in found), name
    assert {w.bias for w in found} == {w.mask for w in found} == {"", "full", "keys"}
    assert any(w.nheads != w.nheads_k for w in found)


FORWARD, BACKWARD = (f"{name}-b1-h2-s64-d64" for name in ("fwd", "bwd"))


@pytest.mark.parametrize(
    ("shapes", "direction", "names"),
    [
        (["b1-h2-s64-d64"], None, [FORWARD]),
        ([BACKWARD], None, [BACKWARD]),
        ([BACKWARD], "forward", [FORWARD]),
        ([FORWARD], "backward", [BACKWARD]),
        ([FORWARD], "both", [FORWARD, BACKWARD]),
        ([FORWARD, BACKWARD], "both", [FORWARD, BACKWARD]),
    ],
)
def test_a_direction_is_of_everything_that_was_named(shapes: list[str], direction: str, names: list[str]) -> None:
    assert collect(shapes=shapes, direction=direction) == tuple(map(Workload.parse, names))


def test_presets_are_tuned_in_the_direction_that_is_asked_for() -> None:
    forward, backward = (collect(models=["gpt2-training"], direction=name) for name in ("forward", "backward"))
    assert backward == preset("gpt2-training").workloads
    assert [dataclasses.replace(w, direction="backward") for w in forward] == list(backward)
    assert collect(models=["gpt2-training"], direction="both")[:2] == (forward[0], backward[0])


def test_determinism_is_of_backward_passes() -> None:
    both = collect(shapes=[FORWARD], direction="both", deterministic=True)
    assert [(w.direction, w.deterministic) for w in both] == [("forward", False), ("backward", True)]
    with pytest.raises(WorkloadError, match="only a backward pass is asked for the same bits"):
        collect(shapes=[FORWARD], deterministic=True)
    with pytest.raises(WorkloadError, match="a direction is one of forward, backward, both, got 'back'"):
        collect(shapes=[FORWARD], direction="back")


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
        ("[1]", ["maps names to groups", "mine: {workloads: [b4-h32-s4096-d128]}, got a list in"]),
        ("", ["got nothing in"]),
        ("a: {workloads: []}", ["a:", "at least one entry"]),
        ("a: {workload: [x]}", ["a:", "'workload'"]),
        ("a: {workloads: [b1-h1-s4]}", ["a: entry 1", "lacks d"]),
        (
            "a: {workloads: [b1-h1-s4-d8, {batch: 1, nheads: 3, nheads_k: 2, seqlen_q: 1, head_dim: 8}]}",
            ["a: entry 2", "multiple of nheads_k"],
        ),
        (
            "a: {workloads: [{batch: 1, nheads: 3, seqlen: 1, head_dim: 8}]}",
            ["a: entry 1", "'seqlen'; did you mean"],
        ),
        ("a: {worklods: [b1-h1-s4-d8]}", ["'worklods'; did you mean workloads?"]),
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
    with pytest.raises(WorkloadError, match=r"a model is one of gpt2, .*, got 'gpt5'; did you mean gpt2\?"):
        collect(models=["gpt5"])
    with pytest.raises(WorkloadError, match=r"got 'abacus'$"):
        collect(models=["abacus"])
    with pytest.raises(WorkloadError, match="readable text"):
        load_file(Path("nowhere.yaml"))
