"""Which configs of the Hopper forward family can work: the reasons against the others, from sense to resources."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from flashgen.codegen.common_mods import has_blocks, hides
from flashgen.codegen.common_softcap import TANH, tanh_values, why_not_tanh
from flashgen.codegen.common_wgmma import FIRST_NAMED_BARRIER, NAMED_BARRIERS, ROWS
from flashgen.codegen.family import Knob
from flashgen.codegen.head_packing import SEQUENCE_HEADS
from flashgen.codegen.head_parts import is_split, why_not_split
from flashgen.codegen.hopper_forward import resources
from flashgen.codegen.key_splits import split_keys, why_not_shared
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.score_mods import MASK_BLOCK
from flashgen.core.workload import Specialization


def invalid(spec: Specialization, config: Config, device: Device) -> str | None:
    """The reason why a config of declared values cannot work, or was never the fastest; None if it is worth a try."""
    return (
        _why_not_together(config)
        or _why_meaningless(spec, config)
        or why_not_tanh(spec, config, device)
        or _why_not_packed(spec, config)
        or (why_not_shared(spec) if split_keys(config) else None)
        or resources.why_not_pages(spec.page_size, config.integer("block_n"))
        or why_impossible_mask(spec, config)
        or _why_not_listed(spec, config)
        or why_too_large(spec, config, device)
        or _why_pointless(spec, config, device)
        or _why_not_in_groups(spec, config)
    )


def why_too_large(spec: Specialization, config: Config, device: Device) -> str | None:
    """The reason why registers, shared memory or named barriers of an SM do not suffice, or None."""
    needed, available = resources.live_registers(spec, config), resources.consumer_registers(config, device)
    if needed > available:
        return f"a consumer thread needs about {needed} registers and gets {available}"
    separate_o_smem = resources.separate_o_smem(spec, config, device)
    if resources.q_stages(config) > 1 and not separate_o_smem:
        return "two tiles of Q leave no place for the output"
    shared, limit = (
        resources.smem_bytes(spec, config, separate_o_smem=separate_o_smem),
        resources.smem_available(config, device),
    )
    if shared > limit:
        return f"it needs {shared} bytes of shared memory and a block has {limit}"
    barriers, left = resources.named_barriers(spec, config), NAMED_BARRIERS - FIRST_NAMED_BARRIER
    if barriers > left:
        return f"it needs {barriers} named barriers and Triton leaves {left}"
    return None


TOGETHER = (
    *("warpgroups", "blocks_per_sm", "v_stages", "k_release", "barriers"),
    *("ping_pong", "conditional_rescale", "exp_order", "max_chains", "qk_prefetch", "softmax_reference"),
)
"""Knobs of a program's warps and their order. Of 18432 combinations of their values 476 are worth a try."""


def _why_not_together(values: Mapping[str, KnobValue] | Config) -> str | None:
    """What makes no sense, and then what was never the fastest on an H200, whatever is computed."""
    named = values["barriers"] == "named"
    if values["ping_pong"] and values["warpgroups"] == 1:
        return "one warpgroup has nobody to take turns with"
    if values["exp_order"] == "data" and (values["barriers"], values["k_release"]) != ("named", "own"):
        return "the release that needs the exponentials is that of K, by a named barrier"
    if values["exp_order"] == "barrier" and (named or not values["conditional_rescale"]):
        return "a wait for their sake only pays together with the conditional rescale, and data does it where it can"
    if values["max_chains"] == 4 and named:
        return "four chains of maxima are slower than one where little else waits"
    side_by_side = values["blocks_per_sm"] != 1
    four = side_by_side and int(values["warpgroups"]) * int(values["blocks_per_sm"]) == 4
    if values.get("qk_prefetch", "block") != "block":
        short = values["warpgroups"] == 3 or four
        if not short or values["exp_order"] != "free":
            return (
                "fewer scores ahead save registers, which three warpgroups or four of several programs lack, and leave "
                "no product to order things by"
            )
    elif four:
        return "four warpgroups of several programs leave no registers for scores ahead"
    plain = values["conditional_rescale"] and values["max_chains"] == 1
    if values.get("softmax_reference", "running") != "running" and not plain:
        return "where few steps follow the maximum, one way to do so is enough"
    if values["warpgroups"] == 1 and not side_by_side:
        return "one warpgroup leaves the tensor cores idle during a softmax, so that its blocks are side by side"
    if values["warpgroups"] != 1 and side_by_side and (not four or values["ping_pong"]):
        return "blocks of several warpgroups are side by side as two of two, which take turns by themselves"
    if values["k_release"] == "with_v" and (values["warpgroups"], values["v_stages"]) != (4, 3):
        return "releasing K with V only pays in a long ring that four warpgroups release"
    return None


