"""Configs of the portable decode family that serve where nothing was tuned: by what is compiled in, then by sizes.

The rule reads what a host knows of a batch: sequences, heads, and the lengths that there may be. Where the bits of a
sequence may not depend on its batch, it reads the query rows alone (`invariant`).
"""

from __future__ import annotations

from flashgen.codegen.family import Sizes
from flashgen.codegen.portable_decode.resources import padded, why_too_large
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

FAMILY_ID = "portable_decode"

BATCH_PADS = (16, 128, 1024)
BLOCK_MS = (16, 32, 64)
MAX_TILE = 64 * 256
"""Numbers of a tile of queries and its outputs; larger ones spill registers."""

PDL_CAPABILITY = 90
"""From here on a kernel may be scheduled before the one in front of it has ended."""


def default_config(spec: Specialization, device: Device) -> Config:
    """A config that is valid wherever the family applies, for batches of any size and up to 16 query rows."""
    width = padded(spec.head_dim) + padded(spec.head_dim_v)
    knobs: dict[str, int | str | bool] = {
        "block_m": BLOCK_MS[0],
        "block_n": 64 if width <= 256 else 32,
        "num_warps": 4,
        "num_stages": 3 if device.is_nvidia else 2,
        "per_sm": 2,
        "min_tiles": 1,
        "slack": 4,
        "batch_pad": BATCH_PADS[-1],
        "overhead": 4,
        "partials": 32 if padded(spec.head_dim_v) <= 128 else 16,
        "reduce_warps": 1,
        "prefetch": False,
        "page_ids": "asm" if device.is_nvidia else "load",
        "pdl": device.capability >= PDL_CAPABILITY,
        "maxnreg": 0,
    }
    return _fitting(spec, Config.of(FAMILY_ID, knobs), device)


def fitted(spec: Specialization, config: Config, sizes: Sizes, device: Device) -> Config:
    """The same for the query rows and the batch of a call; neither changes the order of a sum over keys."""
    rows, width = sizes.seqlen_q * (sizes.nheads // sizes.nheads_k), padded(spec.head_dim) + padded(spec.head_dim_v)
    block_ms = [size for size in BLOCK_MS if size * width <= MAX_TILE]
    block_m = next((size for size in block_ms if rows <= size), block_ms[-1])
    batch_pad = next((size for size in BATCH_PADS if sizes.batch <= size), BATCH_PADS[-1])
    config = config.replace(block_m=block_m, batch_pad=batch_pad)
    if block_m > BLOCK_MS[0] and width > 128:
        config = config.replace(num_warps=8, per_sm=1)  # with four warps their registers spill
    return _fitting(spec, config, device)


def _fitting(spec: Specialization, config: Config, device: Device) -> Config:
    """The config with as few stages, programs and keys a step as the SM asks for."""
    smaller: tuple[dict[str, int | str | bool], ...] = (
        {"per_sm": 1},
        {"num_stages": 2},
        {"block_n": 32},
        {"block_n": 16},
    )
    for changes in smaller:
        if why_too_large(spec, config, device) is None:
            return config
        config = config.replace(**changes)
    return config
