"""The kernels of the Hopper backward families: what a launch binds, how many programs it has, what they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flashgen.codegen.common_groups import key_heads, leaves_sums, programs_of_sums, sums_of_parts
from flashgen.codegen.common_mods import mod_parameters
from flashgen.codegen.common_scores import score_parameters
from flashgen.codegen.common_sequences import SEQUENCE_POINTERS, SEQUENCE_SIZES, key_blocks, sequence_parameters
from flashgen.codegen.common_wgmma import ROWS, block, descriptor_type, widest_block
from flashgen.codegen.family import CompileOptions, KernelSpec, Parameter, Scratch, Sizes
from flashgen.codegen.hopper_backward import resources, scores
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import LaunchError
from flashgen.core.workload import Specialization

PREPARE_ROWS = 32
"""Rows of a program of the first kernel; 16 to 128 took the same time on dense tensors."""

PREPARE_ROWS_OF_SEQUENCES = 64
"""Of packed sequences with narrow heads, where a program finds its sequence first: 0.91 to 0.97 of what 32 take."""

LINE = 32
"""Sums of dq in a line of 128 bytes, as TMA swizzles it."""

Boxes = dict[str, tuple[int, int]]
"""By the name of a descriptor: rows and columns of what it copies at a time."""

_FP32 = ("LSE", "DLSE", "NegDelta", "LseStart", "DpStart", "DqAcc", "TilesDone", "DkParts", "DvParts")
_WIDE_ACCESS = ("DqAcc", "DkParts", "DvParts")
"""Scratch memory that kernels without TMA read or write 16 bytes at a time."""

_FLOATS = ("softmax_scale", "softmax_scale_log2")


def kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    """The kernels of a config, in the order of their launches."""
    found = [_prepare(spec, config), _over_keys(spec, config)]
    if not resources.is_fused(config):
        found.append(_over_queries(spec, config))
    elif config["dq_conversion"] == "kernel":
        found.append(_finish(spec, config))
    if leaves_sums(config):
        found.append(_sum(spec, config))
    # all but the first read what kernels in front of them wrote, and wait for those themselves
    return (found[0], *(dataclasses.replace(kernel, overlaps=True) for kernel in found[1:]))


def scratch(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    """What the kernels share: two values for every row, and the sums of dq that another kernel or tile converts."""
    rows = _padded_rows(spec, config, sizes)
    by_row = (sizes.batch, sizes.nheads, rows)
    if spec.varlen:
        # the first one is for others, who know rows by their number; sums begin in whole blocks
        found = [Scratch(name="neg_delta", shape=(sizes.batch, sizes.nheads, sizes.seqlen_q))]
        found += [Scratch(name="lse_start", shape=by_row), Scratch(name="dp_start", shape=by_row)]
    else:
        found = [Scratch(name="neg_delta", shape=by_row), Scratch(name="lse_start", shape=by_row)]
    if resources.adds_dq(config):
        lines = sizes.batch * sizes.nheads * rows * block(spec.head_dim) // LINE
        found.append(Scratch(name="dq_acc", shape=(lines, LINE)))
    if resources.converts(config):
        # counts of the warpgroups that have added all of a tile, by key head
        found.append(Scratch(name="tiles_done", shape=(sizes.batch * sizes.nheads,)))
    found += sums_of_parts(config, sizes, block(spec.head_dim), block(spec.head_dim_v))
    return tuple(found)


def prepare_rows(spec: Specialization) -> int:
    """Rows of a program of the first kernel, which divide the blocks of every config."""
    return PREPARE_ROWS_OF_SEQUENCES if spec.varlen and widest_block(spec) <= ROWS else PREPARE_ROWS


def _prepare(spec: Specialization, config: Config) -> KernelSpec:
    names = ["O", "DO", "LSE", "DLSE", "NegDelta", "LseStart", *(["DpStart"] if spec.varlen else [])]
    names += ["DqAcc"] if resources.adds_dq(config) else []
    names += ["TilesDone"] if resources.converts(config) else []
    scale = [] if scores.starts_at_zero(spec) else ["softmax_scale_log2"]
    names += [*_strides(spec, "o"), *_strides(spec, "do"), *scale, "nheads", *_query_rows(spec)]
    names.append("dlse_rows")

    def programs(device: Device, sizes: Sizes) -> int:
        return _padded_rows(spec, config, sizes) // prepare_rows(spec) * sizes.batch * sizes.nheads

    return _triton(config, "prepare", _parameters(spec, names, {}), programs, num_warps=8)


def _over_keys(spec: Specialization, config: Config) -> KernelSpec:
    block_m, fused = config.integer("block_m"), resources.is_fused(config)
    width, width_v, columns = block(spec.head_dim), block(spec.head_dim_v), resources.dq_columns(spec, config)
    boxes = {"q": (block_m, width), "k": (ROWS, width), "v": (ROWS, width_v)}
    boxes |= {"do": (block_m, width_v), "dk": boxes["k"], "dv": boxes["v"], "dq": (ROWS, columns)}
    dp_start = "dp_start" if spec.varlen else "neg_delta"
    boxes |= {"lse_start": (block_m, 1), dp_start: (block_m, 1), "dq_acc": (ROWS * columns // LINE, LINE)}
    names = ["q_desc", "k_desc", "v_desc", "do_desc", "lse_start_desc", f"{dp_start}_desc"]
    names += ["dq_acc_desc"] if resources.adds_dq(config) else []
    names += ["dq_desc"] if resources.converts(config) or resources.writes_dq(config) else []
    names += ["DqAcc", "TilesDone"] if resources.converts(config) else []
    names += [*resources.key_gradients(config), *(["Counter"] if config["persistent"] else []), *_sizes(spec)]

    def programs(device: Device, sizes: Sizes) -> int:
        _check_keys(config, sizes)
        if spec.varlen:
            return min(key_blocks(sizes, resources.block_n(spec)) * key_heads(config, sizes), device.num_sms)
        tiles = -(-sizes.seqlen_k // resources.block_n(spec))
        if resources.converts(config):
            blocks = _padded_rows(spec, config, sizes) // block_m * (sizes.nheads // sizes.nheads_k)
            tiles += -(-blocks // resources.PART_BLOCKS)
        tiles *= sizes.batch * key_heads(config, sizes)
        return min(tiles, device.num_sms) if config["persistent"] else tiles

    return _gluon(config, "main" if fused else "dkdv", _parameters(spec, names, boxes), programs)


def _check_keys(config: Config, sizes: Sizes) -> None:
    """Refuse what would be wrong without a word: a tile that writes dq of some of the keys.

    Raises:
        LaunchError: there are more keys than a tile has.
    """
    if reason := resources.why_not_written(config, sizes):
        raise LaunchError(reason)


def _over_queries(spec: Specialization, config: Config) -> KernelSpec:
    block_n = config.integer("dq_block_n")
    width, width_v = block(spec.head_dim), block(spec.head_dim_v)
    boxes = {"q": (ROWS, width), "k": (block_n, width), "v": (block_n, width_v)}
    boxes |= {"do": (ROWS, width_v), "dq": boxes["q"]}
    dp_start = "DpStart" if spec.varlen else "NegDelta"
    names = ["q_desc", "k_desc", "v_desc", "do_desc", "dq_desc", "LseStart", dp_start, *_sizes(spec)]

    def programs(device: Device, sizes: Sizes) -> int:
        if spec.varlen:
            return _blocks_of_sequences(sizes, 2 * ROWS) * sizes.nheads
        return -(-sizes.seqlen_q // (2 * ROWS)) * sizes.batch * sizes.nheads

    return _gluon(config, "dq", _parameters(spec, names, boxes, by_keys=False), programs)


def _finish(spec: Specialization, config: Config) -> KernelSpec:
    names = ["DqAcc", "DQ", *_strides(spec, "dq"), "softmax_scale", "nheads", *_query_rows(spec)]

    def programs(device: Device, sizes: Sizes) -> int:
        return _padded_rows(spec, config, sizes) // config.integer("block_m") * 2 * sizes.batch * sizes.nheads

    return _triton(config, "finish", _parameters(spec, names, {}), programs, num_warps=4)


def _sum(spec: Specialization, config: Config) -> KernelSpec:
    names = ["DkParts", "DvParts", "DK", "DV", *_strides(spec, "dk"), *_strides(spec, "dv"), "softmax_scale", "nheads"]
    names += ["group_size", "total_k" if spec.varlen else "seqlen_k"]

    return _triton(
        config, "sum", _parameters(spec, names, {}), lambda device, sizes: programs_of_sums(sizes), num_warps=4
    )


def _padded_rows(spec: Specialization, config: Config, sizes: Sizes) -> int:
    block_m = config.integer("block_m")
    if spec.varlen:
        return _blocks_of_sequences(sizes, block_m) * block_m
    return -(-sizes.seqlen_q // block_m) * block_m


def _blocks_of_sequences(sizes: Sizes, rows: int) -> int:
    """Blocks of so many query rows, of which sequence b has those from number `cu_seqlens_q[b] // rows + b` on.

    So a program finds where a sequence's blocks begin without counting those before it. The last one is for the rows
    that no sequence has.
    """
    return sizes.seqlen_q // rows + sizes.sequences + 1


Programs = Callable[[Device, Sizes], int]


def _triton(
    config: Config, what: str, parameters: tuple[Parameter, ...], programs: Programs, num_warps: int
) -> KernelSpec:
    options = CompileOptions(num_warps=num_warps, num_stages=1)
    return KernelSpec(entry=f"{config.family}_{what}", parameters=parameters, options=options, programs=programs)


def _gluon(config: Config, what: str, parameters: tuple[Parameter, ...], programs: Programs) -> KernelSpec:
    options = CompileOptions(num_warps=4, num_stages=1, maxnreg=resources.MAXNREG)
    entry = f"{config.family}_{what}"
    return KernelSpec(entry=entry, parameters=parameters, options=options, programs=programs, language="gluon")


def _parameters(spec: Specialization, names: list[str], boxes: Boxes, *, by_keys: bool = True) -> tuple[Parameter, ...]:
    """Parameters by name; `scores` stands for all that make scores of products, `lengths` for those of sequences."""
    found: list[Parameter] = []
    for name in names:
        if name == "scores":
            found += [*score_parameters(spec), *mod_parameters(spec, by_keys=by_keys)]
        elif name == "lengths":
            found += sequence_parameters(spec)
        else:
            found.append(_parameter(spec, name, boxes))
    return tuple(found)


def _sizes(spec: Specialization) -> list[str]:
    if spec.varlen:
        return ["scores", "softmax_scale", "nheads", "group_size", "lengths", *SEQUENCE_SIZES]
    return ["scores", "softmax_scale", "batch", "nheads", "group_size", "seqlen_q", "seqlen_k"]


def _query_rows(spec: Specialization) -> list[str]:
    """What tells the rows of queries to the kernels of rows."""
    return ["CuSeqlensQ", "SeqUsedQ", "has_seqused_q", "sequences", "total_q"] if spec.varlen else ["seqlen_q"]


def _parameter(spec: Specialization, name: str, boxes: Boxes) -> Parameter:
    if name.endswith("_desc"):
        return Parameter(name=name, type=_descriptor(spec, name.removesuffix("_desc"), boxes))
    if name in ("O", "DO", "DQ", "DK", "DV"):
        return Parameter(name=name, type=f"*{spec.dtype}", aligned16=True)
    if name in _FP32:
        return Parameter(name=name, type="*fp32", aligned16=name in _WIDE_ACCESS)
    if name == "Counter" or name in SEQUENCE_POINTERS:
        return Parameter(name=name, type="*i32")
    if name.startswith("stride_"):
        return Parameter(name=name, type="i64")
    return Parameter(name=name, type="fp32" if name in _FLOATS else "i32")


def _descriptor(spec: Specialization, name: str, boxes: Boxes) -> str:
    rows, columns = boxes[name]
    if name in ("lse_start", "neg_delta", "dp_start"):
        return f"tensordesc<fp32[1, 1, {rows}],{_fp32_layout(0, 3)}>"
    if name == "dq_acc":
        return f"tensordesc<fp32[{rows}, {columns}],{_fp32_layout(128, 2)}>"
    # of packed sequences one axis more says where one ends
    return descriptor_type(spec.dtype, *([1] if spec.varlen else []), rows, columns)


def _fp32_layout(swizzle: int, rank: int) -> str:
    return (
        f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth=32, rank={rank}, transposed=False, "
        "fp4_padded=False, cga_layout=[])"
    )


def _strides(spec: Specialization, tensor: str) -> list[str]:
    """Packed sequences are one batch element."""
    return [f"stride_{tensor}{axis}" for axis in ("hs" if spec.varlen else "bhs")]
