"""What turns products into scores and hides them, alike in all families."""

from __future__ import annotations

from flashgen.codegen.common_types import bias_dtype
from flashgen.codegen.family import Parameter
from flashgen.core.workload import Specialization


def score_parameters(spec: Specialization) -> list[Parameter]:
    """Scale, query offset, and one group for each feature, in the order of the kernels' parameters."""
    names = [(name, "fp32") for name in scales(spec)]
    if is_positional(spec) and not spec.varlen:
        names.append(("QOffset", "*i32") if spec.offset_tensor else ("q_offset", "i32"))
    names += [(name, "i32") for name in window_edges(spec)]
    if spec.alibi:
        names += [("AlibiSlopes", "*fp32"), ("stride_alibi_b", "i32")]
    if spec.sink:
        names.append(("Sinks", f"*{spec.sink_dtype or 'fp32'}"))
    found = [Parameter(name=name, type=kind) for name, kind in names]
    for name, kind, element in (("bias", spec.bias, bias_dtype(spec)), ("mask", spec.mask, "u8")):
        if kind:
            found.append(Parameter(name=name.capitalize(), type=f"*{element}", aligned16=spec.aligned_scores))
            found += [Parameter(name=stride, type="i64") for stride in score_strides(spec, name, kind)]
    if spec.dropout:
        found += [Parameter(name="RngState", type="*i64"), Parameter(name="dropout_threshold", type="i32")]
        found.append(Parameter(name="dropout_scale", type="fp32"))
    return found


def scales(spec: Specialization) -> list[str]:
    """Names of the factors of a score."""
    return ["softcap_rate", "softcap_scale_log2"] if spec.softcap else ["softmax_scale_log2"]


def window_edges(spec: Specialization) -> list[str]:
    """Names of a window's widths; a causal mask is the right one."""
    if not spec.window:
        return []
    return ["window_left"] if spec.causal else ["window_left", "window_right"]


def is_positional(spec: Specialization) -> bool:
    """Whether scores depend on where a query stands among the keys."""
    return spec.causal or spec.window or spec.alibi


def has_additive_score(spec: Specialization) -> bool:
    """Whether something is added to the scores, so that their scale cannot be folded into the exponent."""
    return spec.alibi or bool(spec.bias) or changes_scores(spec)


def changes_scores(spec: Specialization) -> bool:
    """Whether a function of the user computes scores."""
    return spec.mods is not None and spec.mods.score_mod is not None


def score_strides(spec: Specialization, name: str, kind: str) -> list[str]:
    """Names of the strides of a bias or a mask that a kernel needs."""
    axes = "bhq" if kind == "full" else "bh"
    return [f"stride_{name}_{axis}" for axis in axes + ("" if spec.aligned_scores else "k")]


def is_plain_forward(spec: Specialization) -> bool:
    """Whether a specialization has no feature but a causal mask and packed sequences."""
    plain = f"fwd-{spec.dtype}-d{spec.head_dim}" + ("-causal" if spec.causal else "")
    plain += "-varlen" if spec.varlen else ""
    return spec.workload_class == plain and not spec.mods
