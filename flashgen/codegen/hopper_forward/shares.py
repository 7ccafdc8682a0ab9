"""What serves sizes that nobody measured: a tile that fills the SMs, CTAs that share its keys, an order of tiles."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.codegen import head_packing
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_packing import SEQUENCE_HEADS
from flashgen.codegen.hopper_forward import defaults, resources, rules, short_queries, tile_choice, tile_order
from flashgen.codegen.key_splits import best_splits, split_keys, why_not_shared, with_shares
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def key_splits(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int:
    """The CTAs that share the keys of a tile in a launch."""
    return _best(spec, config, sizes, device) if split_keys(config) else 1


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config with as many heads in a tile as the sizes ask for, and with shared keys where these take less time."""
    return _shared(spec, defaults.fitted(spec, config, sizes, device), sizes, device)


def balanced(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config that was measured at other sizes, with the tile, its order and the shares that fill the SMs at these."""
    measured, heads = config, resources.packed_heads(config)
    if spec.varlen and sizes.sequences:
        heads = head_packing.packing_of_sequences(sizes) if rules.may_pack_sequences(spec) else 1
        config = defaults.with_heads(spec, config, 1, device)
    grouped = tile_choice.grouped(spec, config, sizes, device)
    if grouped is not None:
        heads = 1  # with which keys are shared
        config = defaults.with_heads(spec, config, heads, device)
    found = _filled(spec, tile_choice.balanced(spec, config, sizes, device, heads), sizes, device, heads)
    if split_keys(found):
        shared = _filled(spec, tile_choice.for_shares(spec, config, device), sizes, device, heads)
        return shared if split_keys(shared) else found
    if grouped is not None:
        tile, heads = grouped
        if tile is not None:
            config = tile_choice.with_tile(spec, config, tile, device)
        elif heads == resources.packed_heads(measured):
            config = measured  # with its groups of heads, of which fewer would be left by way of one head a tile
        found = with_shares(defaults.with_heads(spec, config, heads, device), False)
    return tile_order.ordered(spec, short_queries.narrowed(spec, found, sizes, device), sizes, device)


def beside(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """What `balanced` may serve in the place of a config at one size or another."""
    tiles = _with_any_heads(spec, config, device)
    found = [tile.replace(split_keys=shared) for tile in tiles for shared in _ways(spec)]
    alone = [tile.replace(split_keys=False) for tile in tiles]
    alone += [other for tile in alone for other in short_queries.others(spec, tile, device)]
    alone += _grouped(spec, alone, device)
    # where keys are shared there are too few tiles for an order
    found += [*alone, *(order for tile in alone for order in tile_order.orders(spec, tile))]
    return tuple(other for other in dict.fromkeys(found) if other != config)


def _filled(spec: Specialization, tile: Config, sizes: Sizes, device: Device, heads: int) -> Config:
    return _shared(spec, defaults.with_heads(spec, tile, heads, device), sizes, device)


def _with_any_heads(spec: Specialization, config: Config, device: Device) -> tuple[Config, ...]:
    """The tiles that may take the place of a config's; of packed sequences with each number of heads side by side."""
    if not (spec.varlen or tile_choice.is_grouped(spec, config)):
        return (config, *tile_choice.others(spec, config, device))
    alone = defaults.with_heads(spec, config, 1, device)
    tiles = (alone, *tile_choice.others(spec, alone, device))
    if not spec.varlen:
        return (config, *tiles)  # few queries have the heads that it was measured with
    heads = SEQUENCE_HEADS if rules.may_pack_sequences(spec) else (1,)
    return tuple(defaults.with_heads(spec, tile, number, device) for tile in tiles for number in heads)


def _grouped(spec: Specialization, tiles: Sequence[Config], device: Device) -> list[Config]:
    """Tiles of dense calls with several heads side by side, which share no keys."""
    several = [(tile, number) for tile in tiles if tile_choice.is_grouped(spec, tile) for number in SEQUENCE_HEADS[1:]]
    return [defaults.with_heads(spec, tile, number, device) for tile, number in several]


def _ways(spec: Specialization) -> tuple[bool, ...]:
    return (False, True) if why_not_shared(spec) is None else (False,)


def _shared(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    return with_shares(config, why_not_shared(spec) is None and _best(spec, config, sizes, device) > 1)


def _best(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> int:
    rows, block_n = resources.tile_rows(config), config.integer("block_n")
    # a wait, exponentials that other warpgroups hide, products: of 32 shapes on an H100 within 20%
    products = rows * block_n * (spec.head_dim + spec.head_dim_v) / (128 * 128 * 256)
    return best_splits(
        spec,
        sizes,
        device,
        rows=rows,
        block_n=block_n,
        block_us=0.3 + 0.3 * block_n / 128 + 0.55 * products,
        per_sm=config.integer("blocks_per_sm"),
        packed_heads=resources.packed_heads(config),
    )
