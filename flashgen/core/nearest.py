"""How far apart two workloads of one specialization class are: the nearest one's record serves where none is exact."""

from __future__ import annotations

import functools
from math import log2

from flashgen.core.lengths import page_class
from flashgen.core.workload import Workload

HEADS_WEIGHT = 1 / 2
"""Heads times batch fill the GPU, but a kernel does the same for each of them."""

GROUPS_WEIGHT = 1 / 4
"""Heads that share keys differ in what the caches hold, and in little else."""

PAGES_WEIGHT = 1 / 2
"""Pages twice as large have half as many ids to read; from whole tiles on nothing else differs."""

SHORT, BLOCK = 64, 16
LONG, LONG_BLOCK = 512, 64
"""Lengths above SHORT count in whole blocks of BLOCK rows, above LONG in those of LONG_BLOCK. Tiles are multiples of
a block, or parts: all lengths with as many blocks are as much work and get the same config, which is chosen once."""

GROUPED_LONG = 2048
"""The same as LONG where heads share keys: tiles with several of them have a part of the positions of one."""

Position = tuple[float, float, float, float, float]
"""Coordinates of a workload, in factors of two: sizes that are twice as large are one step away."""


def position(workload: Workload) -> Position:
    """Where a workload lies among those of its class: lengths, heads times batch, group size, width of the window.

    Lengths are those `in_blocks`.
    Of a step of decoding: query rows of a key head, keys that they see, and sequences times key heads. Packed sequences
    lie where the dense workload does that has as many rows.
    """
    w = workload
    group = w.nheads // w.nheads_k
    if w.total_q is not None:
        return packed_position(w.total_q, w.seqlen_q, w.seqlen_k, w.nheads, group, _visible_keys(w))
    if w.is_decode:
        return decode_position(w.seqlen_q * (w.nheads // w.nheads_k), w.keys_reached, w.batch * w.nheads_k)
    rows, keys = (in_blocks(length, is_grouped=group > 1) for length in (w.seqlen_q, w.seqlen_k))
    return position_of(rows, keys, w.batch * w.nheads, group, _visible_keys(w))


def in_blocks(length: int, *, is_grouped: bool = False) -> int:
    """The length that stands for all that have as many blocks of rows: the longest one."""
    if length > (GROUPED_LONG if is_grouped else LONG):
        return -(-length // LONG_BLOCK) * LONG_BLOCK
    return length if length <= SHORT else -(-length // BLOCK) * BLOCK


def position_of(seqlen_q: int, seqlen_k: int, heads: int, group: int, visible_keys: int = 0) -> Position:
    """The same by sizes: `heads` of all batch elements together, 0 visible keys where there is no window."""
    # not by `_log`: most lengths are new
    rows = log2(seqlen_q) if seqlen_q > 1 else 0.0
    return (
        rows,
        rows if seqlen_k == seqlen_q else log2(seqlen_k) if seqlen_k > 1 else 0.0,
        _log(heads) * HEADS_WEIGHT,
        _log(group) * GROUPS_WEIGHT,
        _log(visible_keys),
    )


def packed_position(
    total_q: int, seqlen_q: int, seqlen_k: int, nheads: int, group: int, visible_keys: int = 0
) -> Position:
    """Where packed sequences lie: as many of the longest one count as have the rows of all."""
    sequences = max(1, total_q // max(1, seqlen_q))
    return position_of(seqlen_q, seqlen_k, nheads * sequences, group, visible_keys)


def decode_position(rows: int, visible_keys: int, pairs: int) -> Position:
    """Where a step of decoding lies: what a program does for a pair, how long that takes, and how many pairs are."""
    return (_log(rows), _log(visible_keys), _log(pairs), 0.0, 0.0)


def distance(one: Position, other: Position) -> float:
    """The sum of the steps along each coordinate."""
    a, b, c, d, e = one  # written out: every call of a new length asks this of all records of its class
    v, w, x, y, z = other
    return abs(a - v) + abs(b - w) + abs(c - x) + abs(d - y) + abs(e - z)


def pages_apart(one: int | None, other: int | None) -> float:
    """Steps between two sizes of pages, which are 0 within a class; neither or both have pages."""
    return abs(_log(page_class(one)) - _log(page_class(other))) * PAGES_WEIGHT


def _visible_keys(w: Workload) -> int:
    has_window = w.window_left is not None or w.window_right is not None
    return visible_keys(w.seqlen_k, w.window_left, 0 if w.causal else w.window_right, has_window=has_window)


def visible_keys(seqlen_k: int, left: int | None, right: int | None, *, has_window: bool) -> int:
    """The most keys that a window shows to one query; without a window 0, because the lengths say it all."""
    if not has_window:
        return 0
    left, right = (seqlen_k if width is None else width for width in (left, right))
    return min(left + right + 1, seqlen_k)


@functools.lru_cache(maxsize=1024)  # heads and groups are the same few at every new length
def _log(size: int) -> float:
    return log2(max(size, 1))
