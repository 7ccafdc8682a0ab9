"""The configs of the portable forward family that serve without any record: valid, and almost without spills."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.common_portable import MIN_WARPGROUP_ROWS, is_heavy, table_kind
from flashgen.codegen.head_parts import padded
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
# a mask of keys and nothing else of that: most blocks run without it, as large as others
_DEFAULTS_PADDED: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("wgmma", 64): (128, 64, 4, 3),
    ("wgmma", 128): (128, 128, 8, 3),
}
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


def default_config(spec: Specialization, device: Device) -> Config:
    """The default config of `spec` on `device`, in constant time."""
    block_m, block_n, num_warps, num_stages = _tile(spec, device)
    return Config.of(
        FAMILY_ID,
        {
            "block_m": block_m,
            "block_n": block_n,
            "num_warps": num_warps,
            "num_stages": num_stages,
            "loads": "descriptor" if _prefers_descriptors(spec, device, block_m) else "pointer",
            "maxnreg": 0,
            "heads_per_group": 8 if spec.causal else 1,
            "heavy_first": spec.causal,
            "split_d": False,
        },
    )


def _tile(spec: Specialization, device: Device) -> tuple[int, int, int, int]:
    block = max(64, padded(spec.head_dim, False), padded(spec.head_dim_v, False))
    kind = table_kind(device)
    table = {"fp32": _DEFAULTS_FP32, "tf32": _DEFAULTS_TF32}.get(spec.dtype)
    if table is None:
        table = _DEFAULTS_HEAVY if is_heavy(spec) else _DEFAULTS
        if spec.aligned16 and spec.mask == "keys" and not is_heavy(replace(spec, mask="")):
            table = {**table, **_DEFAULTS_PADDED}
    return table[(kind, block) if (kind, block) in table else ("nvidia", block)]


def _prefers_descriptors(spec: Specialization, device: Device, block_m: int) -> bool:
    """Where the tensor cores read shared memory; Triton pipelines only pointer loads for mma.sync."""
    warpgroups = device.has_warpgroup_mma and block_m >= MIN_WARPGROUP_ROWS
    return warpgroups and spec.aligned16 and spec.dtype != "fp32"
