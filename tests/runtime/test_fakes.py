"""What is asked of an op without memory breaks the same rules as the call that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.core.errors import FlashgenError, WorkloadError
from flashgen.runtime.autograd import ops as training  # defines the ops of training, too
from flashgen.runtime.decode.op import OP as DECODE

OPS = torch.ops.flashgen
SHAPE = (2, 4, 48, 64)


def inputs(device: str = "meta", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> list[torch.Tensor]:
    """q, k and v; `changes` are tensors in their place."""
    return [changes.get(name, torch.empty(SHAPE, dtype=dtype, device=device)) for name in "qkv"]


FORWARD = (OPS.attention, OPS.attention_lse, OPS.attention_features, OPS.attention_features_lse, OPS.attention_train)

WRONG = [
    ({"q": torch.empty(SHAPE[1:], device="meta", dtype=torch.bfloat16)}, "have 4 dimensions"),
    ({"k": torch.empty(SHAPE, device="meta", dtype=torch.float16)}, "share dtype and device"),
    ({"v": torch.empty((2, 4, 47, 64), device="meta", dtype=torch.bfloat16)}, "in bhsd order"),
    ({"k": torch.empty((2, 4, 48, 32), device="meta", dtype=torch.bfloat16)}, "in bhsd order"),
    ({name: torch.empty((2, 3, 48, 64), device="meta", dtype=torch.bfloat16) for name in "kv"}, "multiple of nheads_k"),
    ({name: torch.empty((2, 0, 48, 64), device="meta", dtype=torch.bfloat16) for name in "kv"}, "must be at least 1"),
    ({"v": torch.empty((2, 4, 48, 0), device="meta", dtype=torch.bfloat16)}, "must be at least 1"),
]


@pytest.mark.parametrize("op", FORWARD, ids=str)
def test_shapes_and_dtypes_are_checked_without_memory(op: Any) -> None:
    op(*inputs())
    for changes, rule in WRONG:
        with pytest.raises(WorkloadError, match=rule):
            op(*inputs(**changes))
    with pytest.raises(WorkloadError, match="dtype is bfloat16, float16 or float32"):
        op(*inputs(dtype=torch.float64))


@pytest.mark.parametrize("op", FORWARD, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_on_another_device_is_refused_and_nothing_uninitialised_comes_back(op: Any, name: str) -> None:
    elsewhere = torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")
    with pytest.raises(WorkloadError, match="share dtype and device"):
        op(*inputs("cpu", **{name: elsewhere}))


@pytest.mark.parametrize("op", [OPS.attention_features, OPS.attention_features_lse, OPS.attention_train], ids=str)
def test_features_are_checked_without_memory(op: Any) -> None:
    sinks = torch.empty(4, dtype=torch.float32, device="meta")
    op(*inputs(), sinks=sinks)
    with pytest.raises(WorkloadError, match="sinks are"):
        op(*inputs(), sinks=sinks[:3])
    with pytest.raises(WorkloadError, match="sinks are"):
        op(*inputs("cpu"), sinks=sinks)
    with pytest.raises(WorkloadError, match="bias broadcasts to"):
        op(*inputs(), bias=torch.empty(5, 7, device="meta"))


@pytest.mark.parametrize("op", FORWARD, ids=str)
def test_an_offset_on_another_device_is_refused(op: Any) -> None:
    offset = torch.empty(2, dtype=torch.int32, device="meta")
    op(*inputs(), causal=True, q_offset_tensor=offset)
    with pytest.raises(WorkloadError, match=r"a q_offset tensor is .* on the device of q"):
        op(*inputs("cpu"), causal=True, q_offset_tensor=offset)
    for wrong in (offset[:1], offset.long(), offset[None], torch.empty((), dtype=torch.int32, device="meta")):
        with pytest.raises(WorkloadError, match="a q_offset tensor is int32"):
            op(*inputs(), causal=True, q_offset_tensor=wrong)


def test_backward_passes_are_checked_without_memory() -> None:
    q, k, v = inputs()
    out, lse = OPS.attention_train(q, k, v)
    found = training.attention_backward_op(out, None, q, k, v, out, lse)
    assert [tuple(each.shape) for each in found[:3]] == [SHAPE] * 3
    with pytest.raises(WorkloadError, match="out and dout are"):
        training.attention_backward_op(out[:, :, 1:], None, q, k, v, out, lse)
    with pytest.raises(WorkloadError, match="share dtype and device"):
        training.attention_backward_op(out, None, q, torch.empty(SHAPE, dtype=torch.bfloat16), v, out, lse)
    elsewhere = torch.empty(2, 4, 48)
    for wrong in (elsewhere, lse[:1], lse.half(), lse.transpose(1, 2), lse[..., None]):
        with pytest.raises(WorkloadError, match=r"lse is float32 \(2, 4, 48\) on the device of q"):
            training.attention_backward_op(out, None, q, k, v, out, wrong)
        with pytest.raises(WorkloadError, match=r"dlse is float32 \(2, 4, 48\) on the device of q"):
            training.attention_backward_op(out, wrong, q, k, v, out, lse)


def test_a_layout_is_a_view_of_the_same_rules() -> None:
    q = torch.empty(2, 48, 4, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 64, 2, 64, dtype=torch.bfloat16, device="meta")
    assert OPS.attention(q, k, k, bshd=True).shape == q.shape
    with pytest.raises(WorkloadError, match="in bhsd order"):
        OPS.attention(q, k[:1], k, bshd=True)


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = OPS.attention(q, k, v, causal=True)
        return found


def test_export_fails_where_the_call_would() -> None:
    sizes = {"seqlen": torch.export.Dim("seqlen", min=16, max=4096)}
    dynamic = {name: {2: sizes["seqlen"]} for name in "qkv"}
    exported = torch.export.export(Attention(), tuple(inputs("cpu")), dynamic_shapes=dynamic)
    assert "flashgen.attention" in str(exported.graph)
    for wrong in (inputs("cpu", torch.float64), [torch.empty(SHAPE[1:]) for _ in "qkv"]):
        with pytest.raises(Exception, match=r"dtype is bfloat16|have 4 dimensions"):
            torch.export.export(Attention(), tuple(wrong))


def test_fake_tensors_of_a_gpu_are_checked() -> None:
    with FakeTensorMode():
        q, k, v = inputs("cuda:0")
        assert OPS.attention(q, k, v).device == torch.device("cuda:0")
        with pytest.raises(WorkloadError, match="share dtype and device"):
            OPS.attention(q, k.to("cpu"), v)


# --- decode calls --------------------------------------------------------------------------------------------------

BATCH, PAGES, PAGE = 3, 2, 16


def step(device: str = "meta", **changes: Any) -> dict[str, Any]:
    """The arguments of a step over pages, 8 heads over 2 of 64; `changes` are tensors in their place."""
    half, whole = {"dtype": torch.bfloat16, "device": device}, {"dtype": torch.int32, "device": device}
    return {
        "q": torch.empty((BATCH, 1, 8, 64), **half),  # type: ignore[call-overload]
        "k_cache": torch.empty((9, PAGE, 2, 64), **half),  # type: ignore[call-overload]
        "v_cache": torch.empty((9, PAGE, 2, 48), **half),  # type: ignore[call-overload]
        "seqlens": torch.empty((BATCH,), **whole),  # type: ignore[call-overload]
        "block_table": torch.empty((BATCH, PAGES), **whole),  # type: ignore[call-overload]
    } | changes


def decode(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on these arguments."""
    tensors = [given.pop(name) for name in ("q", "k_cache", "v_cache", "seqlens")]
    prefix = [given.pop(f"prefix_{name}", None) for name in ("seqlens", "table", "k", "v", "starts")]
    options = ("block_table", "causal", "softmax_scale", "leftpad", "batch_idx", "fixed_split_size", "return_lse")
    usual = {"causal": False, "return_lse": True}
    found: tuple[torch.Tensor, torch.Tensor] = DECODE(
        *tensors, *[given.pop(name, usual.get(name)) for name in options], *prefix, **given
    )
    return found


