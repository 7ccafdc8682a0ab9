"""The portable decode family: flash-decoding over contiguous and paged caches in plain Triton, in two kernels."""

from __future__ import annotations

from flashgen.codegen.common_decode import (
    BATCH_PAD,
    BATCH_PADS,
    CHUNK,
    CHUNKS,
    EARLY,
    MERGE_ROWS,
    MIN_TILES,
    ONLY_SHARES,
    OVERHEAD,
    PARTIALS,
    PDL,
    REDUCE_WARPS,
    SCHEDULE,
    SLACK,
    SLACK_PERCENT,
    both_kernels,
    default_partials,
    why_no_merge,
    why_unused,
    zero_bits,
)
from flashgen.codegen.common_portable import MIN_WARPGROUP_ROWS
from flashgen.codegen.common_types import TL_DTYPES
from flashgen.codegen.family import CompileOptions, KernelFamily, KernelSpec, Knob, KnobRows
from flashgen.codegen.head_parts import tile_side
from flashgen.codegen.portable_decode.defaults import (
    BLOCK_MS,
    FAMILY_ID,
    FEWEST_ROWS,
    default_config,
    fitted,
    has_parted_tiles,
    poor_at_sizes,
    seed_configs,
    usual,
)
from flashgen.codegen.portable_decode.resources import register_limit, uses_wgmma, why_too_large
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MIN_WARP_KEYS = 16
"""Keys that `tl.dot` sums at least."""

