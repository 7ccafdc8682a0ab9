"""What the template of the portable forward family needs beside its parameters."""

from __future__ import annotations

from flashgen.codegen.common_mods import hides, mod_step_arguments, mod_values
from flashgen.codegen.common_portable import (
    feature_values,
    has_visible_key_range,
    key_end,
    multiples,
    score_arguments,
    score_rows,
)
from flashgen.codegen.common_products import precision, uses_tensor_cores
from flashgen.codegen.common_softcap import HARDWARE, tanh
from flashgen.codegen.common_types import TL_DTYPES, TORCH_DTYPES, storage
from flashgen.codegen.head_parts import HeadPart, head_parts, is_split, part_names
from flashgen.codegen.key_splits import merge_values, split_keys
from flashgen.codegen.portable_forward.pages import page_values
from flashgen.core.config import Config
from flashgen.core.workload import Specialization


def values(spec: Specialization, config: Config) -> dict[str, object]:
    """The values of the template for one kernel, by name."""
    d_parts = head_parts(spec.head_dim, is_split(config))
    v_parts = head_parts(spec.head_dim_v, is_split(config))
    return {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "d_parts": d_parts,
        "v_parts": v_parts,
        "storage": storage(spec),
        "tl_dtype": TL_DTYPES[storage(spec)],
        "torch_dtype": TORCH_DTYPES[storage(spec)],
        "aligned16": spec.aligned16,
        "descriptors": config["loads"] == "descriptor",
        "precision": precision(spec, config),
        **_features(spec, config),
        **page_values(spec, config),
        **_strides(spec, config),
        **mod_values(spec),
        **merge_values(spec, storage(spec)),
        # names of what a step of the loop changes, and of what it reads
        "state": [*part_names("acc", v_parts), "l_i", "m_i"],
        "step_arguments": _step_arguments(spec, config, d_parts),
        **dict(config.knobs),
        "split_keys": split_keys(config),
    }


def _features(spec: Specialization, config: Config) -> dict[str, object]:
    return {
        **feature_values(spec),
        "hardware_tanh": tanh(config) == HARDWARE,
        "sink": spec.sink,
        "sink_dtype": spec.sink_dtype or "fp32",
        # rows of a block may have ends of their own, or all that of the keys where no mask hides what lies behind it
        "ends": _has_ends(spec),
        # a whole row of any block may be hidden, not only in the blocks at the ends
        "guarded": bool(spec.bias or spec.mask == "full" or spec.mods),
        "cleaning": _cleaning(spec, config),
        # a pass without a pipeline takes fewer registers of the whole kernel; without tensor cores it takes more
        "lean_clean": has_visible_key_range(spec) and uses_tensor_cores(spec, config),
    }


def _cleaning(spec: Specialization, config: Config) -> str:
    """How rows of V that no query sees are kept from the products.

    Pointer loads leave out what lies before and behind all visible keys. Descriptors load whole blocks: behind a causal
    mask the last one can "shift" back, or, where places of dropped weights are counted from its first key, have such
    "rows" cleared. What may be hidden elsewhere needs a "pass" of its own once it made sums NaN.
    """
    if spec.mask or hides(spec):
        return "pass"
    if spec.varlen:
        return ""  # what no query of a sequence sees is cleared wherever it may be loaded
    if config["loads"] == "pointer" or not (spec.causal or spec.window):
        return ""
    if spec.window or spec.bias or spec.mods:
        return "pass"
    return "rows" if spec.dropout else "shift"


def _has_ends(spec: Specialization) -> bool:
    return spec.causal or spec.window or not has_visible_key_range(spec)


def _strides(spec: Specialization, config: Config) -> dict[str, object]:
    """Every stride of the kernel with the number of elements that it is a multiple of (1: unknown)."""
    found = multiples(spec, stride_names(spec, config))
    return {"strides": found, "aligned_strides": any(multiple > 1 for _, multiple in found)}


def stride_names(spec: Specialization, config: Config) -> list[str]:
    """Names of the strides of tensors that a kernel reads or writes by pointers."""
    descriptors = config["loads"] == "descriptor"
    tensors = ("o" if spec.varlen else "") if descriptors else "qkvo"
    if split_keys(config):
        tensors = tensors.replace("o", "")
    found = []
    for tensor in tensors:
        axes = "bhs" if not spec.varlen or (spec.page_size and tensor in "kv") else "hs"
        found += [f"stride_{tensor}{axis}" for axis in axes]
    return found


def _step_arguments(spec: Specialization, config: Config, d_parts: tuple[HeadPart, ...]) -> list[str]:
    """What a step of the loop reads and does not change; the names are the same inside and outside of it."""
    found = part_names("q", d_parts)
    if config["loads"] == "descriptor":
        v_parts = head_parts(spec.head_dim_v, is_split(config))
        found += [f"k{part.descriptor_suffix}_desc" for part in d_parts]
        found += [f"v{part.descriptor_suffix}_desc" for part in v_parts]
        rows = [] if spec.page_size else ["k_start"]
        found += ["b", "h_k"] if not spec.varlen else [*(["b"] if spec.mods else []), "h_k", *rows]
    else:
        pages = ["stride_kb", "stride_vb"] if spec.page_size else []
        found += ["k_base", "v_base", *pages, "stride_ks", "stride_vs", *(["b"] if spec.mods else [])]
    found += ["table", "num_pages"] if spec.page_size else []
    found += [
        "n",
        *(["key_start"] if spec.window or has_visible_key_range(spec) else []),
        key_end(spec),
        *(["first"] if spec.window else []),
        *(["limit"] if _has_ends(spec) else []),
    ]
    found += [*score_arguments(spec), *(["positions"] if spec.alibi else []), *score_rows(spec)]
    found += ["m_block", "rng_seed", "rng_offset", "dropout_threshold", "dropout_scale"] if spec.dropout else []
    return found + mod_step_arguments(spec)
