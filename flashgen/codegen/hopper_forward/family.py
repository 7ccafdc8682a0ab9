"""The Hopper forward family: FlashAttention-3's warp-specialised algorithm in Gluon, for sm90."""

from __future__ import annotations

import functools

from flashgen.codegen import head_packing
from flashgen.codegen.common_order import ALL_HEADS
from flashgen.codegen.common_sequences import why_not_in_pages, why_not_packed
from flashgen.codegen.common_softcap import TANH, exact_sibling
from flashgen.codegen.common_types import GL_DTYPES
from flashgen.codegen.common_wgmma import why_not_head_dim, why_not_wgmma
from flashgen.codegen.family import KernelFamily, Knob, KnobRows
from flashgen.codegen.hopper_forward import defaults, resources, rules, shares
from flashgen.codegen.hopper_forward import template_context as text
from flashgen.codegen.hopper_forward.cost_model import COST_MODEL
from flashgen.codegen.key_splits import SPLIT_KEYS, scratch_of_shares
from flashgen.core.device import Device
from flashgen.core.workload import Specialization

KNOBS = (
    Knob(name="warpgroups", values=(1, 2, 3, 4), meaning="consumer warpgroups of a CTA, each of 64 query rows"),
    Knob(name="blocks_per_sm", values=(1, 2, 3, 4), meaning="CTAs per SM, between which registers are divided"),
    Knob(name="block_n", values=resources.BLOCK_NS, meaning="keys of a step"),
    Knob(name="v_stages", values=(2, 3), meaning="slots for blocks of V, and of K"),
    Knob(
        name="q_stages",
        values=(1, 2),
        meaning="tiles that Q has room for: with two, Q and the first keys of the next tile are there when it begins",
        default=1,
        implied=True,
    ),
    Knob(
        name="k_release",
        values=("own", "with_v"),
        meaning="a slot of K is released by a barrier of its own, or with V's by having one slot more",
    ),
    Knob(
        name="barriers",
        values=("mbarrier", "named"),
        meaning="what slots are released by and turns passed with: barriers in shared memory, or the hardware's own",
    ),
    Knob(name="ping_pong", values=(False, True), meaning="warpgroups take turns at the tensor cores"),
    Knob(
        name="conditional_rescale",
        values=(False, True),
        meaning="the maximum moves only by more than 2**8, and a warp whose maxima stay skips the rescaling",
    ),
    Knob(
        name="exp_order",
        values=("free", "barrier", "data"),
        meaning="exponentials stay ahead of the wait for the product: not, by a wait, by a release that needs them",
    ),
    Knob(
        name="qk_prefetch",
        values=("block", "half", "none"),
        meaning="what of a block's scores is computed beside the product of the block before: "
        "the less, the fewer registers",
        default="block",
        implied=True,
        former="scores_ahead",
    ),
    Knob(
        name="softmax_reference",
        values=("running", "first_block", "row_sums"),
        meaning="what exponentials are taken against: the running maximum of a row, or that of its first keys, where a "
        "softcap bounds how far later scores are above it, or the latter and then what the row's sum says",
        default="running",
        implied=True,
        former="maximum",
    ),
    Knob(
        name="early_settle",
        values=(False, True),
        meaning="where references follow the row sums, weights and sums settle while the product is computed, and the "
        "output behind it",
        default=False,
        implied=True,
    ),
    Knob(
        name="max_chains",
        values=(1, 4),
        meaning="chains of instructions that find the maximum of a row",
        former="max_tree",
    ),
    Knob(
        name="heads_per_group",
        values=(1, 2, 4, 8, 16, 32, ALL_HEADS),
        meaning="tile order: 1 query blocks fastest, n heads fastest in groups of n, most keys first; "
        f"{ALL_HEADS} is all",
    ),
    Knob(
        name="masked_blocks",
        values=("one", "peeled", "branch"),
        meaning="causal: only the first block of keys has hidden ones, since query blocks are cut for it; "
        "or those that have a loop of their own; or a branch in the one loop",
    ),
    Knob(
        name="hidden_blocks",
        values=("computed", "skipped"),
        meaning="causal or with a window: of a tile of several warpgroups each computes all blocks, or leaves out "
        "those at either end of which it sees no key",
        default="computed",
        implied=True,
    ),
    Knob(
        name="split_d",
        values=(False, True),
        meaning="heads in two tiles, a power of two and the rest, instead of one padded tile",
        default=False,
        implied=True,
    ),
    Knob(
        name="packed_heads",
        values=head_packing.PACKED_HEADS,
        meaning="heads of a group side by side in the rows of a warpgroup, whose keys are read once for all of them",
        default=1,
        implied=True,
    ),
    SPLIT_KEYS,
    TANH,
)


FEATURES = frozenset(
    {
        *("causal", "window", "softcap", "alibi", "sinks", "bias", "mask", "functions", "q_offset", "deterministic"),
        *("varlen", "pages"),
    }
)


def _why_not(spec: Specialization, device: Device) -> str | None:
    if reason := why_not_wgmma(device) or why_not_packed(spec) or why_not_in_pages(spec):
        return reason
    if reason := resources.why_not_pages(spec.page_size, min(resources.BLOCK_NS)):
        return reason
    if resources.score_tiles(spec) and not spec.aligned_scores:
        return "TMA needs tiles of bias and mask with strides that are multiples of 16 bytes, 1 along the keys"
    if reason := rules.why_not_functions(spec):
        return reason
    if spec.dtype not in GL_DTYPES:
        return f"its tensor cores multiply bf16 and fp16, not {spec.dtype}"
    if reason := why_not_head_dim(spec):
        return reason
    if not spec.aligned16:
        return "TMA needs pointers and strides that are multiples of 16 bytes"
    if rules.why_too_large(spec, defaults.smallest(spec, device), device):
        return "its tiles of bias and mask do not fit beside heads of this size"
    return None


@functools.cache
def _knob_rows() -> KnobRows:
    return KnobRows(names=rules.TOGETHER, rows=rules.knob_rows(KNOBS))


HOPPER_FORWARD = KernelFamily(
    id=text.FAMILY_ID,
    title="Warp-specialised FlashAttention for Hopper in Gluon",
    template="hopper_forward/hopper_forward.py.jinja",
    direction="forward",
    knobs=KNOBS,
    features=FEATURES,
    unsupported=_why_not,
    invalid=rules.invalid,
    default=defaults.default,
    template_values=text.values,
    kernels=text.kernels,
    scratch=scratch_of_shares,
    key_splits=shares.key_splits,
    seed_configs=defaults.seed_configs,
    allowed_values=rules.allowed_values,
    knob_rows=_knob_rows,
    fitted=shares.fitted,
    over_pages=defaults.over_pages,
    # tiles have other references there, and less room
    default_for_functions=True,
    poor_at_sizes=defaults.poor_at_sizes,
    balanced=shares.balanced,
    beside=shares.beside,
    successor=resources.successor,
    exact_sibling=exact_sibling,
    tolerated_spills=resources.TOLERATED_SPILLS,
    default_spills=resources.DEFAULT_SPILLS,
    cost_model=COST_MODEL,
)
