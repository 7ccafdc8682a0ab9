"""Configs of the portable decode family that serve where nothing was tuned: by what is compiled in, then by sizes.

The rule reads what a host knows of a batch: sequences, heads, and the lengths that there may be. Where the bits of a
sequence may not depend on its batch, it reads the query rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.common_decode import (
    BATCH_PADS,
    CHUNKS,
    ONLY_GRID,
    ONLY_SHARES,
    batch_pad,
    count_pairs,
    default_partials,
    first_that_fits,
    query_rows,
)
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import tile_side
from flashgen.codegen.portable_decode.resources import why_too_large
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

FAMILY_ID = "portable_decode"

FEWEST_ROWS = 8
"""Query rows of a tile of half a product: the other half of its rows is the first one again."""

BLOCK_MS = (16, 32, 64)

FEWEST_PARTIALS = 8
"""Partial results of a step of the merge where rows are many or sequences alike: its programs are small, and more of
them have room beside the first kernel. A long sequence among short ones is merged faster with more."""

MAX_TILE = 64 * 256
"""Numbers of a tile of queries and its outputs; larger ones spill registers."""


WIDE = {"block_n": 128, "num_warps": 8, "num_stages": 3, "per_sm": 1, "slack": 4}
USUAL = {"block_n": 64, "num_warps": 4, "num_stages": 3, "per_sm": 2, "slack": 4}
MANY = {**USUAL, "slack": 16}
SCATTERED_ONE = {"block_n": 32, "num_warps": 4, "num_stages": 4, "per_sm": 2, "slack": 4}
SCATTERED_FEW = {**SCATTERED_ONE, "per_sm": 3}
BRIEF = {"block_n": 32, "num_warps": 2, "num_stages": 3, "per_sm": 4, "slack": 4}
SCATTERED_MANY = BRIEF
TWO_WARPS = {"block_n": 64, "num_warps": 2, "num_stages": 2, "per_sm": 4, "slack": 4}
NARROW_MANY = {**USUAL, "num_stages": 4, "slack": 16}
NARROW_PAGES = {**USUAL, "per_sm": 3, "slack": 16}
HIGH = {"block_n": 32, "num_warps": 4, "num_stages": 3, "per_sm": 2, "slack": 4}
HIGH_AND_WIDE = {"block_n": 32, "num_warps": 8, "num_stages": 3, "per_sm": 1, "slack": 4}
"""Tiles and programs by what won on an H200 at heads of 128: few pairs of sequence and key head over contiguous caches;
over pages that hold whole tiles; pages that do not; short sequences; heads of 64; 64 query rows of a key head; heads
of 256."""

APART: dict[str, KnobValue] = {"warp_keys": True, "late_sums": True}
"""Each warp has a softmax of its own: it waits for the others at the end of a sequence alone."""

GRID: dict[str, KnobValue] = {"schedule": "grid", **ONLY_SHARES, **ONLY_GRID}

HALF: dict[str, KnobValue] = {"block_m": FEWEST_ROWS}
"""Where a key head has so few query rows."""

PADDED: dict[str, KnobValue] = {"padded_rows": True, "block_m": BLOCK_MS[-1]}
"""Warpgroups read keys from shared memory where warps move them to registers first: it pays where most of what they
multiply is padding, too."""

FEW_PARTIALS: dict[str, KnobValue] = {"partials": FEWEST_PARTIALS}

FIXED: dict[str, KnobValue] = {"block_n": 64, "num_warps": 4, "num_stages": 4, "per_sm": 2, **APART, **GRID, **HALF}
"""Near the best with and without pages, for few and many sequences: where the bits of a sequence follow from itself
alone, there is one order of sums for all of these."""

ONE_WARP = {"block_n": 16, "num_warps": 1, "num_stages": 3, "per_sm": 2}
ONE: dict[str, KnobValue] = {**WIDE, **GRID, "late_sums": True, **HALF}
ONE_SCATTERED: dict[str, KnobValue] = {**WIDE, **GRID, "ids_per": "page"}
ONE_IN_PAGES: dict[str, KnobValue] = {**USUAL, **GRID}
"""Of one sequence nothing is uneven: over a contiguous cache, pages that steps are cut from, and all others."""

PARTED_MANY: dict[str, KnobValue] = {**TWO_WARPS, "ids_per": "page", "ids_ahead": True, "late_sums": True}
"""Many sequences over small pages, of which a step has several."""

BRIEF_AND_NARROW: dict[str, KnobValue] = {**ONE_WARP, **GRID, **HALF}
"""Windows of 128 keys over heads of 64: nothing is split, and nothing is merged."""

TILES: tuple[dict[str, int], ...] = (
    *(WIDE, USUAL, MANY, SCATTERED_ONE, SCATTERED_FEW),
    *(BRIEF, NARROW_MANY, NARROW_PAGES, HIGH, HIGH_AND_WIDE),
)

OTHERS: tuple[dict[str, KnobValue], ...] = (
    ONE,
    {**TWO_WARPS, **HALF, **FEW_PARTIALS},
    {**USUAL, "late_sums": True, **FEW_PARTIALS},
    {**USUAL, "block_n": 32, "num_warps": 2, "per_sm": 3, **HALF},
    {**ONE_IN_PAGES, **HALF},
    {**ONE, "early": True},
    {**TWO_WARPS, **HALF},
    {**USUAL, "late_sums": True},
    FIXED,
    {**USUAL, **APART, "per_sm": 3, "slack_percent": 8, **HALF},
    {**USUAL, **GRID, "num_stages": 5, "per_sm": 1, "late_sums": True, **HALF},
    {**WIDE, "late_sums": True, "slack_percent": 8, **HALF},
    {**USUAL, **GRID, "num_stages": 4, "per_sm": 1, "late_sums": True},
    {**FIXED, "num_stages": 3, "per_sm": 3},
    {**WIDE, "num_stages": 2, "per_sm": 2, "late_sums": True, **HALF},
)
"""What won on an H200, or nearly, where no rule takes it."""

OTHERS_PADDED: tuple[dict[str, KnobValue], ...] = (
    {**USUAL, **GRID, **PADDED, **FEW_PARTIALS},
    {**USUAL, **PADDED, **FEW_PARTIALS},
)
"""The same, with rows padded for warpgroups."""

SHORT = 256
"""Keys up to which a sequence is so short that small tiles waste least."""


def default_config(spec: Specialization, device: Device) -> Config:
    """A config that is valid wherever the family applies, for batches of any size and up to 16 query rows."""
    knobs: dict[str, int | str | bool] = {
        **(USUAL if _width(spec) <= 256 else HIGH),
        "schedule": "shares",
        "warp_keys": False,
        "late_sums": False,
        "block_m": BLOCK_MS[0],
        "padded_rows": False,
        "min_tiles": 1,
        "batch_pad": BATCH_PADS[-1],
        "chunk": CHUNKS[0],
        "slack_percent": 0,
        "overhead": 4,
        "partials": default_partials(spec),
        "reduce_warps": 1,
        "merge_rows": 1,
        "page_ids": "asm" if device.is_nvidia else "load",
        "ids_per": "row",
        "ids_ahead": False,
        "aligned_steps": False,
        "early": False,
        "pdl": device.has_dependent_launch,
        "maxnreg": 0,
    }
    return _fitting(spec, Config.of(FAMILY_ID, knobs), device)


def usual(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """The default at the sizes of a call; without lengths (`sizes.seqlen_k` 0) no sum over keys depends on its batch.

    What is not chosen by the rule is that of `config`.
    """
    block_m = _block_m(spec, sizes)
    pairs = count_pairs(sizes, block_m)
    tiles: Mapping[str, KnobValue] = _tiles(spec, block_m, pairs, sizes, device)
    config = config.replace(**tiles, aligned_steps=not sizes.seqlen_k)
    return fitted(spec, config, sizes, device)


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config at the sizes of a call: they decide its query rows and how many lengths a program looks at.

    The merge is scheduled early wherever a device can do so.
    """
    # the lengths of few sequences lie in all threads, and then two programs of eight warps have too few registers
    pads = BATCH_PADS[1:] if config["num_warps"] == 8 and config["per_sm"] == 2 else BATCH_PADS
    block_m = _block_m(spec, sizes)
    if config["block_m"] == FEWEST_ROWS and query_rows(sizes) <= FEWEST_ROWS:
        block_m = FEWEST_ROWS
    if config["padded_rows"]:
        block_m = BLOCK_MS[-1]
    config = config.replace(
        block_m=block_m, batch_pad=batch_pad(config, sizes.batch, pads), pdl=device.has_dependent_launch
    )
    return _fitting(spec, config, device)


