"""Heads that share keys, packed side by side into one tile of queries: what fills it where queries are short.

A tile of R rows holds R query positions of one head, or R / n positions of n heads of a group. Its keys are read once
for all of them. A decoding step, one position of 4 heads a group, takes one tile where it took four nearly empty ones.
Any n serves any group: the last pack of a group has fewer heads, and the rows of those that are not there stay empty.
(FlashAttention-2 and 3 pack likewise, with the heads of a position as neighbours; 3 does so for all packed sequences.)

Of packed sequences each ends in a tile that is not full, so that packing pays for far longer ones than in a dense call,
and how far it does is searched.
"""

from __future__ import annotations

from flashgen.codegen.common_sequences import query_blocks
from flashgen.codegen.family import Sizes
from flashgen.core.config import Config

PACKED_HEADS = (1, 2, 4, 8, 16)

SEQUENCE_HEADS = PACKED_HEADS[:-1]
"""Of packed sequences: with 16 a warpgroup has four positions, and prompts have more."""

SHORT_SEQUENCES = 1024
"""Mean length of packed sequences up to which their heads are packed where nobody measured that.

Half a tile of each sequence is empty, of 128 rows of one head or of 128 / n positions. On an H200 packing took 0.64 to
0.99 of the time of tiles with one head where the mean is 32 to 1024 tokens, and 0.99 to 1.03 at 2048.
"""

LEAST_SAVED = 1 / 4
"""Share of the tiles that packing has to save: a group of positions and heads in a tile has costs of its own."""

MOST_EMPTY = 1 / 16
"""Share of the rows of all packs that may have no head. Of 28 heads over 4 in packs of 8 an eighth has none: these took
0.96 to 1.17 times the time of tiles with one head (docs/experiments/waves.md).
"""

MUCH = 2
"""A config that computes so many times the tiles of another packing is not the one to serve."""


def packs(sizes: Sizes, packed_heads: int) -> int:
    """Packs of heads of all batch elements together."""
    group = sizes.nheads // sizes.nheads_k
    return sizes.batch * sizes.nheads_k * -(-group // packed_heads)


def tiles(sizes: Sizes, rows: int, packed_heads: int) -> int:
    """Tiles of `rows` query rows, in packs of so many heads."""
    return packs(sizes, packed_heads) * -(-sizes.seqlen_q // (rows // packed_heads))


def tiles_of_sequences(sizes: Sizes, rows: int, packed_heads: int) -> int:
    """The same of packed sequences, whose lengths the host does not know: as many as there are at most."""
    return packs(sizes, packed_heads) * query_blocks(sizes, rows // packed_heads)


def packing(sizes: Sizes, rows: int) -> int:
    """The heads to pack into tiles of `rows` rows: the fewest that give the fewest tiles; 1 where that saves little.

    Packing fills the last of the tiles of a head, so it saves less than that one of them.
    """
    if sizes.sequences or sizes.nheads == sizes.nheads_k or -(-sizes.seqlen_q // rows) * LEAST_SAVED >= 1:
        return 1
    best = min(PACKED_HEADS, key=lambda heads: (tiles(sizes, rows, heads), heads))
    saved = tiles(sizes, rows, 1) - tiles(sizes, rows, best)
    return best if saved >= LEAST_SAVED * tiles(sizes, rows, 1) else 1


def suits_group(config: Config, sizes: Sizes) -> bool:
    """Whether a config packs no more heads than `as_group_allows`."""
    heads = int(config.get("packed_heads", 1))
    return as_group_allows(sizes, heads) == heads


def fills_half(config: Config, sizes: Sizes) -> bool:
    """Whether more than half of the heads of a pack are there, as calls of some length may ask for."""
    return int(config.get("packed_heads", 1)) < 2 * (sizes.nheads // sizes.nheads_k)


def as_group_allows(sizes: Sizes, heads: int) -> int:
    """So many heads or fewer, by which a group of packed sequences is divided without a rest.

    A box of TMA has no axis for the group there: a pack that reaches into the next one is right, but stores its output
    by pointers. Groups of 7 in packs of 2, 4 and 8 took 1.2, 1.4 and 1.8 times as long as in tiles of one head.
    """
    group = sizes.nheads // sizes.nheads_k
    return next(n for n in reversed(PACKED_HEADS) if n <= heads and group % n == 0)


def packing_of_group(sizes: Sizes) -> int:
    """The heads to pack of queries that fill tiles of one head: the most that leave few rows of a pack empty."""
    group = sizes.nheads // sizes.nheads_k
    return max(n for n in SEQUENCE_HEADS if -(-group // n) * n <= (1 + MOST_EMPTY) * group)


def packing_of_sequences(sizes: Sizes) -> int:
    """The heads to pack of sequences that nobody measured: as many as a group allows, where they are short."""
    if sizes.seqlen_q > SHORT_SEQUENCES * sizes.sequences:
        return 1
    return as_group_allows(sizes, SEQUENCE_HEADS[-1])


def poor_at_sizes(sizes: Sizes, rows: int, packed_heads: int) -> str | None:
    """The reason why another packing takes much less work at these sizes, or None."""
    heads = packing(sizes, rows)
    if heads == packed_heads:
        return None
    own, best = tiles(sizes, rows, packed_heads), tiles(sizes, rows, heads)
    if own < MUCH * best:
        return None
    return f"with {packed_heads} of the heads that share keys in a tile it computes {own} tiles, where {best} would do"
