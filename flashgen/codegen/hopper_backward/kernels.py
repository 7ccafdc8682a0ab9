"""The kernels of the Hopper backward families: what a launch binds, how many programs it has, what they share."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.codegen.common_scores import score_parameters
from flashgen.codegen.common_wgmma import ROWS, block, descriptor_type
from flashgen.codegen.family import CompileOptions, KernelSpec, Parameter, Scratch, Sizes
from flashgen.codegen.hopper_backward import resources
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

PREPARE_ROWS = 32
"""Rows of a program of the first kernel; 16 to 128 took the same time."""

LINE = 32
"""Sums of dq in a line of 128 bytes, as TMA swizzles it."""

Boxes = dict[str, tuple[int, int]]
"""By the name of a descriptor: rows and columns of what it copies at a time."""

_SIZES = ["softmax_scale", "batch", "nheads", "group_size", "seqlen_q", "seqlen_k"]
_FP32 = ("LSE", "DLSE", "NegDelta", "LseStart", "DqAcc", "TilesDone")
_FLOATS = ("softmax_scale", "softmax_scale_log2")


def kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    """The kernels of a config, in the order of their launches."""
    found = (_prepare(spec, config), _over_keys(spec, config))
    if resources.converts(config):
        return found
    return (*found, _finish(spec, config) if resources.is_fused(config) else _over_queries(spec, config))


def scratch(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    """What the kernels share: two values for every row, and the sums of dq that another kernel or tile converts."""
    rows = _padded_rows(config, sizes)
    by_row = (sizes.batch, sizes.nheads, rows)
    found = [Scratch(name="neg_delta", shape=by_row), Scratch(name="lse_start", shape=by_row)]
    if resources.is_fused(config):
        lines = sizes.batch * sizes.nheads * rows * block(spec.head_dim) // LINE
        found.append(Scratch(name="dq_acc", shape=(lines, LINE)))
    if resources.converts(config):
        # counts of the warpgroups that have added all of a tile, by key head
        found.append(Scratch(name="tiles_done", shape=(sizes.batch * sizes.nheads,)))
    return tuple(found)


def _prepare(spec: Specialization, config: Config) -> KernelSpec:
    names = ["O", "DO", "LSE", "DLSE", "NegDelta", "LseStart", *(["DqAcc"] if resources.is_fused(config) else [])]
    names += ["TilesDone"] if resources.converts(config) else []
    names += [*_strides("o"), *_strides("do"), "softmax_scale_log2", "nheads", "seqlen_q", "dlse_rows"]

    def programs(device: Device, sizes: Sizes) -> int:
        return _padded_rows(config, sizes) // PREPARE_ROWS * sizes.batch * sizes.nheads

    return _triton(config, "prepare", _parameters(spec, names, {}), programs, num_warps=8)


def _over_keys(spec: Specialization, config: Config) -> KernelSpec:
    block_m, fused = config.integer("block_m"), resources.is_fused(config)
    columns = resources.dq_columns(spec, config)
    boxes = {"q": (block_m, spec.head_dim), "k": (ROWS, spec.head_dim), "v": (ROWS, spec.head_dim_v)}
    boxes |= {"do": (block_m, spec.head_dim_v), "dk": boxes["k"], "dv": boxes["v"], "dq": (ROWS, columns)}
    boxes |= {"lse_start": (block_m, 1), "neg_delta": (block_m, 1), "dq_acc": (ROWS * columns // LINE, LINE)}
    names = ["q_desc", "k_desc", "v_desc", "do_desc", "lse_start_desc", "neg_delta_desc"]
    names += ["dq_acc_desc"] if fused else []
    names += ["dq_desc", "DqAcc", "TilesDone"] if resources.converts(config) else []
    names += ["dk_desc", "dv_desc", *(["Counter"] if config["persistent"] else []), "scores", *_SIZES]

    def programs(device: Device, sizes: Sizes) -> int:
        tiles = -(-sizes.seqlen_k // resources.block_n(spec))
        if resources.converts(config):
            blocks = _padded_rows(config, sizes) // block_m * (sizes.nheads // sizes.nheads_k)
            tiles += -(-blocks // resources.PART_BLOCKS)
        tiles *= sizes.batch * sizes.nheads_k
        return min(tiles, device.num_sms) if config["persistent"] else tiles

    return _gluon(config, "main" if fused else "dkdv", _parameters(spec, names, boxes), programs)


def _over_queries(spec: Specialization, config: Config) -> KernelSpec:
    block_n = config.integer("dq_block_n")
    boxes = {"q": (ROWS, spec.head_dim), "k": (block_n, spec.head_dim), "v": (block_n, spec.head_dim_v)}
    boxes |= {"do": (ROWS, spec.head_dim_v), "dq": boxes["q"]}
    names = ["q_desc", "k_desc", "v_desc", "do_desc", "dq_desc", "LseStart", "NegDelta", "scores", *_SIZES]

    def programs(device: Device, sizes: Sizes) -> int:
        return -(-sizes.seqlen_q // (2 * ROWS)) * sizes.batch * sizes.nheads

    return _gluon(config, "dq", _parameters(spec, names, boxes), programs)


def _finish(spec: Specialization, config: Config) -> KernelSpec:
    names = ["DqAcc", "DQ", *_strides("dq"), "softmax_scale", "nheads", "seqlen_q"]

    def programs(device: Device, sizes: Sizes) -> int:
        return _padded_rows(config, sizes) // config.integer("block_m") * 2 * sizes.batch * sizes.nheads

    return _triton(config, "finish", _parameters(spec, names, {}), programs, num_warps=4)


def _padded_rows(config: Config, sizes: Sizes) -> int:
    block_m = config.integer("block_m")
    return -(-sizes.seqlen_q // block_m) * block_m


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


def _parameters(spec: Specialization, names: list[str], boxes: Boxes) -> tuple[Parameter, ...]:
    """Parameters by name; `scores` stands for those that make scores of products."""
    found: list[Parameter] = []
    for name in names:
        found += score_parameters(spec) if name == "scores" else [_parameter(spec, name, boxes)]
    return tuple(found)


def _parameter(spec: Specialization, name: str, boxes: Boxes) -> Parameter:
    if name.endswith("_desc"):
        return Parameter(name=name, type=_descriptor(spec, name.removesuffix("_desc"), boxes))
    if name in ("O", "DO", "DQ"):
        return Parameter(name=name, type=f"*{spec.dtype}", aligned16=True)
    if name in _FP32:
        return Parameter(name=name, type="*fp32", aligned16=name == "DqAcc")
    if name == "Counter":
        return Parameter(name=name, type="*i32")
    if name.startswith("stride_"):
        return Parameter(name=name, type="i64")
    return Parameter(name=name, type="fp32" if name in _FLOATS else "i32")


def _descriptor(spec: Specialization, name: str, boxes: Boxes) -> str:
    rows, columns = boxes[name]
    if name in ("lse_start", "neg_delta"):
        return f"tensordesc<fp32[1, 1, {rows}],{_fp32_layout(0, 3)}>"
    if name == "dq_acc":
        return f"tensordesc<fp32[{rows}, {columns}],{_fp32_layout(128, 2)}>"
    return descriptor_type(spec.dtype, rows, block(columns))


def _fp32_layout(swizzle: int, rank: int) -> str:
    return (
        f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth=32, rank={rank}, transposed=False, "
        "fp4_padded=False, cga_layout=[])"
    )


def _strides(tensor: str) -> list[str]:
    return [f"stride_{tensor}{axis}" for axis in "bhs"]