def poor_at_sizes(config: Config, sizes: Sizes) -> str | None:
    """The reason why a config that was measured for other query rows is far from the best for these, or None."""
    rows, block_m = query_rows(sizes), config.integer("block_m")
    is_wide = block_m > BLOCK_MS[0] and rows <= block_m // 2
    if rows > block_m or (is_wide and not config["padded_rows"]):
        return f"its tiles have {block_m} query rows, and a key head has {rows}"
    return None


def seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    """What won among many configs, over pages with and without their ids read ahead, and every tile of the rule."""
    default = default_config(spec, device)
    every: list[Mapping[str, KnobValue]] = []
    if device.has_wgmma and BLOCK_MS[-1] * _width(spec) <= MAX_TILE:
        every += OTHERS_PADDED
    if device.is_nvidia:
        ids = [_page_ids(spec, tiles) for tiles in OTHERS]
        every += [tiles | one for tiles, one in zip(OTHERS, ids, strict=True)]
        every += OTHERS[: 2 if spec.page_size else 0]
    return tuple(_fitting(spec, default.replace(**tiles), device) for tiles in (*every, *TILES))


def has_parted_tiles(spec: Specialization, block_n: KnobValue) -> bool:
    """Whether steps of so many keys can have several whole pages."""
    page = spec.page_size or 1
    return isinstance(block_n, int) and 1 < page < block_n and block_n % page == 0


