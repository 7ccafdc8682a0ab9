"""Packed sequences, interpreted: right against the oracle, and nothing of a neighbour read or written."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashgen.codegen.key_splits import SPLITS
from tests.interpreter.packed import differentiated, gradient_of, interpreted
from tests.packing import Case, assert_gradients, assert_right, gradients, make
from tests.tiers import every, only

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of rows that do not count


def document(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return q_idx // 7 == k_idx // 7


def apart(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return (q_idx // 3 + h + b) % 3 != k_idx // 5 % 3


def bent(score, b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return score / (1.0 + 0.1 * score * score) + 0.3 * (h - b) * (q_idx // 7 - k_idx // 7)


QUERIES = (5, 0, 16, 33, 1, 17)
CASES = {
    "all see all": Case(queries=QUERIES),
    "causal": Case(queries=QUERIES, options={"causal": True}),
    "a neighbour of NaN": Case(queries=QUERIES, poison=(0, 3), options={"causal": True}),
    "rows that nobody has": Case(queries=(5, 20), spare=40, nheads=3, nheads_k=1),
    "nobody has any": Case(queries=(0, 0), keys=(0, 4), spare=20),
    "more keys": Case(queries=(5, 1, 0, 20), keys=(40, 0, 7, 33), options={"causal": True}),
    "more queries": Case(queries=(40, 9, 20), keys=(5, 0, 33), options={"causal": True}, sinks=True),
    "used": Case(queries=(20, 40, 5), used_q=(7, 0, 5), used_k=(20, 3, 0), sinks=True),
    "used and causal": Case(queries=(20, 40, 5), used_q=(7, 33, 5), used_k=(20, 38, 0), options={"causal": True}),
    "window": Case(queries=(33, 7, 50), poison=(1,), options={"causal": True, "window": (9, 0)}),
    "window of both sides": Case(queries=(33, 7), keys=(20, 40), options={"window": (9, 3)}, sinks=True),
    "softcap and slopes": Case(queries=(33, 7), keys=(20, 40), alibi="own", options={"softcap": 3.0}),
    "a function": Case(queries=(33, 0, 20), mod=document, options={"causal": True}, poison=(2,)),
    "a function of sequences and heads": Case(queries=(20, 0, 33), keys=(33, 4, 20), mod=apart),
    "scores of a function": Case(queries=(20, 5), keys=(33, 7), score_mod=bent, options={"softcap": 3.0}, poison=(1,)),
    "heads before rows": Case(queries=(20, 5), layout="heads", head_dim=24, head_dim_v=40, nheads=3, nheads_k=3),
    "unaligned": Case(queries=(20, 5), layout="odd", alibi="shared", options={"softmax_scale": 0.3}),
    "unaligned rows": Case(queries=(20, 5), head_dim=20, head_dim_v=13),  # those of the output, too
}


@pytest.mark.parametrize("name", every(2, CASES))
def test_it_is_right_and_reads_nothing_that_does_not_count(name: str) -> None:
    packed = make(CASES[name])
    assert_right(packed, *interpreted(packed))


@pytest.mark.parametrize("name", ["a neighbour of NaN", "used and causal", "window", "a function"])
def test_tiles_by_tma_are_right(name: str) -> None:
    packed = make(CASES[name])
    assert_right(packed, *interpreted(packed, loads="descriptor", heads_per_group=0))


SHARED = (
    "a neighbour of NaN",
    "rows that nobody has",
    "more queries",
    "used",
    "softcap and slopes",
    "unaligned",
    "unaligned rows",
)
MOST_SHARES = ("rows that nobody has", "unaligned")


@pytest.mark.parametrize(
    ("name", "splits"), every(4, [*itertools.product(SHARED, (1, 4)), *((name, SPLITS[-1]) for name in MOST_SHARES)])
)
def test_programs_that_share_the_keys_of_a_block_are_right(name: str, splits: int) -> None:
    """With more of them than blocks of keys, too: most see none, and leave memory that holds NaN before.

    No case has more than three blocks, so of four programs one or more see none as of the most that there are, which
    two cases have for what they take of the merge.
    """
    packed = make(CASES[name])
    assert_right(packed, *interpreted(packed, splits, split_keys=True))


def test_programs_that_share_keys_load_tiles_by_tma() -> None:
    packed = make(CASES["used and causal"])
    assert_right(packed, *interpreted(packed, 2, split_keys=True, loads="descriptor", heads_per_group=0))


def test_the_bits_of_a_sequence_follow_from_itself_alone() -> None:
    case = Case(queries=(20, 33, 5), options={"causal": True})
    whole, alone = make(case), make(replace(case, queries=(33,)))
    rows = slice(20, 53)
    alone = replace(alone, q=whole.q[rows].clone(), k=whole.k[rows].clone(), v=whole.v[rows].clone())
    (out, lse), (one, one_lse) = interpreted(whole, heads_per_group=1), interpreted(alone)
    assert torch.equal(out[rows], one)
    assert torch.equal(lse[:, rows], one_lse)


def test_ends_that_lead_out_of_the_tensors_do_not() -> None:
    packed = make(Case(queries=(20, 33, 5)))
    wild = torch.tensor([-5, 70, 30, 2**31 - 1], dtype=torch.int32)
    packed = replace(packed, named={**packed.named, "cu_seqlens_q": wild, "cu_seqlens_k": wild, "max_seqlen_q": 100})
    interpreted(packed)
    differentiated(packed, "portable_backward_fused")


SPLIT, FUSED = "portable_backward_split", "portable_backward_fused"
TRAINED = [
    *((name, SPLIT, "pointer") for name in ("a neighbour of NaN", "used and causal", "window", "more keys")),
    *((name, SPLIT, "pointer") for name in ("softcap and slopes", "nobody has any", "unaligned")),
    *((name, FUSED, "pointer") for name in ("causal", "rows that nobody has", "used", "more queries")),
    *((name, FUSED, "pointer") for name in ("window of both sides", "heads before rows", "a neighbour of NaN")),
    *((name, SPLIT, "descriptor") for name in ("all see all", "used and causal", "window")),
    *((name, FUSED, "descriptor") for name in ("all see all", "a neighbour of NaN", "a function")),
    *((name, SPLIT, "pointer") for name in ("a function", "scores of a function")),
    *(("a function of sequences and heads", *how) for how in ((SPLIT, "pointer"), (FUSED, "descriptor"))),
    ("scores of a function", FUSED, "descriptor"),
]


@pytest.mark.parametrize(("name", "family_id", "loads"), every(4, TRAINED))
def test_gradients_are_right_and_nothing_flows_to_neighbours(name: str, family_id: str, loads: str) -> None:
    packed = make(CASES[name])
    right = gradients(
        packed, gradient_of(packed, torch.empty(*packed.q.shape[:2], packed.v.shape[2]).to(packed.q.dtype))
    )
    assert_gradients(packed, differentiated(packed, family_id, loads=loads), right)


@pytest.mark.parametrize("family_id", [SPLIT, FUSED])
@pytest.mark.parametrize(
    "name",
    only(["rows that nobody has", "a neighbour of NaN", "softcap and slopes", "a function"], "softcap and slopes"),
)
def test_programs_of_one_head_of_a_group_give_the_gradients(name: str, family_id: str) -> None:
    """Their sums lie in memory that holds NaN before: of rows that no sequence has, too."""
    packed = make(CASES[name])
    assert packed.case.nheads > packed.case.nheads_k
    right = gradients(
        packed, gradient_of(packed, torch.empty(*packed.q.shape[:2], packed.v.shape[2]).to(packed.q.dtype))
    )
    assert_gradients(packed, differentiated(packed, family_id, heads_per_tile=1), right)
