"""What the families of decoding share: parameters of both kernels, and knobs of splits and of the merge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flashgen.codegen.decode_splits import split_counts
from flashgen.codegen.family import CompileOptions, KernelSpec, Knob, Parameter, Sizes
from flashgen.codegen.head_parts import tile_side
from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import DTYPE_BYTES, Specialization

TooLarge = Callable[[Config], str | None]
"""The resource of an SM that a config asks too much of, or None."""

CHUNKS = (0, 1024, 2048, 4096, 8192, 16384)
"""Keys for each of which a sequence gets a program; 0 is never."""

BATCH_PADS = (16, 128, 1024)

MOST_LOADED = 128
"""Numbers of partial results that a thread of the merge loads at once, where it has several rows."""

ONLY_SHARES: dict[str, int] = {"slack": 0, "slack_percent": 0, "overhead": 0}
ONLY_GRID: dict[str, int] = {"chunk": CHUNKS[0]}
"""Knobs that one schedule reads, and what they are with the other one."""

SCHEDULE = Knob(
    name="schedule", values=("shares", "grid"), meaning="equal shares of all keys, or programs for each sequence"
)
CHUNK = Knob(
    name="chunk",
    values=CHUNKS,
    meaning="keys for each of which a sequence gets a program, if that makes more; 0 is never (schedule: grid)",
)
SLACK = Knob(
    name="slack",
    values=(0, 2, 4, 8, 16),
    meaning="steps more than an equal share that whole sequences may take, so that nothing is merged "
    "(schedule: shares)",
)
SLACK_PERCENT = Knob(
    name="slack_percent",
    values=(0, 4, 8, 16),
    meaning="the same in hundredths of an equal share; the larger one counts (schedule: shares)",
)
OVERHEAD = Knob(
    name="overhead",
    values=(0, 2, 4, 8),
    meaning="steps that a new sequence costs a program that has several (schedule: shares)",
)
BATCH_PAD = Knob(
    name="batch_pad", values=BATCH_PADS, meaning="sequences whose lengths a program looks at (schedule: shares)"
)
MIN_TILES = Knob(name="min_tiles", values=(1, 2, 4, 8), meaning="steps that are worth a program of its own")
PARTIALS = Knob(name="partials", values=(8, 16, 32, 64), meaning="partial results that the merge reads at once")
REDUCE_WARPS = Knob(name="reduce_warps", values=(1, 2, 4), meaning="warps of a program of the merge")
MERGE_ROWS = Knob(
    name="merge_rows",
    values=(1, 2, 4, 8, 16),
    meaning="query rows of a program of the merge",
    default=1,
    implied=True,
)
EARLY = Knob(
    name="early", values=(False, True), meaning="the first kernel is scheduled before those in front have ended"
)
PDL = Knob(name="pdl", values=(False, True), meaning="the merge is scheduled before the first kernel has ended")


def is_grid(config: Config) -> bool:
    """Whether a config has a program for each split, and no shares of all keys."""
    return config["schedule"] == "grid"


def query_rows(sizes: Sizes) -> int:
    """Query rows of a key head."""
    return sizes.seqlen_q * (sizes.nheads // sizes.nheads_k)


def count_pairs(sizes: Sizes, block_m: int) -> int:
    """Pairs of a sequence and a block of query rows of one of its key heads."""
    return sizes.batch * sizes.nheads_k * -(-query_rows(sizes) // block_m)


def zero_bits(spec: Specialization) -> int:
    """Of strides in elements, the low bits that are 0 where rows are aligned."""
    return (ALIGNMENT_BYTES // DTYPE_BYTES[spec.dtype]).bit_length() - 1 if spec.aligned16 else 0


def first_that_fits(config: Config, smaller: Iterable[Mapping[str, KnobValue]], too_large: TooLarge) -> Config:
    """The config with as many of these changes, in their order, as it takes until nothing is too large."""
    for changes in smaller:
        if too_large(config) is None:
            return config
        config = config.replace(**changes)
    return config


def why_unused(config: Config) -> str | None:
    """The reason against a knob that is set and that the schedule of a config does not read, or None."""
    unused = ONLY_SHARES if is_grid(config) else ONLY_GRID
    for name, value in unused.items():
        if config[name] != value:
            return f"schedule {config['schedule']} has no use for {name}: it is {value} there"
    return None


def why_no_merge(spec: Specialization, config: Config, device: Device) -> str | None:
    """The reason why no program of the merge takes so many rows at once, or None."""
    rows, block_m = config.integer("merge_rows"), config.integer("block_m")
    if rows > block_m:
        return f"tiles have {block_m} query rows, and a program of the merge takes {rows}"
    if rows == 1:
        return None
    loaded = rows * config.integer("partials") * tile_side(spec.head_dim_v)
    most = MOST_LOADED * device.warp_size * config.integer("reduce_warps")
    if loaded > most:
        return (
            f"a thread of the merge holds {MOST_LOADED} numbers of partial results, not {loaded * MOST_LOADED // most}"
        )
    return None


def batch_pad(config: Config, batch: int, pads: tuple[int, ...] = BATCH_PADS) -> int:
    """The least of `pads` with room for so many sequences; the schedule `grid` does not read it."""
    if is_grid(config):
        return BATCH_PADS[0]
    return next((size for size in pads if batch <= size), pads[-1])


def default_partials(spec: Specialization) -> int:
    """Partial results that the merge reads at once, as its registers allow."""
    return 32 if tile_side(spec.head_dim_v) <= 128 else 16


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


PARTS = (Parameter(name="PartO", type="*fp32", aligned16=True), Parameter(name="PartLse", type="*fp32"))
MAIN_NUMBERS = (
    *("nheads_k", "group_size", "seqlen_q", "seqlen_k", "m_blocks", "tile_rows", "split_tiles"),
    *("window_left", "window_right", "has_leftpad", "lse_rows"),
)
"""Numbers of the kernel that reads the keys, whatever its schedule."""

GRID_NUMBERS = ("slots", "least_splits", "most_splits")
SHARES_NUMBERS = ("batch", "groups", "beside", "most_pairs", "most_parts", "pair_units")


def schedule_numbers(config: Config) -> tuple[str, ...]:
    """Those that the schedule of a config adds, in both kernels."""
    return GRID_NUMBERS if is_grid(config) else SHARES_NUMBERS


def _lengths() -> list[Parameter]:
    return [Parameter(name=name, type="*i32") for name in ("Lens", "Leftpad")]


def main_parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    """Those of the kernel that reads the keys."""
    pages = [Parameter(name="Table" if spec.page_size else "BatchIdx", type="*i32")]
    pages += [Parameter(name="OwnLens", type="*i32")] if spec.offset_tensor else []
    found = [*_pointers(spec, "QKVO"), Parameter(name="LSE", type="*fp32"), *_lengths(), *pages, *_sinks(spec), *PARTS]
    found += _scores(spec)
    found += _integers(*MAIN_NUMBERS, *schedule_numbers(config))
    found += [*_integers("num_pages"), *_strides("table")] if spec.page_size else _integers("has_batch_idx")
    found += _integers("members", "own_seqlen_k") if spec.offset_tensor else []
    return (*found, *_strides("qb", "qs", "qh", "kp", "ks", "kh", "vp", "vs", "vh", "ob", "os", "oh"))


def reduce_parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    """Those of the merge."""
    found = [*_pointers(spec, "O"), Parameter(name="LSE", type="*fp32"), *_sinks(spec), *PARTS, *_lengths()]
    found += _integers("nheads_k", "group_size", "seqlen_q", "m_blocks", "tile_rows", "split_tiles", "lse_rows")
    found += _integers("seqlen_k", "window_left", "has_leftpad", *schedule_numbers(config))
    found += _integers("members") if spec.offset_tensor else []
    return (*found, *_strides("ob", "os", "oh"))


def both_kernels(
    spec: Specialization, config: Config, options: CompileOptions, *, language: str = "triton"
) -> tuple[KernelSpec, ...]:
    """The kernels of a config, named after its family: what reads the keys, with these options, and the merge."""
    block_m = config.integer("block_m")

    def programs(device: Device, sizes: Sizes) -> int:
        if not is_grid(config):
            return device.num_sms * config.integer("per_sm")
        pairs = count_pairs(sizes, block_m)
        return pairs * split_counts(config, device, pairs=pairs, seqlen_k=sizes.seqlen_k, split_size=0).most

    def merged(device: Device, sizes: Sizes) -> int:
        groups = count_pairs(sizes, block_m) if is_grid(config) else programs(device, sizes)
        return groups * -(-min(query_rows(sizes), block_m) // config.integer("merge_rows"))

    return (
        KernelSpec(
            entry=config.family,
            parameters=main_parameters(spec, config),
            options=options,
            programs=programs,
            language=language,
            overlaps=bool(config.get("early", False)),
        ),
        KernelSpec(
            entry=f"{config.family}_reduce",
            parameters=reduce_parameters(spec, config),
            options=CompileOptions(num_warps=config.integer("reduce_warps"), num_stages=1),
            programs=merged,
            overlaps=bool(config.get("pdl", False)),
        ),
    )
