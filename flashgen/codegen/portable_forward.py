"""The portable forward family: FlashAttention-2's Algorithm 1 in plain Triton, for every GPU Triton compiles for."""

from __future__ import annotations

from flashgen.codegen.family import CompileOptions, KernelFamily, Knob, Parameter
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

FAMILY_ID = "portable_forward"

MAX_THREADS = 1024
MIN_WARPGROUP_ROWS = 64
"""Rows that the matrix units of sm90 and sm100 multiply at once, from shared memory; smaller tiles use mma.sync."""

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_REGS_PER_THREAD = 255
"""The most registers that one thread can address, on NVIDIA and (in vector registers of a wave) close to it on AMD."""

OTHER_REGS = 24
"""Registers per thread for row statistics, addresses and loop state; below what any compiled variant needed."""

LARGE_SMEM = 160 * 1024
"""A block of a data-centre card has at least this much shared memory, one of a consumer card at most 100 KB."""

ALIGNMENT_BYTES = 16
"""Widest vector load, and what the copy engine demands of base addresses and strides."""

TL_DTYPES = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

KNOBS = (
    Knob(name="block_m", values=(16, 32, 64, 128, 256), meaning="query rows of a program"),
    Knob(name="block_n", values=(16, 32, 64, 128, 256), meaning="keys of a step"),
    Knob(name="num_warps", values=(2, 4, 8, 16), meaning="warps of a program"),
    Knob(name="num_stages", values=(1, 2, 3, 4, 5), meaning="depth of the software pipeline over K and V"),
    Knob(name="loads", values=("pointer", "descriptor"), meaning="pointers with masks, or tensor descriptors (TMA)"),
    Knob(name="maxnreg", values=(0, 128, 168, 224), meaning="register limit of a thread; 0 is none"),
    Knob(
        name="heads_per_group",
        values=(1, 8, 32, 0),
        meaning="program order: 1 query blocks fastest, n heads fastest in groups of n, 0 all heads fastest",
    ),
    Knob(name="heavy_first", values=(False, True), meaning="causal: programs with the most keys start first"),
)


def _why_not(spec: Specialization, device: Device) -> str | None:
    for feature in ("window", "softcap", "alibi", "sink", "bias", "mask", "varlen"):
        if getattr(spec, feature):
            return f"it has no {feature}"
    if spec.page_size is not None:
        return "it reads no paged keys"
    for name, size in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"its {name} is {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {size}"
    if device.is_nvidia and device.capability < 80:
        return f"it needs sm80 or newer, not {device.arch}"
    return None


def _why_invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    return (
        _why_meaningless(spec, config, device)
        or _why_too_large(spec, config, device)
        or _why_pointless(spec, config, device)
    )


def _why_meaningless(spec: Specialization, config: Config, device: Device) -> str | None:
    """What Triton would refuse or silently turn into another config of the space."""
    descriptor = config["loads"] == "descriptor"
    if descriptor and not device.has_tma:
        return f"descriptors are turned into pointers on {device.arch}: the same kernel twice"
    if descriptor and not spec.aligned16:
        return "descriptors need pointers and strides that are multiples of 16 bytes"
    if config["heavy_first"] and not spec.causal:
        return "without a causal mask all programs are equally heavy"
    if config["maxnreg"] and not device.is_nvidia:
        return "maxnreg exists on NVIDIA only"
    if config.integer("num_stages") > 2 and not device.is_nvidia:
        return "the AMD pipeliner has two stages"
    if spec.dtype == "fp32":
        return None  # no matrix unit, no tiles of it
    return _rows_per_warp(config.integer("block_m"), config.integer("num_warps"), device)