def _page_ids(spec: Specialization, tiles: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    per = "page" if has_parted_tiles(spec, tiles["block_n"]) else "row"
    return {"ids_per": per, "ids_ahead": bool(spec.page_size)}


def _block_m(spec: Specialization, sizes: Sizes) -> int:
    block_ms = [size for size in BLOCK_MS if size * _width(spec) <= MAX_TILE]
    return next((size for size in block_ms if query_rows(sizes) <= size), block_ms[-1])


def _tiles(spec: Specialization, block_m: int, pairs: int, sizes: Sizes, device: Device) -> Mapping[str, KnobValue]:
    """What of a config follows from the query rows, and the number and length of pairs of sequence and key head."""
    width, page = _width(spec), spec.page_size
    if width > 256:
        return HIGH if block_m == BLOCK_MS[0] else HIGH_AND_WIDE
    if block_m == BLOCK_MS[-1] and width > 128:
        return HIGH
    if block_m > BLOCK_MS[0]:
        return {**USUAL, **FEW_PARTIALS}
    if not sizes.seqlen_k:
        return FIXED if device.is_nvidia else SCATTERED_MANY
    is_many, is_scattered = pairs > device.num_sms, bool(page and page % USUAL["block_n"])
    if is_many and sizes.seqlen_k <= SHORT:
        return BRIEF_AND_NARROW if width <= 128 and device.is_nvidia else BRIEF
    if sizes.batch == 1 and width > 128 and not is_many and device.is_nvidia:
        parted = has_parted_tiles(spec, ONE_SCATTERED["block_n"]) and is_scattered
        return ONE_SCATTERED if parted else ONE_IN_PAGES if page else ONE
    if width <= 128:
        return USUAL if not is_many else NARROW_PAGES if page else NARROW_MANY
    if is_scattered and is_many and has_parted_tiles(spec, PARTED_MANY["block_n"]) and device.is_nvidia:
        return PARTED_MANY
    if is_scattered:
        return SCATTERED_MANY if is_many else SCATTERED_FEW if 4 * pairs > device.num_sms else SCATTERED_ONE
    if page:
        return MANY if is_many else USUAL
    return MANY if is_many else WIDE


def _width(spec: Specialization) -> int:
    return tile_side(spec.head_dim) + tile_side(spec.head_dim_v)


def _fitting(spec: Specialization, config: Config, device: Device) -> Config:
    """The config with as few stages, programs and keys a step as the SM asks for."""
    smaller: tuple[dict[str, int | str | bool], ...] = (
        {"per_sm": 1},
        {"num_stages": 2},
        {"block_n": 32},
        {"block_n": 16},
    )
    if not device.is_nvidia:
        config = config.replace(num_stages=min(config.integer("num_stages"), 2))
    return first_that_fits(config, smaller, lambda one: why_too_large(spec, one, device))
