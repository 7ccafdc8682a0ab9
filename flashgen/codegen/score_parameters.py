"""The run-time parameters that turn products into scores and hide them, which every forward family has alike."""

from __future__ import annotations

from flashgen.codegen.family import Parameter
from flashgen.codegen.portable_forward.template_context import bias_dtype, is_positional, score_strides
from flashgen.core.workload import Specialization


def score_parameters(spec: Specialization) -> list[Parameter]:
    """Scale, query offset, and one group for each feature, in the order of the kernels' parameters."""
    names = [(name, "fp32") for name in scales(spec)]
    if is_positional(spec):
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
    return found


def scales(spec: Specialization) -> list[str]:
    """Names of the factors of a score."""
    return ["softcap_rate", "softcap_scale_log2"] if spec.softcap else ["softmax_scale_log2"]


def window_edges(spec: Specialization) -> list[str]:
    """Names of a window's widths; a causal mask is the right one."""
    if not spec.window:
        return []
    return ["window_left"] if spec.causal else ["window_left", "window_right"]