def _why_too_large(spec: Specialization, config: Config, device: Device) -> str | None:
    """What cannot fit, by lower bounds: nothing that could run is refused here."""
    threads = config.integer("num_warps") * device.warp_size
    if threads > MAX_THREADS:
        return f"a block has at most {MAX_THREADS} threads, not {threads}"
    needed = registers_needed(spec, config, device)
    available = min(MAX_REGS_PER_THREAD, device.regs_per_sm // threads)
    available = min(available, config.integer("maxnreg") or available)
    if needed > available:
        return f"a thread needs about {needed} registers and has {available}"
    shared = smem_needed(spec, config, device)
    if shared > device.smem_per_block:
        return f"it needs at least {shared} bytes of shared memory and a block has {device.smem_per_block}"
    return None


def _why_pointless(spec: Specialization, config: Config, device: Device) -> str | None:
    """What cannot be faster than another config of the space, so that a search does not spend its time on it."""
    if config["num_stages"] == 1 and device.is_nvidia:
        # without a pipeline only other blocks of the multiprocessor work while one waits for its loads
        deeper = device.smem_per_sm // smem_needed(spec, config.replace(num_stages=2), device)
        if deeper >= device.smem_per_sm // smem_needed(spec, config, device):
            return "without a pipeline every load is waited for, and two stages let as many blocks run side by side"
    limit = config.integer("maxnreg")
    if limit:
        threads = config.integer("num_warps") * device.warp_size
        blocks = device.regs_per_sm // (limit * threads)
        if blocks <= device.regs_per_sm // (min(MAX_REGS_PER_THREAD + 1, device.regs_per_sm // threads) * threads):
            return f"a limit of {limit} registers lets no more blocks run side by side"
        if blocks * smem_needed(spec, config, device) > device.smem_per_sm:
            return f"shared memory does not hold the {blocks} blocks that {limit} registers are meant for"
    return None


def _rows_per_warp(block_m: int, num_warps: int, device: Device) -> str | None:
    """Each warp computes whole rows (the reductions then stay inside it): 16 of them, the height of an MMA tile."""
    if device.is_nvidia and block_m < 16 * num_warps and not (num_warps == 4 and block_m >= 16):
        return f"{num_warps} warps of 16 rows are more than {block_m} rows"
    if device.arch in ("sm90", "sm100") and block_m >= MIN_WARPGROUP_ROWS and num_warps < 4:
        return "the matrix unit works for four warps together"
    return None


def registers_needed(spec: Specialization, config: Config, device: Device) -> int:
    """A lower bound of the 32-bit registers of a thread: output accumulator, fp32 scores, and Q where it stays in them.

    Matrix units before Hopper's (and consumer Blackwell's) multiply from registers, and Q is kept there over the loop.
    """
    threads = config.integer("num_warps") * device.warp_size
    rows = config.integer("block_m")
    words = rows * (config.integer("block_n") + _block(spec.head_dim_v))
    if device.arch not in ("sm90", "sm100"):
        words += rows * _block(spec.head_dim) * DTYPE_BYTES[spec.dtype] // 4
    return words // threads + OTHER_REGS


def smem_needed(spec: Specialization, config: Config, device: Device) -> int:
    """A lower bound of the shared memory in bytes: the stages of K and V, and Q where the matrix unit reads it from."""
    size = DTYPE_BYTES[spec.dtype]
    step = config.integer("block_n") * (_block(spec.head_dim) + _block(spec.head_dim_v)) * size
    stages = config.integer("num_stages")
    warpgroup = device.arch in ("sm90", "sm100") and config.integer("block_m") >= MIN_WARPGROUP_ROWS
    query = config.integer("block_m") * _block(spec.head_dim) * size if warpgroup else 0
    if stages == 1 or not device.is_nvidia:
        return query + step // 2  # without a pipeline V takes the place of K
    # a pipeline of copies keeps a buffer for each stage, one of ordinary loads a buffer less
    buffers = stages if warpgroup and config["loads"] == "descriptor" else stages - 1
    return query + buffers * step


def _block(head_dim: int) -> int:
    """The next power of two, at least the 16 that a matrix unit multiplies."""
    return max(16, 1 << (head_dim - 1).bit_length())


# (kind of device, larger block_d): block_m, block_n, num_warps, num_stages for 16-bit elements; none spills
_DEFAULTS: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("sm90", 64): (128, 128, 4, 3),
    ("sm90", 128): (128, 128, 8, 3),
    ("sm90", 256): (128, 64, 8, 2),
    ("sm100", 64): (128, 64, 4, 3),
    ("sm100", 128): (128, 128, 8, 3),
    ("sm100", 256): (128, 64, 8, 2),
    ("large", 64): (128, 64, 4, 3),
    ("large", 128): (128, 64, 8, 3),
    ("large", 256): (64, 16, 4, 2),
    ("small", 64): (128, 64, 4, 3),
    ("small", 128): (128, 32, 8, 3),
    ("small", 256): (64, 16, 4, 2),
    ("sm120", 64): (128, 64, 8, 3),
    ("sm120", 128): (128, 32, 8, 3),
    ("sm120", 256): (64, 16, 4, 2),
    ("cdna", 64): (128, 64, 4, 1),
    ("cdna", 128): (128, 32, 4, 1),
    ("cdna", 256): (128, 32, 4, 1),
    ("rdna", 64): (128, 32, 4, 1),
    ("rdna", 128): (128, 32, 8, 1),
    ("rdna", 256): (64, 16, 8, 1),
}
# IEEE products come from the ordinary units, whose tiles hold more registers; what spills least on RDNA still spills.
_DEFAULTS_FP32: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("nvidia", 64): (64, 32, 8, 2),
    ("nvidia", 128): (32, 16, 8, 2),
    ("nvidia", 256): (32, 16, 8, 2),
    ("small", 64): (64, 32, 8, 2),
    ("small", 128): (16, 16, 4, 2),
    ("small", 256): (32, 16, 8, 2),
    ("cdna", 64): (64, 32, 8, 1),
    ("cdna", 128): (64, 32, 8, 1),
    ("cdna", 256): (32, 16, 8, 1),
    ("rdna", 64): (16, 16, 4, 1),
    ("rdna", 128): (32, 16, 8, 1),
    ("rdna", 256): (16, 16, 8, 1),
}


