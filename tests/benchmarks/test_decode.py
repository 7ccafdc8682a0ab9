"""The benchmark of decoding without a GPU: its steps, its oracle, what a row says, and why peers have none."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import decode, decode_cases, fa4
from benchmarks.cases import selected
from benchmarks.decode_cases import IMPLS, STEPS, SUITE, Step, caches, flashgen_options
from benchmarks.decode_tables import decode_parts
from benchmarks.decode_vllm import vllm_call, vllm_version, why_not_vllm
from benchmarks.report import load
from benchmarks.results import RESULTS
from flashgen.core.features.values import Features
from flashgen.core.workload import Workload
from flashgen.launch.feature_arguments import NO_FEATURES
from flashgen.measure.timing import Window
from flashgen.runtime.decode.call import DecodeCall
from tests import decoding
from tests.benchmarks.rows import SHARED

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def step(key: str) -> Step:
    return Step(workload=Workload.parse(key))


def test_steps_are_told_apart_and_their_lengths_follow_from_profiles() -> None:
    assert len({each.workload.key for each in STEPS}) == len(STEPS)
    assert all(each.workload == Workload.parse(each.workload.key) for each in STEPS)
    same, ramp, tail = (step(f"dec-b4-sk640-h4-hk2-sq1-d16-wl63-{profile}") for profile in ("same", "ramp", "tail"))
    assert (same.profile, same.lens) == ("same", (640,) * 4)
    assert ramp.lens == (1, 214, 427, 640)
    assert tail.lens == (640, 10, 10, 10)
    assert tail.bytes == (64 + 30) * 2 * 32 * 2


def test_the_oracle_is_that_of_the_tests() -> None:
    ragged = step("dec-b3-sk100-h4-hk2-sq2-d16-causal-sink-page16-wl20-ramp")
    found = caches(ragged, CPU)
    options = flashgen_options(ragged, found)
    features = Features(window=options.pop("window"), sinks=options.pop("sinks"))
    call = DecodeCall(
        q=found.q[0], k_cache=found.k[0], v_cache=found.v[0], seqlens=found.lens, features=features, **options
    )
    assert features != NO_FEATURES
    torch.testing.assert_close(decode.oracle(ragged, found), decoding.oracle(call)[0][-1])


def test_a_row_counts_the_keys_that_are_seen() -> None:
    one = STEPS[1]
    row = decode.row_of(one, IMPLS[0], [Window(ms=0.02), Window(ms=0.01), Window(ms=0.03)], SHARED)
    assert (row.suite, row.workload, row.data, row.timing) == ("decode", one.workload.key, "same", "graph")
    assert row.median_ms == 0.02
    assert row.gbps == 8192 * 8 * 2 * 128 * 2 / 0.02 / 1e6
    assert row.tflops is None
    assert "20.00 us" in decode.line_of(one, IMPLS[0], [Window(ms=0.02)])


def test_peers_say_what_they_lack() -> None:
    ragged = step("dec-b4-sk640-h4-hk2-sq1-d16-ramp")
    reasons = {impl.name: impl.unsupported(ragged) for impl in IMPLS}
    assert reasons["flashgen"] is None
    assert "no lengths" in str(reasons["sdpa-cudnn"])
    assert "longer" in str(reasons["flashgen-fixed"])
    assert [each.workload.page_size for each in selected(STEPS, ["*-page16-*"])].count(16) > 3


PAGED = step("dec-b3-sk100-h4-hk2-sq2-d48-causal-sink-page16-wl20-ramp")
VLLM_SOURCE = """
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.kv_cache_interface import KVQuantMode
import vllm.envs as envs
calls = []
def unified_attention(**given):
    calls.append(given)
