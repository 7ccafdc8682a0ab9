"""What the portable families have in common: the calls they serve, their loads, and what a GPU gives a thread."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.common_mods import has_blocks, host_features
from flashgen.codegen.common_scores import has_additive_score, is_positional, score_strides
from flashgen.codegen.common_types import bias_dtype, storage
from flashgen.codegen.head_parts import padded, why_not_split
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
MAX_REGS_PER_THREAD = 255
"""The most registers that one thread can address, on NVIDIA and (in vector registers of a wave) close to it on AMD."""

OTHER_REGS = 24
"""Registers per thread for row statistics, addresses and loop state; below what any compiled variant needed."""

MIN_WARPGROUP_ROWS = 64
"""Rows that wgmma and tcgen05 multiply at once, from shared memory; smaller tiles use mma.sync."""

TENSOR_MEMORY_ROWS, TENSOR_MEMORY_COLUMNS = 128, 512
"""Of an SM, in 32-bit words."""

MANY_WARPS = 8
"""Programs with so many take the registers of an SM, as their sums do."""

LARGE_SMEM = 160 * 1024
"""A block of a data-centre card has at least this much shared memory, one of a consumer card at most 100 KB."""


def why_not_portable(spec: Specialization, device: Device) -> str | None:
    """What no portable family does, in either direction: the reason, or None."""
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"its {name} is {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {size}"
    if spec.dtype == "tf32" and not device.has_tf32:
        return f"the tensor cores of {device.arch} multiply no TF32"
    if device.is_nvidia and not device.has_async_copy:
        return f"it needs sm80 or newer, not {device.arch}"
    return None


def allowed_values_of_all(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    """What a specialization leaves of the knobs that all portable families have: no other value is ever valid."""
    found: dict[str, tuple[KnobValue, ...]] = {}
    if not spec.aligned16:
        found["loads"] = ("pointer",)
    if why_not_split(spec):
        found["split_d"] = (False,)
    return found


def why_not_loads(spec: Specialization, config: Config, device: Device) -> str | None:
    """Why Triton would refuse the config's kind of loads, or silently turn it into the other, or None."""
    if config["loads"] != "descriptor":
        return None
    if not device.has_tma:
        return f"descriptors are turned into pointers on {device.arch}: the same kernel twice"
    if not spec.aligned16:
        return "descriptors need pointers and strides that are multiples of 16 bytes"
    return None


def programs_side_by_side(config: Config, smem: int, device: Device) -> int:
    """Programs with so many bytes of shared memory that an SM runs at once, before they are compiled."""
    by_registers = max(1, MANY_WARPS // config.integer("num_warps"))
    return max(1, min(by_registers, device.smem_per_sm // max(smem, 1)))


def table_kind(device: Device) -> str:
    """The row of a table of defaults for a device without one of its own: by how it multiplies and what it holds."""
    if not device.is_nvidia or device.has_warpgroup_mma:
        return device.mma
    return "large" if device.smem_per_block >= LARGE_SMEM else "small_tma" if device.has_tma else "small"


def table_block(spec: Specialization) -> int:
    """The row of a table of defaults for a specialization: columns of its wider head, padded, at least 64."""
    return max(64, padded(spec.head_dim, False), padded(spec.head_dim_v, False))


def is_heavy(spec: Specialization) -> bool:
    """Whether weights depend on more than products, the ends of the keys and a softcap."""
    return spec.window or spec.alibi or bool(spec.bias) or bool(spec.mask) or spec.dropout or spec.mods is not None


def has_only_dropout(spec: Specialization) -> bool:
    """Of what makes a specialization heavy."""
    return spec.dropout and not is_heavy(replace(spec, dropout=False))


def feature_values(spec: Specialization) -> dict[str, object]:
    """What the templates of both passes are told of features in the same words."""
    return {
        "causal": spec.causal,
        "varlen": spec.varlen,
        "window": spec.window,
        "positional": is_positional(spec),
        "offset_tensor": spec.offset_tensor and is_positional(spec),
        # scores that go on changing when a query stands far behind the last key or before the first
        "offset_unbounded": spec.window or spec.alibi,
        "softcap": spec.softcap,
        "exact_softcap": spec.dtype == "fp32",
        "alibi": spec.alibi,
        "dropout": spec.dropout,
        "bias": spec.bias,
        "mask": spec.mask,
        "bias_dtype": bias_dtype(spec),
        "visible_key_range": has_visible_key_range(spec),
        # tiles of a bias or a mask are loaded beside K and V, 16 bytes at a time where the compiler knows their places
        "tiled": "full" in (spec.bias, spec.mask),
        "aligned_scores": spec.aligned_scores,
        "has_additive_score": has_additive_score(spec),
        "scale": "LOG2E" if has_additive_score(spec) else scale_name(spec),
        # loads leave out what lies before the keys that any query sees, beside what lies behind them
        "two_ends": spec.window or has_visible_key_range(spec),
        "key_end": key_end(spec),
        "host_features": host_features(spec),
    }


def has_visible_key_range(spec: Specialization) -> bool:
    """Whether a program looks first where the visible keys of its mask begin and end."""
    return spec.mask == "keys" and not has_blocks(spec)


def key_end(spec: Specialization) -> str:
    """What a step calls the end of the keys."""
    return "key_end" if spec.causal or spec.window or has_visible_key_range(spec) else "seqlen_k"


def scale_name(spec: Specialization) -> str:
    """The parameter that scales scores to powers of two."""
    return "softcap_scale_log2" if spec.softcap else "softmax_scale_log2"


def score_arguments(spec: Specialization) -> list[str]:
    """What a step makes scores of products with."""
    found = ["softcap_rate"] if spec.softcap else []
    found += ["score_scale"] if has_additive_score(spec) else [scale_name(spec)]
    return found + (["slope"] if spec.alibi else [])


def score_rows(spec: Specialization) -> list[str]:
    """Where a step that walks over keys finds a bias and a mask."""
    found = []
    for name, kind in (("bias", spec.bias), ("mask", spec.mask)):
        if kind:
            found.append(f"{name}_rows" if kind == "full" else f"{name}_base")
            found += [] if spec.aligned_scores else [f"stride_{name}_k"]
    return found


def multiples(spec: Specialization, names: list[str]) -> list[tuple[str, int]]:
    """Strides, and those of a bias and a mask, with the number of elements that each is a multiple of (1: unknown)."""
    multiple = ALIGNMENT_BYTES // DTYPE_BYTES[storage(spec)] if spec.aligned16 else 1
    found = [(name, multiple) for name in names]
    for name, kind, size in (("bias", spec.bias, DTYPE_BYTES[bias_dtype(spec)]), ("mask", spec.mask, 1)):
        if kind:
            multiple = ALIGNMENT_BYTES // size if spec.aligned_scores else 1
            found += [(stride, multiple) for stride in score_strides(spec, name, kind)]
    return found