def _kind(device: Device) -> str:
    if not device.is_nvidia:
        return "cdna" if device.warp_size == 64 else "rdna"
    if device.arch in ("sm90", "sm100", "sm120"):
        return device.arch
    return "large" if device.smem_per_block >= LARGE_SMEM else "small"


def _default(spec: Specialization, device: Device) -> Config:
    block = max(64, _block(spec.head_dim), _block(spec.head_dim_v))
    kind = _kind(device)
    if spec.dtype == "fp32":
        known = (kind, block) if (kind, block) in _DEFAULTS_FP32 else ("nvidia", block)
        block_m, block_n, num_warps, num_stages = _DEFAULTS_FP32[known]
    else:
        block_m, block_n, num_warps, num_stages = _DEFAULTS[kind, block]
    return Config.of(
        FAMILY_ID,
        {
            "block_m": block_m,
            "block_n": block_n,
            "num_warps": num_warps,
            "num_stages": num_stages,
            "loads": "descriptor" if _prefers_descriptors(spec, device) else "pointer",
            "maxnreg": 0,
            "heads_per_group": 8 if spec.causal else 1,
            "heavy_first": spec.causal,
        },
    )


def _prefers_descriptors(spec: Specialization, device: Device) -> bool:
    """On sm120 Triton pipelines pointer loads for the matrix unit (mma.sync), but not descriptor loads."""
    return device.arch in ("sm90", "sm100") and spec.aligned16 and spec.dtype != "fp32"


def _values(spec: Specialization, config: Config) -> dict[str, object]:
    descriptors = config["loads"] == "descriptor"
    keys = ["k_desc", "v_desc", "b", "h_k"] if descriptors else ["k_base", "v_base", "stride_ks", "stride_vs"]
    return {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "block_d": _block(spec.head_dim),
        "block_dv": _block(spec.head_dim_v),
        "dtype": spec.dtype,
        "tl_dtype": TL_DTYPES[spec.dtype],
        "torch_dtype": TORCH_DTYPES[spec.dtype],
        "causal": spec.causal,
        "offset_tensor": spec.offset_tensor,
        "aligned16": spec.aligned16,
        "aligned_elements": ALIGNMENT_BYTES // DTYPE_BYTES[spec.dtype],
        "descriptors": descriptors,
        "step_arguments": ", ".join(keys),
        # TF32 would be three decimal digits; exact means IEEE products
        "dot_precision": ', input_precision="ieee"' if spec.dtype == "fp32" else "",
        "order_text": _order_text(config),
        **dict(config.knobs),
    }


def _order_text(config: Config) -> str:
    group = config.integer("heads_per_group")
    text = {1: "query blocks fastest", 0: "heads fastest"}.get(group, f"heads fastest, in groups of {group}")
    return text + (", most keys first" if config["heavy_first"] else "")


def _parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    descriptors = config["loads"] == "descriptor"
    rows = {"q": "block_m", "k": "block_n", "v": "block_n", "o": "block_m"}
    cols = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.head_dim_v, "o": spec.head_dim_v}
    found = []
    for tensor, knob in rows.items():
        if descriptors:
            block = f"1, 1, {config.integer(knob)}, {_block(cols[tensor])}"
            found.append(Parameter(name=f"{tensor}_desc", type=f"tensordesc<{spec.dtype}[{block}]>"))
        else:
            found.append(Parameter(name=tensor.upper(), type=f"*{spec.dtype}", aligned16=spec.aligned16))
    found += [Parameter(name="LSE", type="*fp32"), Parameter(name="softmax_scale_log2", type="fp32")]
    if spec.causal:
        offset = ("QOffset", "*i32") if spec.offset_tensor else ("q_offset", "i32")
        found.append(Parameter(name=offset[0], type=offset[1]))
    names = ("nheads", "group_size", "seqlen_q", "seqlen_k", "lse_rows")
    found += [Parameter(name=name, type="i32") for name in names]
    if not descriptors:
        found += [Parameter(name=f"stride_{tensor}{axis}", type="i64") for tensor in rows for axis in "bhs"]
    return tuple(found)


def _options(config: Config) -> CompileOptions:
    return CompileOptions(
        num_warps=config.integer("num_warps"),
        num_stages=config.integer("num_stages"),
        maxnreg=config.integer("maxnreg"),
    )


def _programs(config: Config, device: Device, batch: int, nheads: int, seqlen_q: int) -> int:
    return -(-seqlen_q // config.integer("block_m")) * batch * nheads


PORTABLE_FORWARD = KernelFamily(
    id=FAMILY_ID,
    title="Portable FlashAttention in plain Triton",
    template="portable_forward.py.jinja",
    direction="forward",
    knobs=KNOBS,
    why_not=_why_not,
    why_invalid=_why_invalid,
    default=_default,
    values=_values,
    parameters=_parameters,
    options=_options,
    programs=_programs,
)
