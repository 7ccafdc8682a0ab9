"""The public calls: what they refuse and why, what is no feature, and that an explanation is of the call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import flashgen
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.runtime.decode import runs as decode_runs
from flashgen.runtime.ops import serve
from tests.decoding import Case, make
from tests.fakes.gpu import FakeGpu, OnGpu, qkv, tensor
from tests.runtime.ladders import CAUSAL, Ladder, config, faster, measured

NO_GPU = r"no kernel family serves fwd-bf16-b1-h4-hk2-sq48-sk64-d64 on cpu: all of them run on GPUs"


def cpu() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensor(1, 4, 48, 64, on_gpu=False), tensor(1, 2, 64, 64, on_gpu=False), tensor(1, 2, 64, 64, on_gpu=False)


def test_cpu_tensors_are_told_every_family_s_reason() -> None:
    with pytest.raises(UnsupportedError, match=NO_GPU):
        flashgen.attention(*cpu())
    with pytest.raises(UnsupportedError, match=NO_GPU):
        flashgen.attention(*cpu(), return_lse=True)
    with pytest.raises(UnsupportedError, match=NO_GPU):
        flashgen.explain(*cpu())
    assert serve.MEMO == {}


def test_a_rule_that_is_broken_is_said_before_what_is_not_supported() -> None:
    q, k, v = cpu()
    with pytest.raises(WorkloadError, match="share dtype"):
        flashgen.attention(q, k, v.half())
    with pytest.raises(WorkloadError, match="share dtype"):
        flashgen.explain(q, k, v.half())


def test_a_feature_that_is_off_is_no_feature(gpu: FakeGpu) -> None:
    flashgen.attention(*qkv(), window=(None, None), softcap=0.0, deterministic=True, mask=None)
    assert len(gpu.launched) == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 0, -1])
def test_a_scale_is_finite_and_positive(scale: float, gpu: FakeGpu) -> None:
    """Said of the float that torch's dispatcher makes of a number."""
    with pytest.raises(WorkloadError, match=f"softmax_scale is finite and above 0, got {float(scale)}"):
        flashgen.attention(*qkv(), softmax_scale=scale)


@pytest.mark.parametrize("scale", [2.0**127, 1e300])
def test_a_scale_is_finite_where_kernels_have_it(scale: float, gpu: FakeGpu) -> None:
    """As a number of 32 bits, which a launch could not write."""
    words = re.escape(f"softmax_scale is below 2 ** 127, as kernels have it in float32, got {scale}")
    q, k, v = qkv()
    ends = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(WorkloadError, match=words):
        flashgen.attention(q, k, v, softmax_scale=scale)
    with pytest.raises(WorkloadError, match=words):
        flashgen.attention_varlen(q[0], k[0], v[0], ends, max_seqlen_q=1, softmax_scale=scale)
    call = make(Case(lens=(40, 7)))
    with pytest.raises(WorkloadError, match=words):
        decode_runs.run(replace(call, softmax_scale=scale))


@pytest.mark.parametrize("call", [flashgen.attention, flashgen.explain])
def test_a_layout_has_one_of_two_names(call: Callable[..., object], gpu: FakeGpu) -> None:
    with pytest.raises(WorkloadError, match='layout is "bhsd" or "bshd", got \'bsdh\''):
        call(*qkv(), layout="bsdh")


@pytest.mark.parametrize("call", [flashgen.attention, flashgen.explain])
@pytest.mark.parametrize(
    ("offset", "causal", "message"),
    [
        (3, False, r"shifts a causal mask, a window or ALiBi and needs one of them, got 3 alone"),
        (torch.zeros(1, dtype=torch.int32), False, "needs one of them, got a tensor alone"),
        (torch.zeros(1, dtype=torch.int64), True, r"int32 \(batch,\) .*got torch\.int64 \(1,\) on cpu for batch 1"),
        (torch.zeros(2, dtype=torch.int32), True, r"got torch\.int32 \(2,\) on cpu for batch 1 on cpu"),
        (torch.zeros((), dtype=torch.int32), True, r"got torch\.int32 \(\) on cpu"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), True, r"\(1,\) on meta for batch 1 on cpu"),
    ],
    ids=["not causal", "tensor, not causal", "dtype", "length", "shape", "device"],
)
def test_rules_of_a_query_offset(
    call: Callable[..., object], offset: int | torch.Tensor, causal: bool, message: str, gpu: FakeGpu
) -> None:
    with pytest.raises(WorkloadError, match=message):
        call(*qkv(), causal=causal, q_offset=offset)
    assert gpu.prepared == []


def test_an_offset_tensor_of_any_stride_is_read_contiguously(gpu: FakeGpu) -> None:
    offset = torch.arange(4, dtype=torch.int32)[::2].as_subclass(OnGpu)
    flashgen.attention(*(x.expand(2, -1, -1, -1) for x in qkv()), causal=True, q_offset=offset)
    given = gpu.launched[0].offset
    assert given.is_contiguous()
    assert given.tolist() == [0, 2]


def test_explain_answers_for_the_call_that_it_is_given(gpu: FakeGpu, ladder: Ladder) -> None:
    ladder.user(measured())
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    explanation = flashgen.explain(q, k, v, causal=True)
    assert (explanation.served.rung, explanation.served.config) == (3, config())
    assert explanation.workload == CAUSAL
    shifted = flashgen.explain(q, tensor(4, 8, 4096, 128, shift=1), v, causal=True)
    assert (shifted.served.rung, shifted.specialization.aligned16, shifted.copies) == (3, True, True)
    assert "kernels get copies" in str(shifted)
    few = flashgen.explain(q[:, :, :16], tensor(4, 8, 4096, 128, shift=1), v, causal=True)
    assert (few.served.rung, few.specialization.aligned16, few.copies) == (8, False, False)
    assert flashgen.explain(q, k, v, causal=True, config=config(32)).served.rung == 1
    swapped = flashgen.explain(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", causal=True)
    assert swapped.workload == CAUSAL
    assert gpu.compiled == [], "an explanation compiles nothing"


def test_explain_and_attention_agree_on_the_backend(gpu: FakeGpu, ladder: Ladder) -> None:
    ladder.user(measured(baselines=faster("sdpa-cudnn")))
    q, k, v = (tensor(4, h, 4096, 128) for h in (32, 8, 8))
    assert flashgen.explain(q, k, v, causal=True).backend == "sdpa-cudnn"
    assert flashgen.explain(q, k, v, causal=True, q_offset=0).backend == "generated"
    offset = torch.zeros(4, dtype=torch.int32).as_subclass(OnGpu)
    assert flashgen.explain(q, k, v, causal=True, q_offset=offset).backend == "generated"
