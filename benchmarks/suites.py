"""Which workloads a suite has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatch

from flashgen.core.workload import Workload
from flashgen.tuning.workloads import presets

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


def preset_workloads() -> tuple[Workload, ...]:
    """Every workload of the model presets, each once."""
    return tuple(dict.fromkeys(workload for preset in presets() for workload in preset.workloads))


SUITES: dict[str, Callable[[], tuple[Workload, ...]]] = {"forward": paper_grid, "presets": preset_workloads}


def select(workloads: Iterable[Workload], patterns: Iterable[str]) -> tuple[Workload, ...]:
    """Workloads whose key matches one of the patterns (`*-d128-causal`, `*sq16384*`); all of them if there is none."""
    wanted = tuple(patterns)
    return tuple(w for w in workloads if not wanted or any(fnmatch(w.key, pattern) for pattern in wanted))
