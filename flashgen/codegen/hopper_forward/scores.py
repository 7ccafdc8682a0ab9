"""What the Hopper forward family does to a score: the text of its features."""

from __future__ import annotations

from flashgen.codegen.common_mods import aux_names, block_names, has_blocks, hides, host_features, mod_values
from flashgen.codegen.common_scores import has_additive_score, is_positional, scales, score_strides, window_edges
from flashgen.codegen.common_types import bias_dtype
from flashgen.codegen.hopper_forward.resources import hides_single, score_tiles
from flashgen.core.workload import Specialization


def values(spec: Specialization, *, aligned: bool, shared_keys: bool) -> dict[str, object]:
    """The values of the template that depend on the features.

    Args:
        spec: what is compiled in.
        aligned: whether query blocks are cut along the diagonal.
        shared_keys: whether a CTA has a share of the keys of a tile.
    """
    offset = ("QOffset" if spec.offset_tensor else "q_offset") if is_positional(spec) else ""
    ends = spec.causal or spec.window
    # lengths of packed sequences, and with them the offset, belong to a tile
    of_call = [] if spec.varlen else ["seqlen_q", "seqlen_k", *([offset] if offset else [])]
    splits = ["key_splits"] if shared_keys else []
    sizes = ["nheads", "group_size", *splits, *of_call, *window_edges(spec)]
    sizes += ["lists"] if has_blocks(spec) else []
    return {
        **mod_values(spec),
        "functions": spec.mods is not None,
        # what tells the blocks of a tile where a block mask lists them
        "lists": block_names(spec),
        # whether a mask or a function hides single scores, so that rows of V may turn out to be seen by no query
        "hides_single": hides_single(spec),
        "causal": spec.causal,
        "window": spec.window,
        "softcap": spec.softcap,
        "alibi": spec.alibi,
        "bias": spec.bias,
        "mask": spec.mask,
        "sink": spec.sink,
        "score_tiles": list(score_tiles(spec)),
        "score_dtypes": {name: GL_SCORE_DTYPES[dtype] for name, dtype in score_tiles(spec).items()},
        "score_axes": score_axes(spec),
        "key_mask": ["Mask", *score_strides(spec, "mask", spec.mask)] if spec.mask == "keys" else [],
        "seen": _seen(spec),
        "bias_dtype": bias_dtype(spec),
        "sink_dtype": spec.sink_dtype or "fp32",
        "score_stride": not spec.aligned_scores,
        "aligned_scores": spec.aligned_scores,
        "has_additive_score": has_additive_score(spec),
        "modified": spec.softcap or has_additive_score(spec),
        "positional": is_positional(spec),
        # scores that go on changing when a query stands far behind the last key or before the first
        "offset_unbounded": (spec.window or spec.alibi) and not spec.varlen,
        "aligned": aligned,
        # a row may see no key of a block, or of any
        "guards": ends or bool(spec.bias or spec.mask or spec.mods) or spec.varlen or shared_keys,
        # keys that no query sees, but for those of blocks in lists, which are found in a second pass; those of a packed
        # sequence end with what its queries see, unless a page goes on
        "clears_hidden": not has_blocks(spec)
        and (spec.window or (spec.causal and not spec.varlen) or bool(spec.page_size)),
        "clears_together": clears_together(spec),
        "offset_tensor": spec.offset_tensor,
        "offset_name": offset,
        "sizes": sizes,
        "key_block_arguments": [*(["tile", *splits] if splits else []), *_key_block_arguments(spec)],
        "features": _features(spec),
        "kernel_features": scales(spec)[-1:] + _features(spec)[1:],
        "rule": _rule(spec),
        # one number needs no tuple, unless a function takes it apart
        "by_rule": len(_rule(spec)) > 1 or has_additive_score(spec),
        "host_features": host_features(spec),
    }


GL_SCORE_DTYPES = {"bf16": "gl.bfloat16", "fp16": "gl.float16", "fp32": "gl.float32", "u8": "gl.uint8"}


def score_axes(spec: Specialization) -> list[str]:
    """The strides of tiles of scores that are 0 where all batches or heads share a tile."""
    return [f"stride_{name}_{axis}" for name in score_tiles(spec) for axis in "bh"]


def _seen(spec: Specialization) -> list[str]:
    """What tells which keys of a block some query of a tile sees, where single scores may be hidden."""
    if not hides_single(spec):
        return []
    offset = ["offset"] if spec.causal or spec.window else []
    found = ["mask_base", "stride_mask_q"] if spec.mask == "full" else []
    found += ["b", "h", *aux_names(spec)] if hides(spec) else []
    return [*found, "tile_row", *offset, *window_edges(spec), "seqlen_q", "seqlen_k"]


def _key_block_arguments(spec: Specialization) -> list[str]:
    """What tells which blocks of keys a tile sees."""
    visible = ["first_visible", "visible_end"] if spec.mask == "keys" else []
    if not (spec.causal or spec.window):
        return visible or ["seqlen_k"]
    return ["tile_row", "offset", *window_edges(spec), *visible, "seqlen_q", *([] if visible else ["seqlen_k"])]


def _features(spec: Specialization) -> list[str]:
    """What a consumer is given beside sizes, as it calls it; nothing where the scale is all."""
    found = ["softcap_rate"] if spec.softcap else []
    found += ["AlibiSlopes", "stride_alibi_b"] if spec.alibi else []
    found += ["Sinks"] if spec.sink else []
    found += ["Bias", *score_strides(spec, "bias", spec.bias)] if spec.bias == "keys" else []
    found += ["Mask", *score_strides(spec, "mask", spec.mask)] if spec.mask else []
    found += aux_names(spec)
    return ["scale", *found] if found else []


def clears_together(spec: Specialization) -> bool:
    """Whether what a mask of keys hides of V, and what no query of the call can see, is cleared by one function."""
    return spec.mask == "keys" and (spec.causal or spec.window)


def _rule(spec: Specialization) -> list[str]:
    """What makes scores of products, the same for all steps of a tile."""
    found = ["score_scale" if has_additive_score(spec) else "scale"]
    found += ["softcap_rate"] if spec.softcap else []
    found += ["slope", "positions"] if spec.alibi else []
    for name, kind in (("bias", spec.bias), ("mask", spec.mask)):
        if kind == "keys":
            found += [f"{name}_base", *([] if spec.aligned_scores else [f"stride_{name}_k"])]
    found += ["seqlen_k"] if "keys" in (spec.bias, spec.mask) else []
    found += ["b", "h", "row", "end_key", *aux_names(spec)] if spec.mods else []
    if not clears_together(spec):
        return found
    return [*found, *(["key_start"] if spec.window else []), "key_end"]
