"""Configs of the Hopper family that won races on an H200 (docs/decisions/named-barriers-on-hopper.md).

Which of them wins depends on the lengths of the sequences, which a specialization does not know, so all are named. A
search begins with them. Each is a change of the family's default.
"""

from __future__ import annotations

from flashgen.core.config import KnobValue

Changes = dict[str, KnobValue]

NAMED_BARRIERS: Changes = {
    "barriers": "named",
    "ping_pong": True,
    "conditional_rescale": True,
    "exp_order": "data",
    "max_chains": 1,
}
FREE_EXP_ORDER: Changes = {**NAMED_BARRIERS, "exp_order": "free"}
MBARRIERS: Changes = {"barriers": "mbarrier", "exp_order": "free", "max_chains": 1}
EXP_BEFORE_WAIT: Changes = {**MBARRIERS, "ping_pong": False, "conditional_rescale": True, "exp_order": "barrier"}
"""Exponentials stay ahead of the wait for the product."""

FIRST_MAXIMUM: Changes = {"softmax_reference": "first_block", "conditional_rescale": True, "max_chains": 1}
"""The default under a softcap that bounds the scores (docs/decisions/first-maximum.md)."""

ROW_SUMS: Changes = {**FIRST_MAXIMUM, "softmax_reference": "row_sums"}
"""The default wherever else it is possible, as fast on all data (docs/decisions/row-sums.md)."""

FOUR_WARPGROUPS: Changes = {
    "warpgroups": 4,
    "block_n": 64,
    "v_stages": 3,
    "ping_pong": True,
    "conditional_rescale": True,
}
THREE_WARPGROUPS_HALF_AHEAD: Changes = {
    **MBARRIERS,
    "warpgroups": 3,
    "block_n": 128,
    "v_stages": 2,
    "qk_prefetch": "half",
    "ping_pong": True,
    "conditional_rescale": True,
}
"""Three warpgroups where the registers suffice for 128 keys only because half of the scores wait for others."""

THREE_WARPGROUPS_64_KEYS: Changes = {**NAMED_BARRIERS, "warpgroups": 3, "block_n": 64, "v_stages": 3}
"""Three warpgroups of which each has all scores of 64 keys ahead."""

THREE_WARPGROUPS: Changes = {"warpgroups": 3, "block_n": 128, "v_stages": 3}
ONE_Q_STAGE: Changes = {"q_stages": 1, "hidden_blocks": "computed"}
TWO_Q_STAGES: Changes = {"q_stages": 2, "hidden_blocks": "skipped"}
THREE_CTAS_PER_SM: Changes = {
    "warpgroups": 1,
    "blocks_per_sm": 3,
    "block_n": 64,
    "v_stages": 3,
    "ping_pong": False,
    "conditional_rescale": True,
}

FOUR_CTAS_PER_SM: Changes = {
    **THREE_CTAS_PER_SM,
    **MBARRIERS,
    "blocks_per_sm": 4,
    "v_stages": 2,
    "q_stages": 1,
    "qk_prefetch": "none",
}
"""Of one warpgroup each: where tiles have few steps, others work while one begins or ends."""

SPLIT_HEADS: tuple[Changes, ...] = (
    {"split_d": False, "block_n": 64},
    {"split_d": True, "block_n": 128, "v_stages": 2, **FREE_EXP_ORDER},
    {"split_d": True, "v_stages": 3},
    {"split_d": True, "block_n": 64, "v_stages": 3, "warpgroups": 3},
    {**THREE_WARPGROUPS_HALF_AHEAD, "split_d": True},
    {**THREE_WARPGROUPS_HALF_AHEAD, "split_d": True, "qk_prefetch": "none"},
)
"""Of heads of 96 and 192 columns: a quarter less to multiply and to keep than of padded ones, 13 to 17% faster. A
search tries what the room that two parts leave is good for."""

SHORT_WINDOWS: tuple[Changes, ...] = (
    {**THREE_CTAS_PER_SM, **MBARRIERS, "q_stages": 1, "heads_per_group": 1},
    {**FOUR_CTAS_PER_SM, "heads_per_group": 1},
    {**FOUR_CTAS_PER_SM, "heads_per_group": 32},
    {**THREE_CTAS_PER_SM, **MBARRIERS, "q_stages": 1, "blocks_per_sm": 2, "v_stages": 2},
    {**FREE_EXP_ORDER, "warpgroups": 2, "block_n": 64, "v_stages": 3, "hidden_blocks": "skipped", "heads_per_group": 1},
    {**FREE_EXP_ORDER, "warpgroups": 2, "block_n": 64, "v_stages": 3, "hidden_blocks": "skipped", "heads_per_group": 8},
    {**THREE_WARPGROUPS_64_KEYS, "hidden_blocks": "skipped", "heads_per_group": 4},
    {
        **NAMED_BARRIERS,
        "warpgroups": 2,
        "block_n": 64,
        "v_stages": 2,
        "hidden_blocks": "skipped",
        "heads_per_group": 16,
    },
)
"""Of windows: little covers the ends of a tile of a few steps but another program beside it, and blocks of which a
warpgroup sees nothing are a large share of them (docs/decisions/short-windows.md)."""

