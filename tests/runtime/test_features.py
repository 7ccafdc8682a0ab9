"""Features through the public call: their rules, what of them chooses code, and what reaches the launch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.runtime.ops import runs, serve
from flashgen.runtime.ops.calls import Call, CheckedCall
from tests.fakes.gpu import FakeGpu, OnGpu, qkv, tensor
from tests.runtime.ladders import Ladder, default, faster, measured

SIZES = (1, 4, 48, 64)


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


def masked(*shape: int) -> torch.Tensor:
    return on_gpu(*shape, dtype=torch.bool)


def score(score, b, h, q_idx, k_idx, table):  # type: ignore[no-untyped-def]
    return score + h * 0.5


def visible(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return q_idx >= k_idx


FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "window": lambda: {"window": (16, 8)},
    "left": lambda: {"window": (16, None)},
    "right": lambda: {"window": (None, 0)},
    "softcap": lambda: {"softcap": 30.0},
    "alibi": lambda: {"alibi_slopes": on_gpu(4)},
    "alibi of sequences": lambda: {"alibi_slopes": on_gpu(1, 4)},
    "sinks": lambda: {"sinks": on_gpu(4)},
    "sinks in bf16": lambda: {"sinks": on_gpu(4, dtype=torch.bfloat16)},
    "bias": lambda: {"bias": on_gpu(1, 4, 48, 64, dtype=torch.bfloat16)},
    "bias in fp32": lambda: {"bias": on_gpu(48, 64)},
    "bias of keys": lambda: {"bias": on_gpu(64)},
    "bias of one": lambda: {"bias": on_gpu()},
    "mask": lambda: {"mask": masked(4, 48, 64)},
    "mask of keys": lambda: {"mask": masked(1, 1, 1, 64)},
    "bias and mask": lambda: {"bias": on_gpu(48, 64), "mask": masked(48, 64)},
    "strided mask": lambda: {"mask": masked(48, 128)[:, ::2]},
}
KEYS = {
    "window": "window",
    "left": "window",
    "right": "window",
    "softcap": "softcap",
    "alibi": "alibi",
    "alibi of sequences": "alibi",
    "sinks": "sink",
    "sinks in bf16": "sink-sink_bf16",
    "bias": "bias",
    "bias in fp32": "bias-bias_fp32",
    "bias of keys": "keybias-bias_fp32",
    "bias of one": "keybias-scattered-bias_fp32",
    "mask": "mask",
    "mask of keys": "keymask",
    "bias and mask": "bias-mask-bias_fp32",
    "strided mask": "mask-scattered",
}


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_compiled_in_and_reaches_the_launch(name: str, with_lse: bool, gpu: FakeGpu) -> None:
    arguments = FEATURES[name]()
    q, k, v = qkv()
    for _ in range(2):
        result = flashgen.attention(q, k, v, return_lse=with_lse, **arguments)
    assert isinstance(result, tuple) is with_lse
    assert len(gpu.prepared) == 1
    assert gpu.planned[0][0].key == f"fwd-bf16-d64-{KEYS[name]}"
    features = gpu.launched[-1].features
    for field, given in arguments.items():
        found = getattr(features, field)
        assert found.data_ptr() == given.data_ptr() if isinstance(given, torch.Tensor) else found == given
    assert (gpu.launched[-1].lse is not None) is with_lse


def test_everything_at_once_in_either_layout(gpu: FakeGpu) -> None:
    everything = {**FEATURES["bias and mask"](), **FEATURES["sinks"](), **FEATURES["alibi"](), "softcap": 5.0}
    for swap in (False, True):
        q, k, v = (x.transpose(1, 2) if swap else x for x in qkv())
        layout = "bshd" if swap else "bhsd"
        out = flashgen.attention(q, k, v, layout=layout, causal=True, window=(9, None), q_offset=3, **everything)
        assert out.shape == q.shape
        spec, _, geometry, _ = gpu.planned[-1]
        assert spec.key == "fwd-bf16-d64-causal-softcap-alibi-sink-bias-mask-window-bias_fp32"
        assert geometry.tensor("bias")[1] == geometry.tensor("mask")[1] == (0, 0, 64, 1), (
            "rows and keys in either layout"
        )
    assert gpu.launched[-1].offset == 3


def test_a_window_is_only_one_where_it_hides_something(gpu: FakeGpu) -> None:
    flashgen.attention(*qkv(), window=(1000, 1000))
    assert gpu.planned[-1][0].key == "fwd-bf16-d64"
    flashgen.attention(*qkv(), causal=True, window=(None, 5))
    assert gpu.planned[-1][0].key == "fwd-bf16-d64-causal"
    # from an offset of its own, the edge is not out of reach
    flashgen.attention(*qkv(), window=(1000, None), q_offset=5000)
    assert gpu.planned[-1][0].key == "fwd-bf16-d64-window"
    assert gpu.launched[-1].features.window == (1000, None)


def test_values_change_no_code_and_widths_no_kernel(gpu: FakeGpu) -> None:
    q, k, v = qkv()
    for cap in (1.0, 30.0, 50.5):
        flashgen.attention(q, k, v, softcap=cap)
    for _ in range(3):
        flashgen.attention(q, k, v, sinks=on_gpu(4), bias=on_gpu(48, 64))
    assert len(gpu.prepared) == 2
    for left in (1, 7, 30):
        flashgen.attention(q, k, v, window=(left, 3))
    assert len(gpu.prepared) == 5, "a width chooses a record"
    assert len(gpu.compiled) == 3, "and no kernel"
    assert [done.features.softcap for done in gpu.launched[:3]] == [1.0, 30.0, 50.5]


CHOOSING: dict[str, Callable[[], dict[str, Any]]] = {
    **FEATURES,
    "another left": lambda: {"window": (17, 8)},
    "bias of other strides": lambda: {"bias": on_gpu(1, 4, 64, 48, dtype=torch.bfloat16).transpose(2, 3)},
    "bias that starts elsewhere": lambda: {"bias": tensor(1, 4, 48, 64, shift=4)},
    "bias of heads": lambda: {"bias": on_gpu(1, 1, 48, 64, dtype=torch.bfloat16)},
    "mask and causal": lambda: {"mask": masked(4, 48, 64), "causal": True},
    "slopes with an offset": lambda: {"alibi_slopes": on_gpu(4), "q_offset": 2},
    "slopes with a device offset": lambda: {
        "alibi_slopes": on_gpu(4),
        "q_offset": torch.zeros(1, dtype=torch.int32).as_subclass(OnGpu),
    },
}


def test_whatever_chooses_code_is_in_the_key(gpu: FakeGpu) -> None:
    for number, make in enumerate(CHOOSING.values(), start=1):
        flashgen.attention(*qkv(), **make())
        assert len(gpu.prepared) == len(serve.MEMO) == number
    for make in CHOOSING.values():
        flashgen.attention(*qkv(), **make())
    assert len(gpu.prepared) == len(CHOOSING)
    flashgen.attention(*qkv())
    assert len(gpu.prepared) == len(CHOOSING) + 1


def test_slopes_and_sinks_with_gaps_are_packed(gpu: FakeGpu) -> None:
    slopes = torch.arange(8.0).as_subclass(OnGpu)[::2]
    for _ in range(2):
        flashgen.attention(*qkv(), alibi_slopes=slopes, sinks=slopes)
    features = gpu.launched[-1].features
    assert features.alibi_slopes.stride() == features.sinks.stride() == (1,)
    assert features.sinks.tolist() == [0, 2, 4, 6]
    assert len(gpu.prepared) == 1
    shared = on_gpu(1, 4).expand(2, 4)
    flashgen.attention(*qkv(batch=2), alibi_slopes=shared)
    assert gpu.launched[-1].features.alibi_slopes.data_ptr() == shared.data_ptr()
    assert gpu.planned[-1][2].alibi_batch_stride == 0


@pytest.mark.parametrize("call", [flashgen.attention, flashgen.explain])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": (-1, 0)}, r"at least 0, got \(-1, 0\); None is unlimited, where flash-attn writes -1"),
        ({"window": (3, -2)}, r"None or an int of at least 0, got \(3, -2\)$"),
        ({"window": (3.0, 1)}, r"got \(3\.0, 1\)"),
        ({"window": (True, 1)}, r"got \(True, 1\)"),
        ({"window": 128}, r"window is \(left, right\), got 128"),
        ({"window": (1, 2, 3)}, r"got \(1, 2, 3\)"),
        ({"softcap": 2.0**126}, r"softcap is below 2 \*\* 126, .* got 8\.5"),
        ({"softcap": -1.0}, r"softcap is finite and at least 0 \(off\), got -1\.0"),
        ({"softcap": math.inf}, "got inf"),
        ({"softcap": math.nan}, "got nan"),
        ({"alibi_slopes": on_gpu(4, dtype=torch.bfloat16)}, r"slopes are float32 .* got torch\.bfloat16 \(4,\)"),
        ({"alibi_slopes": on_gpu(2, 4)}, r"got torch\.float32 \(2, 4\) on cpu for batch 1 and 4 heads"),
        ({"alibi_slopes": on_gpu(5)}, r"\(nheads,\) or \(batch, nheads\) .* \(5,\)"),
        ({"alibi_slopes": torch.zeros(4, device="meta")}, "on meta for batch 1"),
        ({"sinks": on_gpu(3)}, r"sinks are \(nheads,\) .* got torch\.float32 \(3,\) on cpu for 4 heads"),
        ({"sinks": on_gpu(1, 4)}, r"\(1, 4\)"),
        ({"sinks": on_gpu(4, dtype=torch.float16)}, r"float32 or the dtype of q .* torch\.float16"),
        (
            {"bias": on_gpu(47, 64)},
            r"bias broadcasts to \(batch, nheads, seqlen_q, seqlen_k\) .* \(47, 64\) for \(1, 4,",
        ),
        ({"bias": on_gpu(2, 4, 48, 64)}, r"got \(2, 4, 48, 64\) for \(1, 4, 48, 64\)"),
        ({"bias": on_gpu(1, 1, 4, 48, 64)}, r"got \(1, 1, 4, 48, 64\)"),
        ({"bias": on_gpu(48, 64, dtype=torch.int32)}, r"bias is float32, float16 or bfloat16, got torch\.int32"),
        ({"bias": masked(48, 64)}, r"got torch\.bool"),
        ({"bias": torch.zeros(48, 64, device="meta")}, "bias is on the device of q, got meta and cpu"),
        ({"mask": on_gpu(48, 64)}, r"mask is bool, True where attended, got torch\.float32; .* is a bias"),
        ({"mask": masked(64, 48)}, r"mask broadcasts to .*\(64, 48\)"),
        ({"softcap": 1.0, "q_offset": 3}, "needs one of them, got 3 alone"),
        ({"aux": (on_gpu(3),)}, "belong to a score_mod or a mask_mod, got neither"),
    ],
    ids=str,
)
def test_rules_of_features(call: Callable[..., object], arguments: dict[str, Any], message: str, gpu: FakeGpu) -> None:
    if "meta" in message:
        call = flashgen.explain  # to torch, a call with a meta tensor is one without data, which has no device
    with pytest.raises(WorkloadError, match=message):
        call(*qkv(), **arguments)
    assert serve.MEMO == {}


@pytest.mark.parametrize("feature", [{"window": (3, 3)}, {"alibi_slopes": on_gpu(4)}, {"causal": True, "softcap": 2.0}])
def test_an_offset_goes_with_whatever_has_positions(feature: dict[str, Any], gpu: FakeGpu) -> None:
    offset = torch.zeros(1, dtype=torch.int32).as_subclass(OnGpu)
    flashgen.attention(*qkv(), q_offset=7, **feature)
    flashgen.attention(*qkv(), q_offset=offset, **feature)
    assert gpu.launched[0].offset == 7
    assert gpu.launched[1].offset.data_ptr() == offset.data_ptr()
    assert [spec.offset_tensor for spec, *_ in gpu.planned] == [False, True]


@pytest.mark.parametrize("name", FEATURES)
def test_on_a_cpu_features_are_told_every_family_s_reason(name: str) -> None:
    q, k, v = (tensor(1, h, s, 64, on_gpu=False) for h, s in ((4, 48), (2, 64), (2, 64)))
    plain = {
        key: value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
        for key, value in FEATURES[name]().items()
    }
    for call in (flashgen.attention, flashgen.explain):
        with pytest.raises(UnsupportedError, match=r"on cpu: all of them run on GPUs"):
            call(q, k, v, **plain)


def test_explain_names_the_features(gpu: FakeGpu) -> None:
    q, k, v = qkv(seqlen_q=64)
    found = flashgen.explain(
        q, k, v, causal=True, window=(9, None), softcap=3.0, sinks=on_gpu(4), mask=masked(64), alibi_slopes=on_gpu(4)
    )
    assert "\nfeatures   causal, window 9/0, softcap, sinks, ALiBi, key mask\n" in str(found)
    assert found.to_dict()["features"] == ["causal", "window 9/0", "softcap", "sinks", "ALiBi", "key mask"]
    assert "\nfeatures   plain\n" in str(flashgen.explain(q, k, v))
    offset = torch.zeros(1, dtype=torch.int32).as_subclass(OnGpu)
    assert "causal, offsets on the device" in str(flashgen.explain(q, k, v, causal=True, q_offset=offset))
    assert gpu.compiled == []


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torch_s_switch_allows_tf32(precision: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = precision
        for features in ({}, {"softcap": 2.0}):
            q, k, v = (x.float() for x in qkv())
            flashgen.attention(q, k, v, **features)
            dtype = "tf32" if precision == "tf32" else "fp32"
            assert gpu.planned[-1][0].dtype == dtype
            assert flashgen.explain(q, k, v, **features).workload.dtype == dtype
            flashgen.attention(*qkv(), **features)
            assert gpu.planned[-1][0].dtype == "bf16"
        torch.backends.cuda.matmul.fp32_precision = "ieee" if precision == "tf32" else "tf32"
        flashgen.attention(q, k, v)
        assert gpu.planned[-1][0].dtype == ("fp32" if precision == "tf32" else "tf32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_warm_up_takes_features(gpu: FakeGpu) -> None:
    keys = ["b1-h4-s64-d64-wl16-causal-softcap-sink", "b1-h4-s64-d64-alibi", "b1-h4-s64-d64-keybias"]
    # ALiBi alone has shared keys, too
    assert flashgen.warmup(keys) == 4
    assert flashgen.warmup(keys, offset_tensor=True) == 7
    made = {spec.key for spec, _ in gpu.compiled}
    assert "fwd-bf16-d64-causal-softcap-sink-window-offset" in made
    assert "fwd-bf16-d64-alibi-offset" in made
    before = len(gpu.compiled)
    q, k, v = qkv(nheads_k=4)
    flashgen.attention(q, k, v, causal=True, window=(5, None), softcap=9.0, sinks=on_gpu(4))
    flashgen.attention(q, k, v, bias=on_gpu(64, dtype=torch.bfloat16))
    assert len(gpu.compiled) == before


def test_random_shapes_and_values_share_one_binary_a_specialization(gpu: FakeGpu) -> None:
    rng = random.Random(0)
    for _ in range(200):
        batch, group, nheads_k = rng.randint(1, 4), rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
        sq, sk = rng.randint(1, 500), rng.randint(1, 500)
        q, k, v = qkv(batch, group * nheads_k, nheads_k, sq, sk)
        window = (rng.randint(0, sq + sk - 1), rng.randint(0, sq + sk - 1))
        flashgen.attention(q, k, v, window=window, softcap=rng.uniform(1, 90), softmax_scale=rng.uniform(0.01, 1))
        bias = on_gpu(rng.choice([1, batch]), rng.choice([1, q.shape[1]]), sq, -(-sk // 8) * 8)[..., :sk]
        flashgen.attention(q, k, v, bias=bias, sinks=on_gpu(q.shape[1]), causal=True)
    specs = {spec for spec, _ in gpu.compiled}
    # but for packed heads, which short queries have, and the order of few tiles
    alike = {"packed_heads": 1, "heads_per_group": 8}
    assert len(
        {
            (spec, config.replace(**alike) if spec.causal else config.replace(packed_heads=1))
            for spec, config in gpu.compiled
        }
    ) == len(specs)
    keys = {spec.key for spec in specs}
    # the last two are of lengths of 1: one query has no bias of its own, and one key no stride
    assert keys >= {"fwd-bf16-d64-softcap-window", "fwd-bf16-d64-causal-sink-bias-bias_fp32"}
    assert len(keys) <= 5


# --- SDPA ----------------------------------------------------------------------------------------------------------

MASKED = flashgen.Workload.parse("b1-h32-s512-d128-mask")


@pytest.mark.parametrize(
    ("workload", "impl", "given"),
    [
        (MASKED, "sdpa-efficient", True),
        (replace(MASKED, mask="keys"), "sdpa-efficient", True),
        (replace(MASKED, mask="", bias="full"), "sdpa-efficient", True),
        (MASKED, "sdpa-cudnn", False),
        (replace(MASKED, bias="full"), "sdpa-efficient", False),
        (replace(MASKED, causal=True), "sdpa-efficient", False),
        (replace(MASKED, nheads_k=8), "sdpa-efficient", False),
        (replace(MASKED, mask="", window_left=5), "sdpa-efficient", False),
        (replace(MASKED, mask="", softcap=True), "sdpa-efficient", False),
        (replace(MASKED, mask="", sink=True), "sdpa-efficient", False),
        (replace(MASKED, mask="", alibi=True), "sdpa-efficient", False),
    ],
    ids=str,
)
def test_one_bias_or_mask_alone_may_go_to_sdpa(
    workload: flashgen.Workload, impl: str, given: bool, gpu: FakeGpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder.user(measured(workload, config=default(workload), baselines=faster(impl)))
    used: list[str] = []
    monkeypatch.setattr(runs, "sdpa_run", lambda impl, **options: used.append(impl) or (lambda *call: call[0]))
    q, k, v = (tensor(1, h, 512, 128) for h in (32, workload.nheads_k, workload.nheads_k))
    rows = {"full": 512, "keys": 1}
    arguments: dict[str, Any] = {"causal": workload.causal}
    if workload.mask:
        arguments["mask"] = masked(1, 1, rows[workload.mask], 512)
    if workload.bias:
        arguments["bias"] = on_gpu(1, 1, rows[workload.bias], 512, dtype=torch.bfloat16)
    arguments |= {"window": (5, None)} if workload.window_left else {}
    arguments |= {"softcap": 2.0} if workload.softcap else {}
    arguments |= {"sinks": on_gpu(32)} if workload.sink else {}
    arguments |= {"alibi_slopes": on_gpu(32)} if workload.alibi else {}
    flashgen.attention(q, k, v, **arguments)
    assert used == ([impl] if given else [])
    assert flashgen.explain(q, k, v, **arguments).backend == (impl if given else "generated")
    if given:
        other = {name: value.float() for name, value in arguments.items() if name == "bias"}
        flashgen.attention(q, k, v, return_lse=True, **arguments)
        if other:
            flashgen.attention(q, k, v, **other)
        assert len(used) == 1


def test_sdpa_gets_the_bias_or_the_mask() -> None:
    """On a CPU the flash backend takes masks, too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 32, 16, generator=generator) for _ in range(3))
    bias = torch.randn(4, 32, 32, generator=generator)
    mask = torch.rand(1, 1, 32, 32, generator=generator) > 0.3
    run = runs.sdpa_run("sdpa-flash", causal=False, bshd=False, gqa=False)
    scores = q @ k.mT * 0.25
    from flashgen.core.features.values import Features

    for features, changed in (
        (Features(bias=bias), scores + bias),
        (Features(mask=mask), scores.masked_fill(~mask, -math.inf)),
    ):
        torch.testing.assert_close(run(q, k, v, None, None, features), changed.softmax(-1) @ v, atol=1e-5, rtol=1e-4)


