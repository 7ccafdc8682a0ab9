"""The Hopper backward families: FlashAttention-2's Algorithm 2 with warp-specialised roles in Gluon, for sm90.

docs/decisions/hopper-backward.md has their design and the figures behind knobs and defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flashgen.codegen.common_groups import HEADS_PER_TILE, QUERY_SHARES, SHARES, leaves_sums, query_shares
from flashgen.codegen.common_mods import has_blocks
from flashgen.codegen.common_order import ALL_HEADS
from flashgen.codegen.common_sequences import why_not_packed
from flashgen.codegen.common_types import GL_DTYPES
from flashgen.codegen.common_wgmma import ROWS, why_not_head_dim, why_not_wgmma, widest_block
from flashgen.codegen.family import KernelFamily, Knob
from flashgen.codegen.head_parts import is_split
from flashgen.codegen.hopper_backward import heads, kernels, resources
from flashgen.codegen.hopper_backward import template_context as text
from flashgen.codegen.hopper_backward.cost_model import FUSED_COST_MODEL, SPLIT_COST_MODEL
from flashgen.codegen.hopper_backward.defaults import fused_default, split_default
from flashgen.codegen.hopper_backward.resources import FUSED_ID, SPLIT_ID
from flashgen.codegen.score_mod_gradient import why_no_gradient
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

_COMMON = (
    Knob(name="block_m", values=(64, 128), meaning="queries of a step"),
    Knob(name="q_stages", values=(2, 3), meaning="slots for blocks of Q"),
    Knob(
        name="accumulator_init",
        values=("interleaved", "upfront"),
        meaning="when sums of dp get the values that they begin with: while s is computed, or before either product",
        former="starts",
    ),
    Knob(
        name="persistent",
        values=(False, True),
        meaning="a CTA for each tile, or one for each SM, which loads ahead for its next tile",
    ),
    Knob(
        name="heads_per_group",
        values=(1, 2, 4, 8, 16, ALL_HEADS),
        meaning="order of tiles: 1 blocks fastest, n heads fastest in groups of n, most work first; "
        f"{ALL_HEADS} is all",
    ),
)
FUSED_KNOBS = (
    *_COMMON,
    Knob(
        name="dq_conversion",
        values=("kernel", "tiles", "none"),
        meaning="sums of dq are converted by a kernel after all tiles, or by tiles of their own between the others; "
        "or there are none, since one tile has all keys, at most 128, and writes dq",
    ),
    Knob(
        name="stagger_warpgroups",
        values=(False, True),
        meaning="the first warpgroup is half a step ahead of the second, or both are in the same part of a step",
        default=False,
        implied=True,
        former="pace",
    ),
    Knob(
        name="qk_prefetch",
        values=(False, True),
        meaning="whether s of a step is computed beside dq and dk of the step before, or at its beginning",
        default=False,
        implied=True,
        former="scores",
    ),
    HEADS_PER_TILE,
    QUERY_SHARES,
)
SPLIT_KNOBS = (
    *_COMMON,
    Knob(name="dq_block_n", values=(64, 128), meaning="keys of a step of the kernel for dq"),
    Knob(
        name="dq_stages", values=(2, 3), meaning="slots for blocks of K in the kernel for dq, and of V where they fit"
    ),
    Knob(
        name="split_d",
        values=(False, True),
        meaning="whether products of heads of 129 to 192 columns have 256, or 128 and 64",
        default=False,
        implied=True,
    ),
    HEADS_PER_TILE,
    QUERY_SHARES,
)


def _why_not(spec: Specialization, device: Device) -> str | None:
    if reason := why_not_wgmma(device) or why_not_packed(spec):
        return reason
    if spec.dtype not in GL_DTYPES:
        return f"its tensor cores multiply bf16 and fp16, not {spec.dtype}"
    if reason := why_not_head_dim(spec):
        return reason
    if not spec.aligned16:
        return "TMA needs pointers and strides that are multiples of 16 bytes"
    return _why_not_scores(spec)


def _why_not_fused(spec: Specialization, device: Device) -> str | None:
    if _why_not(spec, device) is None and resources.is_wide(spec):
        return "heads of more than 128 columns leave no registers for a block of dq beside dk and dv"
    return _why_not(spec, device)


def _why_not_scores(spec: Specialization) -> str | None:
    """What of its features a pass has no gradient of."""
    if spec.mask == "full":
        return "it reads a mask of one value a key, and none of one a score"
    if spec.mods is not None and spec.mods.aux_grads:
        return "it sums no gradients of the tensors of functions"
    if spec.mods is not None and spec.mods.score_mod is not None:
        return why_no_gradient(spec.mods.score_mod)
    return None


def _why_invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    return (
        _why_meaningless(spec, config)
        or _why_not_shared(spec, config)
        or _why_not_parts(spec, config)
        or _why_not_packed(spec, config)
        or (_why_impossible_conversion if resources.is_fused(config) else _why_pointless_step)(spec, config, device)
        or _why_impossible_order(spec, config)
        or _why_too_large(spec, config, device)
    )


def _why_meaningless(spec: Specialization, config: Config) -> str | None:
    if config["block_m"] == 2 * ROWS and widest_block(spec) > ROWS:
        return "dk, dv and scores of 128 queries take more registers than a thread has at heads of more than 64 columns"
    if spec.causal and config["heads_per_group"] == 1:
        return "tiles with the most queries start first, and only groups of heads have an order for that"
    if not (spec.causal or spec.window or spec.varlen or has_blocks(spec)) and config["heads_per_group"] != 1:
        return "without a mask all tiles are equally heavy"
    return None


def _why_not_shared(spec: Specialization, config: Config) -> str | None:
    if query_shares(config) > 1 and not heads.is_plain(spec):
        return "tiles share queries where there is nothing but a causal mask"
    return None


def _why_not_parts(spec: Specialization, config: Config) -> str | None:
    if not is_split(config):
        return None
    if leaves_sums(config):
        return "sums of dk and dv that the last kernel adds lie in one part"
    return resources.why_not_parts(spec)


def _why_not_packed(spec: Specialization, config: Config) -> str | None:
    if spec.varlen and not config["persistent"]:
        return "the producer of a persistent kernel finds the packed sequence of a tile"
    if spec.varlen and resources.converts(config):
        return "the tiles of a head that end before it is converted are not counted in packed sequences"
    return None


def _why_impossible_conversion(spec: Specialization, config: Config, device: Device) -> str | None:
    if resources.writes_dq(config) and not heads.is_plain(spec):
        return "one tile has all keys where there is nothing but a causal mask"
    if not resources.converts(config):
        return None
    if not config["persistent"]:
        return "tiles of two kinds are for programs that fetch them"
    if leaves_sums(config):
        return "the tiles of a head that end before it is converted are counted where they have all heads of a group"
    if has_blocks(spec):
        return "the tiles of a head that end before it is converted are counted where all walk the same queries"
    if resources.dq_columns(spec, config) < ROWS:
        return "rows of dq that a tile converts fill a line of the swizzle"
    return None


def _why_impossible_order(spec: Specialization, config: Config) -> str | None:
    if not resources.prefetches_scores(config):
        return None
    if widest_block(spec) > ROWS:
        return "s of the next step takes the registers that dk and dv of heads of more than 64 columns need"
    if config["accumulator_init"] == "upfront":
        return "s that is computed a step ahead has its start long before dp"
    if resources.is_staggered(config) and (spec.causal or spec.window):
        return "the loop of the warpgroup that is ahead would spill what it hides scores by"
    return None


def _why_pointless_step(spec: Specialization, config: Config, device: Device) -> str | None:
    if config["dq_block_n"] == 128:
        return None
    larger = config.replace(dq_block_n=128, dq_stages=2)
    if resources.dq_bytes(spec, larger, 2) <= device.smem_per_block:
        return "steps of 128 keys fit in the kernel for dq, and have half as many waits"
    return None


def _why_too_large(spec: Specialization, config: Config, device: Device) -> str | None:
    shared = resources.main_bytes(spec, config)
    if not resources.is_fused(config):
        shared = max(shared, resources.dq_bytes(spec, config, resources.dq_v_stages(spec, config, device)))
    if shared > device.smem_per_block:
        return f"it needs {shared} bytes of shared memory and a block has {device.smem_per_block}"
    return None


Changes = dict[str, KnobValue]

_ONE_EACH: Changes = {"persistent": False}
_WON: tuple[Changes, ...] = (
    _ONE_EACH,
    {"heads_per_group": 4},
    {"heads_per_group": 16},
    {"heads_per_group": ALL_HEADS},
    {"dq_conversion": "tiles"},
    {"dq_conversion": "tiles", "heads_per_group": 4},
)
"""Changes of a default that won at some length on an H200, or were within 1% of the winner."""


_TOGETHER: Changes = {"stagger_warpgroups": False}
_ORDERS: tuple[Changes, ...] = (
    {"q_stages": 3},
    {"block_m": ROWS, "q_stages": 3},
    {"qk_prefetch": True, "accumulator_init": "interleaved"},
    _TOGETHER,
    {**_TOGETHER, "dq_conversion": "tiles"},
    {"accumulator_init": "interleaved"},
    {"heads_per_tile": 1},
    {"heads_per_tile": 2},
)
"""Other orders of a step, of which each won at some length."""

_SHARED: tuple[Changes, ...] = tuple({QUERY_SHARES.name: shares} for shares in SHARES[1:])
"""Where there are few tiles; `heads.balanced` says which of them serves sizes that nobody measured."""


def _fused_seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    return _valid(spec, device, fused_default(spec, device), (*_ORDERS, *_WON, *_SHARED))


def _split_seed_configs(spec: Specialization, device: Device) -> tuple[Config, ...]:
    return _valid(spec, device, split_default(spec, device), (_ONE_EACH, {"heads_per_tile": 1}, *_SHARED))


def _valid(spec: Specialization, device: Device, default: Config, changes: Sequence[Changes]) -> tuple[Config, ...]:
    found = dict.fromkeys(default.replace(**each) for each in changes)
    return tuple(config for config in found if _why_invalid(spec, config, device) is None)


def _values_of_shares(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    return {} if heads.is_plain(spec) else {QUERY_SHARES.name: (1,)}


def _split_values(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    parts: dict[str, tuple[KnobValue, ...]] = {"split_d": (False,)} if resources.why_not_parts(spec) else {}
    return _values_of_shares(spec) | parts


FEATURES = frozenset({"causal", "window", "softcap", "alibi", "sinks", "mask", "functions", "q_offset", "varlen"})
"""Sinks are part of the LSE that a backward pass starts from."""

HOPPER_BACKWARD_FUSED = KernelFamily(
    id=FUSED_ID,
    title="Warp-specialised FlashAttention for Hopper in Gluon",
    template="hopper_backward/hopper_backward.py.jinja",
    direction="backward",
    knobs=FUSED_KNOBS,
    features=FEATURES,
    unsupported=_why_not_fused,
    invalid=_why_invalid,
    default=fused_default,
    allowed_values=_values_of_shares,
    template_values=text.values,
    kernels=kernels.kernels,
    scratch=kernels.scratch,
    seed_configs=_fused_seed_configs,
    fitted=heads.fitted,
    poor_at_sizes=heads.poor_at_sizes,
    most_keys=resources.most_keys,
    balanced=heads.balanced,
    beside=heads.beside,
    # a step has fewer scores there
    default_for_functions=True,
    tolerated_spills=resources.TOLERATED_SPILLS,
    default_spills=resources.FUSED_DEFAULT_SPILLS,
    cost_model=FUSED_COST_MODEL,
)

HOPPER_BACKWARD_SPLIT = dataclasses.replace(
    HOPPER_BACKWARD_FUSED,
    id=SPLIT_ID,
    title="Warp-specialised FlashAttention for Hopper in Gluon, in a fixed order",
    knobs=SPLIT_KNOBS,
    features=FEATURES | {"deterministic"},
    unsupported=_why_not,
    default=split_default,
    allowed_values=_split_values,
    seed_configs=_split_seed_configs,
    default_spills=resources.SPLIT_DEFAULT_SPILLS,
    cost_model=SPLIT_COST_MODEL,
)
