"""Configs of the portable decode family that serve where nothing was tuned: by what is compiled in, then by sizes.

The rule reads what a host knows of a batch: sequences, heads, and the lengths that there may be. Where the bits of a
sequence may not depend on its batch, it reads the query rows alone (`invariant`).
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import tile_side
from flashgen.codegen.portable_decode.resources import why_too_large
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

FAMILY_ID = "portable_decode"

BATCH_PADS = (16, 128, 1024)
FEWEST_ROWS = 8
"""Query rows of a tile of half a product: the other half of its rows is the first one again."""

BLOCK_MS = (16, 32, 64)
CHUNKS = (0, 1024, 2048, 4096, 8192, 16384)
ONLY_SHARES: dict[str, int] = {"slack": 0, "slack_percent": 0, "overhead": 0}
ONLY_GRID: dict[str, int] = {"chunk": CHUNKS[0]}
"""Knobs that one schedule reads, and what they are with the other one."""
MAX_TILE = 64 * 256
"""Numbers of a tile of queries and its outputs; larger ones spill registers."""


WIDE = {"block_n": 128, "num_warps": 8, "num_stages": 3, "per_sm": 1, "slack": 4}
USUAL = {"block_n": 64, "num_warps": 4, "num_stages": 3, "per_sm": 2, "slack": 4}
MANY = {**USUAL, "slack": 16}
SCATTERED_ONE = {"block_n": 32, "num_warps": 4, "num_stages": 4, "per_sm": 2, "slack": 4}
SCATTERED_FEW = {**SCATTERED_ONE, "per_sm": 3}
SCATTERED_MANY = {"block_n": 64, "num_warps": 8, "num_stages": 3, "per_sm": 2, "slack": 16}
BRIEF = {"block_n": 32, "num_warps": 2, "num_stages": 3, "per_sm": 4, "slack": 4}
NARROW_MANY = {**USUAL, "num_stages": 4, "slack": 16}
NARROW_PAGES = {**USUAL, "per_sm": 3, "slack": 16}
HIGH = {"block_n": 32, "num_warps": 4, "num_stages": 3, "per_sm": 2, "slack": 4}
HIGH_AND_WIDE = {"block_n": 32, "num_warps": 8, "num_stages": 3, "per_sm": 1, "slack": 4}
"""Tiles and programs by what won on an H200 at heads of 128: few pairs of sequence and key head over contiguous caches;
over pages that hold whole tiles; pages that do not; short sequences; heads of 64; 64 query rows of a key head; heads
of 256."""

TILES: tuple[dict[str, int], ...] = (
    *(WIDE, USUAL, MANY, SCATTERED_ONE, SCATTERED_FEW, SCATTERED_MANY),
    *(BRIEF, NARROW_MANY, NARROW_PAGES, HIGH, HIGH_AND_WIDE),
)

GRID: dict[str, int | str | bool] = {"schedule": "grid", **ONLY_SHARES, **ONLY_GRID}
OTHERS: tuple[dict[str, int | str | bool], ...] = (
    {**USUAL, **GRID},
    {**WIDE, **GRID},
    {**USUAL, "warp_keys": True},
    {**USUAL, **GRID, "warp_keys": True},
)
"""What a search tries early, too, and the rule never takes."""

SHORT = 256
"""Keys up to which a sequence is so short that small tiles waste least."""


def default_config(spec: Specialization, device: Device) -> Config:
    """A config that is valid wherever the family applies, for batches of any size and up to 16 query rows."""
    knobs: dict[str, int | str | bool] = {
        **(USUAL if _width(spec) <= 256 else HIGH),
        "schedule": "shares",
        "warp_keys": False,
        "block_m": BLOCK_MS[0],
        "min_tiles": 1,
        "batch_pad": BATCH_PADS[-1],
        "chunk": CHUNKS[0],
        "slack_percent": 0,
        "overhead": 4,
        "partials": default_partials(spec),
        "reduce_warps": 1,
        "page_ids": "asm" if device.is_nvidia else "load",
        "early": False,
        "pdl": device.has_dependent_launch,
        "maxnreg": 0,
    }
    return _fitting(spec, Config.of(FAMILY_ID, knobs), device)


def default_partials(spec: Specialization) -> int:
    """Partial results that the merge reads at once, as its registers allow."""
    return 32 if tile_side(spec.head_dim_v) <= 128 else 16


def usual(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """The default at the sizes of a call; without lengths (`sizes.seqlen_k` 0) no sum over keys depends on its batch.

    What is not chosen by the rule is that of `config`.
    """
    block_m = _block_m(spec, sizes)
    pairs = sizes.batch * sizes.nheads_k * -(-_rows(sizes) // block_m)
    tiles = _tiles(spec, block_m, pairs, sizes, device)
    return fitted(spec, config.replace(**tiles), sizes, device)


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config at the sizes of a call: they decide its query rows and how many lengths a program looks at.

    The merge is scheduled early wherever a device can do so.
    """
    # the lengths of few sequences lie in all threads, and then two programs of eight warps have too few registers
    pads = BATCH_PADS[1:] if config["num_warps"] == 8 and config["per_sm"] == 2 else BATCH_PADS
    batch_pad = next((size for size in pads if sizes.batch <= size), pads[-1])
    if config["schedule"] == "grid":
        batch_pad = BATCH_PADS[0]  # which it does not read
    block_m = _block_m(spec, sizes)
    if config["block_m"] == FEWEST_ROWS and _rows(sizes) <= FEWEST_ROWS:
        block_m = FEWEST_ROWS
    config = config.replace(block_m=block_m, batch_pad=batch_pad, pdl=device.has_dependent_launch)
    return _fitting(spec, config, device)


