"""The portable decode family: flash-decoding over contiguous and paged caches in plain Triton, in two kernels."""

from __future__ import annotations

from flashgen.codegen.common_types import ALIGNMENT_BYTES, TL_DTYPES
from flashgen.codegen.family import CompileOptions, KernelFamily, KernelSpec, Knob, Parameter, Sizes
from flashgen.codegen.head_parts import tile_side
from flashgen.codegen.portable_decode.defaults import (
    BATCH_PADS,
    BLOCK_MS,
    FAMILY_ID,
    default_config,
    fitted,
)
from flashgen.codegen.portable_decode.resources import why_too_large
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

REDUCE = f"{FAMILY_ID}_reduce"
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256

KNOBS = (
    Knob(name="block_m", values=BLOCK_MS, meaning="query rows of a program"),
    Knob(name="block_n", values=(16, 32, 64, 128), meaning="keys of a step"),
    Knob(name="num_warps", values=(1, 2, 4, 8), meaning="warps of a program"),
    Knob(name="num_stages", values=(1, 2, 3, 4, 5, 6), meaning="depth of the software pipeline over K and V"),
    Knob(name="per_sm", values=(1, 2, 3, 4, 6), meaning="programs of a launch for each SM"),
    Knob(name="min_tiles", values=(1, 2, 4, 8), meaning="steps that are worth a program of its own"),
    Knob(
        name="slack",
        values=(0, 2, 4, 8, 16),
        meaning="steps more than an equal share that whole sequences may take, so that nothing is merged",
    ),
    Knob(
        name="overhead",
        values=(0, 2, 4, 8),
        meaning="steps that a new sequence costs a program that has several",
    ),
    Knob(name="batch_pad", values=BATCH_PADS, meaning="sequences whose lengths a program looks at"),
    Knob(name="partials", values=(8, 16, 32, 64), meaning="partial results that the merge reads at once"),
    Knob(name="reduce_warps", values=(1, 2, 4), meaning="warps of a program of the merge"),
    Knob(name="page_ids", values=("asm", "load"), meaning="page ids hidden from the software pipeliner, or seen by it"),
    Knob(name="pdl", values=(False, True), meaning="the merge is scheduled before the first kernel has ended"),
    Knob(name="maxnreg", values=(0, 128, 168), meaning="register limit of a thread; 0 is none"),
)


def _unsupported(spec: Specialization, device: Device) -> str | None:
    if spec.dtype not in ("bf16", "fp16"):
        return f"its caches are in bf16 or fp16, not {spec.dtype}"
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"its {name} is {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {size}"
    if device.is_nvidia and not device.has_async_copy:
        return f"it needs sm80 or newer, not {device.arch}"
    return None


def _invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    if config["pdl"] and not device.has_dependent_launch:
        return f"no kernel of {device.arch} is scheduled before the one in front of it has ended"
    if config["page_ids"] == "asm" and not device.is_nvidia:
        return "inline assembly is NVIDIA's"
    if config["maxnreg"] and not device.is_nvidia:
        return "maxnreg exists on NVIDIA only"
    if config.integer("num_stages") > 2 and not device.is_nvidia:
        return "the AMD pipeliner has two stages"
    return why_too_large(spec, config, device)


def _pointers(spec: Specialization, names: str) -> list[Parameter]:
    return [Parameter(name=name, type=f"*{spec.dtype}", aligned16=spec.aligned16) for name in names]


def _scores(spec: Specialization) -> list[Parameter]:
    names = ["softcap_rate", "softcap_scale_log2"] if spec.softcap else ["softmax_scale_log2"]
    found = [Parameter(name=name, type="fp32") for name in names]
    if spec.alibi:
        found += [Parameter(name="AlibiSlopes", type="*fp32"), Parameter(name="stride_alibi_b", type="i32")]
    return found


def _sinks(spec: Specialization) -> list[Parameter]:
    return [Parameter(name="Sinks", type=f"*{spec.sink_dtype or 'fp32'}")] if spec.sink else []


def _integers(*names: str) -> list[Parameter]:
    return [Parameter(name=name, type="i32") for name in names]


def _strides(*names: str) -> list[Parameter]:
    return [Parameter(name=f"stride_{name}", type="i64") for name in names]


PARTS = (
    Parameter(name="PartO", type="*fp32", aligned16=True),
    Parameter(name="PartLse", type="*fp32"),
    Parameter(name="Splits", type="*i32"),
)


