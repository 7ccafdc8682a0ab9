"""The blocks that a tile walks, against a count of every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashgen.codegen.common_steps import MIN_FULL_BLOCKS, key_steps, steps
from flashgen.core.workload import Workload

edge = st.none() | st.integers(0, 40)


@given(sq=st.integers(1, 40), sk=st.integers(1, 60), causal=st.booleans(), left=edge, right=edge)
def test_blocks_are_counted_pair_by_pair(sq: int, sk: int, causal: bool, left: int | None, right: int | None) -> None:
    block_m, block_n = 8, 4
    work = Workload(
        batch=1,
        nheads=1,
        seqlen_q=sq,
        seqlen_k=sk,
        head_dim=16,
        causal=causal,
        window_left=left,
        window_right=right,
    )
    found = steps(work, block_m, block_n)
    assert len(found.full) == len(found.masked) == -(-sq // block_m)
    for block, (full, masked) in enumerate(zip(found.full, found.masked, strict=True)):
        rows = range(block * block_m, min((block + 1) * block_m, sq))
        some, every = 0, 0
        for start in range(0, sk, block_n):
            keys = range(start, start + block_n)
            seen = [[visible(work, i, j) for j in keys] for i in rows]
            some += any(map(any, seen))
            every += all(map(all, seen))
        if work.window_left is not None and every < MIN_FULL_BLOCKS:
            every = 0
        assert (full, full + masked) == (every, some)


@given(sq=st.integers(1, 40), sk=st.integers(1, 60), causal=st.booleans(), left=edge, right=edge)
def test_blocks_of_keys_walk_the_queries_that_see_them(
    sq: int, sk: int, causal: bool, left: int | None, right: int | None
) -> None:
    block_m, block_n = 8, 4
    work = Workload(
        batch=1, nheads=1, seqlen_q=sq, seqlen_k=sk, head_dim=16, causal=causal, window_left=left, window_right=right
    )
    found = key_steps(work, block_m, block_n)
    assert len(found.full) == len(found.masked) == -(-sk // block_n)
    for block, (full, masked) in enumerate(zip(found.full, found.masked, strict=True)):
        keys = range(block * block_n, min((block + 1) * block_n, sk))
        some, every = 0, 0
        for start in range(0, sq, block_m):
            seen = [[visible(work, i, j) for j in keys] for i in range(start, min(start + block_m, sq))]
            some += any(map(any, seen))
            every += all(map(all, seen))
        assert (full, full + masked) == (every, some)


def test_both_sides_walk_the_same_tiles() -> None:
    for name in ("causal", "causal-wl1023", "wl256-wr256", ""):
        work = Workload.parse("-".join(filter(None, ["b1-h1-s4096-d64", name])))
        assert key_steps(work, 128, 64).total == steps(work, 128, 64).total


def visible(work: Workload, i: int, j: int) -> bool:
    place = i + work.seqlen_k - work.seqlen_q
    right = 0 if work.causal else work.window_right
    if right is not None and j > place + right:
        return False
    return j < work.seqlen_k and (work.window_left is None or j >= place - work.window_left)


def test_a_window_walks_as_many_blocks_however_long_the_sequence_is() -> None:
    short, long = (
        Workload(batch=1, nheads=1, seqlen_q=length, head_dim=64, causal=True, window_left=1023)
        for length in (8192, 65536)
    )
    last = {(found.full[-1], found.masked[-1]) for found in (steps(short, 128, 64), steps(long, 128, 64))}
    assert len(last) == 1
    assert sum(*last) <= (1024 + 128) // 64 + 1