def poor_at_sizes(config: Config, sizes: Sizes) -> str | None:
    """The reason why a config that was measured for other query rows is far from the best for these, or None."""
    rows, block_m = _rows(sizes), config.integer("block_m")
    if rows > block_m or (block_m > BLOCK_MS[0] and rows <= block_m // 2):
        return f"its tiles have {block_m} query rows, and a key head has {rows}"
    return None


def seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    """Every tile of the rule, each of which won somewhere, and tiles of other kinds."""
    default = default_config(spec, device)
    every: tuple[Mapping[str, KnobValue], ...] = (*TILES, *OTHERS)
    return tuple(_fitting(spec, default.replace(**tiles), device) for tiles in every)


def _rows(sizes: Sizes) -> int:
    return sizes.seqlen_q * (sizes.nheads // sizes.nheads_k)


def _block_m(spec: Specialization, sizes: Sizes) -> int:
    block_ms = [size for size in BLOCK_MS if size * _width(spec) <= MAX_TILE]
    return next((size for size in block_ms if _rows(sizes) <= size), block_ms[-1])


def _tiles(spec: Specialization, block_m: int, pairs: int, sizes: Sizes, device: Device) -> dict[str, int]:
    """What of a config follows from the query rows, and the number and length of pairs of sequence and key head."""
    width, page = _width(spec), spec.page_size
    if width > 256:
        return HIGH if block_m == BLOCK_MS[0] else HIGH_AND_WIDE
    if block_m == BLOCK_MS[-1] and width > 128:
        return HIGH
    if block_m > BLOCK_MS[0]:
        return USUAL
    if not sizes.seqlen_k:
        return SCATTERED_MANY  # near the best with and without pages: which of them there are may change no bits
    is_many, is_scattered = pairs > device.num_sms, bool(page and page % USUAL["block_n"])
    if is_many and sizes.seqlen_k <= SHORT:
        return BRIEF
    if width <= 128:
        return USUAL if not is_many else NARROW_PAGES if page else NARROW_MANY
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
    for changes in smaller:
        if why_too_large(spec, config, device) is None:
            return config
        config = config.replace(**changes)
    return config
