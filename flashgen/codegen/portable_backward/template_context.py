"""What the template of the portable backward families needs beside the parameters of their kernels."""

from __future__ import annotations

from flashgen.codegen.aux_gradient import aux_gradient_sources
from flashgen.codegen.common_groups import SUM_ROWS, heads_per_tile
from flashgen.codegen.common_mods import BLOCK_LISTS, aux_names, daux_names, has_blocks, hides, mod_values
from flashgen.codegen.common_portable import (
    feature_values,
    has_visible_key_range,
    key_end,
    multiples,
    scale_name,
    score_arguments,
    score_rows,
)
from flashgen.codegen.common_products import precision
from flashgen.codegen.common_types import TL_DTYPES, TORCH_DTYPES, storage
from flashgen.codegen.head_parts import HeadPart, head_parts, is_split, padded, part_names
from flashgen.codegen.portable_backward.resources import dbias_blocks, is_fused, prepare_rows, row_block
from flashgen.codegen.score_mod_gradient import gradient_source
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.config import Config
from flashgen.core.workload import DTYPE_BYTES, Specialization

TENSORS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
"""What has strides in a backward pass, by its name in the launch vocabulary."""

DROPOUT = ("rng_seed", "rng_offset", "dropout_threshold", "dropout_scale")
"""What says which weights of a tile are dropped."""


def values(spec: Specialization, config: Config) -> dict[str, object]:
    """The values of the template for the kernels of one config, by name."""
    d_parts = head_parts(spec.head_dim, is_split(config))
    v_parts = head_parts(spec.head_dim_v, is_split(config))
    fused = is_fused(config)
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
        "fused": fused,
        "dkdv_entry": f"{config.family}_{'main' if fused else 'dkdv'}",
        "row_block": row_block(spec, config),
        "prepare_rows": prepare_rows(spec),
        "dbias_block_m": dbias_blocks(spec)[0],
        "dbias_block_n": dbias_blocks(spec)[1],
        "sum_rows": SUM_ROWS,
        "sum_d": padded(spec.head_dim, False),
        "sum_dv": padded(spec.head_dim_v, False),
        "sum_multiple": ALIGNMENT_BYTES // DTYPE_BYTES[storage(spec)] if spec.aligned16 else 1,
        # the head of a program: of keys, or one of the parts of its group
        "tile_head": "part_head" if heads_per_tile(config) else "h_k",
        "zero_parts": d_parts if fused else (),
        **_features(spec, config),
        **mod_values(spec),
        "score_mod_bwd": gradient_source(spec.mods.score_mod) if spec.mods and spec.mods.score_mod else "",
        "aux_bwd": _aux_gradients(spec),
        "daux": daux_names(spec),
        "aux_grads": list(spec.mods.aux_grads) if spec.mods else [],
        "block_lists": list(BLOCK_LISTS.items()) if has_blocks(spec) else [],
        "strides": _strides(spec),
        "dkdv_state": [*part_names("dk", d_parts), *part_names("dv", v_parts), *(["dbias"] if sums_keys(spec) else [])],
        "dkdv_arguments": _dkdv_arguments(spec, config, d_parts, v_parts),
        "dq_state": part_names("dq", d_parts),
        "dq_arguments": _dq_arguments(spec, config, d_parts, v_parts),
        **dict(config.knobs),
        "heads_per_tile": heads_per_tile(config),
    }


def _aux_gradients(spec: Specialization) -> list[str]:
    """The functions that add gradients of the caller's tensors, one for each load."""
    mods = spec.mods
    return list(aux_gradient_sources(mods.score_mod, mods.aux_grads)) if mods and mods.score_mod else []


def sums_keys(spec: Specialization) -> bool:
    """Whether the kernel of dK and dV also sums the gradient of a bias that all queries share."""
    return spec.bias_grad and spec.bias == "keys"


def has_dbias(spec: Specialization) -> bool:
    """Whether the gradient of a bias has a kernel of its own."""
    return spec.bias_grad and spec.bias == "full"


def _features(spec: Specialization, config: Config) -> dict[str, object]:
    edges = spec.causal or spec.window
    checks_end = is_fused(config) or "full" in (spec.bias, spec.mask) or spec.varlen
    return {
        **feature_values(spec),
        "hardware_tanh": False,
        "bias_grad": spec.bias_grad,
        "sums_keys": sums_keys(spec),
        "dbias_kernel": has_dbias(spec),
        "scale_argument": scale_name(spec),
        # dq is a sum over keys, so the zeros behind the last one must not meet an infinite p there
        "checks_end": checks_end,
        # a second loop for blocks of which something is hidden
        "two_loops": checks_end or edges or spec.mask == "keys" or has_blocks(spec),
        # pointer loads leave out what no query sees because of its place; else it may hold anything, and 0 * NaN is NaN
        "guard": _guards(spec, config),
        "cleaning": _cleaning(spec, config),
        # what shared parts ask for and a backward pass has not
        "sink": False,
    }


