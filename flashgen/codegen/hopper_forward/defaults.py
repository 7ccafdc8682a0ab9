"""Configs of the Hopper forward family to begin with: defaults, seed_configs, and either fitted to short queries."""

from __future__ import annotations

import functools

from flashgen.codegen import head_packing
from flashgen.codegen.common_mods import has_blocks
from flashgen.codegen.common_order import ALL_HEADS
from flashgen.codegen.common_softcap import EXACT, HARDWARE, TANH, tanh_values
from flashgen.codegen.common_wgmma import LEAST_COLUMNS, widest_block
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import why_not_split
from flashgen.codegen.hopper_forward import resources, rules, tile_choice
from flashgen.codegen.hopper_forward import template_context as text
from flashgen.codegen.hopper_forward.seed_configs import (
    FIRST_MAXIMUM,
    MBARRIERS,
    NAMED_BARRIERS,
    ROW_SUMS,
    SEED_CONFIGS,
    SHORT_STEPS,
    SHORT_WINDOWS,
    SPLIT_HEADS,
    Changes,
)
from flashgen.codegen.hopper_forward.tile_order import LARGE_GROUP
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

# by (larger padded head_dim, causal): the winner of long sequences on an H200
_DEFAULTS: dict[tuple[int, bool], Changes] = {
    (64, False): {"warpgroups": 3, "v_stages": 3, "ping_pong": True},
    (64, True): {
        "warpgroups": 3,
        "v_stages": 3,
        "heads_per_group": 8,
        "ping_pong": True,
        "conditional_rescale": True,
        "q_stages": 2,
        "hidden_blocks": "skipped",
        **MBARRIERS,
    },
    (128, False): NAMED_BARRIERS,
    (128, True): {"heads_per_group": 4, **NAMED_BARRIERS},
    (256, False): {"block_n": 64, **NAMED_BARRIERS},
    (256, True): {"block_n": 64, "heads_per_group": 8, **NAMED_BARRIERS},
}


# of calls with functions of the caller, likewise: the best of 35 on an H100, over documents and prefixes with block
# masks, and at 64 columns over functions of scores, too
_FOR_FUNCTIONS: dict[int, Changes] = {
    64: {"warpgroups": 1, "blocks_per_sm": 2, "ping_pong": False, "q_stages": 1, "v_stages": 2, "exp_order": "free"},
    128: {"warpgroups": 2, "ping_pong": True, "q_stages": 2, "v_stages": 2, "exp_order": "data"},
}


USUAL: Changes = {
    "warpgroups": 2,
    "blocks_per_sm": 1,
    "block_n": 128,
    "v_stages": 2,
    "k_release": "own",
    "barriers": "mbarrier",
    "ping_pong": False,
    "conditional_rescale": False,
    "exp_order": "free",
    "max_chains": 1,
    "heads_per_group": 1,
    "masked_blocks": "one",
    "split_d": False,
    "q_stages": 1,
    "hidden_blocks": "computed",
    "packed_heads": 1,
    "qk_prefetch": "block",
    "softmax_reference": "running",
    "early_settle": False,
    "split_keys": False,
    TANH.name: EXACT,
}


PROMPT_HEADS = 4
"""That a search of packed sequences meets first: those of Llama-3 that share keys, and half of many other groups."""


def default(spec: Specialization, device: Device) -> Config:
    """What won for long sequences on an H200, made smaller where features take room."""
    width = widest_block(spec)
    config = Config.of(text.FAMILY_ID, {**USUAL, **_DEFAULTS[width, spec.causal]})
    if width == 64 and spec.window:
        # the windows of such models are as short as a block
        config = config.replace(warpgroups=2, block_n=64, **NAMED_BARRIERS)
    config = _over_pages(spec, config)
    if spec.softcap:
        # three times as many exponentials must not wait for the product
        config = config.replace(**NAMED_BARRIERS)
    if resources.live_registers(spec, config) > resources.consumer_registers(config, device):
        config = config.replace(warpgroups=2, **NAMED_BARRIERS)
    if spec.mods is not None:
        config = _over_pages(spec, _with_functions(spec, config))
    config = _in_parts(spec, config, device)
    if rules.why_not_first_block(spec) is None:
        config = config.replace(**FIRST_MAXIMUM)
    elif rules.why_not_row_sums(spec) is None:
        config = config.replace(**ROW_SUMS)
    changes: tuple[Changes, ...] = ({}, {"v_stages": 2}, {"warpgroups": 2, "v_stages": 2, **NAMED_BARRIERS})
    smaller = (_tidy(spec, config.replace(**change), device) for change in changes)
    return next((each for each in smaller if rules.why_too_large(spec, each, device) is None), smallest(spec, device))


def _with_functions(spec: Specialization, config: Config) -> Config:
    """`config` with tiles whose accumulators are seldom scaled, those with the most keys first where they differ."""
    group = 8 if spec.causal or has_blocks(spec) else 1
    changes = {**NAMED_BARRIERS, "conditional_rescale": True, "heads_per_group": group}
    return config.replace(**{**changes, **_FOR_FUNCTIONS.get(widest_block(spec), {})})


