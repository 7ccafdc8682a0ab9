"""Configs of the Hopper family that won races on an H200 (docs/decisions/named-barriers-on-hopper.md).

Which of them wins depends on the lengths of the sequences, which a specialization does not know, so all are named. A
search begins with them. Each is a change of the family's default.
"""

from __future__ import annotations

from flashgen.core.config import KnobValue

Changes = dict[str, KnobValue]

NAMED: Changes = {
    "barriers": "named",
    "ping_pong": True,
    "conditional_rescale": True,
    "exp_order": "data",
    "max_tree": "chain",
}
FREE: Changes = {**NAMED, "exp_order": "free"}
MBARRIER: Changes = {"barriers": "mbarrier", "exp_order": "free", "max_tree": "chain"}
PATIENT: Changes = {**MBARRIER, "ping_pong": False, "conditional_rescale": True, "exp_order": "barrier"}

FIRST: Changes = {"maximum": "first", "conditional_rescale": True, "max_tree": "chain"}
"""The default wherever it is possible (docs/decisions/first-maximum.md); what won is tried with it."""

FOUR: Changes = {"warpgroups": 4, "block_n": 64, "v_stages": 3, "ping_pong": True, "conditional_rescale": True}
WIDE: Changes = {
    **MBARRIER,
    "warpgroups": 3,
    "block_n": 128,
    "v_stages": 2,
    "scores_ahead": "half",
    "ping_pong": True,
    "conditional_rescale": True,
}
"""Three warpgroups where the registers suffice for 128 keys only because half of the scores wait for others."""

NARROW: Changes = {**NAMED, "warpgroups": 3, "block_n": 64, "v_stages": 3}
"""Three warpgroups of which each has all scores of 64 keys ahead."""

THREE: Changes = {"warpgroups": 3, "block_n": 128, "v_stages": 3}
ONCE: Changes = {"q_stages": 1, "hidden_blocks": "computed"}
AHEAD: Changes = {"q_stages": 2, "hidden_blocks": "skipped"}
ONE: Changes = {
    "warpgroups": 1,
    "blocks_per_sm": 3,
    "block_n": 64,
    "v_stages": 3,
    "ping_pong": False,
    "conditional_rescale": True,
}

CROWD: Changes = {**ONE, **MBARRIER, "blocks_per_sm": 4, "v_stages": 2, "q_stages": 1, "scores_ahead": "none"}
"""Four programs of one warpgroup: where tiles have few steps, others work while one begins or ends."""

SPLIT: tuple[Changes, ...] = (
    {"split_d": False, "block_n": 64},
    {"split_d": True, "block_n": 128, "v_stages": 2, **FREE},
    {"split_d": True, "v_stages": 3},
    {"split_d": True, "block_n": 64, "v_stages": 3, "warpgroups": 3},
    {**WIDE, "split_d": True},
    {**WIDE, "split_d": True, "scores_ahead": "none"},
)
"""Of heads of 96 and 192 columns: a quarter less to multiply and to keep than of padded ones, 13 to 17% faster. A
search tries what the room that two parts leave is good for."""

SHORT: tuple[Changes, ...] = (
    {**ONE, **MBARRIER, "q_stages": 1, "heads_per_group": 1},
    {**CROWD, "heads_per_group": 1},
    {**CROWD, "heads_per_group": 32},
    {**ONE, **MBARRIER, "q_stages": 1, "blocks_per_sm": 2, "v_stages": 2},
    {**FREE, "warpgroups": 2, "block_n": 64, "v_stages": 3, "hidden_blocks": "skipped", "heads_per_group": 1},
    {**FREE, "warpgroups": 2, "block_n": 64, "v_stages": 3, "hidden_blocks": "skipped", "heads_per_group": 8},
    {**NARROW, "hidden_blocks": "skipped", "heads_per_group": 4},
    {**NAMED, "warpgroups": 2, "block_n": 64, "v_stages": 2, "hidden_blocks": "skipped", "heads_per_group": 16},
)
"""Of windows: little covers the ends of a tile of a few steps but another program beside it, and blocks of which a
warpgroup sees nothing are a large share of them (docs/decisions/short-windows.md)."""

SMALLER: tuple[Changes, ...] = ({"block_n": 64, "v_stages": 2}, {"block_n": 64, "v_stages": 3})
"""Where tiles of a bias or a mask take room, likewise."""

WON: dict[tuple[int, bool], tuple[Changes, ...]] = {
    (64, False): (
        {**FOUR, **MBARRIER, "k_release": "with_v"},
        {**FOUR, **MBARRIER, "q_stages": 2},
        {**FOUR, **FREE},
        {**THREE, **MBARRIER, "q_stages": 2},
        {**THREE, **FREE},
    ),
    (64, True): (
        {**ONE, **MBARRIER, **ONCE, "masked_blocks": "one", "heads_per_group": 32},
        {**ONE, **MBARRIER, **ONCE, "q_stages": 2, "v_stages": 2, "masked_blocks": "one", "heads_per_group": 32},
        {**CROWD, **ONCE, "masked_blocks": "one", "heads_per_group": 32},
        {**FOUR, **MBARRIER, **AHEAD, "masked_blocks": "branch", "heads_per_group": 32},
        {**FOUR, **MBARRIER, **AHEAD, "masked_blocks": "branch", "heads_per_group": 8},
        {**FOUR, **MBARRIER, **AHEAD, "masked_blocks": "branch", "heads_per_group": 8, "ping_pong": False},
        {**THREE, **MBARRIER, **AHEAD, "masked_blocks": "branch", "heads_per_group": 4},
        {**THREE, **FREE, **AHEAD, "masked_blocks": "branch", "heads_per_group": 8},
    ),
    (128, False): (NARROW, {**NAMED, "q_stages": 2}, {**NAMED, "ping_pong": False}, WIDE, FREE),
    (128, True): (
        {**NAMED, "heads_per_group": 2},
        {**NAMED, "heads_per_group": 4, "ping_pong": False},
        {**NAMED, "heads_per_group": 8},
        {**NAMED, "heads_per_group": 32, "q_stages": 2},
        {**NAMED, "heads_per_group": 16, "q_stages": 2},
        {**FREE, "heads_per_group": 4},
        {**NAMED, "heads_per_group": 4, "masked_blocks": "branch"},
        {**WIDE, "heads_per_group": 8, "masked_blocks": "branch", "hidden_blocks": "skipped"},
        {**NARROW, "heads_per_group": 8, "masked_blocks": "branch", "hidden_blocks": "skipped"},
    ),
    (256, False): (FREE, {**NAMED, "ping_pong": False}),
    (256, True): (
        {**NAMED, "heads_per_group": 16},
        {**NAMED, "heads_per_group": 4},
        {**PATIENT, "heads_per_group": 8},
        {**PATIENT, "heads_per_group": 4},
    ),
}
"""By the larger padded head_dim and whether the mask is causal; those for short sequences first."""
