"""Scratch memory of a call: pieces beside each other, each where TMA takes it; what a backward family must leave."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashgen.codegen.family import Scratch, Sizes
from flashgen.core.errors import LaunchError
from flashgen.core.workload import DTYPE_BYTES, Specialization
from flashgen.launch import scratch as scratch_module
from flashgen.launch.backward import NEG_DELTA as FIRST
from flashgen.launch.backward import backward_geometry, check_backward, neg_delta_view
from flashgen.launch.scratch import PIECE_ALIGNMENT_BYTES, ScratchPlan
from tests.fakes.imagined import PLAIN, backward_tensors

SIZES = Sizes(batch=2, nheads=3, nheads_k=3, seqlen_q=5, seqlen_k=7)
NEG_DELTA = Scratch(name="neg_delta", shape=(2, 3, 8))
GEOMETRY = backward_geometry(backward_tensors(shape=(2, 3, 3, 5, 7)))


SPEC = Specialization.parse("bwd-bf16-d64")


def laid_out(*asked: Scratch) -> ScratchPlan:
    with pytest.MonkeyPatch.context() as patch:
        row = SimpleNamespace(scratch=lambda spec, config, sizes: asked)
        patch.setattr(scratch_module, "family", lambda name: row)
        return ScratchPlan.of(SPEC, PLAIN, SIZES, first=FIRST)


shapes = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)
others = st.lists(st.tuples(shapes, st.sampled_from(["fp32", "bf16", "fp16"])), max_size=4)


@given(asked=others, place=st.integers(0, 4))
def test_no_two_pieces_overlap_and_each_is_aligned(asked: list[tuple[tuple[int, ...], str]], place: int) -> None:
    pieces = [Scratch(name=f"piece_{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(asked)]
    plan = laid_out(*pieces[:place], NEG_DELTA, *pieces[place:])
    memory = plan.allocate(torch.empty(1))
    assert memory.dtype == torch.float32
    spans = []
    for piece in plan.pieces.values():
        tensor, scratch = piece.of(memory), piece.scratch
        assert piece.offset_bytes % PIECE_ALIGNMENT_BYTES == 0
        assert tensor.data_ptr() == memory.data_ptr() + piece.offset_bytes
        assert (tuple(tensor.shape), tensor.stride()) == piece.view(len(scratch.shape))
        assert tensor.shape == scratch.shape
        for rank in range(1, len(scratch.shape)):
            merged = tensor.flatten(0, len(scratch.shape) - rank)
            assert (tuple(merged.shape), merged.stride()) == piece.view(rank)
        assert tensor.element_size() == DTYPE_BYTES[scratch.dtype]
        spans.append((piece.offset_bytes, piece.offset_bytes + math.prod(scratch.shape) * tensor.element_size()))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= 4 * plan.floats < spans[-1][1] + PIECE_ALIGNMENT_BYTES, "and no more than that"
    assert len(spans) == 1 + len(asked)


def test_neg_delta_is_a_view_of_the_start_without_its_padding() -> None:
    plan = laid_out(Scratch(name="dq_acc", shape=(48, 64)), NEG_DELTA)
    memory = plan.allocate(torch.empty(1)).zero_()
    plan.pieces["neg_delta"].of(memory).copy_(torch.arange(48.0).view(2, 3, 8))
    view = memory.as_strided(*neg_delta_view(plan))
    assert torch.equal(view, torch.arange(48.0).view(2, 3, 8)[..., :5])


def test_pointers_are_named_in_camel_case() -> None:
    plan = laid_out(NEG_DELTA, Scratch(name="dq_acc", shape=(1,)), Scratch(name="lse_log2", shape=(1,)))
    assert [piece.pointer for piece in plan.pieces.values()] == ["NegDelta", "DqAcc", "LseLog2"]


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        (Scratch(name="dq_acc", shape=(2, 3, 8)),),
        (Scratch(name="neg_delta", shape=(2, 3, 4)),),
        (Scratch(name="neg_delta", shape=(6, 8)),),
        (Scratch(name="neg_delta", shape=(3, 2, 8)),),
        (Scratch(name="neg_delta", shape=(2, 3, 8), dtype="bf16"),),
    ],
    ids=str,
)
def test_a_family_without_neg_delta_is_refused(wrong: tuple[Scratch, ...]) -> None:
    with pytest.raises(LaunchError, match=r"leaves neg_delta, fp32 \(2, 3, 5 or more rows\), got .* of imagined"):
        check_backward(SPEC, PLAIN.family, GEOMETRY, laid_out(*wrong))


def test_a_family_with_neg_delta_is_not() -> None:
    check_backward(SPEC, PLAIN.family, GEOMETRY, laid_out(NEG_DELTA))


def test_kernels_that_share_nothing_have_no_memory() -> None:
    assert (laid_out().pieces, laid_out().floats) == ({}, 0)


def test_two_pieces_of_one_name_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"different names, got \['neg_delta', 'more', 'more'\] of imagined"):
        laid_out(Scratch(name="more", shape=(1,)), NEG_DELTA, Scratch(name="more", shape=(2,)))