# --- the user's own functions --------------------------------------------------------------------------------------


def test_score_functions_are_known_by_what_they_compute(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family calls them here; the problem that the slow path sees is what matters."""
    seen: list[Call] = []
    monkeypatch.setattr(serve, "prepare", lambda call: seen.append(call) or (lambda *arguments: arguments[0]))
    table = on_gpu(4)
    for _ in range(2):
        flashgen.attention(*qkv(), score_mod=score, aux=(table,))
        flashgen.attention(*qkv(), mask_mod=visible, causal=True, return_lse=False)
    assert len(seen) == 2
    problems = [CheckedCall.of(call) for call in seen]
    assert problems[0].spec.mods is not None
    assert problems[0].spec.mods.aux == ("fp32",)
    assert problems[0].spec.key.startswith("fwd-bf16-d64-score_")
    assert problems[1].spec.key.startswith("fwd-bf16-d64-causal-mask_")
    assert problems[1].spec.workload_class == "fwd-bf16-d64-causal"
    assert seen[0].features is not None
    assert seen[0].features.aux[0].data_ptr() == table.data_ptr()


def test_a_block_mask_travels_with_its_function(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Call, Any]] = []

    def prepare(call: Call) -> Any:
        return lambda *arguments: seen.append((call, arguments[-1])) or arguments[0]

    monkeypatch.setattr(serve, "prepare", prepare)
    counts = [torch.zeros(1, 1, 1, dtype=torch.int32).as_subclass(OnGpu) for _ in range(2)]
    indices = [torch.zeros(1, 1, 1, 1, dtype=torch.int32).as_subclass(OnGpu) for _ in range(2)]
    block_mask = flashgen.BlockMask(
        partial_counts=counts[0],
        partial_indices=indices[0],
        full_counts=counts[1],
        full_indices=indices[1],
        seqlen_q=48,
        seqlen_k=64,
    )
    flashgen.attention(*qkv(), mask_mod=visible, block_mask=block_mask)
    call, features = seen[0]
    problem = CheckedCall.of(call)
    assert problem.spec.mods is not None
    assert problem.spec.mods.block_mask
    assert problem.geometry.blocks is not None
    assert (problem.geometry.blocks.query_blocks, problem.geometry.blocks.key_blocks) == (1, 1)
    assert features.block_mask.full_counts.data_ptr() == counts[1].data_ptr()
    assert (features.block_mask.seqlen_q, features.block_mask.seqlen_k, features.block_mask.block_size) == (48, 64, 128)
    with pytest.raises(WorkloadError, match="a block mask is built for the lengths of its call"):
        CheckedCall.of(replace(call, features=replace(features, block_mask=replace(features.block_mask, seqlen_k=65))))
    with pytest.raises(WorkloadError, match="belong to a score_mod or a mask_mod"):
        flashgen.attention(*qkv(), block_mask=block_mask)


def test_a_call_with_functions_is_served_from_the_records_without(gpu: FakeGpu, ladder: Ladder) -> None:
    from flashgen.core.device import find_device
    from flashgen.runtime.lookup.records import Choices

    workload = CheckedCall.of(Call(q=qkv()[0], k=qkv()[1], v=qkv()[2], causal=False)).workload
    ladder.user(measured(workload, config=default(workload)))
    records, device = ladder.records(), find_device("h200")
    plain = workload.specialization
    found = records.of(plain, device)
    handle = flashgen.runtime.ops.mods.handle_for(None, visible)
    spec = replace(plain, mods=flashgen.runtime.ops.mods.resolve(handle))
    assert records.of(spec, device) == found
    choices = Choices.of(spec, device, default(workload), found)
    assert (choices.exact, len(choices.here)) == ({}, 1), "none of them is a record of these functions"
    assert Choices.of(plain, device, default(workload), found).exact.keys() == {workload}
