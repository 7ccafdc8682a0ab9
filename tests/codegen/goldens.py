"""The kernels that are kept whole in tests/golden, for people to read, and others with branches they do not take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from flashgen.codegen.families import family
from flashgen.core.config import Config, KnobValue
from flashgen.core.device import find_device
from flashgen.core.score_mods import ScoreMods, UserFunction
from flashgen.core.workload import Specialization
from scripts.crosscompile_jobs import ONE_WARPGROUP, SMALL_TILES

GOLDEN = Path(__file__).parent.parent / "golden"

DOCUMENT = UserFunction(
    name="mask_mod",
    source="def mask_mod(b, h, q_idx, k_idx, doc, slopes):\n    return tl.load(doc + q_idx) == tl.load(doc + k_idx)\n",
)
SLOPED = UserFunction(
    name="score_mod",
    source="def score_mod(score, b, h, q_idx, k_idx, doc, slopes):\n"
    "    return score - tl.load(slopes + h) * tl.abs(q_idx - k_idx)\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of a family: its call, the device whose default config it has, and the knobs that are changed."""

    family: str
    key: str
    device: str = "h200"
    changes: dict[str, KnobValue] = field(default_factory=dict)
    mods: ScoreMods | None = None

    @property
    def rendered_from(self) -> tuple[Specialization, Config]:
        """What `render` takes."""
        spec = replace(Specialization.parse(self.key), mods=self.mods)
        return spec, family(self.family).default(spec, find_device(self.device)).replace(**self.changes)


GOLDENS = {
    "portable_forward_causal": Kernel(family="portable_forward", key="fwd-bf16-d128-causal"),
    # gpt-oss, by pointers
    "portable_forward_sink_window": Kernel(
        family="portable_forward", key="fwd-bf16-d64-causal-sink-window-sink_bf16", device="rtx 4090"
    ),
    "portable_forward_alibi_mask": Kernel(
        family="portable_forward", key="fwd-fp16-d128-causal-alibi-mask-scattered-offset"
    ),
    "portable_forward_mods": Kernel(
        family="portable_forward",
        key="fwd-bf16-d128",
        mods=ScoreMods(score_mod=SLOPED, mask_mod=DOCUMENT, aux=("i32", "fp32"), block_mask=True),
    ),
    "portable_backward_fused": Kernel(family="portable_backward_fused", key="bwd-fp16-d64", device="a100"),
    "portable_backward_split_causal": Kernel(family="portable_backward_split", key="bwd-bf16-d128-causal"),
    "hopper_forward": Kernel(family="hopper_forward", key="fwd-bf16-d64"),
    "hopper_forward_causal": Kernel(family="hopper_forward", key="fwd-bf16-d128-causal"),
    "hopper_forward_sink_window": Kernel(family="hopper_forward", key="fwd-bf16-d64-causal-sink-window"),
    "hopper_backward_fused_causal": Kernel(family="hopper_backward_fused", key="bwd-bf16-d128-causal"),
    "hopper_backward_split_offset": Kernel(family="hopper_backward_split", key="bwd-fp16-d256-causal-offset"),
}
"""Of each family one or more, chosen to be read."""

SMALL: dict[str, KnobValue] = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
"""Tiles of the portable families that compile in half the time."""

