"""How many steps of a tiled kernel a workload costs: the blocks of keys that each block of query rows walks.

The arithmetic is that of the portable template: a block is masked where some row of the tile does not see some key of
it, blocks outside of a causal mask or a window are not visited, and between the two edges of a window fewer than
`MIN_FULL_BLOCKS` unmasked blocks are walked as masked ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.core.workload import Workload

MIN_FULL_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Unmasked and masked steps of every query block of one head, in the order of the rows."""

    full: tuple[int, ...]
    masked: tuple[int, ...]

    @property
    def total(self) -> int:
        """Steps of all query blocks together."""
        return sum(self.full) + sum(self.masked)


@functools.lru_cache(maxsize=256)
def steps(w: Workload, block_m: int, block_n: int) -> Steps:
    """The steps of one head of `w` in tiles of `block_m` query rows and `block_n` keys."""
    counts = [
        _steps(w, start, min(start + block_m, w.seqlen_q) - 1, block_n) for start in range(0, w.seqlen_q, block_m)
    ]
    return Steps(full=tuple(full for full, _ in counts), masked=tuple(masked for _, masked in counts))


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
