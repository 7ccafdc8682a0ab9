from __future__ import annotations

import pytest
import torch

from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.workload import Workload
from flashgen.measure.inputs import MAX_COPIES, make_inputs, rotation_copies

WORKLOAD = Workload.parse("bf16-b2-h4-hk2-sq5-sk7-d16-dv8")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("padding", [0, 3])
def test_shapes_strides_and_poison(layout: str, padding: int) -> None:
    inputs = make_inputs(WORKLOAD, copies=3, seed=1, device="cpu", layout=layout, padding=padding)
    assert inputs.copies == 3
    for n in range(3):
        assert inputs.q[n].shape == (2, 4, 5, 16)
        assert inputs.k[n].shape == (2, 2, 7, 16)
        assert inputs.v[n].shape == (2, 2, 7, 8)
        assert inputs.out[n].shape == (2, 4, 5, 8)
        assert inputs.lse[n].shape == (2, 4, 5)
        assert inputs.lse[n].is_contiguous()
        assert inputs.q[n].stride(3) == 1
        assert (inputs.q[n].stride(1) < inputs.q[n].stride(2)) == (layout == "bshd")
        assert torch.isfinite(inputs.q[n]).all()
        assert torch.isnan(inputs.out[n]).all()
        assert torch.isnan(inputs.lse[n]).all()
    assert bool(inputs.guards) == bool(padding)
    assert all(torch.isnan(guard).all() for guard in inputs.guards)


def test_sets_are_reproducible_and_differ_from_each_other() -> None:
    one = make_inputs(WORKLOAD, copies=2, seed=1, device="cpu")
    same = make_inputs(WORKLOAD, copies=2, seed=1, device="cpu")
    other = make_inputs(WORKLOAD, copies=2, seed=2, device="cpu")
    assert torch.equal(one.q[0], same.q[0])
    assert torch.equal(one.v[1], same.v[1])
    assert not torch.equal(one.q[0], one.q[1])
    assert not torch.equal(one.q[0], one.k[0][:, :1].expand(2, 4, 7, 16)[:, :, :5])
    assert not torch.equal(one.q[0], other.q[0])


def test_gain_makes_scores_larger() -> None:
    usual = make_inputs(WORKLOAD, copies=1, seed=1, device="cpu")
    large = make_inputs(WORKLOAD, copies=1, seed=1, device="cpu", gain=32.0)
    assert torch.equal(large.q[0], 32.0 * usual.q[0])
    assert torch.equal(large.k[0], usual.k[0])


def test_rotation_moves_twice_the_cache() -> None:
    small = Workload.parse("bf16-b1-h8-s1024-d64")
    copies = rotation_copies(small, 60 * 2**20)
    assert 2 * 60 * 2**20 <= copies * small.bytes < 2 * 60 * 2**20 + small.bytes
    assert rotation_copies(Workload.parse("bf16-b4-h32-s8192-d128"), 60 * 2**20) == 1
    assert rotation_copies(Workload.parse("bf16-b1-h1-s1-d64"), 60 * 2**20) == MAX_COPIES
    assert rotation_copies(small, 0) > 1


@pytest.mark.parametrize("token", ["varlen", "page16", "bwd"])
def test_what_inputs_cannot_be_made_for_is_refused(token: str) -> None:
    with pytest.raises(UnsupportedError, match="packed forward attention"):
        make_inputs(Workload.parse(f"b1-h1-s4-d16-{token}"), copies=1, seed=0, device="cpu")


@pytest.mark.parametrize("wrong", [{"layout": "sbhd"}, {"copies": 0}])
def test_bad_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(WorkloadError):
        make_inputs(WORKLOAD, **{"copies": 1, "seed": 0, "device": "cpu", **wrong})  # type: ignore[arg-type]
