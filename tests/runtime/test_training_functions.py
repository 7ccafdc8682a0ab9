"""Gradients of calls with functions of the caller, tables and block masks: what flows around them, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.utils.checkpoint import checkpoint

import flashgen
from flashgen.core.errors import UnsupportedError, WorkloadError
from flashgen.core.features.values import BlockMask
from tests.fakes.gpu import EmulatedGpu
from tests.runtime.training import SK, SQ, H, assert_gradients, leaf, qkv

pytestmark = pytest.mark.usefixtures("emulated", "fresh_compiler")


def test_what_has_no_gradient_is_refused_where_one_is_asked_for(emulated: EmulatedGpu) -> None:
    q, k, v = qkv()
    constant = [x.detach() for x in (q, k, v)]
    slopes = leaf(H)
    for inputs in ((q, k, v), constant):
        with pytest.raises(
            UnsupportedError, match=r"alibi_slopes have no gradient here, and these require one; detach"
        ):
            flashgen.attention(*inputs, alibi_slopes=slopes)
    with pytest.raises(UnsupportedError, match=r"no gradient through tl.sin of .*line 2 .*'return tl.sin\(score\)'"):
        flashgen.attention(q, k, v, score_mod=rolled)
    with pytest.raises(UnsupportedError, match=r"no gradient through tl\.sin"):
        flashgen.attention(*constant, score_mod=rolled, bias=leaf(SQ, SK))
    with pytest.raises(UnsupportedError, match=r"functions of the caller load from have no gradient.* got aux\[1\]"):
        flashgen.attention(*constant, mask_mod=of_table, aux=(torch.zeros(3), leaf(3)))
    assert emulated.launched == []
    with torch.no_grad():
        flashgen.attention(*constant, alibi_slopes=slopes)


def of_table(b, h, q_idx, k_idx, ends, unused):  # type: ignore[no-untyped-def]
    return k_idx <= tl.load(ends + q_idx)


@pytest.mark.parametrize("how", ["eager", "compiled", "transformed", "checkpoint"])
def test_gradients_flow_around_what_a_function_hides(how: str) -> None:
    ends = torch.arange(SQ, dtype=torch.int32) % 5 * 3
    mask = torch.arange(SK) <= ends[:, None]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, return_lse: bool) -> Any:
        return flashgen.attention(q, k, v, mask_mod=of_table, aux=(ends, ends), return_lse=return_lse)

    if how == "transformed":
        inputs = qkv()
        found = torch.func.grad(lambda *one: call(*one, None, True)[0].sum(), (0, 1, 2))(*inputs)
        out, _ = call(*inputs, None, True)
        for one, other in zip(found, torch.autograd.grad(out.sum(), inputs), strict=True):
            torch.testing.assert_close(one, other)
        return
    asked = {
        "eager": call,
        "compiled": torch.compile(call, backend="aot_eager", fullgraph=True),
        "checkpoint": functools.partial(checkpoint, call, use_reentrant=False),
    }[how]
    assert_gradients(qkv(), {"mask": mask}, lse=True, call=asked)


def test_a_changed_table_is_noticed() -> None:
    q, k, v = qkv()
    ends = torch.full((SQ,), 5, dtype=torch.int32)
    out = flashgen.attention(q * 1, k, v, mask_mod=of_table, aux=(ends, ends))
    ends.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_block_mask_that_trains_has_lists_both_ways() -> None:
    lists = {"counts": torch.ones(1, 1, 1, dtype=torch.int32), "indices": torch.zeros(1, 1, 1, 1, dtype=torch.int32)}
    forward = {f"{kind}_{name}": one for kind in ("partial", "full") for name, one in lists.items()}
    blocks = BlockMask(**forward, seqlen_q=SQ, seqlen_k=SK)
    ends = torch.zeros(SQ, dtype=torch.int32)
    with pytest.raises(
        WorkloadError, match=r"a block mask that trains also lists .*q_partial_counts.* got one without"
    ):
        flashgen.attention(*qkv(), mask_mod=of_table, aux=(ends, ends), block_mask=blocks)


def rolled(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return tl.sin(score)