KNOBS = (
    SCHEDULE,
    Knob(name="block_m", values=(FEWEST_ROWS, *BLOCK_MS), meaning="query rows of a program"),
    Knob(
        name="padded_rows",
        values=(False, True),
        meaning="query rows padded to those that a warpgroup multiplies: it reads keys from shared memory",
        default=False,
        implied=True,
    ),
    Knob(name="block_n", values=(16, 32, 64, 128), meaning="keys of a step"),
    Knob(name="num_warps", values=(1, 2, 4, 8), meaning="warps of a program"),
    Knob(name="num_stages", values=(1, 2, 3, 4, 5, 6), meaning="depth of the software pipeline over K and V"),
    Knob(
        name="warp_keys",
        values=(False, True),
        meaning="each warp has keys of a step and a softmax of its own: warps meet at the end of a sequence",
    ),
    Knob(
        name="late_sums",
        values=(False, True),
        meaning="row sums over threads and warps taken once, behind the last step",
        default=False,
        implied=True,
    ),
    Knob(
        name="per_sm",
        values=(1, 2, 3, 4, 6),
        meaning="programs for each SM: of a launch, or that splits of sequences make at least",
    ),
    MIN_TILES,
    CHUNK,
    SLACK,
    SLACK_PERCENT,
    OVERHEAD,
    BATCH_PAD,
    PARTIALS,
    REDUCE_WARPS,
    MERGE_ROWS,
    Knob(name="page_ids", values=("asm", "load"), meaning="page ids hidden from the software pipeliner, or seen by it"),
    Knob(
        name="ids_per",
        values=("row", "page"),
        meaning="page ids read for each row, or once for all rows of a page: then steps begin where pages do",
        default="row",
        implied=True,
    ),
    Knob(
        name="ids_ahead",
        values=(False, True),
        meaning="page ids read a step before they are needed",
        default=False,
        implied=True,
    ),
    Knob(
        name="aligned_steps",
        values=(False, True),
        meaning="steps begin at multiples of their keys, or at the first visible key unless they lie in one page",
        default=False,
        implied=True,
    ),
    EARLY,
    PDL,
    Knob(name="maxnreg", values=(0, 128, 168), meaning="register limit of a thread; 0 is what per_sm programs leave"),
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
    if (reason := why_unused(config) or why_no_merge(spec, config, device)) is not None:
        return reason
    if config["warp_keys"] and config.integer("block_n") < MIN_WARP_KEYS * config.integer("num_warps"):
        return f"each warp multiplies {MIN_WARP_KEYS} keys at least"
    if (config["pdl"] or config["early"]) and not device.has_dependent_launch:
        return f"no kernel of {device.arch} is scheduled before the one in front of it has ended"
    if config["padded_rows"] and not (device.has_wgmma and uses_wgmma(config)):
        return f"rows are padded for warpgroups, which multiply {MIN_WARPGROUP_ROWS} at once and exist on sm90 only"
    if config["block_m"] == FEWEST_ROWS and not device.is_nvidia:
        return "half a product is NVIDIA's"
    if config["page_ids"] == "asm" and not device.is_nvidia:
        return "inline assembly is NVIDIA's"
    if config["ids_per"] == "page" and (config["aligned_steps"] or not has_parted_tiles(spec, config["block_n"])):
        return "steps have several pages where an id serves the rows of each, and begin with a page"
    if config["ids_ahead"] and not spec.page_size:
        return "a contiguous cache has no page ids"
    if config["maxnreg"] and not device.is_nvidia:
        return "maxnreg exists on NVIDIA only"
    if config.integer("num_stages") > 2 and not device.is_nvidia:
        return "the AMD pipeliner has two stages"
    return why_too_large(spec, config, device)


def _kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    options = CompileOptions(
        num_warps=config.integer("num_warps"),
        num_stages=config.integer("num_stages"),
        maxnreg=register_limit(config),
    )
    return both_kernels(spec, config, options)


def _searched(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    """What a search looks at: what decides how keys stream in.

    What follows from sizes or from the device is left to `fitted`. Of the rest the default is as good as any, but where
    a list that the search begins with says otherwise: with each value more a search has as many candidates again to
    rank, which took it longer than trying them.
    """
    ids: tuple[KnobValue, ...] = ("asm", "load") if spec.page_size else ("asm",)
    return {
        "block_m": (FEWEST_ROWS, BLOCK_MS[0]),
        "padded_rows": (False,),
        "num_stages": (2, 3, 4),
        "per_sm": (1, 2, 3, 4),
        "min_tiles": (1,),
        "batch_pad": BATCH_PADS[:1],
        "partials": (default_partials(spec),),
        "reduce_warps": (1,),
        "page_ids": ids,
        "ids_per": ("row", "page") if spec.page_size else ("row",),
        "ids_ahead": (False, True) if spec.page_size else (False,),
        "aligned_steps": (False,),
        "early": (False,),
        "pdl": (False,),
        "maxnreg": (0,),
    }


SCHEDULES = KnobRows(
    names=("schedule", "chunk", "slack", "slack_percent", "overhead"),
    rows=(
        *(("shares", CHUNKS[0], slack, percent, 4) for slack, percent in ((0, 0), (4, 0), (4, 8))),
        *(("grid", chunk, *ONLY_SHARES.values()) for chunk in (0, 4096)),
    ),
)
"""Those that a search looks at, each with the knobs that it reads."""


def _values(spec: Specialization, config: Config) -> dict[str, object]:
    page = spec.page_size or 0
    tensors = ("qb", "qs", "qh", "kp", "ks", "kh", "vp", "vs", "vh", "ob", "os", "oh")
    scales = ["softcap_rate", "softcap_scale_log2"] if spec.softcap else ["softmax_scale_log2"]
    bases = ["q", "k_base", "v_base", *(["table", "num_pages"] if page else ["cache_row"])]
    scores = [
        "first",
        "end",
        "low",
        "limit",
        "whole_low",
        "whole_limit",
        *(["position", "slope"] if spec.alibi else []),
        *scales,
    ]
    rows = ["stride_kp", "stride_ks", "stride_vp", "stride_vs"]
    step = ["acc", "l_i", "m_i", *(["ids"] if config["ids_ahead"] else []), *bases, "tile", *scores, *rows]
    owner = "sequence" if spec.offset_tensor else "b"
    output = ["o", "lse", owner, "h", "query", "row_ok", "O", "LSE", *(["Sinks"] if spec.sink else [])]
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
        "rebased": config["aligned_steps"] and not page and not spec.offset_tensor,
        "same_cuts": config["aligned_steps"] and spec.offset_tensor,
        "parted_tiles": config["ids_per"] == "page",
        "given_pages": config["ids_per"] == "page" or config["ids_ahead"],
        "softcap": spec.softcap,
        "exact_softcap": False,
        "alibi": spec.alibi,
        "sink": spec.sink,
        "shared": spec.offset_tensor,
        "owner": owner,
        "scales": scales,
        "strides": [(f"stride_{name}", zero_bits(spec)) for name in tensors],
        "step_arguments": step,
        "step_parameters": ["row" if name == "cache_row" else name for name in step],
        "attend_parameters": [*bases, "start", "stop", *scores, *rows],
        "output_arguments": [*output, "nheads", "seqlen_q", "lse_rows", "stride_ob", "stride_os", "stride_oh"],
        **dict(config.knobs),
        "maxnreg": register_limit(config),
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
    seed_configs=seed_configs,
    allowed_values=_searched,
    knob_rows=lambda: SCHEDULES,
    fitted=fitted,
    usual=usual,
    poor_at_sizes=poor_at_sizes,
)