def _guards(spec: Specialization, config: Config) -> bool:
    """Whether a block with masks chooses 0 for the gradients of hidden scores, whatever was loaded."""
    edges, descriptors = spec.causal or spec.window, config["loads"] == "descriptor"
    if spec.mods is not None:
        return False  # what functions hide is 0 in any block
    return spec.mask == "keys" or spec.varlen or (edges and (bool(spec.mask) or descriptors))


def _cleaning(spec: Specialization, config: Config) -> str:
    """How keys that no query sees are kept from a sum of dQ: see `portable_backward/_dq_step.py.jinja`."""
    if spec.mask == "full" or hides(spec):
        return "pass"
    hidden = spec.causal or spec.window or spec.varlen
    if spec.mask == "keys" or (config["loads"] == "descriptor" and hidden):
        return "step"
    return ""


def _strides(spec: Specialization) -> list[tuple[str, int]]:
    """Every stride of the kernels with the number of elements that it is a multiple of (1: unknown)."""
    found = multiples(spec, [f"stride_{tensor}{axis}" for tensor in TENSORS for axis in "bhs"])
    if has_dbias(spec):
        found += [(f"stride_dbias_{axis}", 1) for axis in "bhq"]
    return found


def _dkdv_arguments(
    spec: Specialization, config: Config, d_parts: tuple[HeadPart, ...], v_parts: tuple[HeadPart, ...]
) -> list[str]:
    """What a step of the loop of dK and dV reads; the names are the same inside and outside of it."""
    features = _features(spec, config)
    descriptors = config["loads"] == "descriptor"
    found = [*part_names("k", d_parts), *part_names("v", v_parts)]
    if descriptors:
        found += [*_descriptors("q", d_parts), *_descriptors("do", v_parts), "q_start" if spec.varlen else "b", "h"]
    else:
        found += ["q_base", "do_base", "stride_qs", "stride_dos"]
    found += ["m", "keys", "lse_base", "neg_delta_base"]
    found += ["seqlen_q"] if not descriptors or features["tiled"] or spec.varlen or spec.mods else []
    edges = spec.causal or spec.window
    ends = features["two_loops"] and not edges and spec.mask != "keys"
    found += ["seqlen_k"] if features["tiled"] or ends else []
    found += ["key_end"] if edges else []
    found += ["DqAcc", "head_row"] if is_fused(config) else []
    found += ["reach"] if edges else []
    found += ["left"] if spec.window else []
    found += score_arguments(spec)
    found += ["offset"] if spec.alibi else []
    for name, kind in (("bias", spec.bias), ("mask", spec.mask)):
        if kind == "full":
            found += [f"{name}_base", f"stride_{name}_q", *([] if spec.aligned_scores else [f"stride_{name}_k"])]
        elif kind:
            found.append(name)
    found += [*_mod_arguments(spec, found, "k_idx"), *daux_names(spec)] if spec.mods else []
    return found + (["n", *DROPOUT] if spec.dropout else [])


def _dq_arguments(
    spec: Specialization, config: Config, d_parts: tuple[HeadPart, ...], v_parts: tuple[HeadPart, ...]
) -> list[str]:
    """What a step of the loop of dQ reads; the names are the same inside and outside of it."""
    edges = spec.causal or spec.window
    found = [*part_names("q", d_parts), *part_names("do", v_parts), "lse", "neg_delta"]
    if config["loads"] == "descriptor":
        found += [*_descriptors("k", d_parts), *_descriptors("v", v_parts)]
        found += ["h_k", "k_start"] if spec.varlen else ["b", "h_k"]
    else:
        found += ["k_base", "v_base", "stride_ks", "stride_vs"]
    found += ["n"]
    found += ["key_start"] if spec.window or has_visible_key_range(spec) else []
    found += [key_end(spec)]
    found += ["first"] if spec.window else []
    found += ["limit"] if edges else []
    found += [*score_arguments(spec), *(["positions"] if spec.alibi else []), *score_rows(spec)]
    found += _mod_arguments(spec, found, "row", "last_key") if spec.mods else []
    return found + (["m_block", *DROPOUT] if spec.dropout else [])


def _mod_arguments(spec: Specialization, found: list[str], *places: str) -> list[str]:
    """What a step reads for the functions of the caller beside what it has."""
    return [*(name for name in ("b", "h") if name not in found), *places, *aux_names(spec)]


def _descriptors(name: str, parts: tuple[HeadPart, ...]) -> list[str]:
    return [f"{name}{part.descriptor_suffix}_desc" for part in parts]
