"""Which workloads a suite has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatch

from flashgen.core.workload import Workload
from flashgen.tuning.workloads import preset, presets

TOKENS = 16384
HIDDEN = 2048
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


def paper_grid() -> tuple[Workload, ...]:
    """The grid of the FlashAttention-2 and -3 papers (section 4.1): 16k tokens, hidden size 2048, bf16."""
    return tuple(
        Workload(batch=TOKENS // s, nheads=HIDDEN // d, seqlen_q=s, head_dim=d, causal=causal)
        for d in HEAD_DIMS
        for causal in (False, True)
        for s in SEQLENS
    )


def backward_grid() -> tuple[Workload, ...]:
    """The backward passes of the same grid."""
    return tuple(replace(workload, direction="backward") for workload in paper_grid())


def fp16_grid() -> tuple[Workload, ...]:
    """The same grid in fp16."""
    return tuple(replace(workload, dtype="fp16") for workload in paper_grid())


DATA_HEAD_DIMS = (64, 96, 128, 256)
DATA_SEQLENS = (2048, 16384)


def data_grid() -> tuple[Workload, ...]:
    """Short and long sequences of the grid and heads of 96 (rounded down to whole heads), in bf16 and in fp16.

    Masks alternate, so that of two shards each compiles the kernels of one mask.
    """
    return tuple(
        Workload(batch=TOKENS // s, nheads=HIDDEN // d, seqlen_q=s, head_dim=d, causal=causal, dtype=dtype)
        for dtype in ("bf16", "fp16")
        for d in DATA_HEAD_DIMS
        for s in DATA_SEQLENS
        for causal in (False, True)
    )


FEATURES: tuple[dict[str, object], ...] = (
    {"head_dim": 128, "causal": True, "window_left": 1023},
    {"head_dim": 128, "window_left": 512, "window_right": 512},
    {"head_dim": 128, "causal": True, "softcap": True},
    {"head_dim": 128, "causal": True, "alibi": True},
    {"head_dim": 64, "causal": True, "sink": True, "nheads_k": 8},
    {"head_dim": 64, "causal": True, "sink": True, "window_left": 127, "nheads_k": 8},
    {"head_dim": 64, "bias": "full"},
    {"head_dim": 128, "bias": "full"},
    {"head_dim": 128, "mask": "full"},
    {"head_dim": 128, "mask": "full", "nheads_k": 4},
    {"head_dim": 64, "mask": "keys"},
    {"head_dim": 128, "mask": "keys"},
    {"head_dim": 256, "causal": True, "softcap": True, "window_left": 4095, "nheads_k": 4},
    {"head_dim": 128, "causal": True, "nheads_k": 4},
    {"head_dim": 80},
    {"head_dim": 96, "causal": True},
    {"head_dim": 192, "head_dim_v": 128, "causal": True},
    {"head_dim": 512, "causal": True},
)
"""One feature each, and the combinations of Gemma-2, gpt-oss and a masked GQA model."""

FEATURE_SEQLENS = (4096, 16384)
WINDOWS = (127, 255, 511, 1023, 2047, 4095, 8191, 16383)


def features_grid() -> tuple[Workload, ...]:
    """Each feature at 4k and 16k, 16k tokens and hidden size 2048 in all (rounded down to whole heads), bf16."""
    return tuple(
        Workload(batch=TOKENS // s, nheads=_heads(feature), seqlen_q=s, **feature)  # type: ignore[arg-type]
        for feature in FEATURES
        for s in FEATURE_SEQLENS
    )


def _heads(feature: dict[str, object]) -> int:
    nheads_k = int(str(feature.get("nheads_k", 1)))
    return HIDDEN // int(str(feature["head_dim"])) // nheads_k * nheads_k


def window_grid() -> tuple[Workload, ...]:
    """One sequence of 16k tokens under windows of every width: the time of a window is that of its visible blocks."""
    return tuple(
        Workload(batch=1, nheads=16, seqlen_q=TOKENS, head_dim=128, causal=True, window_left=width) for width in WINDOWS
    )


def preset_workloads() -> tuple[Workload, ...]:
    """Every forward pass of the model presets, each once; `benchmarks.varlen` has those of packed sequences."""
    every = dict.fromkeys(workload for preset in presets() for workload in preset.workloads)
    return tuple(workload for workload in every if workload.direction == "forward" and not workload.is_packed)


MODELS = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "gemma-2-9b": "Gemma-2 9B",
    "gemma-3-12b": "Gemma-3 12B",
    "gpt-oss-20b": "gpt-oss-20b",
    "deepseek-v3": "DeepSeek-V3",
    "vit-l": "ViT-L/16",
    "sdxl": "SD-XL",
    "flux": "FLUX.1",
}
"""Presets of the models that are raced as they are run, which are the suites of that race, by their short titles."""


def model_workloads(name: str) -> tuple[Workload, ...]:
    """The forward passes of one model's preset."""
    return tuple(workload for workload in preset(name).workloads if workload.direction == "forward")


FP16_SUITE = "forward_fp16"
SUITES: dict[str, Callable[[], tuple[Workload, ...]]] = {
    "forward": paper_grid,
    FP16_SUITE: fp16_grid,
    "presets": preset_workloads,
}
"""Suites of `forward.csv`."""

DATA_SUITE = "data"

BACKWARD_SUITE, BOTH_PASSES = "backward", "forward_backward"
"""Suites of training; a row of the second is a forward and a backward pass, and its workload the backward pass's."""


def work_of(suite: str, workload: Workload) -> tuple[int, int]:
    """Floating-point operations, and the fewest bytes moved, of what one row of a suite times."""
    if suite != BOTH_PASSES:
        return workload.flops, workload.bytes
    forward = replace(workload, direction="forward")
    return workload.flops + forward.flops, workload.bytes + forward.bytes


def select(workloads: Iterable[Workload], patterns: Iterable[str]) -> tuple[Workload, ...]:
    """Workloads whose key matches one of the patterns (`*-d128-causal`, `*sq16384*`); all of them if there is none."""
    wanted = tuple(patterns)
    return tuple(w for w in workloads if not wanted or any(fnmatch(w.key, pattern) for pattern in wanted))
