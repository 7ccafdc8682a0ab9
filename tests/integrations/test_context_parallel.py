"""A sequence in parts on several ranks: which scores each of them computes, and what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Window
from flashgen.integrations.torch import context_parallel_attention, join_sequence, split_sequence
from flashgen.integrations.torch.sequence_parts import ORDERS, Block, ring_steps

ROOT = Path(__file__).parents[2]
X = torch.zeros(1, 2, 4, 8)


def test_parts_are_the_whole(tmp_path: Path) -> None:
    """Four processes, and two groups of two, by all-gather and by a ring, in both orders."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, "-W", "error::FutureWarning", "-m", "tests.integrations.ranks", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


def visible(length: int, causal: bool, window: Window) -> torch.Tensor:
    """Which keys (second) each query (first) of a whole sequence sees."""
    distance = torch.arange(length) - torch.arange(length)[:, None]
    left, right = (length if edge is None else edge for edge in window)
    return (distance >= -left) & (distance <= (0 if causal else right))


def computed(steps: tuple[tuple[Block, ...], ...], length: int, causal: bool, window: Window) -> list[torch.Tensor]:
    """How often each score of a rank's rows with the keys of each step is computed."""
    found = []
    for blocks in steps:
        counts = torch.zeros(length, length, dtype=torch.int64)
        for block in blocks:
            rows = torch.arange(block.rows.stop - block.rows.start)[:, None]
            distance = torch.arange(block.keys.stop - block.keys.start) - rows - (block.q_offset or 0)
            left, right = (10**6 if edge is None else edge for edge in window)
            is_seen = (distance >= -left) & (distance <= (0 if causal else right))
            counts[block.rows, block.keys] += 1 if block.q_offset is None else is_seen
        found.append(counts)
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, (None, None)), (True, (None, None)), (False, (3, 1)), (True, (5, 4)), (False, (None, 2)), (True, (17, 0))],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_visible_score_is_computed_once(order: str, causal: bool, window: Window, ranks: int) -> None:
    length = 6
    places = [split_sequence(torch.arange(length * ranks), rank, ranks, order=order, dim=0) for rank in range(ranks)]
    whole = visible(length * ranks, causal, window).long()
    for rank in range(ranks):
        counts = torch.zeros_like(whole)
        steps = ring_steps(order, rank, ranks, length, causal, window)
        for step, found in enumerate(computed(steps, length, causal, window)):
            counts[places[rank][:, None], places[(rank - step) % ranks]] += found
        assert torch.equal(counts[places[rank]], whole[places[rank]])
        own = [block.rows for blocks in steps for block in blocks if block.has_own_keys]
        assert sorted(row for rows in own for row in range(*rows.indices(length))) == list(range(length))


def test_zigzag_shares_a_causal_mask_equally_in_one_call_a_step() -> None:
    for rank in range(4):
        own, *others = ring_steps("zigzag", rank, 4, 8, True, (None, None))
        assert [len(blocks) for blocks in (own, *others)] == [1] * 4
        for (block,) in others:
            assert block.q_offset is None
            rows, keys = (part.stop - part.start for part in (block.rows, block.keys))
            assert rows * keys == 8 * 8 // 2


def test_a_causal_window_ends_the_ring_where_no_rank_needs_more() -> None:
    assert len(ring_steps("consecutive", 0, 8, 16, True, (16, 0))) == 2
    assert len(ring_steps("consecutive", 0, 8, 16, True, (17, 0))) == 3
    assert len(ring_steps("consecutive", 7, 8, 16, True, (None, None))) == 8


@pytest.mark.parametrize("order", ORDERS)
def test_parts_of_a_sequence_join_to_it(order: str) -> None:
    whole = torch.arange(24).view(2, 12)
    parts = [split_sequence(whole, rank, 3, order=order, dim=1) for rank in range(3)]
    assert torch.equal(join_sequence(parts, order=order, dim=1), whole)
    assert parts[0].tolist()[0] == ([0, 1, 2, 3] if order == "consecutive" else [0, 1, 10, 11])


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ({"mask": X}, "takes no mask"),
        ({"k": X[:, :, :2]}, "of one length, got 4, 2 and 4"),
        ({"q": X[0]}, r"q is \(batch, nheads, seqlen, head_dim\), got shape \(2, 4, 8\)"),
        ({"v": "x"}, "v must be a tensor"),
        ({"method": "gather"}, 'method is "all_gather" or "ring", got \'gather\''),
        ({"order": "striped"}, 'order is "consecutive" or "zigzag"'),
        ({"order": "zigzag", **dict.fromkeys("qkv", X[:, :, :3])}, "two runs of one length, got 3 rows"),
        ({"causal": 1}, "causal must be True or False"),
        ({"dropout_p": 0.1}, "takes no dropout_p: it knows places of one part alone"),
        ({"layout": "bshd"}, r"takes no layout: parts are \(batch, nheads, seqlen, head_dim\)"),
        ({"return_lse": True}, "takes no return_lse: the LSE of a part is not returned"),
        ({"window": 3}, "window is .left, right., got 3"),
        ({"softcap": -1.0}, "softcap"),
        ({"deterministic": None}, "deterministic must be True or False"),
        ({}, "init_process_group of torch.distributed, and nobody called it"),
    ],
)
def test_what_breaks_a_rule_is_refused(named: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule):
        context_parallel_attention(**{"q": X, "k": X, "v": X, "group": None, **named})


def test_names_that_nobody_has_get_a_hint() -> None:
    with pytest.raises(TypeError, match=r"context_parallel_attention\(\) has no argument 'is_causal': "):
        context_parallel_attention(X, X, X, None, is_causal=True)


@pytest.mark.parametrize(
    ("rank", "ranks", "order", "rule"),
    [
        (0, 3, "zigzag", "a length that 6 divides, got 4"),
        (0, 3, "consecutive", "a length that 3 divides, got 4"),
        (2, 2, "zigzag", "rank must be at most 1"),
        (0, 0, "zigzag", "ranks must be at least 1"),
        (0, 2, "other", "order is"),
    ],
)
def test_sequences_that_do_not_divide_are_refused(rank: int, ranks: int, order: str, rule: str) -> None:
    with pytest.raises(WorkloadError, match=rule):
        split_sequence(X, rank, ranks, order=order)
