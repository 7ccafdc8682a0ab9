"""The kernels that are kept whole in tests/golden, for people to read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashgen.codegen.hopper_backward.family import HOPPER_BACKWARD_FUSED, HOPPER_BACKWARD_SPLIT
from flashgen.codegen.hopper_forward.family import HOPPER_FORWARD
from flashgen.codegen.portable_backward.family import PORTABLE_BACKWARD_FUSED, PORTABLE_BACKWARD_SPLIT
from flashgen.codegen.portable_forward.family import PORTABLE_FORWARD
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization

GOLDEN = Path(__file__).parent.parent / "golden"

# of the portable family, name of the golden file: specialization, device whose default it is, knobs changed
GOLDENS = {
    "forward_d128_causal_h200": ("fwd-bf16-d128-causal", "h200", {}),
    "forward_d64_h200": ("fwd-bf16-d64", "h200", {}),
    "forward_d256_fp16_h200": ("fwd-fp16-d256", "h200", {}),
    "forward_d128_causal_4090": ("fwd-bf16-d128-causal", "rtx 4090", {}),
    "forward_d64_causal_a100_offset": ("fwd-fp16-d64-causal-offset", "a100", {"heads_per_group": 1}),
    "forward_d80_unaligned_h200": ("fwd-bf16-d80-unaligned", "h200", {}),
    "forward_d192_dv128_causal_h200": ("fwd-bf16-d192-dv128-causal", "h200", {"heads_per_group": 0}),
    "forward_d64_fp32_h200": ("fwd-fp32-d64", "h200", {}),
    "forward_d128_mi300x": ("fwd-fp16-d128", "mi300x", {}),
    # Gemma 2: alternating windows, capped scores
    "forward_d256_causal_softcap_window_h200": ("fwd-bf16-d256-causal-softcap-window", "h200", {}),
    # gpt-oss
    "forward_d64_causal_sink_window_4090": ("fwd-bf16-d64-causal-sink-window-sink_bf16", "rtx 4090", {}),
    "forward_d64_bias_h200": ("fwd-bf16-d64-bias", "h200", {}),
    "forward_d128_keymask_h200": ("fwd-bf16-d128-keymask", "h200", {}),
    "forward_d128_alibi_mask_scattered_h200": ("fwd-fp16-d128-causal-alibi-mask-scattered-offset", "h200", {}),
    "forward_d192_dv128_split_h200": ("fwd-bf16-d192-dv128-causal", "h200", {"split_d": True}),
    "forward_d80_split_a100": ("fwd-fp16-d80", "a100", {"split_d": True}),
    "forward_d128_causal_maxnreg": (
        "fwd-bf16-d128-causal",
        "h200",
        {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 168, "heavy_first": False},
    ),
}


def golden(name: str) -> tuple[Specialization, Config]:
    key, device, changes = GOLDENS[name]
    spec = Specialization.parse(key)
    return spec, PORTABLE_FORWARD.default(spec, find_device(device)).replace(**changes)  # type: ignore[arg-type]


HOPPER_GOLDENS = {
    "hopper_d128_causal": ("fwd-bf16-d128-causal", {}),
    "hopper_d64": ("fwd-bf16-d64", {}),
    "hopper_d256_causal_offset": ("fwd-fp16-d256-causal-offset", {}),
    "hopper_d256_gemma": ("fwd-bf16-d256-causal-softcap-window", {}),
    "hopper_d64_gpt_oss": ("fwd-bf16-d64-causal-sink-window", {}),
    "hopper_d128_causal_packed": ("fwd-bf16-d128-causal", {"packed_heads": 4, "masked_blocks": "branch"}),
    "hopper_d96_bias_mask": ("fwd-bf16-d96-bias-mask", {"split_d": True}),
    "hopper_d64_short": (
        "fwd-bf16-d64-causal",
        {
            "warpgroups": 1,
            "blocks_per_sm": 3,
            "block_n": 64,
            "ping_pong": False,
            "barriers": "named",
            "exp_order": "free",
            "masked_blocks": "one",
            "q_stages": 1,
            "hidden_blocks": "computed",
        },
    ),
}
"""Kernels of the Hopper family: specialization, knobs changed from its default."""


def hopper_golden(name: str) -> tuple[Specialization, Config]:
    key, changes = HOPPER_GOLDENS[name]
    spec = Specialization.parse(key)
    return spec, HOPPER_FORWARD.default(spec, find_device("h200")).replace(**changes)  # type: ignore[arg-type]


HOPPER_BACKWARD_GOLDENS = {
    "hopper_backward_d128_causal": ("bwd-bf16-d128-causal", HOPPER_BACKWARD_FUSED),
    "hopper_backward_d256_offset": ("bwd-fp16-d256-causal-offset", HOPPER_BACKWARD_SPLIT),
}
"""Kernels of the Hopper backward families: specialization, family whose default it is."""


def hopper_backward_golden(name: str) -> tuple[Specialization, Config]:
    key, row = HOPPER_BACKWARD_GOLDENS[name]
    spec = Specialization.parse(key)
    return spec, row.default(spec, find_device("h200"))


DOCUMENT = UserFunction(
    name="mask_mod",
    source="def mask_mod(b, h, q_idx, k_idx, doc, slopes):\n    return tl.load(doc + q_idx) == tl.load(doc + k_idx)\n",
)
SLOPED = UserFunction(
    name="score_mod",
    source="def score_mod(score, b, h, q_idx, k_idx, doc, slopes):\n"
    "    return score - tl.load(slopes + h) * tl.abs(q_idx - k_idx)\n",
)
MODS_GOLDENS = {
    "mods_d128_blocks_h200": (
        "fwd-bf16-d128",
        "h200",
        ScoreMods(score_mod=SLOPED, mask_mod=DOCUMENT, aux=("i32", "fp32"), block_mask=True),
    ),
    "mods_d64_a100": ("fwd-fp16-d64", "a100", ScoreMods(mask_mod=DOCUMENT, aux=("i32", "fp32"))),
}
"""Kernels with a user's functions: specialization without them, device whose default it is, the functions."""


def mods_golden(name: str) -> tuple[Specialization, Config]:
    key, device, mods = MODS_GOLDENS[name]
    spec = replace(Specialization.parse(key), mods=mods)
    return spec, PORTABLE_FORWARD.default(spec, find_device(device))


BACKWARD_GOLDENS = {
    "backward_split_d128_causal_h200": (PORTABLE_BACKWARD_SPLIT, "bwd-bf16-d128-causal", "h200"),
    "backward_fused_d64_a100": (PORTABLE_BACKWARD_FUSED, "bwd-fp16-d64", "a100"),
    "backward_split_d64_bias_softcap_window_4090": (
        PORTABLE_BACKWARD_SPLIT,
        "bwd-bf16-d64-softcap-bias-window-dbias",
        "rtx 4090",
    ),
}
"""Kernels of the portable backward families: family, specialization, device whose default it is."""


def backward_golden(name: str) -> tuple[Specialization, Config]:
    row, key, device = BACKWARD_GOLDENS[name]
    spec = Specialization.parse(key)
    return spec, row.default(spec, find_device(device))