def _in_parts(spec: Specialization, config: Config, device: Device) -> Config:
    """`config` with heads in two parts where that is less, and steps of 128 keys where there is room then."""
    if widest_block(spec) == LEAST_COLUMNS or why_not_split(spec):
        return config
    parts = config.replace(split_d=True)
    if spec.causal and spec.head_dim == spec.head_dim_v > 2 * LEAST_COLUMNS:
        # 2 x 10 heads of 8192 tokens take 0.74 ms on an H100, and 0.78 in groups of 8; of 4096 tokens either is equal
        parts = parts.replace(heads_per_group=4)
    wide = _over_pages(spec, parts.replace(block_n=128, v_stages=2))
    return wide if rules.why_too_large(spec, wide, device) is None else parts


def _over_pages(spec: Specialization, config: Config) -> Config:
    """`config` with steps of as many keys as TMA can fill from the pages."""
    if resources.why_not_pages(spec.page_size, config.integer("block_n")) is None:
        return config
    return config.replace(block_n=min(resources.BLOCK_NS))


def over_pages(spec: Specialization, config: Config, device: Device) -> Config:
    """A config that knows of no pages, with steps that pages can fill, and tidy."""
    return _tidy(spec, _over_pages(spec, config), device)


def smallest(spec: Specialization, device: Device) -> Config:
    """What takes the least registers and shared memory for a warpgroup's rows, of what is not pointless."""
    changes: Changes = {"block_n": 64, "heads_per_group": 8 if spec.causal else 1, **NAMED_BARRIERS}
    config = Config.of(text.FAMILY_ID, {**USUAL, **changes})
    config = config.replace(split_d=why_not_split(spec) is None)
    return _tidy(spec, config, device)


def seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    """Configs that won at other lengths, for a search to begin with."""
    served = usual = default(spec, device)
    found = [usual.replace(**changes) for changes in ({}, *SEED_CONFIGS[widest_block(spec), spec.causal])]
    best = found[1]
    if resources.softmax_reference(served) != "running":
        found.append(usual.replace(softmax_reference="running"))
    if resources.softmax_reference(served) == "row_sums":
        found.append(usual.replace(early_settle=True))
    if spec.window:
        # a tile of a few steps waits for its Q longest
        found += [
            config.replace(q_stages=2)
            for config in (best, best.replace(**{**NAMED_BARRIERS, "ping_pong": best["ping_pong"]}))
        ]
        # what wins for short windows is furthest from the default: it must not come last where there is time for little
        found = [*(usual.replace(**change) for change in SHORT_WINDOWS), *found]
    if resources.score_tiles(spec):
        found += [config.replace(**change) for config in (usual, best) for change in SHORT_STEPS]
    if why_not_split(spec) is None:
        found += [config.replace(**change) for config in (usual, best) for change in SPLIT_HEADS]
    if rules.may_pack_sequences(spec):
        found += [with_heads(spec, config, PROMPT_HEADS, device) for config in (usual, best)]
    if HARDWARE in tanh_values(spec):
        found = [each for config in (served, *found) for each in (config.replace(tanh=HARDWARE), config)]
    others = (config for config in dict.fromkeys(over_pages(spec, each, device) for each in found) if config != served)
    return tuple(config for config in others if rules.invalid(spec, config, device) is None)


def _tidy(spec: Specialization, config: Config, device: Device) -> Config:
    """`config` without what its tiles leave no sense or no room for: a kind of masked blocks, a second place for Q."""
    if rules.why_impossible_mask(spec, config) is not None:
        config = config.replace(masked_blocks="branch")
    if not rules.hides_whole_blocks(spec, config):
        config = config.replace(hidden_blocks="computed")
    if resources.q_stages(config) > 1 and rules.why_too_large(spec, config, device) is not None:
        config = config.replace(q_stages=1)
    return config


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """`config` with so many heads in a tile as the query length and the group ask for.

    Of packed sequences with no more than the group has, and otherwise as it is.
    """
    if spec.varlen:
        return with_heads(spec, config, head_packing.as_group_allows(sizes, resources.packed_heads(config)), device)
    heads = tile_choice.grouped_heads(spec, config, sizes, device)
    if heads is not None:
        return with_heads(spec, config, heads, device)
    heads = head_packing.packing(sizes, resources.tile_rows(config))
    if heads == resources.packed_heads(config):
        return config
    return _changed(spec, config, device, packed_heads=heads)


def with_heads(spec: Specialization, config: Config, heads: int, device: Device) -> Config:
    """`config` with so many heads in a tile, and about as many of all in a group.

    As it is where that is not valid.
    """
    # a new length asks for the number that there is
    return config if heads == resources.packed_heads(config) else _with_other_heads(spec, config, heads, device)


@functools.lru_cache(maxsize=256)
def _with_other_heads(spec: Specialization, config: Config, heads: int, device: Device) -> Config:
    group = config.integer("heads_per_group")
    if group not in (1, ALL_HEADS):
        group = min(max(2, group * resources.packed_heads(config) // heads), LARGE_GROUP)
    return _changed(spec, config, device, packed_heads=heads, heads_per_group=group)


def _changed(spec: Specialization, config: Config, device: Device, **changes: int) -> Config:
    """`config` with other values, and tidy; as it is where that is not valid."""
    found = _tidy(spec, config.replace(**changes), device)
    return found if rules.invalid(spec, found, device) is None else config


def poor_at_sizes(config: Config, sizes: Sizes) -> str | None:
    """Why a nearby record's config is not worth serving at these sizes, or None."""
    return head_packing.poor_at_sizes(sizes, resources.tile_rows(config), resources.packed_heads(config))
