"""What the Hopper backward families make of scores beside hiding them by place: the text of their features."""

from __future__ import annotations

from flashgen.codegen.common_mods import aux_names, has_blocks, hides, mod_values
from flashgen.codegen.common_scores import changes_scores, has_additive_score, scales, score_strides
from flashgen.codegen.common_wgmma import ROWS, block
from flashgen.codegen.score_mod_gradient import gradient_source
from flashgen.core.workload import Specialization


def starts_at_zero(spec: Specialization) -> bool:
    """Whether sums of scores start from 0 and the LSE is subtracted behind, since scores are not linear in them."""
    return spec.softcap or changes_scores(spec)


def values(spec: Specialization) -> dict[str, object]:
    """The values of the template that depend on what becomes of a score, by name."""
    mods = spec.mods
    score_mod = mods.score_mod if mods else None
    return {
        **mod_values(spec),
        "score_mod_bwd": gradient_source(score_mod) if score_mod else "",
        "functions": mods is not None,
        "softcap": spec.softcap,
        "alibi": spec.alibi,
        "mask": spec.mask,
        "aligned_scores": spec.aligned_scores,
        "from_zero": starts_at_zero(spec),
        # whether scores are in natural units before the exponent
        "natural": starts_at_zero(spec) and has_additive_score(spec),
        "weighs": spec.softcap or spec.alibi or mods is not None,
        # hidden keys may hold what is not finite, and only a choice makes 0 of that
        "guards": bool(spec.mask) or score_mod is not None or hides(spec),
        # what becomes of a score depends on its batch and head
        "by_head": by_head(spec),
        "scales": [*scales(spec), "softmax_scale", *_of_call(spec)],
        "weighs_first": weighs_first(spec),
        "weigh_arguments": _weigh_arguments(spec),
        "dq_weigh_arguments": _dq_weigh_arguments(spec),
        "dq_visibility": _dq_visibility(spec),
        "mask_names": mask_names(spec),
    }


def weighs_first(spec: Specialization) -> bool:
    """Whether dp is computed behind the weights, and not beside the scores.

    Functions of the caller hold values of their own for each score, and dk and dv of heads of more than 64 columns
    leave no registers for those and dp. With 128 columns a bias from a table took 1.78 ms so on an H100, and 2.16
    beside the scores.
    """
    return spec.mods is not None and max(block(spec.head_dim), block(spec.head_dim_v)) > ROWS


def by_head(spec: Specialization) -> bool:
    """Whether a step needs to know the batch and head that its queries are of."""
    return spec.alibi or bool(spec.mask) or spec.mods is not None


def visibility_arguments(spec: Specialization) -> list[str]:
    """What of a mask says which keys a warpgroup sees."""
    return ["b", "h", *mask_names(spec), "all_shown"] if spec.mask else []


def mask_names(spec: Specialization) -> list[str]:
    """A mask of keys, and its strides."""
    return ["Mask", *score_strides(spec, "mask", spec.mask)] if spec.mask else []


def _of_call(spec: Specialization) -> list[str]:
    """What consumers are told of a call beside scales and sizes."""
    found = ["AlibiSlopes", "stride_alibi_b"] if spec.alibi else []
    return [*found, *aux_names(spec)]


def _weigh_arguments(spec: Specialization) -> list[str]:
    """What makes p of products, under the same names inside and outside of the function."""
    found = ["s", *(["lse_tile"] if starts_at_zero(spec) else []), "m_block", "own_key"]
    if spec.softcap:
        found += ["softcap_rate", "softcap_scale_log2"]
    else:
        found += ["softmax_scale" if starts_at_zero(spec) else "scale_log2"]
    found += ["slope", "offset"] if spec.alibi else []
    if spec.mods is not None:
        found += ["b", "h", *aux_names(spec), "seqlen_q", "seqlen_k"]
    found += ["partial"] if has_blocks(spec) else []
    return [*found, "visibility"]


def _dq_weigh_arguments(spec: Specialization) -> list[str]:
    """The same of the kernel that owns queries."""
    places = {"lse_tile": "", "m_block": "first_key", "own_key": "rows"}
    found = [places.get(name, name) for name in _weigh_arguments(spec)]
    return [*found[:1], "start", *filter(None, found[1:])]


def _dq_visibility(spec: Specialization) -> list[str]:
    """What hides keys from the rows of the kernel that owns queries."""
    window = ["from_key", "all_from"] if spec.window else []
    return ["limit", "all_to", *window, *(["shown_keys"] if spec.mask else [])]
