"""Configs of the Hopper decode family that serve where nothing was tuned, by what is compiled in and by sizes."""

from __future__ import annotations

from flashgen.codegen.common_decode import (
    BATCH_PADS,
    ONLY_GRID,
    ONLY_SHARES,
    batch_pad,
    count_pairs,
    default_partials,
    first_that_fits,
    is_grid,
    query_rows,
)
from flashgen.codegen.common_wgmma import ROWS
from flashgen.codegen.family import Sizes
from flashgen.codegen.head_parts import tile_side
from flashgen.codegen.hopper_decode.resources import FEW_ROWS, why_too_large
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

FAMILY_ID = "hopper_decode"

SHARES: dict[str, KnobValue] = {"schedule": "shares", "slack": 4, "slack_percent": 0, "overhead": 4, **ONLY_GRID}
GRID: dict[str, KnobValue] = {"schedule": "grid", **ONLY_SHARES, **ONLY_GRID}

ONE: dict[str, KnobValue] = {"block_n": 64, "num_stages": 4, "per_sm": 1}
"""Within 1% of the best of its space at heads of 128 over contiguous caches and pages, with 1 to 16 queries."""

TWO: dict[str, KnobValue] = {"block_n": 64, "num_stages": 3, "per_sm": 2}
"""One program begins while the other one ends: for more programs than run at a time."""

WIDE: dict[str, KnobValue] = {"block_n": 128, "num_stages": 2, "per_sm": 1}
"""Fewer steps, for pairs with many of them."""

OTHERS: tuple[dict[str, KnobValue], ...] = (
    TWO,
    WIDE,
    {"block_n": 64, "num_stages": 6, "per_sm": 1},
    {"block_n": 32, "num_stages": 6, "per_sm": 2},
    GRID,
    {**GRID, **TWO},
    {**GRID, **TWO, "chunk": 2048},
    {**GRID, **WIDE},
    {**TWO, "slack": 16},
    *(
        {"block_m": FEW_ROWS[0], "overhead": 2, **schedule, **tiles}
        for schedule in ({}, GRID)
        for tiles in (ONE, TWO, WIDE)
    ),
)
"""What was ahead somewhere, or nearly; few rows are as many as a call has."""

MOST_COLUMNS = 16
"""Query rows of a key head up to which they are columns of the products."""

SHORT = 2048
"""Keys up to which programs for each sequence are faster than equal shares."""

MANY_PAIRS = 4
"""Pairs of sequence and key head for each SM from which on two programs have room there."""

MOST_MERGES = 48
"""Programs of the merge for each SM, of one query row each, up to which that is as fast as rows together."""

MERGED_NUMBERS = 1024
"""Numbers of the query rows that a program of the merge takes together: eight for each of its threads."""


def default_config(spec: Specialization, device: Device) -> Config:
    """A config that is valid wherever the family applies."""
    knobs: dict[str, KnobValue] = {
        **ONE,
        **SHARES,
        "block_m": ROWS,
        "min_tiles": 1,
        "batch_pad": BATCH_PADS[-1],
        **_single_rows(spec),
        "early": False,
        "pdl": True,
    }
    return _fitting(spec, Config.of(FAMILY_ID, knobs), device)


def seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    """What was ahead somewhere, as it fits."""
    default = default_config(spec, device)
    return tuple(_fitting(spec, default.replace(**tiles), device) for tiles in OTHERS)


def slower_at(spec: Specialization, sizes: Sizes, device: Device) -> str | None:
    """The reason why the portable family's default is faster at some sizes, or None."""
    if not sizes.seqlen_k and spec.head_dim > 128 and query_rows(sizes) > MOST_COLUMNS:
        return "splits of fixed size of heads of 256 are as fast there, and its programs are smaller"
    return None


def poor_at_sizes(config: Config, sizes: Sizes) -> str | None:
    """The reason why a config that was measured for other query rows is far from the best for these, or None."""
    rows = query_rows(sizes)
    if (config["block_m"] in FEW_ROWS) != (rows <= MOST_COLUMNS):
        return f"its tiles have {config['block_m']} query rows, and a key head has {rows}"
    return None


def usual(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """The default at the sizes of a call; without lengths (`sizes.seqlen_k` 0) by what is compiled in alone."""
    if query_rows(sizes) <= MOST_COLUMNS:
        tiles = {**_of_few_rows(spec, sizes, device), "block_m": FEW_ROWS[0]}
    else:
        tiles = _of_many_rows(spec, sizes, device)
    return fitted(spec, _fitting(spec, config.replace(**tiles), device), sizes, device)


def _of_few_rows(spec: Specialization, sizes: Sizes, device: Device) -> dict[str, KnobValue]:
    shares = {**SHARES, "overhead": 2}
    if spec.head_dim > 128:
        return {**SHARES, **ONE}
    if not sizes.seqlen_k:
        return {**shares, **TWO}
    if sizes.seqlen_k > SHORT and sizes.batch > 1:
        return {**shares, **WIDE}
    return {**GRID, **(TWO if count_pairs(sizes, ROWS) > MANY_PAIRS * device.num_sms else WIDE)}


def _of_many_rows(spec: Specialization, sizes: Sizes, device: Device) -> dict[str, KnobValue]:
    is_narrow, is_wide = spec.head_dim < 128, spec.head_dim > 128
    if not sizes.seqlen_k:
        return {**SHARES, **TWO}
    if sizes.seqlen_k > SHORT and sizes.batch > 1:
        return {**SHARES, **({**TWO, "slack": 16} if is_narrow else ONE)}
    room = device.num_sms * (1 if is_narrow else MANY_PAIRS)
    has_two = count_pairs(sizes, ROWS) > room or (is_narrow and query_rows(sizes) > ROWS)
    return {**GRID, **(ONE if is_wide else TWO if has_two else WIDE)}


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """A config at the sizes of a call: how many lengths a program looks at, and few rows are as many as there are."""
    rows = query_rows(sizes)
    config = config.replace(batch_pad=batch_pad(config, sizes.batch))
    if config["block_m"] in FEW_ROWS:
        enough = config.replace(block_m=next((few for few in FEW_ROWS if few >= rows), FEW_ROWS[-1]))
        config = config if why_too_large(spec, enough, device) else enough
    return config.replace(**_merge(spec, config, rows))


def _merge(spec: Specialization, config: Config, rows: int) -> dict[str, KnobValue]:
    """The programs of the merge, where a key head has so many query rows."""
    if is_grid(config) or min(rows, config.integer("block_m")) * config.integer("per_sm") <= MOST_MERGES:
        return _single_rows(spec)
    return {"merge_rows": MERGED_NUMBERS // tile_side(spec.head_dim_v), "reduce_warps": 4, "partials": 8}


def _single_rows(spec: Specialization) -> dict[str, KnobValue]:
    """A program of the merge for each query row."""
    return {"merge_rows": 1, "reduce_warps": 1, "partials": default_partials(spec)}


def _fitting(spec: Specialization, config: Config, device: Device) -> Config:
    """The config with as few stages and keys a step as the SM asks for."""
    is_few = config["block_m"] in FEW_ROWS
    smaller: tuple[dict[str, KnobValue], ...] = (
        {"num_stages": 3},
        {"num_stages": 2},
        {"block_n": 64, "num_stages": 3} if is_few else {"block_n": 32, "num_stages": 4},
        {"per_sm": 1},
    )
    return first_that_fits(config, smaller, lambda one: why_too_large(spec, one, device))
