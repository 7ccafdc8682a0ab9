"""Which rows of a sequence lie on which rank, and which blocks of scores a rank computes.

In consecutive order, rank r of n has the r-th of n runs. In zigzag order the sequence is cut into 2n runs, and rank r
has the r-th from the front and the r-th from the back, so that all ranks have as much of a causal mask (Dubey et al.
2024, The Llama 3 Herd of Models, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from flashgen.core.checks import is_name_in, whole_number
from flashgen.core.errors import WorkloadError
from flashgen.core.features.values import Window
from flashgen.core.quoting import shown

Tensor = torch.Tensor

CONSECUTIVE, ZIGZAG = "consecutive", "zigzag"
ORDERS = (CONSECUTIVE, ZIGZAG)


def split_sequence(x: Tensor, rank: int, ranks: int, *, order: str = ZIGZAG, dim: int = 2) -> Tensor:
    """The part of a sequence that lies on a rank, of tokens, positions or labels as well as of queries and keys.

    Args:
        x: the whole sequence along `dim`.
        rank: which part, from 0.
        ranks: how many parts there are; they divide the length, and twice as many do in zigzag order.
        order: "consecutive" or "zigzag".
        dim: the dimension of the sequence.

    Returns:
        The rows of the part along `dim`, in the order in which they stand in the sequence.

    Raises:
        WorkloadError: the length does not divide, or there is no such part or order.
    """
    check_order(order)
    whole_number("ranks", ranks, 1)
    whole_number("rank", rank, 0, ranks - 1)
    runs_a_part = 2 if order == ZIGZAG else 1
    if x.shape[dim] % (runs_a_part * ranks):
        raise WorkloadError(
            f"a sequence in {order} order over {ranks} ranks has a length that {runs_a_part * ranks} divides, "
            f"got {x.shape[dim]}"
        )
    pieces = x.chunk(runs_a_part * ranks, dim)
    if order == CONSECUTIVE:
        return pieces[rank]
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim)


def join_sequence(parts: Sequence[Tensor], *, order: str = ZIGZAG, dim: int = 2) -> Tensor:
    """The sequence whose parts these are, those of rank 0 first: what `split_sequence` took apart.

    Raises:
        WorkloadError: there is no such order, or a part in zigzag order is not of two runs.
    """
    check_order(order)
    if order == CONSECUTIVE:
        return torch.cat(list(parts), dim)
    halves = [halves_of(part, dim) for part in parts]
    return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))], dim)


def halves_of(part: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The two runs of a part in zigzag order.

    Raises:
        WorkloadError: its length is odd.
    """
    length = part.shape[dim]
    if length % 2:
        raise WorkloadError(f"a part in zigzag order is of two runs of one length, got {length} rows")
    return part.narrow(dim, 0, length // 2), part.narrow(dim, length // 2, length // 2)


def check_order(order: str) -> None:
    """Refuse an unknown order.

    Raises:
        WorkloadError: it is neither.
    """
    if not is_name_in(order, ORDERS):
        raise WorkloadError(f'order is "consecutive" or "zigzag", got {shown(order)}')


class Run(NamedTuple):
    """Rows that follow each other in the sequence, and in the part of a rank."""

    first: int
    """Place of its first row in the sequence."""
    rows: slice
    """Its rows in the part."""


class Block(NamedTuple):
    """Scores of rows of one part with keys of another that one call of attention computes."""

    rows: slice
    keys: slice
    q_offset: int | None
    """Of the call, whose mask hides some of the scores; None where every row sees every key."""
    has_own_keys: bool
    """Whether each of the rows meets the key of its own place."""


def runs(order: str, rank: int, ranks: int, length: int) -> tuple[Run, ...]:
    """The runs of a rank's part of `length` rows, in the order of the sequence."""
    if order == CONSECUTIVE:
        return (Run(rank * length, slice(0, length)),)
    half = length // 2
    back = 2 * ranks - 1 - rank
    return Run(rank * half, slice(0, half)), Run(back * half, slice(half, length))


@lru_cache(maxsize=64)
def ring_steps(
    order: str, rank: int, ranks: int, length: int, causal: bool, window: Window
) -> tuple[tuple[Block, ...], ...]:
    """What a rank computes at each step of a ring, at whose step t it holds the keys of rank `(rank - t) % ranks`.

    There are as many steps as the rank that is served last needs, so that all ranks make the same number. Without a
    left edge the last rows see the first keys, which takes every step.
    """
    needed = ranks
    if window[0] is not None:
        needed = 1 + max(
            step
            for step in range(ranks)
            if any(blocks(order, one, (one - step) % ranks, ranks, length, causal, window) for one in range(ranks))
        )
    return tuple(blocks(order, rank, (rank - step) % ranks, ranks, length, causal, window) for step in range(needed))


def blocks(
    order: str, rank: int, source: int, ranks: int, length: int, causal: bool, window: Window
) -> tuple[Block, ...]:
    """The blocks of the rows of a rank with the keys of another: no visible score is left out, none is in two."""
    left, right = (math.inf if edge is None else edge for edge in window)
    right = min(right, 0) if causal else right
    whole = slice(0, length)
    if rank == source and (order == CONSECUTIVE or (left == math.inf and right in (0, math.inf))):
        # places rise within a part, so that the causal mask of the part is that of the sequence
        is_open = left == right == math.inf
        return (Block(whole, whole, None if is_open else 0, True),)
    mine, theirs = runs(order, rank, ranks, length), runs(order, source, ranks, length)
    found = [block for row in mine for key in theirs if (block := _block(row, key, left, right)) is not None]
    return tuple(found) if rank == source else tuple(_joined(_joined(found, "rows"), "keys"))


def _block(row: Run, key: Run, left: float, right: float) -> Block | None:
    """The block of two runs of one length, where a row sees keys from `left` before to `right` behind its place."""
    distance, reach = key.first - row.first, row.rows.stop - row.rows.start - 1
    if reach < 0 or distance - reach > right or distance + reach < -left:
        return None
    is_open = distance + reach <= right and distance - reach >= -left
    return Block(row.rows, key.rows, None if is_open else -distance, distance == 0)


def _joined(found: list[Block], field: str) -> list[Block]:
    """Open blocks that touch each other and differ in `field` alone, as one."""
    joined: list[Block] = []
    for block in found:
        place = next((n for n, one in enumerate(joined) if _touch(one, block, field)), None)
        if place is None:
            joined.append(block)
        else:
            span = slice(getattr(joined[place], field).start, getattr(block, field).stop)
            joined[place] = block._replace(rows=span) if field == "rows" else block._replace(keys=span)
    return joined


def _touch(one: Block, other: Block, field: str) -> bool:
    same = "keys" if field == "rows" else "rows"
    are_open = one.q_offset is None and other.q_offset is None
    is_next = getattr(one, field).stop == getattr(other, field).start
    return are_open and is_next and getattr(one, same) == getattr(other, same)
