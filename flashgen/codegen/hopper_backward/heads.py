"""What of the Hopper backward families serves sizes that nobody measured: tiles, their steps and order, who has dq.

Two warpgroups in the same part of a step wait for the tensor cores together; with one of them half a step ahead they do
not, but a tile takes half a step more. On an H100 the latter is faster for heads of up to 64 columns and where there
are few tiles, 1.0 to 1.4 times. With many tiles under a causal mask heads of 128 columns are up to 1.05 times as fast
in step; with a window either is, on one card or the other.

Under a causal mask tiles begin with the heaviest of a group of heads (`common_order`). In groups of 4 heads 32 shapes
with one to six tiles for each SM took 1.12 times as long on an H200 as in the groups that serve them.

Few heads leave SMs idle even with one of them a tile. Several tiles share the queries of a block of keys then: on an
H200 it is up to 2.7 times as fast (docs/decisions/query-shares.md).

Sums of dq in memory are cleared, added to and read again, which costs the same however few blocks of keys add to them.
Where many tiles have few, another kernel that computes scores again is faster: up to 1.6 times on an H100.
"""

from __future__ import annotations

import functools

from flashgen.codegen.common_groups import (
    BY_RULE,
    SHARES,
    KeyTiles,
    able_shares,
    heads_per_tile,
    key_heads,
    query_shares,
    why_pointless,
)
from flashgen.codegen.common_order import ALL_HEADS, in_groups, in_groups_of
from flashgen.codegen.common_wgmma import NUM_SMS, ROWS, widest_block
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import is_split
from flashgen.codegen.hopper_backward import resources
from flashgen.codegen.hopper_backward.defaults import fused_default, split_default
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

FEW_WAVES = 4
"""Tiles for each SM up to which heads of 128 columns are better off with staggered warpgroups under a causal mask."""

ONE_GROUP_WAVES, LARGE_GROUP_WAVES = 3, 6
"""Tiles for each SM up to which all heads are one group under a causal mask, and up to which groups are large.

With more of them groups are usual, or a record's smaller ones: large ones took 1.09 to 1.17 times as long.
"""

GROUPS = (16, 8, 4)
LARGE_GROUP, USUAL_GROUP, _ = GROUPS
"""Heads of a group; where the queries of all heads do not fit into the L2 cache, those of a group do."""

SHORT, ODD = 6, 11
"""Steps of 64 queries up to which heads of 64 columns take these; and where steps of 128 would compute one more."""

IN_STEP = 2
"""Steps of 64 queries up to which the warpgroups of a tile that has all keys are in step."""

SHARED_WAVES = 2
"""Tiles for each SM up to which they may share queries."""

FEW_BLOCKS, MANY_TILES = 4, 3
"""Blocks of keys up to which, and tiles of one query head for each SM above which, a kernel of its own computes dq of
wider heads."""

FAST_MEMORY_GBS, FEW_BLOCKS_OF_FAST = 4000, 2
"""The same blocks where memory moves sums of dq fast enough: with 512 keys that kernel took 1.04 to 1.13 times as long
on an H200, with 4800 GB/s, in six searches of four workloads, and 0.79 to 0.99 of the time on an H100, with 3350."""


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """The same without sums in memory where a tile has all heads of a group anyway, or where there are many tiles.

    And with sums of dq, where there are more keys than those of a tile that writes it.
    """
    if resources.why_not_written(config, sizes) is not None:
        config = _with_sums(config)
    if why_pointless(config, sizes) is not None:
        config = config.replace(heads_per_tile=0)
    return config if _why_share_no_queries(config, sizes) is None else _alone(config)


def poor_at_sizes(config: Config, sizes: Sizes) -> str | None:
    """The reason why sums go through memory for nothing at these sizes, or None."""
    return why_pointless(config, sizes) or _why_share_no_queries(config, sizes)


def _why_share_no_queries(config: Config, sizes: Sizes) -> str | None:
    shares = query_shares(config)
    if shares == 1:
        return None
    if shares not in able_shares(sizes, config.integer("block_m")):
        return f"{shares} tiles share the queries of a head, which has few blocks of these: {sizes.seqlen_q} queries"
    tiles = sizes.batch * key_heads(config, sizes) // shares * -(-sizes.seqlen_k // resources.KEYS)
    if tiles > SHARED_WAVES * NUM_SMS:
        return f"there are {tiles} tiles, which fill all SMs without sharing queries"
    return None


