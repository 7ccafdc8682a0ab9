"""The portable backward families: FlashAttention-2's Algorithm 2 in plain Triton, for every GPU Triton compiles for.

`portable_backward_split` computes dK and dV in one kernel and dQ in another: seven products instead of five, sums in
a fixed order. `portable_backward_fused` computes all in one pass over the keys, and adds dQ in fp32 with atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashgen.codegen.aux_gradient import why_no_aux_gradient
from flashgen.codegen.common_groups import (
    HEADS_PER_TILE,
    heads_per_tile,
    key_heads,
    programs_of_sums,
    sums_of_parts,
    why_pointless,
)
from flashgen.codegen.common_mods import has_blocks
from flashgen.codegen.common_portable import allowed_values_of_all, why_not_loads, why_not_portable
from flashgen.codegen.common_products import PRODUCTS, products_values, uses_tensor_cores, why_not_products
from flashgen.codegen.common_sequences import key_blocks, query_blocks, why_not_packed
from flashgen.codegen.family import CompileOptions, KernelFamily, KernelSpec, Knob, Parameter, Scratch, Sizes
from flashgen.codegen.head_parts import is_split, padded, why_not_split
from flashgen.codegen.portable_backward import heads, parameters
from flashgen.codegen.portable_backward.cost_model import FUSED_COST_MODEL, SPLIT_COST_MODEL
from flashgen.codegen.portable_backward.defaults import (
    default_fused,
    default_split,
    fused_slower_on,
    seed_configs_fused,
)
from flashgen.codegen.portable_backward.resources import (
    FUSED_ID,
    SPLIT_ID,
    Loop,
    dbias_blocks,
    dq_columns,
    is_fused,
    loops,
    prepare_rows,
    row_block,
    smem_needed,
    why_too_large,
    why_too_wide,
)
from flashgen.codegen.portable_backward.template_context import has_dbias, values
from flashgen.codegen.score_mod_gradient import why_no_gradient
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.score_mods import ScoreMods
from flashgen.core.workload import Specialization

LEAST_ROWS = 8
"""Of a warp. Products are 16 rows high, so more than two warps would compute the same scores."""

WIDE_COLUMNS = 384
WIDE_HEAD = 256
"""Of K and V together, and of the wider one, by which defaults are chosen. From either on many warps share few rows,
because one cannot hold the sums of whole ones."""

TOLERATED_SPILLS = 320
"""Bytes of a thread. On an H200 the fastest tile of one pass over heads of 128 spills 120 and more: with four tiles of
sums and scores the registers are full, and what is spilled is needed once a step."""

FUSED_DEFAULT_SPILLS, SPLIT_DEFAULT_SPILLS = 96, 280
"""Of defaults for plain shapes of 64 to 256 columns under Triton 3.9; up to 40 under 3.6."""

ROW_WARPS = 4
"""Of the kernels that work on rows, which wait for memory alone."""

DBIAS_WARPS = 4
DBIAS_PROGRAMS_PER_SM = 8
"""Enough for all that an SM holds at once; each walks more blocks where there are more."""

_SHARED = (
    Knob(name="loads", values=("pointer", "descriptor"), meaning="pointers with masks, or tensor descriptors (TMA)"),
    Knob(
        name="heads_per_group",
        values=(1, 8),
        meaning="program order: 1 blocks fastest, n heads fastest in groups of n",
    ),
    Knob(
        name="split_d",
        values=(False, True),
        meaning="heads in two tiles, a power of two and the rest, instead of one padded tile",
    ),
    PRODUCTS,
    HEADS_PER_TILE,
)
_FUSED = (
    Knob(
        name="dq_transposed",
        values=(False, True),
        meaning="dQ as a product of rows of K and ds, instead of rows of ds and K: which one comes from registers",
    ),
)
_DKDV = (
    Knob(name="block_m", values=(16, 32, 64, 128), meaning="queries of a step of dK and dV"),
    Knob(name="block_n", values=(16, 32, 64, 128), meaning="keys of a program of dK and dV"),
    Knob(name="num_warps", values=(4, 8), meaning="warps of a program of dK and dV"),
    Knob(name="num_stages", values=(1, 2, 3), meaning="depth of its software pipeline over Q and dO"),
)
_DQ = (
    Knob(name="dq_block_m", values=(16, 32, 64, 128), meaning="queries of a program of dQ"),
    Knob(name="dq_block_n", values=(16, 32, 64, 128), meaning="keys of a step of dQ"),
    Knob(name="dq_num_warps", values=(4, 8), meaning="warps of a program of dQ"),
    Knob(name="dq_num_stages", values=(1, 2, 3), meaning="depth of its software pipeline over K and V"),
)


def _why_not_split(spec: Specialization, device: Device) -> str | None:
    return _why_not(spec, device) or why_too_wide(spec, device, fused=False)


def _why_not_fused(spec: Specialization, device: Device) -> str | None:
    return _why_not(spec, device) or why_too_wide(spec, device, fused=True)


def _why_not(spec: Specialization, device: Device) -> str | None:
    return why_not_portable(spec, device) or why_not_packed(spec) or _why_not_functions(spec)


def _why_not_functions(spec: Specialization) -> str | None:
    if spec.mods is not None and spec.dropout:
        return "functions of the caller with dropout have no gradient"
    if spec.mods is not None and spec.mods.score_mod is not None and (why := why_no_gradient(spec.mods.score_mod)):
        return why
    if spec.mods is not None and spec.mods.aux_grads and (why := _why_no_aux_gradients(spec, spec.mods)):
        return why
    if has_blocks(spec) and has_dbias(spec):
        return "beside a block mask a bias of one value a score has no gradient"
    return None


def _why_no_aux_gradients(spec: Specialization, mods: ScoreMods) -> str | None:
    if spec.deterministic:
        return "gradients of aux tensors are summed in the order of their arrival: a deterministic call has none"
    return why_no_aux_gradient(mods.score_mod, mods.aux_grads) if mods.score_mod is not None else None


def _why_invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    by_cores = uses_tensor_cores(spec, config)

    def why_not(loop: Loop) -> str | None:
        return _why_loop(loop, device, by_cores=by_cores) or _why_pointless(loop, device)

    # one loop after the other: of an enumeration's configs with one that cannot work, the other is not looked at
    return _why_meaningless(spec, config, device) or next(filter(None, map(why_not, loops(spec, config))), None)


def _seed_configs_fused(spec: Specialization, device: Device) -> tuple[Config, ...]:
    found = seed_configs_fused(spec, device)
    return tuple(config for config in found if _why_invalid(spec, config, device) is None)


def _why_meaningless(spec: Specialization, config: Config, device: Device) -> str | None:
    """What Triton would refuse or silently turn into another config of the space."""
    if reason := why_not_loads(spec, config, device):
        return reason
    if config["heads_per_group"] != 1 and not spec.causal:
        return "without a causal mask all programs are equally heavy"
    if is_split(config) and (reason := why_not_split(spec)):
        return reason
    return why_not_products(spec, config, device)


def _choices(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    """Values that `_why_meaningless` refuses on every device; without them there is less to enumerate."""
    found = allowed_values_of_all(spec)
    found[PRODUCTS.name] = products_values(spec)
    found[HEADS_PER_TILE.name] = (0,)  # `heads.fitted` says at which sizes it is another one
    if not spec.causal:
        found["heads_per_group"] = (1,)
    return found


def _why_loop(loop: Loop, device: Device, *, by_cores: bool) -> str | None:
    """What one of its kernels cannot do."""
    if loop.stages > 2 and not device.is_nvidia:
        return "the AMD pipeliner has two stages"
    if loop.own < LEAST_ROWS * loop.warps and by_cores and not _is_wide(loop):
        return f"{loop.warps} warps have less than {LEAST_ROWS} of {loop.own} rows each"
    return why_too_large(loop, device)


def _is_wide(loop: Loop) -> bool:
    """Whether a warp cannot hold the sums of whole rows."""
    return loop.columns >= WIDE_COLUMNS or loop.widest >= WIDE_HEAD


def _why_pointless(loop: Loop, device: Device) -> str | None:
    """What cannot be faster than another config of the space, so that a search does not spend its time on it."""
    if loop.stages == 1 and device.is_nvidia and not _is_wide(loop):
        # without a pipeline only other blocks of the SM work while one waits for its loads
        deeper = device.smem_per_sm // smem_needed(replace(loop, stages=2), device)
        if deeper >= device.smem_per_sm // smem_needed(loop, device):
            return "without a pipeline every load is waited for, and two stages let as many blocks run side by side"
    return None


def _kernels(spec: Specialization, config: Config) -> tuple[KernelSpec, ...]:
    fused, name = is_fused(config), config.family
    rows = CompileOptions(num_warps=ROW_WARPS, num_stages=1)
    by_rows = _programs_of_rows(spec, config)
    found = [_kernel(f"{name}_prepare", parameters.prepare_parameters(spec, config), rows, by_rows)]
    found.append(
        _kernel(
            f"{name}_{'main' if fused else 'dkdv'}",
            parameters.dkdv_parameters(spec, config),
            _options(config, ""),
            _programs_of_keys(spec, config),
        )
    )
    if fused:
        found.append(_kernel(f"{name}_finish", parameters.finish_parameters(spec), rows, by_rows))
    else:
        found.append(
            _kernel(
                f"{name}_dq",
                parameters.dq_parameters(spec, config),
                _options(config, "dq_"),
                _programs_of_queries(spec, config),
            )
        )
    if heads_per_tile(config):
        sums = parameters.sum_parameters(spec)
        found.append(_kernel(f"{name}_sum", sums, rows, lambda device, sizes: programs_of_sums(sizes)))
    if has_dbias(spec):
        options = CompileOptions(num_warps=DBIAS_WARPS, num_stages=1)
        found.append(_kernel(f"{name}_dbias", parameters.dbias_parameters(spec), options, _programs_of_dbias(spec)))
    return tuple(found)


def _kernel(
    entry: str,
    parameters_: tuple[Parameter, ...],
    options: CompileOptions,
    programs: Callable[[Device, Sizes], int],
) -> KernelSpec:
    return KernelSpec(entry=entry, parameters=parameters_, options=options, programs=programs)


def _options(config: Config, prefix: str) -> CompileOptions:
    return CompileOptions(
        num_warps=config.integer(f"{prefix}num_warps"), num_stages=config.integer(f"{prefix}num_stages")
    )


def _blocks(seqlen: int, config: Config, knob: str) -> int:
    return -(-seqlen // config.integer(knob))


def _programs_of_keys(spec: Specialization, config: Config) -> Callable[[Device, Sizes], int]:
    if spec.varlen:
        return lambda device, sizes: key_blocks(sizes, config.integer("block_n")) * key_heads(config, sizes)
    return lambda device, sizes: _blocks(sizes.seqlen_k, config, "block_n") * sizes.batch * key_heads(config, sizes)


def _programs_of_queries(spec: Specialization, config: Config) -> Callable[[Device, Sizes], int]:
    if spec.varlen:
        return lambda device, sizes: query_blocks(sizes, config.integer("dq_block_m")) * sizes.nheads
    return lambda device, sizes: _blocks(sizes.seqlen_q, config, "dq_block_m") * sizes.batch * sizes.nheads


def _programs_of_rows(spec: Specialization, config: Config) -> Callable[[Device, Sizes], int]:
    padding, rows = row_block(spec, config), prepare_rows(spec)
    return lambda device, sizes: -(-sizes.seqlen_q // padding) * (padding // rows) * sizes.batch * sizes.nheads


def _programs_of_dbias(spec: Specialization) -> Callable[[Device, Sizes], int]:
    """As many as there may be blocks: no size of a launch says how many heads and sequences the bias has of its own."""
    rows, keys = dbias_blocks(spec)

    def programs(device: Device, sizes: Sizes) -> int:
        blocks = -(-sizes.seqlen_q // rows) * -(-sizes.seqlen_k // keys) * sizes.batch * sizes.nheads
        return min(blocks, device.num_sms * DBIAS_PROGRAMS_PER_SM)

    return programs


def _scratch(spec: Specialization, config: Config, sizes: Sizes) -> tuple[Scratch, ...]:
    padding = row_block(spec, config)
    rows = (sizes.batch, sizes.nheads, -(-sizes.seqlen_q // padding) * padding)
    found = [Scratch(name="neg_delta", shape=rows), Scratch(name="lse_log2", shape=rows)]
    if is_fused(config):
        found.append(Scratch(name="dq_acc", shape=(*rows, dq_columns(spec, config))))
    found += sums_of_parts(config, sizes, padded(spec.head_dim, False), padded(spec.head_dim_v, False))
    return tuple(found)


FEATURES = frozenset(
    {"causal", "window", "softcap", "alibi", "sinks", "bias", "mask", "functions", "q_offset", "varlen", "dropout"}
)
"""Sinks are part of the LSE that a backward pass starts from."""

PORTABLE_BACKWARD_FUSED = KernelFamily(
    id=FUSED_ID,
    title="Portable FlashAttention in plain Triton, backward in one pass",
    template="portable_backward/portable_backward.py.jinja",
    direction="backward",
    knobs=(*_DKDV, *_FUSED, *_SHARED),
    features=FEATURES,
    unsupported=_why_not_fused,
    invalid=_why_invalid,
    default=default_fused,
    template_values=values,
    kernels=_kernels,
    scratch=_scratch,
    allowed_values=_choices,
    fitted=heads.fitted,
    poor_at_sizes=why_pointless,
    balanced=heads.fitted,
    beside=heads.beside,
    slower_on=fused_slower_on,
    seed_configs=_seed_configs_fused,
    tolerated_spills=TOLERATED_SPILLS,
    default_spills=FUSED_DEFAULT_SPILLS,
    cost_model=FUSED_COST_MODEL,
)

PORTABLE_BACKWARD_SPLIT = KernelFamily(
    id=SPLIT_ID,
    title="Portable FlashAttention in plain Triton, backward in two passes",
    template="portable_backward/portable_backward.py.jinja",
    direction="backward",
    knobs=(*_DKDV, *_DQ, *_SHARED),
    features=FEATURES | {"deterministic"},
    unsupported=_why_not_split,
    invalid=_why_invalid,
    default=default_split,
    template_values=values,
    kernels=_kernels,
    scratch=_scratch,
    allowed_values=_choices,
    fitted=heads.fitted,
    poor_at_sizes=why_pointless,
    balanced=heads.fitted,
    beside=heads.beside,
    tolerated_spills=TOLERATED_SPILLS,
    default_spills=SPLIT_DEFAULT_SPILLS,
    cost_model=SPLIT_COST_MODEL,
)
