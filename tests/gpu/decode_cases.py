"""Steps of decoding of real sizes: pages, queries, groups and features."""

from __future__ import annotations

from typing import Any

import torch

from tests.decoding import Case

BF16 = torch.bfloat16
LENS = (1, 5000, 17, 0, 4096, 333, 64, 63, 65, 2047, 128)
WIDE: dict[str, Any] = {"nheads": 32, "nheads_k": 8, "head_dim": 128, "dtype": BF16}

CASES = {
    "contiguous": Case(lens=LENS, **WIDE),
    "one sequence": Case(lens=(8191,), **WIDE),
    "pages of 1": Case(lens=(0, 1, 700), page=1, **WIDE),
    "pages of 16": Case(lens=LENS, page=16, layout="hnd", **WIDE),
    "pages of 64": Case(lens=LENS, page=64, layout="halves", **WIDE),
    "pages of 256": Case(lens=LENS, page=256, layout="interleaved", **WIDE),
    "pages of 48": Case(lens=(47, 48, 49, 1000), page=48, **WIDE),
    "ends of pages of 1": Case(lens=(0, 1, 2), page=1, **WIDE),
    "ends of pages of 16": Case(lens=(0, 1, 15, 16, 17), page=16, **WIDE),
    "ends of pages of 64": Case(lens=(0, 1, 63, 64, 65), page=64, layout="halves", **WIDE),
    "ends of pages of 128": Case(lens=(0, 1, 127, 128, 129), page=128, **WIDE),
    "more queries than keys": Case(lens=(0, 1, 3, 4, 5, 300), page=16, seqlen_q=4, options={"causal": True}, **WIDE),
    "queries of 4": Case(lens=(2, 4, 3000, 0), page=64, seqlen_q=4, options={"causal": True}, **WIDE),
    "queries of 16": Case(lens=(2, 16, 3000), seqlen_q=16, options={"causal": True}, **WIDE),
    "all queries see all": Case(lens=(3, 400), seqlen_q=7, **WIDE),
    "window and sinks": Case(
        lens=(3, 64, 5000, 0, 129),
        page=16,
        sinks=True,
        nheads=64,
        nheads_k=8,
        head_dim=64,
        dtype=BF16,
        options={"window": (127, 0)},
    ),
    "softcap and slopes": Case(lens=(500, 0, 1800), alibi=True, page=32, options={"softcap": 30.0}, **WIDE),
    "left padding": Case(lens=(500, 2000, 90), leftpad=(3, 1999, 90), seqlen_q=2, options={"causal": True}, **WIDE),
    "rows of the cache": Case(lens=(500, 2, 0), batch_idx=(5, 0, 2), sinks=True, **WIDE),
    "unequal heads": Case(lens=(400, 1100), nheads=7, nheads_k=1, head_dim=96, head_dim_v=80, dtype=torch.float16),
    "wide heads": Case(lens=(400, 1100), page=16, nheads=8, nheads_k=4, head_dim=256, dtype=BF16),
    "groups of 1": Case(lens=(400, 1100), page=16, nheads=4, nheads_k=4, head_dim=64, dtype=BF16),
    "groups of 3": Case(lens=(400, 1100), nheads=6, nheads_k=2, head_dim=64, dtype=torch.float16),
    "groups of 5": Case(lens=(400, 1100), page=64, nheads=10, nheads_k=2, head_dim=64, dtype=torch.float16),
    "groups of 7": Case(lens=(400, 1100), page=16, nheads=14, nheads_k=2, head_dim=128, dtype=BF16),
    "groups of 8": Case(lens=(400, 1100), page=64, nheads=16, nheads_k=2, head_dim=128, dtype=torch.float16),
    "groups of 16": Case(lens=(400, 1100), page=128, nheads=16, nheads_k=1, head_dim=128, dtype=BF16),
    "groups of 71": Case(lens=(400, 100), nheads=71, nheads_k=1, head_dim=64, dtype=BF16),
}
