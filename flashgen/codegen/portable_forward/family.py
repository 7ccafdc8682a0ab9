"""The portable forward family: FlashAttention-2's Algorithm 1 in plain Triton, for every GPU Triton compiles for."""

from __future__ import annotations

from flashgen.codegen.common_mods import mod_parameters, why_mods_do_not_fit
from flashgen.codegen.common_portable import (
    MAX_REGS_PER_THREAD,
    MIN_WARPGROUP_ROWS,
    allowed_values_of_all,
    why_not_loads,
    why_not_portable,
)
from flashgen.codegen.common_products import PRODUCTS, products_values, uses_tensor_cores, why_not_products
from flashgen.codegen.common_scores import score_parameters
from flashgen.codegen.common_sequences import (
    query_blocks,
    sequence_parameters,
    table_strides,
    why_not_in_pages,
    why_not_packed,
)
from flashgen.codegen.common_softcap import TANH, exact_sibling, tanh_values, why_not_tanh
from flashgen.codegen.common_types import storage
from flashgen.codegen.family import CompileOptions, KernelFamily, KernelSpec, Knob, Parameter, Sizes
from flashgen.codegen.head_parts import head_parts, is_split, padded, why_not_split
from flashgen.codegen.key_splits import (
    KEY_SPLITS,
    SPLIT_KEYS,
    merge_kernel,
    scratch_of_shares,
    share_parameters,
    split_keys,
    why_not_shared,
)
from flashgen.codegen.portable_forward import shares
from flashgen.codegen.portable_forward.cost_model import COST_MODEL
from flashgen.codegen.portable_forward.defaults import FAMILY_ID, default_config, seed_configs
from flashgen.codegen.portable_forward.pages import (
    PAGE_IDS,
    key_lengths,
    over_pages,
    page_ids_values,
    why_not_paged,
)
from flashgen.codegen.portable_forward.resources import smem_needed, why_too_large
from flashgen.codegen.portable_forward.template_context import stride_names, values
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

WIDE_HEAD = 256
"""From here on warps may share rows, because one cannot hold the queries and outputs of whole ones."""

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
    Knob(
        name="split_d",
        values=(False, True),
        meaning="heads in two tiles, a power of two and the rest, instead of one padded tile",
        default=False,
    ),
    PRODUCTS,
    TANH,
    PAGE_IDS,
    SPLIT_KEYS,
)


def _why_invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    return (
        _why_meaningless(spec, config, device)
        or why_mods_do_not_fit(spec, config, config.integer("num_warps") * device.warp_size)
        or why_too_large(spec, config, device)
        or _why_pointless(spec, config, device)
    )


def _why_meaningless(spec: Specialization, config: Config, device: Device) -> str | None:
    """What Triton would refuse or silently turn into another config of the space."""
    if reason := why_not_loads(spec, config, device) or why_not_paged(spec, config, device):
        return reason
    if config["heavy_first"] and not spec.causal:
        return "without a causal mask all programs are equally heavy"
    if config["maxnreg"] and not device.is_nvidia:
        return "maxnreg exists on NVIDIA only"
    if config.integer("num_stages") > 2 and not device.is_nvidia:
        return "the AMD pipeliner has two stages"
    if is_split(config) and (reason := why_not_split(spec)):
        return reason
    if split_keys(config) and (reason := why_not_shared(spec)):
        return reason
    if reason := why_not_products(spec, config, device) or why_not_tanh(spec, config, device):
        return reason
    if not uses_tensor_cores(spec, config):
        return None  # nor tiles of them
    wide = max(padded(size, is_split(config)) for size in (spec.head_dim, spec.head_dim_v)) >= WIDE_HEAD
    return _rows_per_warp(config.integer("block_m"), config.integer("num_warps"), device, wide=wide)


def _why_pointless(spec: Specialization, config: Config, device: Device) -> str | None:
    """What cannot be faster than another config of the space, so that a search does not spend its time on it."""
    if config["num_stages"] == 1 and device.is_nvidia:
        # without a pipeline only other blocks of the SM work while one waits for its loads
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


def _seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    return tuple(config for config in seed_configs(spec, device) if _why_invalid(spec, config, device) is None)


