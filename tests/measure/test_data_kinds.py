"""Kinds of data: what they do to scores, in every dtype, and that the gate has one case of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.workload import Specialization, Workload
from flashgen.measure.backward_inputs import make_backward_inputs
from flashgen.measure.data_kinds import DATA_KINDS, HARD_KINDS, PEAK_KEY, hard_kind
from flashgen.measure.inputs import make_inputs
from flashgen.measure.odd_shapes import odd_shapes

WORKLOAD = Workload.parse("b1-h4-hk2-sq96-sk512-d64")


def scores_of(data: str, dtype: str = "bf16", shape: Workload = WORKLOAD) -> torch.Tensor:
    inputs = make_inputs(replace(shape, dtype=dtype), copies=1, seed=3, device="cpu", data=data)
    k = inputs.k[0].float().repeat_interleave(shape.nheads // shape.nheads_k, 1)
    return inputs.q[0].float() @ k.mT * shape.head_dim**-0.5


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_scores_are_what_their_kind_says(dtype: str, head_dim: int) -> None:
    shape = Workload.parse(f"b1-h4-hk2-sq96-sk512-d{head_dim}")
    found = {name: scores_of(name, dtype, shape) for name in DATA_KINDS}
    assert found["randn"].std() == pytest.approx(1.0, rel=0.1)
    assert found["std8"].std() == pytest.approx(8.0, rel=0.1)
    assert found["std20"].std() == pytest.approx(20.0, rel=0.1)
    peak = found["peak"].mean((0, 1, 2))
    assert peak[PEAK_KEY] - peak.sum() / 511 == pytest.approx(60.0, abs=1.0)
    rising = found["rising"].mean((0, 1, 2))
    assert rising[0] - rising[-1] == pytest.approx(200.0, abs=2.0)
    assert (rising[::64].diff() < -20).all()


@pytest.mark.parametrize("name", HARD_KINDS)
def test_no_input_of_half_precision_comes_near_its_largest_number(name: str) -> None:
    inputs = make_inputs(Workload.parse("fp16-b1-h2-s64-d256-softcap"), copies=1, seed=0, device="cpu", data=name)
    for tensor in (inputs.q[0], inputs.k[0]):
        assert tensor.isfinite().all()
        assert tensor.abs().max() < 0.1 * torch.finfo(torch.float16).max


def test_what_keys_get_is_exact_in_every_product() -> None:
    columns = [
        make_inputs(w, copies=1, seed=0, device="cpu", data="rising").k[0][..., 0].float() for w in every_dtype()
    ]
    assert all(torch.equal(column, columns[0]) for column in columns)


def every_dtype() -> list[Workload]:
    return [Workload.parse(f"{dtype}-b1-h1-s300-d96") for dtype in ("bf16", "fp16", "fp32", "tf32")]


def test_normal_data_are_what_they_were_and_each_set_has_the_kind() -> None:
    usual, named, hard = (
        make_inputs(WORKLOAD, copies=2, seed=1, device="cpu", **data)  # type: ignore[arg-type]
        for data in ({}, {"data": "randn"}, {"data": "peak"})
    )
    assert torch.equal(usual.q[1], named.q[1])
    for n in range(2):
        assert torch.equal(hard.q[n][..., 1:], usual.q[n][..., 1:])
        assert torch.equal(hard.v[n], usual.v[n])
        assert hard.k[n][..., 0].count_nonzero() == WORKLOAD.nheads_k
    assert not torch.equal(hard.k[0], hard.k[1])


def test_a_backward_pass_has_the_data_of_its_forward_pass() -> None:
    forward = make_inputs(WORKLOAD, copies=1, seed=2, device="cpu", data="rising")
    backward = make_backward_inputs(WORKLOAD, copies=1, seed=2, device="cpu", data="rising")
    assert torch.equal(backward.tensors[0].q, forward.q[0])
    assert torch.equal(backward.tensors[0].k, forward.k[0])


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match="randn, std8, std20, peak, rising, got 'spiky'"):
        make_inputs(WORKLOAD, copies=1, seed=0, device="cpu", data="spiky")


@pytest.mark.parametrize("key", ["fwd-bf16-d64-causal", "fwd-fp16-d128-window-softcap", "bwd-bf16-d64-causal"])
def test_the_gate_has_a_case_of_every_hard_kind_with_keys_for_several_blocks(key: str) -> None:
    hard = [shape for shape in odd_shapes(Specialization.parse(key)) if shape.data in HARD_KINDS]
    assert [shape.data for shape in hard] == list(HARD_KINDS)
    assert all(shape.seqlen_k > 2 * 128 and shape.window == (None, None) for shape in hard)
    assert "rise by 200" in hard[-1].title


def test_tf32_is_judged_on_normal_data_alone() -> None:
    assert not [shape for shape in odd_shapes(Specialization.parse("bwd-tf32-d64")) if shape.data in HARD_KINDS]
    assert hard_kind(Workload.parse("tf32-b1-h8-s4096-d64")) is None


@pytest.mark.parametrize(
    ("key", "kind"), [("s4096-causal", "rising"), ("s4096", "rising"), ("s4096-causal-wl127", "std20")]
)
def test_the_last_race_has_data_that_its_rows_meet(key: str, kind: str) -> None:
    assert hard_kind(Workload.parse(f"b1-h8-d64-{key}")) == kind
