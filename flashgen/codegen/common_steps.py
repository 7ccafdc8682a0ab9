"""How many steps of a tiled kernel a workload costs: the blocks that each block of the other side walks.

The arithmetic is that of the portable templates: a block is masked where some row of the tile does not see some key of
it, and blocks outside of a causal mask or a window are not visited. Between the two edges of a window, programs that
own queries walk fewer than `MIN_FULL_BLOCKS` unmasked blocks as masked ones.
"""

from __future__ import annotations

import functools

from flashgen.codegen.cost import Steps
from flashgen.core.workload import Workload

MIN_FULL_BLOCKS = 2


@functools.lru_cache(maxsize=256)
def steps(w: Workload, block_m: int, block_n: int) -> Steps:
    """The steps of one head of `w` in tiles of `block_m` query rows and `block_n` keys."""
    counts = [
        _steps(w, start, min(start + block_m, w.seqlen_q) - 1, block_n) for start in range(0, w.seqlen_q, block_m)
    ]
    return Steps(full=tuple(full for full, _ in counts), masked=tuple(masked for _, masked in counts))


@functools.lru_cache(maxsize=256)
def key_steps(w: Workload, block_m: int, block_n: int) -> Steps:
    """The steps of one head of `w` where a program owns `block_n` keys and walks `block_m` query rows at a time."""
    counts = [
        _key_steps(w, start, min(start + block_n, w.seqlen_k) - 1, block_m) for start in range(0, w.seqlen_k, block_n)
    ]
    return Steps(full=tuple(full for full, _ in counts), masked=tuple(masked for _, masked in counts))


def _key_steps(w: Workload, first_key: int, last_key: int, block_m: int) -> tuple[int, int]:
    """Blocks of queries that see all of a block of keys, and those that see a part of it."""
    offset = w.seqlen_k - w.seqlen_q
    right = 0 if w.causal else w.window_right
    start = full_start = 0
    end = full_end = w.seqlen_q
    if right is not None:  # key j is seen from row j - offset - right on
        start = max(first_key - offset - right, 0)
        full_start = max(last_key - offset - right, 0)
    if w.window_left is not None:  # and up to row j - offset + left
        end = min(max(last_key - offset + w.window_left + 1, 0), w.seqlen_q)
        full_end = min(max(first_key - offset + w.window_left + 1, 0), w.seqlen_q)
    first, last = start // block_m, -(-end // block_m)
    # rows behind the last one are no reason for masks: they add nothing
    whole = -(-full_end // block_m) if full_end == w.seqlen_q else full_end // block_m
    every = max(last - first, 0) if end > start else 0
    full = max(whole - -(-full_start // block_m), 0)
    return min(full, every), every - min(full, every)


def _steps(w: Workload, first_row: int, last_row: int, block_n: int) -> tuple[int, int]:
    offset = w.seqlen_k - w.seqlen_q
    right = 0 if w.causal else w.window_right
    end = full_end = w.seqlen_k
    if right is not None:
        end = min(max(last_row + offset + right + 1, 0), w.seqlen_k)
        full_end = min(max(first_row + offset + right + 1, 0), w.seqlen_k)
    full_end = full_end // block_n * block_n
    if w.window_left is None:
        return full_end // block_n, -(-end // block_n) - full_end // block_n
    start = max(first_row + offset - w.window_left, 0) // block_n * block_n
    full_start = -(-max(last_row + offset - w.window_left, 0) // block_n) * block_n
    every = max(-(-(end - start) // block_n), 0)
    full = max((full_end - full_start) // block_n, 0)
    if full < MIN_FULL_BLOCKS:
        full = 0
    return full, every - full
