"""How many query heads of a group a tile of keys walks over in a backward pass: the knob `heads_per_tile`.

A tile is a block of keys of one key head. With all query heads of the group in it, dk and dv are summed in registers;
but 28 query heads over 4 key heads and 4096 keys are 128 tiles then, of which a causal mask leaves the first one twice
the mean. Tiles with fewer heads of a group fill the SMs, and leave sums that another kernel adds: a tile writes and
that kernel reads fp32 rows of dk and dv, in the time of `PART_STEPS` steps.

Where tiles of one head each leave SMs idle, several share the queries of a head: the knob `query_shares`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.common_sequences import key_blocks
from flashgen.codegen.family import Knob, Scratch, Sizes
from flashgen.core.config import Config

HEADS_PER_TILE = Knob(
    name="heads_per_tile",
    values=(0, 1, 2, 4),
    meaning="query heads of a group that a tile walks over; 0 is all, fewer make more tiles, whose sums are added",
    default=0,
    implied=True,
)

SHARES = (1, 2, 4)
QUERY_SHARES = Knob(
    name="query_shares",
    values=SHARES,
    meaning="tiles of one block of keys, each with a share of the queries that see it, whose sums are added",
    default=1,
    implied=True,
)

BY_RULE = (0, 1, 2)
"""Values that serve without a record of the sizes: 4 heads were at most 5% faster than 2."""

PART_STEPS = 3.0
"""Steps of 64 queries and 128 keys that take as long as the sums of a tile, in memory and back."""

SHARE_STEPS = 6.0
"""Such steps that take as long as the sums of one tile on every SM, where tiles share queries; with fewer tiles than
SMs the sums take less, since memory moves them."""

STEP_SCORES = 64 * 128

COARSE = 0.3
"""What SMs idle at the end under a causal mask, in tiles of the mean SM: the last ones end at different times."""

WORTH = 0.98
"""Another number of heads or shares serves where the time that is expected falls below this share."""

SUM_ROWS = 16
"""Keys of a program of the kernel that adds the sums of a group's tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTiles:
    """The tiles of a kernel that owns keys.

    Attributes:
        block_m: queries of a step.
        block_n: keys of a tile.
        slots: tiles that run side by side on the device.
        causal: whether later keys are seen by fewer queries, and tiles start with the heaviest.
        coarse: whether the last tiles end at different times.
    """

    block_m: int
    block_n: int
    slots: int
    causal: bool
    coarse: bool

    def blocks(self, sizes: Sizes) -> int:
        """Blocks of keys of a head, of packed sequences those of all."""
        return key_blocks(sizes, self.block_n) if sizes.sequences else -(-sizes.seqlen_k // self.block_n)

    def count(self, sizes: Sizes, heads: int, shares: int = 1) -> int:
        """All tiles, of which each walks over so many query heads of a group, 0 being all, and a share of queries."""
        parts = parts_of(sizes.nheads // sizes.nheads_k, heads)
        return sizes.batch * sizes.nheads_k * parts * shares * self.blocks(sizes)

    def steps(self, sizes: Sizes, heads: int, shares: int = 1) -> float:
        """Steps until the last tile ends, in each of which a tile meets a block of queries of one head.

        Tiles are of equal work, or begin with the heaviest: then the longest one, or the mean of all SMs, says when the
        last one ends; or the number of rounds, where tiles are nearly alike. On none of 20 shapes on an H100 another
        number of heads was more than 5% faster than the one with the least (docs/decisions/heads-per-tile.md).
        """
        packed = sizes.sequences > 0
        blocks, tiles = self.blocks(sizes), self.count(sizes, heads, shares)
        if not tiles:  # an empty batch, or no keys
            return 0.0
        rounds = -(-tiles // self.slots)
        queries, keys = (sizes.max_seqlen_q, sizes.max_seqlen_k) if packed else (sizes.seqlen_q, sizes.seqlen_k)
        longest = -(-queries // self.block_m)
        # of packed sequences a host knows how long they are on average
        mean = min(longest, sizes.seqlen_q / sizes.sequences / self.block_m + 1) if packed else longest
        if self.causal:
            mean *= 1 - min(queries, keys) / max(keys, 1) / 2
        walked: float = 0
        if not packed:
            # an SM that has one of the last round has none with less work in the rounds before
            first_key = (rounds - 1) * self.slots // (tiles // blocks) * self.block_n
            hidden = max(first_key - (keys - queries), 0) if self.causal else 0
            walked = rounds * heads * -(-(queries - hidden) // (self.block_m * shares))
        if self.causal or packed:
            idle = COARSE * self.slots / tiles if self.coarse else 0.0
            mean_of_sms = sizes.batch * sizes.nheads * blocks * mean / self.slots
            walked = max(walked, heads * -(-longest // shares), mean_of_sms * (1 + idle))
        step = self.block_m * self.block_n / STEP_SCORES
        if shares > 1:
            return walked + SHARE_STEPS / step * tiles / self.slots
        return walked + (PART_STEPS / step * rounds if heads < sizes.nheads // sizes.nheads_k else 0.0)

    def best(self, sizes: Sizes, own: int) -> int:
        """The value of the knob for these sizes, where that is better than a config's own, else that one.

        A config's own is below the heads of a group: see `why_pointless`.
        """
        group = sizes.nheads // sizes.nheads_k
        if group == 1:
            return own
        expected = {heads: self.steps(sizes, heads or group) for heads in {own, *BY_RULE} if heads < group}
        return _least(expected, own)

    def best_shares(self, sizes: Sizes) -> int:
        """The tiles of one head each that share its queries at these sizes; 1 where no other number is better.

        On none of 75 shapes on an H200 another number was more than 3% faster, and tiles that share nothing took 1.21
        times as long in the mean of these (docs/decisions/query-shares.md).
        """
        return _least({n: self.steps(sizes, 1, n) for n in able_shares(sizes, self.block_m)}, 1)


def _least(expected: dict[int, float], own: int) -> int:
    best = min(expected, key=lambda value: (expected[value], value))
    return best if expected[best] < WORTH * expected[own] else own


def parts_of(group: int, heads: int) -> int:
    """Tiles that share the query heads of a group; `heads` 0 is all of them in one."""
    return -(-group // heads) if heads else 1


def heads_per_tile(config: Config) -> int:
    """Query heads of a group that a tile walks over; 0 is all, also in a config that is older than the knob."""
    heads = config.get("heads_per_tile", 0)
    assert isinstance(heads, int)
    return heads


def query_shares(config: Config) -> int:
    """Tiles that share the queries which see a block of keys; 1 also in a config that is older than the knob."""
    shares = config.get("query_shares", 1)
    assert isinstance(shares, int)
    return shares


def able_shares(sizes: Sizes, block_m: int) -> list[int]:
    """The values of `query_shares` below the number of blocks of so many queries, so that no tile is without one."""
    blocks = -(-sizes.seqlen_q // block_m)
    return [shares for shares in SHARES if shares == 1 or shares < blocks]


def leaves_sums(config: Config) -> bool:
    """Whether sums of dk and dv of a tile are some of those of its keys, which another kernel adds."""
    return heads_per_tile(config) > 0 or query_shares(config) > 1


def why_pointless(config: Config, sizes: Sizes) -> str | None:
    """The reason why sums go through memory for nothing at these sizes, or None."""
    heads, group = heads_per_tile(config), sizes.nheads // sizes.nheads_k
    if heads and group <= heads:
        return f"its tiles walk over {heads} query heads of a group, which has {group}: no other tile has sums to add"
    return None


def key_heads(config: Config, sizes: Sizes) -> int:
    """Heads of keys, times the tiles that share the query heads of one, and their queries."""
    return sizes.nheads_k * parts_of(sizes.nheads // sizes.nheads_k, heads_per_tile(config)) * query_shares(config)


def sums_of_parts(config: Config, sizes: Sizes, columns: int, columns_v: int) -> tuple[Scratch, ...]:
    """The sums of dk and dv of tiles with some heads of a group, or some queries, in rows of so many columns."""
    if not leaves_sums(config):
        return ()
    rows = sizes.batch * key_heads(config, sizes) * sizes.seqlen_k
    return Scratch(name="dk_parts", shape=(rows, columns)), Scratch(name="dv_parts", shape=(rows, columns_v))


def programs_of_sums(sizes: Sizes) -> int:
    """Of the kernel that adds them."""
    return -(-sizes.seqlen_k // SUM_ROWS) * sizes.batch * sizes.nheads_k