def balanced(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config with as many heads a tile as these sizes take, and what else of a tile is faster at them."""
    writes = sizes.seqlen_k <= resources.KEYS and _may_write(spec)
    config = _fused_default(spec, device) if writes else fitted(spec, config, sizes, device)
    tiles = _tiles(spec, config, device)
    config = _sharing(spec, config, sizes, tiles) or _unshared(spec, _alone(config), sizes, device)
    if writes:
        walk = config.integer("block_m"), heads_per_tile(config), query_shares(config)
        return _writing(spec, device, *walk, sizes.seqlen_q <= IN_STEP * ROWS)
    return _staggered(spec, _ordered(spec, config, sizes, tiles, device), sizes, tiles)


_fused_default = functools.lru_cache(maxsize=256)(fused_default)
"""Which every new length of few keys asks for."""


def _may_write(spec: Specialization) -> bool:
    """Whether a tile may write dq: the fused family computes the class, and nothing but a causal mask is timed."""
    return is_plain(spec) and not spec.deterministic and widest_block(spec) <= 2 * ROWS


@functools.lru_cache(maxsize=256)
def _writing(spec: Specialization, device: Device, block_m: int, heads: int, shares: int, in_step: bool) -> Config:
    """The default with tiles that have all keys and write dq, of which no two have an order.

    A warpgroup half a step ahead costs half a step, and a loop over tiles a little where each SM has one of them: on an
    H200 1.01 to 1.05 times as long with up to two steps, and 1.02 to 1.03 where tiles share queries.
    """
    walk: dict[str, KnobValue] = {"block_m": block_m, "heads_per_tile": heads, "query_shares": shares}
    how: dict[str, KnobValue] = {"persistent": shares == 1, "stagger_warpgroups": not in_step}
    return _fused_default(spec, device).replace(dq_conversion="none", **walk, **how)


@functools.lru_cache(maxsize=256)
def _tiles(spec: Specialization, config: Config, device: Device) -> KeyTiles:
    return KeyTiles(
        block_m=config.integer("block_m"),
        block_n=resources.block_n(spec),
        slots=device.num_sms,
        causal=spec.causal,
        coarse=spec.causal and not spec.window and not resources.is_wide(spec),
    )


def _sharing(spec: Specialization, config: Config, sizes: Sizes, tiles: KeyTiles) -> Config | None:
    """A config whose tiles share the queries of a head; None where they had better not, or cannot."""
    if sizes.seqlen_q <= SHORT * ROWS or not _may_share(spec, config):
        return None
    if tiles.count(sizes, 1) > SHARED_WAVES * tiles.slots:
        return None
    heads = tiles.best(sizes, heads_per_tile(config))
    if (heads or sizes.nheads // sizes.nheads_k) > 1:
        return None
    shares = tiles.best_shares(sizes)
    return None if shares == 1 else _in_shares(spec, config, heads, shares)


@functools.lru_cache(maxsize=256)
def _in_shares(spec: Specialization, config: Config, heads: int, shares: int) -> Config:
    """With all heads in one group: they are few, and those of groups of 8 took up to 1.4 times as long on an H200."""
    return in_groups(spec, _with(config, heads, shares), ALL_HEADS)


def _may_share(spec: Specialization, config: Config) -> bool:
    """Whether the rule speaks of a config: heads in two parts gain more than most of them would by sharing."""
    return is_plain(spec) and not is_split(config)


def _unshared(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    steps = -(-sizes.seqlen_q // ROWS)
    if steps <= SHORT or (steps % 2 and steps <= ODD):
        config = short_steps(spec, config)
    tiles = _tiles(spec, config, device)
    if _reads_dq_for_little(spec, config, sizes, tiles, device):
        config = split_default(spec, device)
    return _with(config, tiles.best(sizes, heads_per_tile(config)))


def beside(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """The configs that `balanced` may serve in the place of one."""
    own = _alone(config)
    fused = [own, short_steps(spec, own)]
    kinds = [*fused, *([split_default(spec, device)] if _may_split(spec, config) else [])]
    found = [_with(kind, heads) for kind in kinds for heads in dict.fromkeys((heads_per_tile(config), *BY_RULE))]
    found += [in_groups(spec, other, ALL_HEADS) for other in found]
    found += [in_groups_of(spec, other, heads) for other in found for heads in GROUPS]
    found += [stagger(spec, other) for other in found]
    if _may_share(spec, config):
        found += [stagger(spec, _in_shares(spec, own, heads, n)) for heads in (0, 1) for n in SHARES[1:]]
    if _may_write(spec):
        walks = [(heads, 1, in_step) for heads in (0, *BY_RULE) for in_step in (False, True)]
        walks += [(heads, shares, False) for heads in (0, 1) for shares in SHARES[1:]]
        default = _fused_default(spec, device)
        steps = {kind.integer("block_m") for kind in (default, short_steps(spec, default))}
        found += [_writing(spec, device, rows, *walk) for rows in sorted(steps) for walk in walks]
    return tuple(other for other in dict.fromkeys(found) if other != config)


@functools.lru_cache(maxsize=256)
def _with_sums(config: Config) -> Config:
    return config.replace(dq_conversion="kernel")


@functools.lru_cache(maxsize=256)
def _alone(config: Config) -> Config:
    """A config whose tiles share no queries."""
    return config if query_shares(config) == 1 else config.replace(query_shares=1)


@functools.lru_cache(maxsize=256)
def short_steps(spec: Specialization, config: Config) -> Config:
    """A config with steps of 64 queries; as it is where nobody timed them."""
    if not resources.is_fused(config) or resources.prefetches_scores(config) or not is_plain(spec):
        return config
    return config.replace(block_m=ROWS)


def _reads_dq_for_little(spec: Specialization, config: Config, sizes: Sizes, tiles: KeyTiles, device: Device) -> bool:
    blocks = FEW_BLOCKS if device.bandwidth_gbs < FAST_MEMORY_GBS else FEW_BLOCKS_OF_FAST
    if not _may_split(spec, config) or not resources.KEYS < sizes.seqlen_k <= blocks * tiles.block_n:
        return False
    return tiles.count(sizes, 1) > MANY_TILES * tiles.slots


def _may_split(spec: Specialization, config: Config) -> bool:
    return resources.is_fused(config) and ROWS < widest_block(spec) <= 2 * ROWS and is_plain(spec)


def is_plain(spec: Specialization) -> bool:
    """Whether a specialization has no feature but a causal mask."""
    return not (spec.varlen or spec.window or spec.mods or spec.mask or spec.softcap or spec.alibi)


@functools.lru_cache(maxsize=256)
def stagger(spec: Specialization, config: Config) -> Config:
    """A config with one warpgroup ahead of the other; as it is where that is not valid, or nobody timed it."""
    if not resources.is_fused(config) or resources.prefetches_scores(config) or spec.varlen:
        return config
    return config.replace(stagger_warpgroups=True)


def _ordered(spec: Specialization, config: Config, sizes: Sizes, tiles: KeyTiles, device: Device) -> Config:
    waves = tiles.count(sizes, heads_per_tile(config), query_shares(config)) / tiles.slots
    own, heads = config.integer("heads_per_group"), sizes.batch * key_heads(config, sizes)
    if waves <= 1 or (waves > LARGE_GROUP_WAVES and own <= USUAL_GROUP):
        return config
    head_bytes = sizes.batch * sizes.nheads * sizes.seqlen_q * _row_bytes(spec) // heads
    room = device.l2_bytes // head_bytes if device.l2_bytes else heads
    if waves > LARGE_GROUP_WAVES or room < heads:
        most = LARGE_GROUP if waves <= LARGE_GROUP_WAVES else USUAL_GROUP
        return in_groups_of(spec, config, next((each for each in GROUPS if each <= min(most, room)), GROUPS[-1]))
    wanted = ALL_HEADS if heads > LARGE_GROUP and waves <= ONE_GROUP_WAVES else LARGE_GROUP
    return in_groups(spec, config, wanted) if own < heads else config


def _row_bytes(spec: Specialization) -> int:
    """Of what a tile of keys reads of a query: its row of Q and of dO."""
    return (spec.head_dim + spec.head_dim_v) * DTYPE_BYTES[spec.dtype]


def _staggered(spec: Specialization, config: Config, sizes: Sizes, tiles: KeyTiles) -> Config:
    decides = widest_block(spec) > ROWS and (spec.causal or spec.window)
    if decides and tiles.count(sizes, heads_per_tile(config)) > FEW_WAVES * tiles.slots:
        return config
    return stagger(spec, config)


@functools.lru_cache(maxsize=256)
def _with(config: Config, heads: int, shares: int = 1) -> Config:
    if (heads, shares) == (heads_per_tile(config), query_shares(config)):
        return config
    changes: dict[str, KnobValue] = {"heads_per_tile": heads, "query_shares": shares}
    if resources.converts(config):
        changes["dq_conversion"] = "kernel"
    if heads and is_split(config):  # a tile that leaves sums has heads in one part, and more of these gain more
        changes["split_d"] = False
    return config.replace(**changes)
