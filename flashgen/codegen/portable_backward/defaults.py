"""The configs of the portable backward families that serve without any record: valid, and almost without spills."""

from __future__ import annotations

from flashgen.codegen.common_groups import HEADS_PER_TILE
from flashgen.codegen.common_portable import MIN_WARPGROUP_ROWS, has_only_dropout, is_heavy, table_block, table_kind
from flashgen.codegen.common_products import IEEE, PRODUCTS
from flashgen.codegen.portable_backward.resources import FUSED_ID, SPLIT_ID
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

Tile = tuple[int, int, int, int]
"""Rows that a program owns, rows of a step, num_warps, num_stages."""

# (kind of device, larger block_d): the kernels of dK and dV, of dQ, and the fused one, for 16-bit elements
_DEFAULTS: dict[tuple[str, int], tuple[Tile, Tile, Tile]] = {
    ("wgmma", 64): ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
    ("wgmma", 128): ((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
    ("wgmma", 256): ((64, 64, 8, 2), (128, 32, 8, 2), (32, 64, 8, 1)),
    ("wgmma", 512): ((32, 16, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1)),
    ("tcgen05", 64): ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
    ("tcgen05", 128): ((64, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
    ("tcgen05", 256): ((64, 32, 8, 1), (64, 32, 8, 2), (32, 32, 8, 2)),
    ("tcgen05", 512): ((16, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 2)),
    ("nvidia", 64): ((128, 32, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3)),
    ("nvidia", 128): ((128, 16, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
    ("nvidia", 256): ((32, 16, 8, 2), (64, 16, 4, 2), (32, 16, 8, 2)),
    ("nvidia", 512): ((16, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 1)),
    ("large", 128): ((128, 16, 8, 3), (128, 32, 8, 2), (64, 16, 8, 2)),
    ("mfma", 64): ((128, 32, 4, 1), (128, 32, 4, 1), (128, 32, 4, 1)),
    ("mfma", 128): ((128, 32, 4, 1), (128, 32, 4, 1), (64, 32, 4, 1)),
    ("mfma", 256): ((64, 16, 4, 1), (64, 16, 4, 1), (32, 32, 4, 1)),
    ("mfma", 512): ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ("wmma", 64): ((64, 32, 4, 1), (64, 32, 4, 1), (64, 16, 4, 1)),
    ("wmma", 128): ((64, 16, 8, 1), (64, 16, 4, 1), (32, 16, 4, 1)),
    ("wmma", 256): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("wmma", 512): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# of tensors that are not aligned to 16 bytes, whose loads go number by number through registers: the kernels of
# dK and dV, and of dQ
_UNALIGNED_WGMMA: dict[int, tuple[Tile, Tile]] = {
    64: ((128, 32, 8, 3), (128, 32, 8, 3)),
    128: ((64, 32, 8, 2), (128, 32, 8, 3)),
    256: ((32, 32, 8, 1), (32, 32, 8, 1)),
}
# with a bias or a mask of dense sequences: at 128 columns dK and dV spill, up to 96 bytes under Triton 3.6, where steps
# half as long, which spill nothing, took 1.06 to 1.25 times as long in three searches on an H200; at 64 nothing spills
_SCORE_TENSOR_WGMMA: dict[int, tuple[Tile, Tile]] = {
    64: ((128, 64, 8, 3), (128, 64, 8, 3)),
    128: ((128, 64, 8, 2), (128, 64, 8, 2)),
}
# with a bias of keys alone, which takes a row: in searches of 4096 tokens on an H100 and an H200 the tiles above took
# 1.14 and 1.10 times as long; dQ spills 24 bytes
_KEY_BIAS_WGMMA: dict[int, tuple[Tile, Tile]] = {128: ((128, 64, 8, 3), (128, 128, 8, 2))}
# with dropout, whose bits take registers and time, too: several small programs on an SM hide it
_DROPOUT_WGMMA: dict[int, tuple[Tile, Tile]] = {
    64: ((64, 64, 4, 3), (64, 64, 4, 3)),
    128: ((64, 32, 4, 3), (64, 64, 4, 2)),
    256: ((64, 32, 8, 2), (64, 32, 8, 2)),
}
_DROPOUT_FUSED_WGMMA: Tile = (64, 64, 4, 2)
"""For heads of up to 64: one pass computes the bits once."""
# twice the bytes of 16-bit elements
_DEFAULTS_TF32: dict[tuple[str, int], tuple[Tile, Tile, Tile]] = {
    ("wgmma", 64): ((64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    ("wgmma", 128): ((64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 4, 2)),
    ("wgmma", 256): ((32, 16, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
    ("nvidia", 64): ((64, 16, 4, 2), (64, 16, 4, 2), (64, 16, 4, 2)),
    ("nvidia", 128): ((32, 16, 4, 2), (32, 16, 4, 2), (32, 16, 4, 2)),
    ("nvidia", 256): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("nvidia", 512): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("mfma", 64): ((64, 16, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1)),
    ("mfma", 128): ((64, 16, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1)),
    ("mfma", 256): ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ("mfma", 512): ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}
# IEEE products come from the ordinary units, whose tiles hold more registers; what spills least on RDNA still spills
_DEFAULTS_FP32: dict[tuple[str, int], tuple[Tile, Tile, Tile]] = {
    ("nvidia", 64): ((32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    ("nvidia", 128): ((32, 32, 8, 2), (16, 16, 8, 2), (32, 32, 8, 2)),
    ("nvidia", 256): ((16, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 2)),
    ("nvidia", 512): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("mfma", 64): ((32, 16, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
    ("mfma", 128): ((32, 16, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
    ("mfma", 256): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    ("mfma", 512): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    **{("wmma", block): ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)) for block in (64, 128, 256, 512)},
}


# by larger block_d: tiles that were faster on an H200 than smaller ones that spill nothing
_SEED_TILES_FUSED: dict[int, tuple[Tile, ...]] = {
    64: ((128, 128, 8, 2),),
    128: ((128, 64, 8, 3), (128, 64, 8, 2)),
}
# of products of fp32 tiles in parts, for searches alone: parts take registers, and wider heads spill with any tile
_SEED_TILES_PARTS: dict[int, tuple[Tile, ...]] = {64: ((64, 32, 8, 2), (32, 32, 4, 2))}


def default_split(spec: Specialization, device: Device) -> Config:
    """The default config of the split family, in constant time."""
    dkdv, dq, _ = _tiles(spec, device)
    shared = _shared(spec, device, dkdv, dq)
    return Config.of(SPLIT_ID, {**_knobs(dkdv, "block_n", "block_m"), **_dq_knobs(dq), **shared})


def default_fused(spec: Specialization, device: Device) -> Config:
    """The default config of the fused family, in constant time."""
    tile = _tiles(spec, device)[2]
    knobs = {**_knobs(tile, "block_n", "block_m"), **_shared(spec, device, tile)}
    if spec.varlen:
        knobs["loads"] = (
            "pointer"  # to clear rows of neighbours in tiles that TMA loads takes more registers than it has
        )
    return Config.of(FUSED_ID, {**knobs, "dq_transposed": False})


def fused_slower_on(spec: Specialization, device: Device) -> str | None:
    """The reason why the default of two passes is faster than that of one, or None."""
    if _is_half_by_wgmma(spec, device) and not _prefers_one_pass(spec, device):
        return (
            "two passes have room for longer steps: ahead in 69 of 74 searches of H100 and H200, by 7% behind at most"
        )
    return None


def seed_configs_fused(spec: Specialization, device: Device) -> tuple[Config, ...]:
    """Configs of the fused family for a search to begin with, beside its default; some may be invalid."""
    default = default_fused(spec, device)
    if spec.dtype == "fp32":
        parts = [default.replace(products=kind) for kind in ("tf32x3", "bf16x6")]
        tiles = _SEED_TILES_PARTS.get(table_block(spec), ())
        return tuple(each.replace(**_knobs(tile, "block_n", "block_m")) for tile in tiles for each in parts)
    if not device.has_wgmma or spec.dtype == "tf32" or is_heavy(spec):
        return ()
    tiles = _SEED_TILES_FUSED.get(table_block(spec), ())
    return tuple(default.replace(**_knobs(tile, "block_n", "block_m")) for tile in tiles)


def _knobs(tile: Tile, own: str, walk: str) -> dict[str, KnobValue]:
    return dict(zip((own, walk, "num_warps", "num_stages"), tile, strict=True))


def _dq_knobs(tile: Tile) -> dict[str, KnobValue]:
    return {f"dq_{name}": value for name, value in _knobs(tile, "block_m", "block_n").items()}


def _shared(spec: Specialization, device: Device, *tiles: Tile) -> dict[str, KnobValue]:
    # where the tensor cores read shared memory; Triton pipelines only pointer loads for mma.sync
    warpgroups = device.has_warpgroup_mma and all(tile[0] >= MIN_WARPGROUP_ROWS for tile in tiles)
    descriptors = warpgroups and spec.aligned16 and spec.dtype != "fp32"
    return {
        "loads": "descriptor" if descriptors else "pointer",
        "heads_per_group": 8 if spec.causal else 1,
        "split_d": False,
        PRODUCTS.name: IEEE,
        HEADS_PER_TILE.name: 0,
    }


def _tiles(spec: Specialization, device: Device) -> tuple[Tile, Tile, Tile]:
    block = table_block(spec)
    table = {"fp32": _DEFAULTS_FP32, "tf32": _DEFAULTS_TF32}.get(spec.dtype, _DEFAULTS)
    kinds = (table_kind(device), "nvidia")
    dkdv, dq, fused = next(table[kind, block] for kind in kinds if (kind, block) in table)
    is_wgmma, is_lighter = _is_half_by_wgmma(spec, device), is_heavy(spec) or spec.varlen
    if is_lighter:
        fused = _lighter(fused, device)
    if is_wgmma and not spec.aligned16:
        dkdv, dq = _UNALIGNED_WGMMA.get(block, (dkdv, dq))
    elif is_wgmma and block in _DROPOUT_WGMMA and has_only_dropout(spec):
        (dkdv, dq), is_lighter = _DROPOUT_WGMMA[block], spec.varlen
    elif is_wgmma and block in _SCORE_TENSOR_WGMMA and _has_score_tensor_alone(spec):
        has_key_bias = spec.bias == "keys" and not spec.mask
        tiles = _KEY_BIAS_WGMMA.get(block) if has_key_bias else None
        (dkdv, dq), is_lighter = tiles or _SCORE_TENSOR_WGMMA[block], False
    if is_lighter:
        dkdv, dq = _lighter(dkdv, device), _lighter(dq, device)
    return dkdv, dq, _DROPOUT_FUSED_WGMMA if _prefers_one_pass(spec, device) else fused


def _has_score_tensor_alone(spec: Specialization) -> bool:
    """Of what makes a specialization heavy, a bias or a mask."""
    others = spec.window or spec.alibi or spec.softcap or spec.dropout or spec.varlen or spec.mods is not None
    return bool(spec.bias or spec.mask) and not others


def _prefers_one_pass(spec: Specialization, device: Device) -> bool:
    """Whether the kernel of one pass has room for what dropout takes, and saves the second pass its bits."""
    fits = table_block(spec) == 64 and spec.aligned16 and not spec.varlen
    return fits and has_only_dropout(spec) and _is_half_by_wgmma(spec, device)


def _is_half_by_wgmma(spec: Specialization, device: Device) -> bool:
    return device.has_wgmma and spec.dtype in ("bf16", "fp16")


def _lighter(tile: Tile, device: Device) -> Tile:
    """Half as long a step, as positions, tiles of a bias and a second choice take registers too."""
    own, walk, warps, stages = tile
    if device.is_nvidia and stages == 1:
        return tile  # shared memory set the length of its step
    return own, max(walk // 2, 16), warps, stages
