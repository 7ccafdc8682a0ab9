"""Configs of the Hopper backward families that serve where nothing was tuned."""

from __future__ import annotations

from flashgen.codegen.common_mods import has_blocks
from flashgen.codegen.common_wgmma import ROWS, widest_block
from flashgen.codegen.hopper_backward import resources, scores
from flashgen.codegen.hopper_backward.resources import FUSED_ID, SPLIT_ID
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import Device
from flashgen.core.workload import Specialization


def fused_default(spec: Specialization, device: Device) -> Config:
    """Sums of dq go to memory."""
    own: dict[str, KnobValue] = {
        "dq_conversion": "kernel",
        "stagger_warpgroups": True,
        "qk_prefetch": False,
        "accumulator_init": "upfront",
    }
    return Config.of(FUSED_ID, {**_common_default(spec), **own})


def split_default(spec: Specialization, device: Device) -> Config:
    """A kernel of its own computes dq."""
    own: dict[str, KnobValue] = {
        # with scores of 128 queries the starts of all sums do not fit beside the mask of none
        "accumulator_init": "upfront" if widest_block(spec) > ROWS or spec.causal else "interleaved",
        "dq_block_n": ROWS if resources.is_wide(spec) else 2 * ROWS,
        "dq_stages": 2 if widest_block(spec) > ROWS else 3,
        "split_d": resources.why_not_parts(spec) is None,
    }
    return Config.of(SPLIT_ID, {**_common_default(spec), **own})


def _common_default(spec: Specialization) -> dict[str, KnobValue]:
    return {
        "block_m": ROWS if widest_block(spec) > ROWS or _takes_registers(spec) else 2 * ROWS,
        "q_stages": 2,
        # beside functions the values of a tile take registers of the next ones
        "persistent": spec.varlen or not (scores.weighs_first(spec) or has_blocks(spec)),
        # tiles of a block mask have lists of any lengths, most of them the longer the sooner
        "heads_per_group": 8 if spec.causal or has_blocks(spec) else 1,
        "heads_per_tile": 0,
        "query_shares": 1,
    }


def _takes_registers(spec: Specialization) -> bool:
    """Whether what scores become leaves a thread registers for those of 64 queries, and not of 128.

    A mask_mod that is asked in the partial blocks of a block mask takes them in a branch.
    """
    return scores.starts_at_zero(spec) or (spec.mods is not None and not has_blocks(spec))
