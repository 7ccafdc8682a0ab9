"""What is asked of an op without memory breaks the same rules as the call that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen.core.errors import WorkloadError
from flashgen.runtime.autograd import ops as training  # defines the ops of training, too

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