"""


def test_vllm_is_loaded_from_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CHECKOUT", raising=False)
    assert "not installed" in str(why_not_vllm(PAGED))
    monkeypatch.setenv("VLLM_CHECKOUT", str(tmp_path))
    assert "names a folder without" in str(why_not_vllm(PAGED))
    file = tmp_path / "vllm/v1/attention/ops/triton_unified_attention.py"
    file.parent.mkdir(parents=True)
    file.write_text(VLLM_SOURCE)
    assert (why_not_vllm(PAGED), vllm_version()) == (None, "checkout")
    assert "have pages" in str(why_not_vllm(STEPS[0]))
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '1.2.3'")
    assert vllm_version() == "1.2.3"
    before = set(sys.modules)
    try:
        found = caches(PAGED, CPU)
        assert vllm_call(PAGED, found).run(1).shape == found.q[1].shape
        (given,) = sys.modules["vllm.v1.attention.ops.triton_unified_attention"].calls
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert given["q"].shape == given["out"].shape == (6, 4, 48)
    assert given["q"].data_ptr() == found.q[1].data_ptr()
    assert given["cu_seqlens_q"].tolist() == [0, 2, 4, 6]
    assert (given["window_size"], given["seq_threshold_3D"]) == ((20, 0), 64)
    assert given["softmax_segm_output"].shape == (64, 4, 16, 64)


def test_the_table_has_a_line_for_each_step() -> None:
    times = {"flashgen": 0.02, "sdpa-cudnn": 0.01}
    impls = [impl for impl in IMPLS if impl.name in times]
    rows = [
        decode.row_of(each, impl, [Window(ms=times[impl.name])], SHARED)
        for each in (STEPS[1], step("dec-b64-sk8192-h32-hk8-sq1-d128-page16-ramp"))
        for impl in impls[: 1 + (each is STEPS[1])]
    ]
    title, text, table = decode_parts(rows)
    assert title == "### Decoding"
    assert "0.50 of the speed of SDPA cuDNN on 1 steps" in text
    assert table.splitlines()[2:] == [
        "| 1 x 8192 | 32/8 | 128 | contiguous | - | 20.0 | 10.0 | 1678 |",
        "| 64 x 1 to 8192 | 32/8 | 128 | pages of 16 | - | 20.0 | - | 53687 |",
    ]
    assert decode_parts([]) == []


def test_flash_attention_4_is_called_with_what_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    (impl,) = (each for each in IMPLS if each.name == "fa4")
    monkeypatch.setattr(fa4, "is_installed", lambda: False)
    assert "not installed" in str(impl.unsupported(PAGED))
    monkeypatch.setattr(fa4, "is_installed", lambda: True)
    assert impl.unsupported(PAGED) is None
    calls: list[dict[str, object]] = []

    def flash_attn_varlen_func(q: torch.Tensor, *rest: torch.Tensor, **given: object) -> tuple[torch.Tensor, None]:
        calls.append(given)
        return torch.zeros_like(q), None

    module = ModuleType(fa4.MODULE)
    vars(module)["flash_attn_varlen_func"] = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, fa4.MODULE, module)
    found = caches(PAGED, CPU)
    assert impl.prepare(PAGED, found).run(0).shape == found.q[0].shape
    (given,) = calls
    assert (given["causal"], given["window_size"]) == (True, (20, 0))
    assert given["seqused_k"] is found.lens
    assert given["page_table"] is found.table
    assert given["learnable_sink"] is found.sinks


def test_flash_attention_3_has_lengths_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    (impl,) = (each for each in IMPLS if each.name == "fa3")
    calls: list[dict[str, object]] = []

    def flash_attn_with_kvcache(q: torch.Tensor, *rest: torch.Tensor, **given: object) -> torch.Tensor:
        calls.append(given)
        return torch.zeros_like(q)

    module = ModuleType("fa3_stand_in")
    module.__spec__ = ModuleSpec("fa3_stand_in", None)
    vars(module)["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "fa3_stand_in", module)
    monkeypatch.setattr(decode_cases, "FA3_MODULE", "fa3_stand_in")
    for key, expected in (
        ("sq1-d16-same", {"causal": False}),
        ("sq4-d16-causal-same", {"causal": True}),
        ("sq1-d16-ramp", {"causal": False, "cache_seqlens": None}),
        ("sq1-d16-page16-same", {"causal": False, "cache_seqlens": None, "page_table": None}),
        ("sq1-d16-wl20-ramp", {"causal": False, "cache_seqlens": None, "window_size": (20, 0)}),
    ):
        one = step(f"dec-b3-sk96-h4-hk2-{key}")
        found = caches(one, CPU)
        assert impl.prepare(one, found).run(0).shape == found.q[0].shape
        tensors = {"cache_seqlens": found.lens, "page_table": found.table}
        assert calls.pop() == {name: tensors.get(name, value) for name, value in expected.items()}
    for lacks, reason in ((True, "this build has no windows"), (False, None)):
        monkeypatch.setattr(decode_cases, "fa3_lacks", lambda part, lacks=lacks: lacks and part == "LOCAL")
        assert impl.unsupported(step("dec-b3-sk96-h4-hk2-sq1-d16-wl20-ramp")) == reason


def test_all_copies_of_the_largest_caches_fit_on_a_gpu() -> None:
    bytes_of = [
        each.copies * w.batch * w.seqlen_k * w.nheads_k * (w.head_dim + w.head_dim_v) * 2
        for each in STEPS
        for w in (each.workload,)
    ]
    assert max(bytes_of) <= 20e9


FIXED_COSTS = {
    "{}% where 16 sequences or more of Llama's heads are equally long": r"b(16|64)-h32-hk8-sq1-.*-d128(-page\d+)?-same",
    "{}% for 64 sequences of 1 to 8192 keys": r"b64-h32-hk8-sq1-sk8192-d128(-page\d+)?-ramp",
    "{}% with 4 or 8 queries": r"b16-h32-hk8-sq[48]-sk8192-d128-page64-.*",
    "{}% with 16, ": r"b16-h32-hk8-sq16-sk8192-d128-page64-.*",
    "{}% for 64 sequences of 8192 keys with heads of 64": r"b64-h64-hk8-.*-d64(-page\d+)?(-sink)?-same",
    "{}% for one sequence (": r"b1-h32-.*",
    "{}% with heads of 64)": r"b1-h64-.*",
    "{}% in windows of 128 keys": r".*-wl127.*",
}
"""Parts of sentences of `docs/decoding.md`, and the steps that they are about."""


def test_what_fixed_splits_cost_is_what_the_page_says() -> None:
    text = " ".join((ROOT / "docs/decoding.md").read_text().split())
    times: dict[str, dict[str, float]] = {}
    for row in load(RESULTS)["nvidia_h100_80gb_hbm3"]:
        if row.suite.startswith(SUITE) and row.median_ms:
            times.setdefault(row.workload.removeprefix("dec-bf16-"), {})[row.impl] = row.median_ms
    times = {key: by_impl for key, by_impl in times.items() if "flashgen-fixed" in by_impl}
    for words, keys in FIXED_COSTS.items():
        costs = [
            round(100 * (by_impl["flashgen-fixed"] / by_impl["flashgen"] - 1))
            for key, by_impl in times.items()
            if re.fullmatch(keys, key)
        ]
        least, most = min(costs), max(costs)
        assert words.format(f"{least} to {most}" if least < most else least) in text
    for pages, words in (("", "{} us in place of {} ("), ("-page16", "({} in place of {} over pages of 16)")):
        by_impl = times[f"b64-h32-hk8-sq1-sk65536-d128{pages}-tail"]
        fixed, shares = (round(1e3 * by_impl[impl]) for impl in ("flashgen-fixed", "flashgen"))
        assert words.format(fixed, shares) in text
