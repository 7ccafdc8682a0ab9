"""Changes of the Hopper family's default for packed sequences, which a search may choose."""

from __future__ import annotations

from flashgen.core.config import KnobValue

ONE_WARPGROUP: dict[str, KnobValue] = {
    "warpgroups": 1,
    "blocks_per_sm": 2,
    "block_n": 64,
    "v_stages": 2,
    "barriers": "mbarrier",
    "ping_pong": False,
    "exp_order": "free",
    "q_stages": 1,
    "hidden_blocks": "computed",
}
CHANGES: dict[str, dict[str, KnobValue]] = {
    "default": {},
    "running maximum": {"softmax_reference": "running", "early_settle": False},
    "early settle": {"early_settle": True},
    "one warpgroup": ONE_WARPGROUP,
    "two tiles of Q": {"q_stages": 2, "block_n": 64},
    "mbarriers": {"barriers": "mbarrier", "exp_order": "free"},
    "hidden blocks": {"block_n": 64, "v_stages": 3, "hidden_blocks": "skipped"},
    "given order": {"heads_per_group": 1},
    "all heads": {"heads_per_group": 32},
    "shares": {"split_keys": True},
    "heads side by side": {"packed_heads": 4, "hidden_blocks": "computed"},
    "more heads than a group has": {**ONE_WARPGROUP, "packed_heads": 8},
    "shares of heads side by side": {"packed_heads": 2, "hidden_blocks": "computed", "split_keys": True},
}
