"""Calls of packed sequences from the rows of covering arrays, for the families that compute them."""

from __future__ import annotations

from typing import Any

import torch

from tests.packing import Case

BF16 = torch.bfloat16
QUERIES = (1, 300, 0, 128, 17, 513, 129)
KEYS = (40, 300, 7, 0, 700, 513, 127)
WIDE: dict[str, Any] = {"nheads": 8, "nheads_k": 2, "head_dim": 128, "dtype": BF16}

_TAKEN = ("dtype", "layout", "spare", "poison", "sinks", "alibi")


def case_of(row: dict[str, Any]) -> Case:
    """The call of a row, whichever of the factors it has."""
    options: dict[str, Any] = {}
    if "causal" in row["position"]:
        options["causal"] = True
    if "window" in row["position"]:
        options["window"] = (100, 0 if "causal" in row["position"] else 30)
    if row.get("softcap"):
        options["softcap"] = 20.0
    keys = row["keys"] or QUERIES
    used = {"used_q": tuple(n // 2 for n in QUERIES), "used_k": tuple(n - n // 3 for n in keys)} if row["used"] else {}
    (nheads, nheads_k), (head_dim, head_dim_v) = row["heads"], row["dims"]
    same = {name: row[name] for name in _TAKEN if name in row}
    return Case(
        queries=QUERIES,
        keys=row["keys"] or (),
        nheads=nheads,
        nheads_k=nheads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        options=options,
        **same,
        **used,
    )
