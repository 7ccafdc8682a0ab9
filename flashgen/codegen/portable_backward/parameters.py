"""The run-time parameters of every kernel of the portable backward families."""

from __future__ import annotations

from flashgen.codegen.common_groups import heads_per_tile
from flashgen.codegen.common_mods import aux_parameters, daux_names, mod_parameters
from flashgen.codegen.common_scores import score_parameters
from flashgen.codegen.common_sequences import sequence_parameters
from flashgen.codegen.common_types import bias_dtype, storage
from flashgen.codegen.family import Parameter
from flashgen.codegen.head_parts import head_parts, is_split
from flashgen.codegen.portable_backward.resources import is_fused
from flashgen.codegen.portable_backward.template_context import sums_keys
from flashgen.core.config import Config
from flashgen.core.workload import Specialization

INPUTS = ("q", "k", "v", "do")


def prepare_parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    """Of the kernel that reads O and dO once."""
    found = [_pointer(spec, "o"), _pointer(spec, "do"), *_typed("*fp32", "LSE", "DLSE"), *_rows()]
    found += [_scratch("DqAcc")] if is_fused(config) else []
    return (*found, *_typed("i32", "nheads", "seqlen_q", "dlse_rows"), *_all_strides("o", "do"))


def dkdv_parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    """Of the kernel that owns blocks of keys."""
    found = [*_inputs(spec, config, "block_m", "block_n"), *_rows()]
    found += [_scratch("DqAcc")] if is_fused(config) else []
    some = heads_per_tile(config) > 0
    found += [_scratch("DkParts"), _scratch("DvParts")] if some else [_pointer(spec, "dk"), _pointer(spec, "dv")]
    found += _typed("*fp32", "DBias") if sums_keys(spec) else []
    found += [*score_parameters(spec), *mod_parameters(spec, by_keys=True)]
    found += _typed("*fp32", *daux_names(spec))
    found += [*_typed("fp32", "softmax_scale"), *_sizes(spec)]
    return (*found, *_input_strides(spec, config), *([] if some else _strides(spec, "dk", "dv")))


def sum_parameters(spec: Specialization) -> tuple[Parameter, ...]:
    """Of the kernel that adds what tiles with some heads of a group have summed."""
    found = [_scratch("DkParts"), _scratch("DvParts"), _pointer(spec, "dk"), _pointer(spec, "dv")]
    found += _typed("fp32", "softmax_scale")
    found += _typed("i32", "nheads", "group_size", "total_k" if spec.varlen else "seqlen_k")
    return (*found, *_strides(spec, "dk", "dv"))


def dq_parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    """Of the kernel that owns blocks of queries."""
    found = [*_inputs(spec, config, "dq_block_m", "dq_block_n"), *_rows(), _pointer(spec, "dq")]
    found += [*score_parameters(spec), *mod_parameters(spec), *_typed("fp32", "softmax_scale"), *_sizes(spec)]
    return (*found, *_input_strides(spec, config), *_strides(spec, "dq"))


def finish_parameters(spec: Specialization) -> tuple[Parameter, ...]:
    """Of the kernel that converts dQ."""
    found = [_scratch("DqAcc"), _pointer(spec, "dq"), *_typed("fp32", "softmax_scale")]
    return (*found, *_typed("i32", "nheads", "seqlen_q"), *_all_strides("dq"))


def dbias_parameters(spec: Specialization) -> tuple[Parameter, ...]:
    """Of the kernel that owns blocks of the gradient of a bias."""
    found = [_pointer(spec, tensor) for tensor in INPUTS]
    found += [*_rows(), *_typed(f"*{bias_dtype(spec)}", "DBias"), *score_parameters(spec), *aux_parameters(spec)]
    found += [*_typed("i32", "batch"), *_sizes(spec), *_typed("i32", "bias_batch", "bias_heads")]
    return (*found, *_typed("i64", *(f"stride_dbias_{axis}" for axis in "bhq")), *_all_strides(*INPUTS))


def _inputs(spec: Specialization, config: Config, m_knob: str, n_knob: str) -> list[Parameter]:
    if config["loads"] == "pointer":
        return [_pointer(spec, tensor) for tensor in INPUTS]
    rows = {"q": m_knob, "k": n_knob, "v": n_knob, "do": m_knob}
    cols = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.head_dim_v, "do": spec.head_dim_v}
    return [
        Parameter(
            name=f"{tensor}{part.descriptor_suffix}_desc",
            type=f"tensordesc<{storage(spec)}[1, 1, {config.integer(knob)}, {part.block}]>",
        )
        for tensor, knob in rows.items()
        for part in head_parts(cols[tensor], is_split(config))
    ]


def _pointer(spec: Specialization, tensor: str) -> Parameter:
    return Parameter(name=tensor.upper(), type=f"*{storage(spec)}", aligned16=spec.aligned16)


def _rows() -> list[Parameter]:
    """What the first kernel leaves of every query row."""
    return [_scratch("LseLog2"), _scratch("NegDelta")]


def _scratch(name: str) -> Parameter:
    return Parameter(name=name, type="*fp32", aligned16=True)


def _sizes(spec: Specialization) -> list[Parameter]:
    lengths = ("sequences", "total_q", "total_k") if spec.varlen else ("seqlen_q", "seqlen_k")
    return [*sequence_parameters(spec), *_typed("i32", "nheads", "group_size", *lengths)]


def _input_strides(spec: Specialization, config: Config) -> list[Parameter]:
    return _strides(spec, *INPUTS) if config["loads"] == "pointer" else []


def _strides(spec: Specialization, *tensors: str) -> list[Parameter]:
    """Those of a kernel that finds sequences; packed ones are one batch element."""
    axes = "hs" if spec.varlen else "bhs"
    return _typed("i64", *(f"stride_{tensor}{axis}" for tensor in tensors for axis in axes))


def _all_strides(*tensors: str) -> list[Parameter]:
    """Those of a kernel of rows, to which packed sequences are a batch element like any other."""
    return _typed("i64", *(f"stride_{tensor}{axis}" for tensor in tensors for axis in "bhs"))


def _typed(kind: str, *names: str) -> list[Parameter]:
    return [Parameter(name=name, type=kind) for name in names]
