"""The configs of the portable forward family that serve without any record: valid, and almost without spills."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.common_portable import MIN_WARPGROUP_ROWS, has_only_dropout, is_heavy, table_block, table_kind
from flashgen.codegen.common_products import IEEE, PRODUCTS
from flashgen.codegen.common_scores import is_plain_forward
from flashgen.codegen.common_softcap import EXACT, TANH
from flashgen.codegen.key_splits import SPLIT_KEYS
from flashgen.codegen.portable_forward.pages import PAGE_IDS, default_page_ids, holds_tiles
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

FAMILY_ID = "portable_forward"

# (kind of device, larger block_d): block_m, block_n, num_warps, num_stages for 16-bit elements; under Triton 3.6 at
# most 8 bytes of a thread spill
_DEFAULTS: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (128, 128, 4, 3),
    ("wgmma", 128): (128, 128, 8, 3),
    ("wgmma", 256): (128, 64, 8, 2),
    ("wgmma", 512): (64, 32, 8, 2),
    ("tcgen05", 64): (128, 64, 4, 3),
    ("tcgen05", 128): (128, 128, 8, 3),
    ("tcgen05", 256): (128, 64, 8, 2),
    ("tcgen05", 512): (64, 32, 8, 2),
    ("large", 64): (128, 64, 4, 3),
    ("large", 128): (128, 64, 8, 3),
    ("large", 256): (64, 16, 4, 2),
    ("large", 512): (32, 32, 8, 2),
    ("small", 64): (128, 64, 4, 3),
    ("small", 128): (128, 32, 8, 3),
    ("small", 256): (64, 16, 4, 2),
    ("small", 512): (32, 32, 8, 2),
    ("small_tma", 64): (128, 64, 8, 3),
    ("small_tma", 128): (128, 32, 8, 3),
    ("small_tma", 256): (64, 16, 4, 2),
    ("small_tma", 512): (32, 32, 8, 2),
    ("mfma", 64): (128, 64, 4, 1),
    ("mfma", 128): (128, 32, 4, 1),
    ("mfma", 256): (128, 32, 4, 1),
    ("mfma", 512): (64, 16, 4, 1),
    ("wmma", 64): (128, 32, 4, 1),
    ("wmma", 128): (128, 32, 8, 1),
    ("wmma", 256): (64, 16, 8, 1),
    ("wmma", 512): (16, 16, 8, 1),
}
# of tensors that are not aligned to 16 bytes, whose loads go number by number through registers
_DEFAULTS_UNALIGNED: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (128, 64, 8, 3),
    ("wgmma", 128): (128, 64, 8, 3),
    ("wgmma", 256): (64, 32, 8, 2),
}
# the same with a window, ALiBi, a bias or a mask: positions, tiles of the bias and a second pass take registers too
_DEFAULTS_HEAVY: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (128, 64, 8, 3),
    ("wgmma", 128): (128, 64, 8, 3),
    ("wgmma", 256): (128, 32, 8, 2),
    ("wgmma", 512): (32, 32, 8, 2),
    ("tcgen05", 64): (64, 64, 4, 3),
    ("tcgen05", 128): (128, 64, 8, 3),
    ("tcgen05", 256): (128, 32, 8, 2),
    ("tcgen05", 512): (32, 16, 8, 2),
    ("nvidia", 64): (128, 64, 8, 2),
    ("nvidia", 128): (64, 32, 4, 2),
    ("nvidia", 256): (64, 16, 8, 2),
    ("nvidia", 512): (32, 16, 8, 2),
    ("mfma", 64): (128, 32, 4, 1),
    ("mfma", 128): (128, 32, 4, 1),
    ("mfma", 256): (64, 16, 4, 1),
    ("mfma", 512): (32, 16, 4, 1),
    ("wmma", 64): (128, 32, 8, 1),
    ("wmma", 128): (64, 32, 8, 1),
    ("wmma", 256): (32, 16, 8, 1),
    ("wmma", 512): (16, 16, 8, 1),
}
# dropout and nothing else of that: several small programs on an SM hide the time of its bits
_DEFAULTS_DROPOUT: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (64, 64, 4, 3),
    ("wgmma", 128): (64, 64, 4, 3),
}
# a mask of keys and nothing else of that: most blocks run without it, as large as others
_DEFAULTS_PADDED: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (128, 64, 4, 3),
    ("wgmma", 128): (128, 128, 8, 3),
}
# packed sequences: what finds one takes registers of a causal loop
_DEFAULTS_PACKED: dict[tuple[str, int], tuple[int, int, int, int]] = {("wgmma", 64): (128, 128, 8, 3)}
# twice the bytes of 16-bit elements, with and without features
_DEFAULTS_TF32: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (128, 64, 8, 2),
    ("wgmma", 128): (128, 32, 8, 2),
    ("wgmma", 256): (64, 16, 8, 2),
    ("wgmma", 512): (32, 16, 8, 2),
    ("tcgen05", 64): (128, 64, 8, 2),
    ("tcgen05", 128): (128, 32, 8, 2),
    ("tcgen05", 256): (64, 16, 8, 2),
    ("tcgen05", 512): (32, 16, 8, 2),
    ("nvidia", 64): (128, 32, 8, 2),
    ("nvidia", 128): (64, 16, 4, 2),
    ("nvidia", 256): (32, 16, 4, 2),
    ("nvidia", 512): (16, 16, 8, 1),
    ("mfma", 64): (128, 32, 8, 1),
    ("mfma", 128): (64, 16, 8, 1),
    ("mfma", 256): (32, 16, 8, 1),
    ("mfma", 512): (16, 16, 8, 1),
}
# IEEE products come from the ordinary units: a thread holds whole rows of q and of k for its scores. On RDNA, with one
# score a thread, that fits 256 registers up to 128 columns (from Triton 3.7 on all but five of them); wider heads spill
# with any tile.
_DEFAULTS_FP32: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("nvidia", 64): (64, 32, 8, 2),
    ("nvidia", 128): (32, 16, 8, 2),
    ("nvidia", 256): (32, 16, 8, 2),
    ("nvidia", 512): (16, 16, 8, 1),
    ("small", 64): (64, 32, 8, 2),
    ("small", 128): (16, 16, 4, 2),
    ("small", 256): (32, 16, 8, 2),
    ("mfma", 64): (64, 32, 8, 1),
    ("mfma", 128): (64, 32, 8, 1),
    ("mfma", 256): (32, 16, 8, 1),
    ("mfma", 512): (16, 16, 8, 1),
    ("wmma", 64): (16, 16, 8, 1),
    ("wmma", 128): (16, 16, 8, 1),
    ("wmma", 256): (16, 16, 8, 1),
    ("wmma", 512): (16, 16, 8, 1),
}
# products of six bf16 parts, where tensor cores multiply these faster than the ordinary units multiply fp32: plain
# shapes of up to 128 columns on the cards of data centres. Parts and a step's sum take registers.
_DEFAULTS_PARTS: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (128, 32, 8, 3),
    ("wgmma", 128): (128, 16, 8, 3),
    ("large", 64): (64, 16, 4, 3),
    ("large", 128): (32, 16, 4, 2),
}
# aligned tensors and no feature but a causal mask: in seven searches on an H200 these, which spill up to 120 bytes with
# one Triton or another, took 0.68 to 0.81 of the time of tiles that spill nothing
_DEFAULTS_PLAIN_WGMMA: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("fp32", 64): (128, 64, 8, 3),
    ("fp32", 128): (128, 32, 8, 3),
    ("tf32", 64): (128, 64, 4, 2),
    ("tf32", 128): (128, 128, 8, 1),
}
_SEED_TILES_PARTS: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 32, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3), (128, 32, 8, 2), (64, 16, 4, 3), (32, 32, 4, 3)),
    128: ((128, 32, 8, 3), (64, 16, 4, 3), (128, 16, 8, 3), (128, 16, 8, 2), (32, 32, 4, 3), (32, 32, 4, 2)),
}
"""By larger block_d: tiles that spill little under either Triton; tensor cores work for four warps from 64 rows on."""

PAGED_STEP = 64
"""Keys of a step over pages that do not hold those of the default: then TMA loads them."""

BLOCK_KNOBS = ("block_m", "block_n", "num_warps", "num_stages")


def default_config(spec: Specialization, device: Device) -> Config:
    """The default config of `spec` on `device`, in constant time."""
    tile, products = _tile(spec, device), IEEE
    if (parts := _tile_of_parts(spec, device)) is not None:
        tile, products = parts, "bf16x6"
    if table_kind(device) == "wgmma" and spec.aligned16 and is_plain_forward(spec) and not spec.varlen:
        tile = _DEFAULTS_PLAIN_WGMMA.get((spec.dtype, table_block(spec)), tile)
    return Config.of(
        FAMILY_ID,
        {
            **dict(zip(BLOCK_KNOBS, tile, strict=True)),
            "loads": "descriptor" if _prefers_descriptors(spec, device, tile) else "pointer",
            "maxnreg": 0,
            "heads_per_group": 8 if spec.causal else 1,
            "heavy_first": spec.causal,
            "split_d": False,
            PRODUCTS.name: products,
            TANH.name: EXACT,
            PAGE_IDS.name: default_page_ids(spec, device),
            SPLIT_KEYS.name: False,
        },
    )


def seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    """Configs for a search to begin with, beside the default; some may be invalid."""
    if spec.dtype != "fp32" or not device.is_nvidia:
        return ()
    default = default_config(spec, device)
    tiles = _SEED_TILES_PARTS.get(table_block(spec), ())
    found = (default.replace(**dict(zip(BLOCK_KNOBS, tile, strict=True))) for tile in tiles)
    return tuple(config.replace(products=products) for config in found for products in ("bf16x6", "tf32x3"))


def _tile_of_parts(spec: Specialization, device: Device) -> tuple[int, int, int, int] | None:
    """The default tile of products in parts, or None where IEEE products serve."""
    if spec.dtype != "fp32" or is_heavy(spec):
        return None
    return _DEFAULTS_PARTS.get((table_kind(device), table_block(spec)))


def _tile(spec: Specialization, device: Device) -> tuple[int, int, int, int]:
    block, kind = table_block(spec), table_kind(device)
    table = {"fp32": _DEFAULTS_FP32, "tf32": _DEFAULTS_TF32}.get(spec.dtype)
    if table is None:
        table = _DEFAULTS_HEAVY if is_heavy(spec) else _DEFAULTS
        if spec.aligned16 and spec.mask == "keys" and not is_heavy(replace(spec, mask="")):
            table = {**table, **_DEFAULTS_PADDED}
        if has_only_dropout(spec):
            table = {**table, **_DEFAULTS_DROPOUT}
        if spec.varlen and not is_heavy(spec):
            table = {**table, **_DEFAULTS_PACKED}
        if not spec.aligned16:
            table = {**table, **_DEFAULTS_UNALIGNED}
    tile = table[(kind, block) if (kind, block) in table else ("nvidia", block)]
    block_m, block_n, num_warps, num_stages = tile
    if holds_tiles(spec, PAGED_STEP) and not holds_tiles(spec, block_n) and device.has_tma:
        return block_m, PAGED_STEP, num_warps, num_stages
    return tile


def _prefers_descriptors(spec: Specialization, device: Device, tile: tuple[int, int, int, int]) -> bool:
    """Where the tensor cores read shared memory; Triton pipelines only pointer loads for mma.sync."""
    block_m, block_n, _, _ = tile
    if spec.page_size and not holds_tiles(spec, block_n):
        return False
    warpgroups = device.has_warpgroup_mma and block_m >= MIN_WARPGROUP_ROWS
    return warpgroups and spec.aligned16 and spec.dtype != "fp32"