def _main_parameters(spec: Specialization) -> tuple[Parameter, ...]:
    lengths = [Parameter(name=name, type="*i32") for name in ("Lens", "Leftpad")]
    pages = [Parameter(name="Table" if spec.page_size else "BatchIdx", type="*i32")]
    pages += [Parameter(name="OwnLens", type="*i32")] if spec.offset_tensor else []
    found = [*_pointers(spec, "QKVO"), Parameter(name="LSE", type="*fp32"), *lengths, *pages, *_sinks(spec), *PARTS]
    found += _scores(spec)
    found += _integers("batch", "nheads_k", "group_size", "seqlen_q", "seqlen_k", "m_blocks", "tile_rows", "grid")
    found += _integers("split_tiles", "pair_units", "window_left", "window_right", "has_leftpad", "lse_rows")
    found += [*_integers("num_pages"), *_strides("table")] if spec.page_size else _integers("has_batch_idx")
    found += _integers("members", "own_seqlen_k") if spec.offset_tensor else []
    return (*found, *_strides("qb", "qs", "qh", "kp", "ks", "kh", "vp", "vs", "vh", "ob", "os", "oh"))


def _reduce_parameters(spec: Specialization) -> tuple[Parameter, ...]:
    found = [*_pointers(spec, "O"), Parameter(name="LSE", type="*fp32"), *_sinks(spec), *PARTS]
    found += _integers("nheads_k", "group_size", "seqlen_q", "m_blocks", "tile_rows", "split_tiles", "lse_rows")
    found += _integers("members") if spec.offset_tensor else []
    return (*found, *_strides("ob", "os", "oh"))


def _kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    def programs(device: Device, sizes: Sizes) -> int:
        return device.num_sms * config.integer("per_sm")

    def reduce_programs(device: Device, sizes: Sizes) -> int:
        rows = sizes.seqlen_q * (sizes.nheads // sizes.nheads_k)
        return programs(device, sizes) * min(rows, config.integer("block_m"))

    options = CompileOptions(
        num_warps=config.integer("num_warps"),
        num_stages=config.integer("num_stages"),
        maxnreg=config.integer("maxnreg"),
    )
    reduce_options = CompileOptions(num_warps=config.integer("reduce_warps"), num_stages=1)
    return (
        KernelSpec(entry=FAMILY_ID, parameters=_main_parameters(spec), options=options, programs=programs),
        KernelSpec(entry=REDUCE, parameters=_reduce_parameters(spec), options=reduce_options, programs=reduce_programs),
    )


def _values(spec: Specialization, config: Config) -> dict[str, object]:
    multiple = ALIGNMENT_BYTES // DTYPE_BYTES[spec.dtype] if spec.aligned16 else 1
    page = spec.page_size or 0
    tensors = ("qb", "qs", "qh", "kp", "ks", "kh", "vp", "vs", "vh", "ob", "os", "oh")
    scales = ["softcap_rate", "softcap_scale_log2"] if spec.softcap else ["softmax_scale_log2"]
    places = ["acc", "l_i", "m_i", "q", "k_base", "v_base", *(["table", "num_pages"] if page else ["cache_row"])]
    places += ["tile", "first", "end", "low", "limit", *(["position", "slope"] if spec.alibi else []), *scales]
    return {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "block_d": tile_side(spec.head_dim),
        "block_dv": tile_side(spec.head_dim_v),
        "tl_dtype": TL_DTYPES[spec.dtype],
        "aligned16": spec.aligned16,
        "paged": bool(page),
        "page_size": page,
        "hidden_ids": bool(page) and config["page_ids"] == "asm",
        "whole_pages": bool(page) and page % config.integer("block_n") == 0,
        "softcap": spec.softcap,
        "exact_softcap": False,
        "alibi": spec.alibi,
        "sink": spec.sink,
        "shared": spec.offset_tensor,
        "scales": scales,
        "strides": [(f"stride_{name}", multiple) for name in tensors],
        "step_arguments": [*places, "stride_kp", "stride_ks", "stride_vp", "stride_vs"],
        **dict(config.knobs),
    }


PORTABLE_DECODE = KernelFamily(
    id=FAMILY_ID,
    title="Flash-decoding in plain Triton",
    template="portable_decode/portable_decode.py.jinja",
    direction="decode",
    knobs=KNOBS,
    features=frozenset({"causal", "window", "softcap", "alibi", "sinks", "q_offset", "pages", "deterministic"}),
    unsupported=_unsupported,
    invalid=_invalid,
    default=default_config,
    template_values=_values,
    kernels=_kernels,
    fitted=fitted,
)