SHORT_STEPS: tuple[Changes, ...] = ({"block_n": 64, "v_stages": 2}, {"block_n": 64, "v_stages": 3})
"""Where tiles of a bias or a mask take room, likewise."""

SEED_CONFIGS: dict[tuple[int, bool], tuple[Changes, ...]] = {
    (64, False): (
        {**FOUR_WARPGROUPS, **MBARRIERS, "k_release": "with_v"},
        {**FOUR_WARPGROUPS, **MBARRIERS, "q_stages": 2},
        {**FOUR_WARPGROUPS, **FREE_EXP_ORDER},
        {**THREE_WARPGROUPS, **MBARRIERS, "q_stages": 2},
        {**THREE_WARPGROUPS, **FREE_EXP_ORDER},
    ),
    (64, True): (
        {**THREE_CTAS_PER_SM, **MBARRIERS, **ONE_Q_STAGE, "masked_blocks": "one", "heads_per_group": 32},
        {
            **THREE_CTAS_PER_SM,
            **MBARRIERS,
            **ONE_Q_STAGE,
            "q_stages": 2,
            "v_stages": 2,
            "masked_blocks": "one",
            "heads_per_group": 32,
        },
        {**FOUR_CTAS_PER_SM, **ONE_Q_STAGE, "masked_blocks": "one", "heads_per_group": 32},
        {**FOUR_WARPGROUPS, **MBARRIERS, **TWO_Q_STAGES, "masked_blocks": "branch", "heads_per_group": 32},
        {**FOUR_WARPGROUPS, **MBARRIERS, **TWO_Q_STAGES, "masked_blocks": "branch", "heads_per_group": 8},
        {
            **FOUR_WARPGROUPS,
            **MBARRIERS,
            **TWO_Q_STAGES,
            "masked_blocks": "branch",
            "heads_per_group": 8,
            "ping_pong": False,
        },
        {**THREE_WARPGROUPS, **MBARRIERS, **TWO_Q_STAGES, "masked_blocks": "branch", "heads_per_group": 4},
        {**THREE_WARPGROUPS, **FREE_EXP_ORDER, **TWO_Q_STAGES, "masked_blocks": "branch", "heads_per_group": 8},
    ),
    (128, False): (
        THREE_WARPGROUPS_64_KEYS,
        {**NAMED_BARRIERS, "q_stages": 2},
        {**NAMED_BARRIERS, "ping_pong": False},
        THREE_WARPGROUPS_HALF_AHEAD,
        FREE_EXP_ORDER,
    ),
    (128, True): (
        {**NAMED_BARRIERS, "heads_per_group": 2},
        {**NAMED_BARRIERS, "heads_per_group": 4, "ping_pong": False},
        {**NAMED_BARRIERS, "heads_per_group": 8},
        {**NAMED_BARRIERS, "heads_per_group": 32, "q_stages": 2},
        {**NAMED_BARRIERS, "heads_per_group": 16, "q_stages": 2},
        {**FREE_EXP_ORDER, "heads_per_group": 4},
        {**NAMED_BARRIERS, "heads_per_group": 4, "masked_blocks": "branch"},
        {**THREE_WARPGROUPS_HALF_AHEAD, "heads_per_group": 8, "masked_blocks": "branch", "hidden_blocks": "skipped"},
        {**THREE_WARPGROUPS_64_KEYS, "heads_per_group": 8, "masked_blocks": "branch", "hidden_blocks": "skipped"},
    ),
    (256, False): (FREE_EXP_ORDER, {**NAMED_BARRIERS, "ping_pong": False}),
    (256, True): (
        {**NAMED_BARRIERS, "heads_per_group": 16},
        {**NAMED_BARRIERS, "heads_per_group": 4},
        {**EXP_BEFORE_WAIT, "heads_per_group": 8},
        {**EXP_BEFORE_WAIT, "heads_per_group": 4},
    ),
}
"""By the larger padded head_dim and whether the mask is causal; those for short sequences first."""