OTHERS = {
    "forward_d64_h200": Kernel(family="portable_forward", key="fwd-fp16-d64"),
    "forward_d256_fp16_h200": Kernel(family="portable_forward", key="fwd-fp16-d256"),
    "forward_d128_causal_4090": Kernel(family="portable_forward", key="fwd-bf16-d128-causal", device="rtx 4090"),
    "forward_d64_causal_a100_offset": Kernel(
        family="portable_forward", key="fwd-fp16-d64-causal-offset", device="a100", changes={"heads_per_group": 1}
    ),
    "forward_d80_unaligned_h200": Kernel(family="portable_forward", key="fwd-bf16-d80-unaligned", changes=SMALL),
    "forward_d192_dv128_causal_h200": Kernel(
        family="portable_forward", key="fwd-bf16-d192-dv128-causal", changes={**SMALL, "heads_per_group": 0}
    ),
    "forward_d64_fp32_h200": Kernel(family="portable_forward", key="fwd-fp32-d64-causal"),
    "forward_d128_mi300x": Kernel(family="portable_forward", key="fwd-fp16-d128", device="mi300x"),
    # Gemma 2: alternating windows, capped scores
    "forward_d256_gemma_h200": Kernel(
        family="portable_forward", key="fwd-bf16-d256-causal-softcap-window", changes=SMALL
    ),
    "forward_d64_bias_h200": Kernel(family="portable_forward", key="fwd-bf16-d64-bias"),
    "forward_d128_keymask_h200": Kernel(family="portable_forward", key="fwd-bf16-d128-keymask", changes=SMALL),
    "forward_d192_dv128_split_h200": Kernel(
        family="portable_forward", key="fwd-bf16-d192-dv128-causal", changes={"split_d": True}
    ),
    "forward_d80_split_a100": Kernel(
        family="portable_forward", key="fwd-fp16-d80", device="a100", changes={"split_d": True}
    ),
    "forward_d128_causal_maxnreg": Kernel(
        family="portable_forward",
        key="fwd-bf16-d128-causal",
        changes={
            "block_m": 64,
            "block_n": 64,
            "num_warps": 4,
            "num_stages": 2,
            "maxnreg": 168,
            "heavy_first": False,
        },
    ),
    "mods_d64_a100": Kernel(
        family="portable_forward",
        key="fwd-fp16-d64",
        device="a100",
        mods=ScoreMods(mask_mod=DOCUMENT, aux=("i32", "fp32")),
    ),
    "backward_split_bias_softcap_window_4090": Kernel(
        family="portable_backward_split",
        key="bwd-bf16-d64-softcap-bias-window-dbias",
        device="rtx 4090",
        changes={**SMALL_TILES},
    ),
    "forward_d64_dropout_h200": Kernel(family="portable_forward", key="fwd-bf16-d64-causal-dropout", changes=SMALL),
    "backward_split_dropout_a100": Kernel(family="portable_backward_split", key="bwd-fp16-d64-dropout", device="a100"),
    "hopper_d128_causal_offset": Kernel(family="hopper_forward", key="fwd-bf16-d128-causal-offset"),
    "hopper_d256_gemma": Kernel(family="hopper_forward", key="fwd-bf16-d256-causal-softcap-window"),
    "hopper_d128_causal_packed": Kernel(
        family="hopper_forward",
        key="fwd-bf16-d128-causal-alibi-sink-window",
        changes={"packed_heads": 4, "masked_blocks": "branch", **ONE_WARPGROUP},
    ),
    "hopper_d96_bias_mask": Kernel(
        family="hopper_forward", key="fwd-bf16-d96-bias-mask-bias_fp32", changes={"split_d": True, **ONE_WARPGROUP}
    ),
    "hopper_d64_short": Kernel(
        family="hopper_forward",
        key="fwd-bf16-d64-causal",
        changes={
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
"""Rendered, formatted and compiled as the goldens are; nobody reads them whole.

Most are kernels of which other tests look at the machine code: Triton's cache has them compiled once for all.
"""

COMPILED_BY_OTHERS = {
    "portable_forward_causal",
    "portable_forward_sink_window",
    "portable_forward_mods",
    "portable_backward_split_causal",
    "forward_d128_causal_4090",
    "forward_d80_unaligned_h200",
    "forward_d192_dv128_split_h200",
    "forward_d80_split_a100",
    "forward_d256_gemma_h200",
    "forward_d64_bias_h200",
}
"""Those whose branches `make crosscompile-all` compiles with the newest Triton, and the oldest accepts there.

Of the Triton in between they are formatted and looked at, but not compiled once more.
"""

COMPILED_HERE = {
    "forward_d64_fp32_h200": "test_build.py has the same head_dim and mask in IEEE products for other targets",
    "forward_d128_mi300x": "test_build.py compiles that default for its own target",
    "mods_d64_a100": "test_portable_mods.py compiles the same function by the same loads",
    "hopper_d96_bias_mask": "test_hopper_forward_compiled.py has both in one kernel, and heads of 96 in two parts",
    "hopper_d64_short": "test_hopper_forward_compiled.py has three programs side by side among its knobs",
}
"""Those whose branches other tests of this folder compile."""


def kernel(name: str) -> tuple[Specialization, Config]:
    """What a golden or one of the others is rendered from."""
    return {**GOLDENS, **OTHERS}[name].rendered_from
