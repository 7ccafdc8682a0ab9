"""The configs of the portable forward family that serve without any record: valid, and without spills."""

from __future__ import annotations

from flashgen.codegen.head_parts import padded
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

FAMILY_ID = "portable_forward"

LARGE_SMEM = 160 * 1024
"""A block of a data-centre card has at least this much shared memory, one of a consumer card at most 100 KB."""

# (kind of device, larger block_d): block_m, block_n, num_warps, num_stages for 16-bit elements; none spills
_DEFAULTS: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("sm90", 64): (128, 128, 4, 3),
    ("sm90", 128): (128, 128, 8, 3),
    ("sm90", 256): (128, 64, 8, 2),
    ("sm100", 64): (128, 64, 4, 3),
    ("sm100", 128): (128, 128, 8, 3),
    ("sm100", 256): (128, 64, 8, 2),
    ("large", 64): (128, 64, 4, 3),
    ("large", 128): (128, 64, 8, 3),
    ("large", 256): (64, 16, 4, 2),
    ("small", 64): (128, 64, 4, 3),
    ("small", 128): (128, 32, 8, 3),
    ("small", 256): (64, 16, 4, 2),
    ("sm120", 64): (128, 64, 8, 3),
    ("sm120", 128): (128, 32, 8, 3),
    ("sm120", 256): (64, 16, 4, 2),
    ("cdna", 64): (128, 64, 4, 1),
    ("cdna", 128): (128, 32, 4, 1),
    ("cdna", 256): (128, 32, 4, 1),
    ("rdna", 64): (128, 32, 4, 1),
    ("rdna", 128): (128, 32, 8, 1),
    ("rdna", 256): (64, 16, 8, 1),
}
# IEEE products come from the ordinary units, whose tiles hold more registers; what spills least on RDNA still spills.
_DEFAULTS_FP32: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("nvidia", 64): (64, 32, 8, 2),
    ("nvidia", 128): (32, 16, 8, 2),
    ("nvidia", 256): (32, 16, 8, 2),
    ("small", 64): (64, 32, 8, 2),
    ("small", 128): (16, 16, 4, 2),
    ("small", 256): (32, 16, 8, 2),
    ("cdna", 64): (64, 32, 8, 1),
    ("cdna", 128): (64, 32, 8, 1),
    ("cdna", 256): (32, 16, 8, 1),
    ("rdna", 64): (16, 16, 4, 1),
    ("rdna", 128): (32, 16, 8, 1),
    ("rdna", 256): (16, 16, 8, 1),
}


def default_tile(spec: Specialization, device: Device) -> Config:
    """The default config of `spec` on `device`, in constant time."""
    block = max(64, padded(spec.head_dim, False), padded(spec.head_dim_v, False))
    kind = _kind(device)
    if spec.dtype == "fp32":
        known = (kind, block) if (kind, block) in _DEFAULTS_FP32 else ("nvidia", block)
        block_m, block_n, num_warps, num_stages = _DEFAULTS_FP32[known]
    else:
        block_m, block_n, num_warps, num_stages = _DEFAULTS[kind, block]
    if spec.mods is not None:
        block_n = max(16, block_n // 2)  # registers for what the user's functions compute
    return Config.of(
        FAMILY_ID,
        {
            "block_m": block_m,
            "block_n": block_n,
            "num_warps": num_warps,
            "num_stages": num_stages,
            "loads": "descriptor" if _prefers_descriptors(spec, device) else "pointer",
            "maxnreg": 0,
            "heads_per_group": 8 if spec.causal else 1,
            "heavy_first": spec.causal,
            "split_d": False,
        },
    )


def _kind(device: Device) -> str:
    if not device.is_nvidia:
        return "cdna" if device.warp_size == 64 else "rdna"
    if device.arch in ("sm90", "sm100", "sm120"):
        return device.arch
    return "large" if device.smem_per_block >= LARGE_SMEM else "small"


def _prefers_descriptors(spec: Specialization, device: Device) -> bool:
    """On sm120 Triton pipelines pointer loads for the matrix unit (mma.sync), but not descriptor loads."""
    return device.arch in ("sm90", "sm100") and spec.aligned16 and spec.dtype != "fp32"
