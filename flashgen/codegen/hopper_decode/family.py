"""The Hopper decode family: flash-decoding with warp specialization, over contiguous and paged caches, in two kernels.

It has the parameters, the schedules and the merge of the portable family; the kernel that reads the keys is in Gluon.
Keys are copied by `cp.async` and not by TMA: a launch writes nothing but pointers and numbers, pages are of any size,
and rows that nobody sees are not read.
"""

from __future__ import annotations

from flashgen.codegen.common_decode import (
    BATCH_PAD,
    BATCH_PADS,
    CHUNK,
    CHUNKS,
    EARLY,
    MAIN_NUMBERS,
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
    is_grid,
    schedule_numbers,
    why_no_merge,
    why_unused,
    zero_bits,
)
from flashgen.codegen.common_types import GL_DTYPES, TL_DTYPES
from flashgen.codegen.common_wgmma import ROWS
from flashgen.codegen.family import CompileOptions, KernelFamily, KernelSpec, Knob, KnobRows
from flashgen.codegen.hopper_decode.defaults import (
    FAMILY_ID,
    default_config,
    fitted,
    poor_at_sizes,
    seed_configs,
    slower_at,
    usual,
)
from flashgen.codegen.hopper_decode.resources import (
    CONSUMER_WARPS,
    FEW_ROWS,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    q_stages,
    register_limit,
    why_too_large,
)
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

HEAD_DIMS = (64, 128, 256)
"""A row is copied by 8, 16 or 32 lanes, 16 bytes each; others would be padded."""

KNOBS = (
    SCHEDULE,
    Knob(
        name="block_m",
        values=(*FEW_ROWS, ROWS),
        meaning="query rows of a program: as rows of the products 64, as columns of their transposes fewer",
    ),
    Knob(name="block_n", values=(32, 64, 128), meaning="keys of a step"),
    Knob(name="num_stages", values=(2, 3, 4, 6, 8), meaning="slots of the ring of K and V"),
    Knob(
        name="per_sm",
        values=(1, 2, 3),
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
    EARLY,
    PDL,
)


def _unsupported(spec: Specialization, device: Device) -> str | None:
    if not device.has_wgmma:
        return f"it needs sm90, not {device.arch}"
    if spec.dtype not in GL_DTYPES:
        return f"its caches are in bf16 or fp16, not {spec.dtype}"
    if spec.head_dim not in HEAD_DIMS or spec.head_dim_v != spec.head_dim:
        return f"its heads are of 64, 128 or 256, of K and of V, not {spec.head_dim} and {spec.head_dim_v}"
    if not spec.aligned16:
        return "it copies 16 bytes at a time, and rows begin anywhere"
    return None


def _invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    return why_unused(config) or why_no_merge(spec, config, device) or why_too_large(spec, config, device)


def _kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    options = CompileOptions(num_warps=CONSUMER_WARPS, num_stages=1, maxnreg=register_limit(config))
    return both_kernels(spec, config, options, language="gluon")


def _searched(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    return {
        "min_tiles": (1,),
        "batch_pad": BATCH_PADS[:1],
        "partials": (default_partials(spec),),
        "reduce_warps": (1,),
        "early": (False,),
        "pdl": (True,),
    }


SCHEDULES = KnobRows(
    names=("schedule", "chunk", "slack", "slack_percent", "overhead"),
    rows=(
        *(("shares", CHUNKS[0], slack, percent, 4) for slack, percent in ((0, 0), (4, 0), (4, 8), (16, 0))),
        *(("grid", chunk, *ONLY_SHARES.values()) for chunk in (0, 2048, 4096)),
    ),
)
"""Those that a search looks at, each with the knobs that it reads."""


def _values(spec: Specialization, config: Config) -> dict[str, object]:
    page = spec.page_size or 0
    whole_pages = bool(page) and page % config.integer("block_n") == 0
    caches = ["K", "V", *(f"stride_{tensor}{axis}" for tensor in "kv" for axis in "psh")]
    return {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "gl_dtype": GL_DTYPES[spec.dtype],
        "tl_dtype": TL_DTYPES[spec.dtype],
        "zero_bits": zero_bits(spec),
        "paged": bool(page),
        "page_size": page,
        "whole_pages": whole_pages,
        "row_pages": bool(page) and not whole_pages,
        "aligned_steps": True,
        "parted_tiles": False,
        "rebased": not page,
        "same_cuts": False,
        "shared": False,
        "sink": spec.sink,
        "few_rows": config["block_m"] != ROWS,
        "q_stages": q_stages(spec, config),
        "producer_warps": PRODUCER_WARPS,
        "producer_registers": PRODUCER_REGISTERS[config.integer("per_sm")],
        "maxnreg": register_limit(config),
        "sizes": [*MAIN_NUMBERS, *schedule_numbers(config), *([] if is_grid(config) else ["blocks_of_sequence"])],
        "lists": ["Lens", "Leftpad", "has_leftpad", *([] if page else ["BatchIdx", "has_batch_idx"])],
        "caches": [*caches, *(["Table", "stride_table", "num_pages"] if page else [])],
        **dict(config.knobs),
    }


HOPPER_DECODE = KernelFamily(
    id=FAMILY_ID,
    title="Flash-decoding with warp specialization",
    template="hopper_decode/hopper_decode.py.jinja",
    direction="decode",
    knobs=KNOBS,
    features=frozenset({"causal", "window", "sinks", "pages", "deterministic"}),
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
    slower_at=slower_at,
    poor_at_sizes=poor_at_sizes,
)