def other(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WRONG_STEPS: list[tuple[dict[str, Any], str]] = [
    ({"q": other(torch.bfloat16, BATCH, 8, 64)}, "q has four dimensions"),
    ({"q": other(torch.bfloat16, BATCH, 17, 8, 64)}, "1 to 16 queries"),
    ({"q": other(torch.bfloat16, BATCH, 1, 3, 64)}, "a multiple of those of the caches, got 3 and 2"),
    ({"k_cache": other(torch.float16, 9, PAGE, 2, 64)}, "all bfloat16 or all float16"),
    ({name: other(torch.float64, *step()[name].shape) for name in ("q", "k_cache", "v_cache")}, "all bfloat16 or all"),
    ({"k_cache": other(torch.bfloat16, 9, PAGE, 2, 32)}, "the head_dim of q, 64, got 32"),
    ({"v_cache": other(torch.bfloat16, 8, PAGE, 2, 48)}, "the same shape but for the last dimension"),
    (
        {name: other(torch.bfloat16, 9, PAGE, 0, size) for name, size in (("k_cache", 64), ("v_cache", 48))},
        "got 8 and 0",
    ),
    ({"seqlens": other(torch.int64, BATCH)}, "seqlens is int32"),
    ({"seqlens": other(torch.int32, BATCH + 1)}, "with batch 3"),
    ({"block_table": other(torch.int32, BATCH)}, "block_table is int32"),
    ({"block_table": None}, "a row for each of the 3 sequences, got 9"),
    ({"leftpad": other(torch.int32, BATCH)}, "belong to contiguous caches"),
    ({"fixed_split_size": 100}, "fixed_split_size must be at least 128"),
    ({"softmax_scale": 0.0}, "softmax_scale must|softmax_scale is finite and above 0"),
    ({"sinks": other(torch.float32, 3)}, "sinks are"),
    ({"prefix_seqlens": other(torch.int32, 1)}, "without k and v has a block_table"),
    ({"prefix_seqlens": other(torch.int64, 1), "prefix_table": other(torch.int32, 1, 2)}, "seqlens is int32"),
    (
        {
            "prefix_seqlens": other(torch.int32, 1),
            "prefix_k": other(torch.float16, 1, 40, 2, 64),
            "prefix_v": other(torch.bfloat16, 1, 40, 2, 48),
        },
        "all bfloat16 or all float16",
    ),
]


def test_a_step_is_checked_without_memory() -> None:
    out, lse = decode(**step())
    assert (tuple(out.shape), tuple(lse.shape)) == ((BATCH, 1, 8, 48), (BATCH, 8, 1))
    decode(**step(), prefix_seqlens=other(torch.int32, 1), prefix_table=other(torch.int32, 1, 2))
    for changes, rule in WRONG_STEPS:
        with pytest.raises(WorkloadError, match=rule):
            decode(**step() | changes)


class Wrapped(torch.Tensor):
    """A subclass, whose calls go through the dispatcher."""


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "seqlens", "block_table"])
def test_a_step_on_two_devices_is_refused_and_nothing_uninitialised_comes_back(name: str) -> None:
    mixed = step("cpu") | {name: step()[name]}
    with pytest.raises(WorkloadError, match="on the device of q"):
        decode(**mixed)
    with torch.profiler.profile(), pytest.raises(FlashgenError, match="on the device of q"):
        flashgen.attention_decode(**mixed)
    with pytest.raises(FlashgenError, match="on the device of q"):
        flashgen.attention_decode(**mixed | {"q": mixed["q"].as_subclass(Wrapped)})
    with FakeTensorMode(), pytest.raises(FlashgenError, match="on the device of q"):
        flashgen.attention_decode(**step("cuda:0") | {name: step("cuda:1")[name]})


def test_a_prefix_on_another_device_is_refused() -> None:
    prefix = flashgen.Prefix(seqlens=other(torch.int32, 1), block_table=other(torch.int32, 1, 2))
    with torch.profiler.profile(), pytest.raises(FlashgenError, match="on the device of q"):
        flashgen.attention_decode(**step("cpu"), prefix=prefix)
