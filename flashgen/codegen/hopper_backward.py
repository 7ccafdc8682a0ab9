"""The Hopper backward families: FlashAttention-2's Algorithm 2 with warp-specialised roles in Gluon, for sm90."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.codegen import hopper_backward_resources as resources
from flashgen.codegen import hopper_backward_text as text
from flashgen.codegen.family import CompileOptions, Kernel, KernelFamily, Knob, Parameter, Scratch, Sizes
from flashgen.codegen.hopper_forward import GL_DTYPES, HEAD_DIMS, descriptor_type
from flashgen.codegen.hopper_resources import ROWS, block
from flashgen.codegen.score_parameters import score_parameters
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

FUSED_ID = "hopper_backward_fused"
SPLIT_ID = "hopper_backward_split"

_COMMON = (
    Knob(name="block_m", values=(64, 128), meaning="queries of a step"),
    Knob(name="q_stages", values=(2, 3), meaning="slots for blocks of Q"),
    Knob(name="do_stages", values=(1, 2), meaning="slots for blocks of dO"),
    Knob(
        name="starts",
        values=("late", "early"),
        meaning="dp gets the values that its sums begin with while s is computed, or both before the first product",
    ),
    Knob(
        name="barriers",
        values=("mbarrier", "named"),
        meaning="what slots are released by and warpgroups meet at: barriers in shared memory, or the hardware's own",
    ),
    Knob(
        name="heads_per_group",
        values=(1, 2, 4, 8, 16),
        meaning="order of programs: 1 blocks fastest, n heads fastest in groups of n, most work first",
    ),
)
FUSED_KNOBS = (
    *_COMMON,
    Knob(
        name="dq_path",
        values=("inline", "writer", "atomic"),
        meaning="dq is added by the copy engine, started by its warpgroup or by a warp of its own, or by atomics",
    ),
)
SPLIT_KNOBS = (
    *_COMMON,
    Knob(name="dq_block_n", values=(64, 128), meaning="keys of a step of the kernel for dq"),
    Knob(name="dq_stages", values=(2, 3), meaning="slots for blocks of K and of V in the kernel for dq"),
)


def _why_not(spec: Specialization, device: Device) -> str | None:
    if device.arch != "sm90":
        return f"it needs sm90, not {device.arch}"
    if spec.mods:
        return "no gradient through functions of the caller"
    for name in ("varlen", "softcap", "alibi"):
        if getattr(spec, name):
            return f"it has no {name}"
    for name in ("bias", "mask"):
        if getattr(spec, name):
            return f"it reads no {name}"
    if spec.page_size is not None:
        return "it reads no paged keys"
    if spec.dtype not in GL_DTYPES:
        return f"its matrix unit multiplies bf16 and fp16, not {spec.dtype}"
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if size not in HEAD_DIMS:
            return f"its {name} is one of {', '.join(map(str, HEAD_DIMS))}, not {size}"
    if not spec.aligned16:
        return "the copy engine needs pointers and strides that are multiples of 16 bytes"
    return None


def _why_not_fused(spec: Specialization, device: Device) -> str | None:
    if resources.is_wide(spec):
        return "heads of more than 128 columns leave no registers for a block of dq beside dk and dv"
    return _why_not(spec, device)


def _why_invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    width = max(block(spec.head_dim), block(spec.head_dim_v))
    if config["block_m"] == 2 * ROWS and width > ROWS:
        return "dk, dv and scores of 128 queries take more registers than a thread has at heads of more than 64 columns"
    if spec.causal and config["heads_per_group"] == 1:
        return "programs with the most queries start first, and only groups of heads have an order for that"
    if not (spec.causal or spec.window) and config["heads_per_group"] != 1:
        return "without a mask all blocks of keys are equally heavy"
    if dict(config.knobs).get("dq_path") == "writer" and config["barriers"] != "named":
        return "a warp that writes dq is told so by named barriers"
    if resources.is_wide(spec) and config["barriers"] != "named":
        return "warpgroups that hand weights to each other do so by named barriers"
    shared = resources.main_bytes(spec, config)
    if config.family == SPLIT_ID:
        shared = max(shared, resources.dq_bytes(spec, config, resources.dq_v_stages(spec, config, device)))
    if shared > device.smem_per_block:
        return f"it needs {shared} bytes of shared memory and a block has {device.smem_per_block}"
    return None


def _default(family_id: str, own: dict[str, KnobValue]) -> Callable[[Specialization, Device], Config]:
    def default(spec: Specialization, device: Device) -> Config:
        wide = max(block(spec.head_dim), block(spec.head_dim_v)) > ROWS
        knobs: dict[str, KnobValue] = {
            "block_m": 64 if wide else 128,
            "q_stages": 2,
            "do_stages": 2,
            "starts": "early" if wide or spec.causal else "late",
            "barriers": "mbarrier",
            "heads_per_group": 8 if spec.causal else 1,
            **own,
        }
        if family_id == SPLIT_ID and not wide:
            knobs["dq_stages"] = 3
        if resources.is_wide(spec):
            knobs |= {"barriers": "named", "dq_block_n": 64}
        return Config.of(family_id, knobs)

    return default


def _parameters(spec: Specialization, names: list[str], boxes: dict[str, tuple[int, int]]) -> tuple[Parameter, ...]:
    """Parameters by name: descriptors of `boxes` have so many rows, of heads with so many columns."""
    scores = {parameter.name: parameter for parameter in score_parameters(spec)}
    found = []
    for name in names:
        if name == "scores":
            found += list(scores.values())
        elif name.endswith("_desc"):
            found.append(Parameter(name=name, type=_descriptor(spec, name, boxes)))
        else:
            found.append(_plain(spec, name))
    return tuple(found)


def _descriptor(spec: Specialization, name: str, boxes: dict[str, tuple[int, int]]) -> str:
    rows, columns = boxes[name.removesuffix("_desc")]
    if name in ("lse_start_desc", "neg_delta_desc"):
        return f"tensordesc<fp32[1, 1, {rows}],{_layout(0, 3)}>"
    if name == "dq_acc_desc":
        return f"tensordesc<fp32[{rows}, {columns}],{_layout(128, 2)}>"
    return descriptor_type(spec.dtype, rows, block(columns))


def _layout(swizzle: int, rank: int) -> str:
    return (
        f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth=32, rank={rank}, transposed=False, "
        "fp4_padded=False, cga_layout=[])"
    )


_FP32 = ("LSE", "DLSE", "NegDelta", "LseStart", "DqAcc")
_FLOATS = ("softmax_scale", "softmax_scale_log2")


def _plain(spec: Specialization, name: str) -> Parameter:
    if name in ("O", "DO", "DQ"):
        return Parameter(name=name, type=f"*{spec.dtype}", aligned16=True)
    if name in _FP32:
        return Parameter(name=name, type="*fp32", aligned16=name == "DqAcc")
    if name.startswith("stride_"):
        return Parameter(name=name, type="i64")
    return Parameter(name=name, type="fp32" if name in _FLOATS else "i32")


_SIZES = ["softmax_scale", "batch", "nheads", "group_size", "seqlen_q", "seqlen_k"]


def _strides(tensor: str) -> list[str]:
    return [f"stride_{tensor}{axis}" for axis in "bhs"]


def _prepare(spec: Specialization, config: Config) -> Kernel:
    fused = config.family == FUSED_ID
    names = ["O", "DO", "LSE", "DLSE", "NegDelta", "LseStart", *(["DqAcc"] if fused else [])]
    names += [*_strides("o"), *_strides("do"), "softmax_scale_log2", "nheads", "seqlen_q", "dlse_rows"]

    def programs(device: Device, sizes: Sizes) -> int:
        return _padded_rows(config, sizes) // text.PREPARE_ROWS * sizes.batch * sizes.nheads

    options = CompileOptions(num_warps=8, num_stages=1)
    return Kernel(
        entry=f"{config.family}_prepare", parameters=_parameters(spec, names, {}), options=options, programs=programs
    )


def _owning_keys(spec: Specialization, config: Config) -> Kernel:
    block_m, path = config.integer("block_m"), dict(config.knobs).get("dq_path")
    chunk = ROWS * resources.dq_columns(spec, config)
    boxes = {"q": (block_m, spec.head_dim), "k": (ROWS, spec.head_dim), "v": (ROWS, spec.head_dim_v)}
    boxes |= {"do": (block_m, spec.head_dim_v), "dk": boxes["k"], "dv": boxes["v"]}
    boxes |= {"lse_start": (block_m, 1), "neg_delta": (block_m, 1), "dq_acc": (chunk // 32, 32)}
    names = ["q_desc", "k_desc", "v_desc", "do_desc", "lse_start_desc", "neg_delta_desc"]
    names += [] if path is None else ["DqAcc" if path == "atomic" else "dq_acc_desc"]
    names += ["dk_desc", "dv_desc", "scores", *_SIZES]

    def programs(device: Device, sizes: Sizes) -> int:
        return -(-sizes.seqlen_k // resources.block_n(spec)) * sizes.batch * sizes.nheads_k

    return _gluon(config, "dkdv" if path is None else "main", _parameters(spec, names, boxes), programs)


def _owning_queries(spec: Specialization, config: Config) -> Kernel:
    block_n = config.integer("dq_block_n")
    boxes = {"q": (ROWS, spec.head_dim), "k": (block_n, spec.head_dim), "v": (block_n, spec.head_dim_v)}
    boxes |= {"do": (ROWS, spec.head_dim_v), "dq": boxes["q"]}
    names = ["q_desc", "k_desc", "v_desc", "do_desc", "dq_desc", "LseStart", "NegDelta", "scores", *_SIZES]

    def programs(device: Device, sizes: Sizes) -> int:
        return -(-sizes.seqlen_q // (2 * ROWS)) * sizes.batch * sizes.nheads

    return _gluon(config, "dq", _parameters(spec, names, boxes), programs)


def _gluon(
    config: Config, what: str, parameters: tuple[Parameter, ...], programs: Callable[[Device, Sizes], int]
) -> Kernel:
    options = CompileOptions(num_warps=4, num_stages=1, maxnreg=resources.MAXNREG)
    entry = f"{config.family}_{what}"
    return Kernel(entry=entry, parameters=parameters, options=options, programs=programs, language="gluon")


def _finish(spec: Specialization, config: Config) -> Kernel:
    names = ["DqAcc", "DQ", *_strides("dq"), "softmax_scale", "nheads", "seqlen_q"]

    def programs(device: Device, sizes: Sizes) -> int:
        return _padded_rows(config, sizes) // config.integer("block_m") * 2 * sizes.batch * sizes.nheads

    options = CompileOptions(num_warps=4, num_stages=1)
    return Kernel(
        entry=f"{FUSED_ID}_finish", parameters=_parameters(spec, names, {}), options=options, programs=programs
    )


def _padded_rows(config: Config, sizes: Sizes) -> int:
    block_m = config.integer("block_m")
    return -(-sizes.seqlen_q // block_m) * block_m


def _kernels(spec: Specialization, config: Config) -> tuple[Kernel, ...]:
    last = _finish if config.family == FUSED_ID else _owning_queries
    return _prepare(spec, config), _owning_keys(spec, config), last(spec, config)


def _scratch(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    rows = _padded_rows(config, sizes)
    by_row = (sizes.batch, sizes.nheads, rows)
    found = (Scratch(name="neg_delta", shape=by_row), Scratch(name="lse_start", shape=by_row))
    if config.family == SPLIT_ID:
        return found
    lines = sizes.batch * sizes.nheads * rows * block(spec.head_dim) // 32
    return (*found, Scratch(name="dq_acc", shape=(lines, 32)))


HOPPER_BACKWARD_FUSED = KernelFamily(
    id=FUSED_ID,
    title="Warp-specialised FlashAttention for Hopper in Gluon",
    template="hopper_backward.py.jinja",
    direction="backward",
    knobs=FUSED_KNOBS,
    why_not=_why_not_fused,
    why_invalid=_why_invalid,
    default=_default(FUSED_ID, {"dq_path": "inline"}),
    values=lambda spec, config: text.values(spec, config, FUSED_ID),
    kernels=_kernels,
    scratch=_scratch,
    is_deterministic=False,
)

HOPPER_BACKWARD_SPLIT = KernelFamily(
    id=SPLIT_ID,
    title="Warp-specialised FlashAttention for Hopper in Gluon, in a fixed order",
    template="hopper_backward.py.jinja",
    direction="backward",
    knobs=SPLIT_KNOBS,
    why_not=_why_not,
    why_invalid=_why_invalid,
    default=_default(SPLIT_ID, {"dq_block_n": 128, "dq_stages": 2}),
    values=lambda spec, config: text.values(spec, config, SPLIT_ID),
    kernels=_kernels,
    scratch=_scratch,
)
