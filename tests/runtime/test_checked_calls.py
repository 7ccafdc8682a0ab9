"""From tensors to a workload: the rules of shapes, dtypes, devices and strides, and what is aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.core.errors import WorkloadError
from flashgen.runtime.ops import serve
from flashgen.runtime.ops.calls import Call, CheckedCall
from tests.fakes.gpu import FakeGpu, qkv, tensor


def workload_of(call: Call) -> flashgen.Workload:
    return CheckedCall.of(call).workload


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changes: Any) -> Call:
    return Call(**{"q": q, "k": k, "v": v, "causal": False, **changes})


def test_the_workload_of_a_call() -> None:
    q, k, v = tensor(2, 6, 10, 96), tensor(2, 3, 20, 96), tensor(2, 3, 20, 64)
    expected = flashgen.Workload.parse("bf16-b2-h6-hk3-sq10-sk20-d96-dv64-causal")
    assert workload_of(call(q, k, v, causal=True)) == expected
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    assert workload_of(call(*swapped, bshd=True, causal=True)) == expected
    assert workload_of(call(q.half(), k.half(), v.half())).dtype == "fp16"
    assert workload_of(call(q.float(), k.float(), v.float())).dtype == "fp32"


B, H, S, D = 2, 6, 10, 64
WRONG: dict[str, tuple[Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], str]] = {
    "dimensions": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, D)[0], tensor(B, H, S, D)),
        r"4 dimensions, got k with shape \(6, 10, 64\)",
    ),
    "dtype": (
        lambda: (tensor(B, H, S, D, dtype=torch.float64),) * 3,
        r"bfloat16, float16 or float32, got q with torch\.float64",
    ),
    "dtypes": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, D), tensor(B, H, S, D).half()),
        r"share dtype and device, got q torch\.bfloat16 on cpu, v torch\.float16 on cpu",
    ),
    "devices": (
        lambda: (tensor(B, H, S, D), torch.empty(B, H, S, D, device="meta", dtype=torch.bfloat16), tensor(B, H, S, D)),
        r"share dtype and device, got q torch\.bfloat16 on cpu, k torch\.bfloat16 on meta",
    ),
    "last stride": (
        lambda: (tensor(B, H, S, D), tensor(B, H, D, S).transpose(2, 3), tensor(B, H, S, D)),
        r"last dimension is contiguous, got k with strides \(3840, 640, 1, 10\)",
    ),
    "batch": (
        lambda: (tensor(B, H, S, D), tensor(1, H, S, D), tensor(1, H, S, D)),
        r"got \(2, 6, 10, 64\), \(1, 6, 10, 64\) and \(1, 6, 10, 64\)",
    ),
    "lengths": (
        lambda: (tensor(B, H, S, D), tensor(B, H, 11, D), tensor(B, H, 12, D)),
        r"got \(2, 6, 10, 64\), \(2, 6, 11, 64\) and \(2, 6, 12, 64\)",
    ),
    "heads of v": (
        lambda: (tensor(B, H, S, D), tensor(B, 3, S, D), tensor(B, 2, S, D)),
        r"k \(batch, nheads_k, seqlen_k, head_dim\) and v \(batch, nheads_k",
    ),
    "head_dim": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, 32), tensor(B, H, S, D)),
        r"got \(2, 6, 10, 64\), \(2, 6, 10, 32\) and",
    ),
    "groups": (
        lambda: (tensor(B, H, S, D), tensor(B, 4, S, D), tensor(B, 4, S, D)),
        "nheads must be a multiple of nheads_k, got 6 and 4",
    ),
    "no heads of k": (
        lambda: (tensor(B, H, S, D), tensor(B, 0, S, D), tensor(B, 0, S, D)),
        r"must be at least 1, got \(2, 6, 10, 64\), \(2, 0, 10, 64\) and \(2, 0, 10, 64\)",
    ),
    "no head_dim_v": (
        lambda: (tensor(B, H, S, D), tensor(B, H, S, D), tensor(B, H, S, 0)),
        r"must be at least 1, got \(2, 6, 10, 64\), \(2, 6, 10, 64\) and \(2, 6, 10, 0\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_a_rule_is_told_the_rule_and_the_value(name: str, gpu: FakeGpu) -> None:
    make, message = WRONG[name]
    with pytest.raises(WorkloadError, match=message):
        workload_of(call(*make()))
    if name != "devices":  # torch itself chooses where such a call goes
        with pytest.raises(WorkloadError, match=message):
            flashgen.attention(*make())
    assert serve.MEMO == {}


def test_strides_that_nothing_steps_along_break_no_rule() -> None:
    one = torch.empty(2, 2, 5, 1, dtype=torch.float16).as_strided((2, 2, 5, 1), (10, 5, 1, 7))
    assert workload_of(call(one, one, one)).head_dim == 1
    empty = torch.empty(2, 2, 64, 0, dtype=torch.float16).transpose(2, 3)
    q = torch.empty(2, 2, 3, 64, dtype=torch.float16)
    assert workload_of(call(q, empty, empty)).seqlen_k == 0


def test_alignment_is_that_of_pointers_and_strides_in_use() -> None:
    q, k, v = qkv()

    def aligned(*tensors: torch.Tensor, **changes: bool) -> bool:
        made = call(*tensors, **changes)
        return CheckedCall.of(made).spec.aligned16

    assert aligned(q, k, v)
    assert aligned(*(x.transpose(1, 2) for x in (q, k, v)), bshd=True)
    assert not aligned(q, k, tensor(1, 2, 64, 64, shift=1))
    assert not aligned(tensor(1, 4, 48, 64, shift=4), k, v)
    assert aligned(tensor(1, 4, 48, 64, shift=8), k, v)
    wide = tensor(1, 2, 64, 65)[..., :64]
    assert not aligned(q, wide, v)
    assert aligned(q, tensor(1, 2, 64, 72)[..., :64], v)
    assert aligned(q, k[:, :1].expand(1, 4, 64, 64), v[:, :1].expand(1, 4, 64, 64))
    assert not aligned(tensor(1, 4, 48, 20), tensor(1, 2, 64, 20), tensor(1, 2, 64, 20))
    offset = call(q, k, v, causal=True, offset_tensor=True)
    assert CheckedCall.of(offset).spec.key == "fwd-bf16-d64-causal-offset"
