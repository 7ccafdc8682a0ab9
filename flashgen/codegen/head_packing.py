"""Heads that share keys, packed side by side into one tile of queries: what fills it where queries are short.

A tile of R rows holds R query positions of one head, or R / n positions of n heads of a group. Its keys are read once
for all of them. A decoding step, one position of 4 heads a group, takes one tile where it took four nearly empty ones.
Any n serves any group: the last pack of a group has fewer heads, and the rows of those that are not there stay empty.
(FlashAttention-2 and 3 pack likewise, with the heads of a position as neighbours.)
"""

from __future__ import annotations

from flashgen.codegen.family import Sizes

PACKED_HEADS = (1, 2, 4, 8, 16)

LEAST_SAVED = 1 / 4
"""Share of the tiles that packing has to save: a group of positions and heads in a tile has costs of its own."""

MUCH = 2
"""A config that computes so many times the tiles of another packing is not the one to serve."""


def packs(sizes: Sizes, packed_heads: int) -> int:
    """Packs of heads of all batch elements together."""
    group = sizes.nheads // sizes.nheads_k
    return sizes.batch * sizes.nheads_k * -(-group // packed_heads)


def tiles(sizes: Sizes, rows: int, packed_heads: int) -> int:
    """Tiles of `rows` query rows, in packs of so many heads."""
    return packs(sizes, packed_heads) * -(-sizes.seqlen_q // (rows // packed_heads))


def packing(sizes: Sizes, rows: int) -> int:
    """The heads to pack into tiles of `rows` rows: the fewest that give the fewest tiles; 1 where that saves little.

    Packing fills the last of the tiles of a head, so it saves less than that one of them.
    """
    if sizes.sequences or sizes.nheads == sizes.nheads_k or -(-sizes.seqlen_q // rows) * LEAST_SAVED >= 1:
        return 1
    best = min(PACKED_HEADS, key=lambda heads: (tiles(sizes, rows, heads), heads))
    saved = tiles(sizes, rows, 1) - tiles(sizes, rows, best)
    return best if saved >= LEAST_SAVED * tiles(sizes, rows, 1) else 1


def poor_at_sizes(sizes: Sizes, rows: int, packed_heads: int) -> str | None:
    """The reason why another packing takes much less work at these sizes, or None."""
    heads = packing(sizes, rows)
    if heads == packed_heads:
        return None
    own, best = tiles(sizes, rows, packed_heads), tiles(sizes, rows, heads)
    if own < MUCH * best:
        return None
    return f"with {packed_heads} of the heads that share keys in a tile it computes {own} tiles, where {best} would do"