def knob_rows(knobs: Sequence[Knob]) -> tuple[tuple[KnobValue, ...], ...]:
    """The combinations of values of `TOGETHER` that a search enumerates."""
    known = {knob.name: knob.values for knob in knobs}
    rows = itertools.product(*(known[name] for name in TOGETHER))
    return tuple(row for row in rows if _why_not_together(dict(zip(TOGETHER, row, strict=True))) is None)


LOSES_SUMS = (
    "ptxas computes wrong sums here: beside a branch for masked blocks, a step whose exponentials are free reads row "
    "sums as they were before they settled"
)
"""Seen in the machine code of ptxas 12.8 and 12.9: what settles is a copy of a sum, and the next step that follows the
maximum multiplies the sum. On an H200 10 of 10 such configs failed the gate, and none of 14 with another order of the
exponentials or another way to mask."""


SETTLES_LATE = (
    "without packed sequences, weights that settle ahead of the output were never faster, and mostly 1 to 5% slower"
)
"""In balanced races of 91 records with and without on an H200 (docs/experiments/row-sums.md)."""


def _why_meaningless(spec: Specialization, config: Config) -> str | None:
    if is_split(config) and (reason := why_not_split(spec)):
        return reason
    if resources.qk_prefetch(config) != "block" and resources.score_tiles(spec):
        return "tiles of bias and mask are taken to registers while the product is computed, and need all that are free"
    kind = resources.softmax_reference(config)
    if kind == "first_block" and (reason := why_not_first_block(spec)):
        return reason
    if kind == "row_sums" and (reason := why_not_row_sums(spec)):
        return reason
    if resources.early_settle(config) and (kind != "row_sums" or resources.qk_prefetch(config) != "block"):
        return "sums settle early beside a product, where references follow them"
    if resources.early_settle(config) and config["masked_blocks"] == "branch" and config["exp_order"] == "free":
        return LOSES_SUMS
    if resources.early_settle(config) and not spec.varlen:
        return SETTLES_LATE
    if config["hidden_blocks"] == "skipped" and not hides_whole_blocks(spec, config):
        return "every warpgroup sees keys of every block that its tile sees"
    return None


def why_not_first_block(spec: Specialization) -> str | None:
    """Why references must not stay at the maximum of a row's first keys, or None."""
    if not resources.is_capped(spec):
        return "only a softcap bounds how far sums may come above the maximum of the first keys"
    return _why_running(spec)


def why_not_row_sums(spec: Specialization) -> str | None:
    """Why references cannot follow the row sums, or need not, or None."""
    if resources.is_capped(spec):
        return "a softcap bounds the scores, and no sum can come too high"
    return _why_running(spec)


def _why_running(spec: Specialization) -> str | None:
    if spec.mods:
        return "where a function of the caller makes or hides scores, a row may see its first key in any block"
    if spec.bias or spec.mask == "full":
        return "where a bias or a mask hides single scores, a row may see its first key in any block"
    return None


def why_not_functions(spec: Specialization) -> str | None:
    """What of a call with functions of its caller is left to the portable family: the reason, or None."""
    if hides(spec) and spec.mask == "keys":
        return (
            "a mask of keys and a function that hides more of them would clear the same rows of V one after the other"
        )
    return None


def hides_whole_blocks(spec: Specialization, config: Config) -> bool:
    """Whether a warpgroup may see no key of a tile's last block, or of its first, and the kernel can do without it."""
    return (
        (spec.causal or spec.window)
        and config["masked_blocks"] == "branch"
        and not resources.score_tiles(spec)
        and not has_blocks(spec)
        and resources.tile_rows(config) - ROWS >= resources.packed_heads(config) * config.integer("block_n")
    )


