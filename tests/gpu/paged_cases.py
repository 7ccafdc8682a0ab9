"""Calls of packed sequences over pages from the rows of covering arrays."""

from __future__ import annotations

from typing import Any

import flashgen
from tests.packing import Case
from tests.paging import Paged

QUERIES = (1, 1, 300, 0, 128, 17, 513, 129)
KEYS = (900, 1, 300, 7, 1200, 0, 530, 127)


def near(b, h, q_idx, k_idx):  # type: ignore[no-untyped-def]
    return q_idx // 100 != k_idx // 70


def case_of(row: dict[str, Any]) -> Case:
    """The call of a row of the covering array."""
    options: dict[str, Any] = {"causal": True} if "causal" in row["position"] else {}
    if "window" in row["position"]:
        options["window"] = (600, 0 if "causal" in row["position"] else 30)
    if row["softcap"]:
        options["softcap"] = 20.0
    (nheads, nheads_k), (head_dim, head_dim_v) = row["heads"], row["dims"]
    return Case(
        queries=QUERIES,
        keys=KEYS,
        used_q=tuple(n - n // 3 for n in QUERIES) if row["used"] else (),
        nheads=nheads,
        nheads_k=nheads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=row["dtype"],
        spare=40,
        sinks=row["sinks"],
        alibi=row["alibi"],
        mod=near if row["mod"] else None,
        options=options,
    )


def run(call: Paged, **changes: Any) -> Any:
    """The public call."""
    return flashgen.attention_varlen(call.q, call.k, call.v, **{**call.named, **changes})