def _choices(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    """Values that `_why_meaningless` refuses on every device; without them there is less to enumerate."""
    found = allowed_values_of_all(spec)
    found |= {PRODUCTS.name: products_values(spec), TANH.name: tanh_values(spec), PAGE_IDS.name: page_ids_values(spec)}
    found[SPLIT_KEYS.name] = (False,)  # sizes decide
    if not spec.causal:
        found["heavy_first"] = (False,)
    return found


def _rows_per_warp(block_m: int, num_warps: int, device: Device, *, wide: bool) -> str | None:
    """Each warp computes whole rows (the reductions then stay inside it): 16 of them, the height of an MMA tile.

    Up to four warps may share them, and eight where one warp cannot hold the outputs of whole rows.
    """
    if device.is_nvidia and block_m < 16 * num_warps and num_warps > (8 if wide else 4):
        return f"{num_warps} warps of 16 rows are more than {block_m} rows"
    if device.has_warpgroup_mma and block_m >= MIN_WARPGROUP_ROWS and num_warps < 4:
        return "the tensor cores work for four warps together"
    return None


def _parameters(spec: Specialization, config: Config) -> tuple[Parameter, ...]:
    descriptors = config["loads"] == "descriptor"
    found = _descriptors(spec, config) if descriptors else _pointers(spec)
    shared = split_keys(config)
    if shared:
        found = [one for one in found if not one.name.lower().startswith("o")]
    found += share_parameters(wide=True) if shared else [Parameter(name="LSE", type="*fp32")]
    found += [*score_parameters(spec), *mod_parameters(spec)]
    lengths = ("sequences", "total_q", *key_lengths(spec)) if spec.varlen else ("seqlen_q", "seqlen_k")
    found += sequence_parameters(spec)
    found += [Parameter(name=name, type="i32") for name in ("nheads", "group_size", *lengths)]
    found.append(KEY_SPLITS if shared else Parameter(name="lse_rows", type="i32"))
    found += [*table_strides(spec), *(Parameter(name=name, type="i64") for name in stride_names(spec, config))]
    return tuple(found)


def _descriptors(spec: Specialization, config: Config) -> list[Parameter]:
    rows = {"q": "block_m", "k": "block_n", "v": "block_n", "o": "block_m"}
    cols = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.head_dim_v, "o": spec.head_dim_v}
    found = []
    for tensor, knob in rows.items():
        for part in head_parts(cols[tensor], is_split(config)):
            block = f"1, 1, {config.integer(knob)}, {part.block}"
            name = f"{tensor}{part.descriptor_suffix}_desc"
            found.append(Parameter(name=name, type=f"tensordesc<{storage(spec)}[{block}]>"))
    if spec.varlen:
        # behind the last row of a sequence are those of the next one, which TMA would write
        found = [one for one in found if not one.name.startswith("o")] + _pointers(spec)[-1:]
    return found


def _pointers(spec: Specialization) -> list[Parameter]:
    return [Parameter(name=name, type=f"*{storage(spec)}", aligned16=spec.aligned16) for name in "QKVO"]


def _options(config: Config) -> CompileOptions:
    return CompileOptions(
        num_warps=config.integer("num_warps"),
        num_stages=config.integer("num_stages"),
        maxnreg=config.integer("maxnreg"),
    )


def _kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    block_m = config.integer("block_m")

    def programs(device: Device, sizes: Sizes) -> int:
        if spec.varlen:
            return query_blocks(sizes, block_m) * sizes.nheads * sizes.key_splits
        return -(-sizes.seqlen_q // block_m) * sizes.batch * sizes.nheads * sizes.key_splits

    parameters, options = _parameters(spec, config), _options(config)
    main = KernelSpec(entry=FAMILY_ID, parameters=parameters, options=options, programs=programs)
    return (main, merge_kernel(spec, FAMILY_ID, storage(spec))) if split_keys(config) else (main,)


DEFAULT_SPILLS = 48
"""Bytes of a thread that its defaults spill for plain shapes under Triton 3.9; up to 8 under 3.6."""

FEW_WAVES = 5
"""Of 293 searches on an H200 that timed the Hopper family, too, it won three: with 1, 2.4 and 4.8 programs an SM."""

FEATURES = frozenset(
    {
        *("causal", "window", "softcap", "alibi", "sinks", "bias", "mask", "functions", "q_offset", "deterministic"),
        *("varlen", "pages", "dropout"),
    }
)


def _why_unsupported(spec: Specialization, device: Device) -> str | None:
    return why_not_portable(spec, device) or why_not_packed(spec) or why_not_in_pages(spec)


PORTABLE_FORWARD = KernelFamily(
    id=FAMILY_ID,
    title="Portable FlashAttention in plain Triton",
    template="portable_forward/portable_forward.py.jinja",
    direction="forward",
    knobs=KNOBS,
    features=FEATURES,
    unsupported=_why_unsupported,
    invalid=_why_invalid,
    default=default_config,
    template_values=values,
    kernels=_kernels,
    seed_configs=_seed_configs,
    allowed_values=_choices,
    scratch=scratch_of_shares,
    key_splits=shares.key_splits,
    fitted=shares.fitted,
    few_waves=FEW_WAVES,
    balanced=shares.fitted,
    beside=shares.beside,
    over_pages=over_pages,
    exact_sibling=exact_sibling,
    default_spills=DEFAULT_SPILLS,
    cost_model=COST_MODEL,
)