def _why_not_packed(spec: Specialization, config: Config) -> str | None:
    if (spec.bias or spec.mask) and resources.packed_heads(config) > 1:
        return "heads side by side may have different biases or masks, and a step loads those of one"
    if spec.mods and resources.packed_heads(config) > 1:
        return "a function of the caller is asked about one head, and heads side by side are several"
    return None


def may_pack_sequences(spec: Specialization) -> bool:
    """Whether heads of packed sequences may be side by side."""
    return spec.varlen and spec.mods is None


def _why_not_listed(spec: Specialization, config: Config) -> str | None:
    rows = resources.tile_rows(config)
    if has_blocks(spec) and MASK_BLOCK % rows:
        return f"tiles of {rows} query rows do not divide the {MASK_BLOCK} of a block mask"
    return None


def why_impossible_mask(spec: Specialization, config: Config) -> str | None:
    """The reason why `masked_blocks` cannot hide what causal mask and window hide, or None."""
    kind = config["masked_blocks"]
    if has_blocks(spec) and spec.causal:
        return None if kind == "branch" else "blocks of a block mask come in no order, and a branch tells them apart"
    if spec.window:
        return (
            None if kind == "branch" else "a window hides keys at both ends, in blocks that only a branch tells apart"
        )
    if not spec.causal:
        return None if kind == "one" else "without a causal mask only the first block of a tile may need a mask"
    if kind != "branch" and resources.packed_heads(config) > 1:
        return "few query positions of packed heads are not cut along the diagonal"
    one = resources.tile_rows(config) <= config.integer("block_n") and not (spec.offset_tensor or spec.varlen)
    if kind == "one" and not one:
        return (
            "one block of keys holds the diagonal where it has as many keys as the tile has rows, at one known offset"
        )
    if kind == "peeled" and resources.softmax_reference(config) != "running":
        return "steps that follow the maximum are apart from the others anyway"
    if kind == "peeled" and (one or config.integer("warpgroups") > 2):
        return "a second loop for masked blocks only pays where more than one is masked, and where registers are left"
    return None


def _why_pointless(spec: Specialization, config: Config, device: Device) -> str | None:
    """Like the second half of `_why_not_together`."""
    if (
        config["block_n"] == 64
        and not spec.window
        and not spec.page_size  # of which a tile of 64 keys may be one, and 128 two
        and not resources.score_tiles(spec)  # smaller tiles of them leave registers, and the output a place of its own
        and why_too_large(spec, config.replace(block_n=128, v_stages=2), device) is None
    ):
        return "steps of 128 keys fit, and have half as many waits"
    return None


def _why_not_in_groups(spec: Specialization, config: Config) -> str | None:
    """Asked last: an enumeration is the shorter, the fewer rules are behind a knob that they do not look at."""
    if spec.causal and not spec.window and config["heads_per_group"] == 1:
        return "tiles with the most keys start first, and only groups of heads have an order for that"
    if not (spec.causal or has_blocks(spec)) and config["heads_per_group"] != 1:
        return "without a causal mask all tiles are equally heavy"
    return None


def allowed_values(spec: Specialization) -> dict[str, tuple[KnobValue, ...]]:
    """What a specialization leaves of knobs: no other value is valid, or sizes decide which one serves."""
    found: dict[str, tuple[KnobValue, ...]] = {
        "packed_heads": SEQUENCE_HEADS if may_pack_sequences(spec) else (1,),
        "split_keys": (False,),
        TANH.name: tanh_values(spec),
    }
    refused = {"first_block": why_not_first_block(spec), "row_sums": why_not_row_sums(spec)}
    found["softmax_reference"] = ("running", *(kind for kind, reason in refused.items() if reason is None))
    if refused["row_sums"] or not spec.varlen:
        found["early_settle"] = (False,)
    if why_not_split(spec):
        found["split_d"] = (False,)
    if spec.page_size:
        found["block_n"] = tuple(n for n in resources.BLOCK_NS if resources.why_not_pages(spec.page_size, n) is None)
    if not (spec.causal or has_blocks(spec)):
        found["heads_per_group"] = (1,)
    if not (spec.causal or spec.window):
        found["hidden_blocks"] = ("computed",)
    if spec.window or not spec.causal:
        found["masked_blocks"] = ("branch",) if spec.window else ("one",)
    return found
