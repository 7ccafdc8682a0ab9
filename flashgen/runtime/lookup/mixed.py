"""Which mixed batches are two launches: steps of decoding by a decode family, chunks of prompts by a forward family.

A forward pass has a program for each head of a sequence of one query, with one row of a tile in use, and that program
reads all keys of the sequence alone, once for every head of a group. A decode family reads them once for all heads of a
group and shares them among all SMs, and costs two more kernels. So it is worth them from some keys on: `APART_KEYS`,
below which a program reads its keys in about the time of these kernels. The figure is an estimate from the parts of the
rule for few queries (`flashgen.runtime.lookup.few_queries`), not a measurement of mixed batches.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.families import reasons
from flashgen.core.device import Device
from flashgen.core.workload import DECODE, Specialization
from flashgen.runtime.lookup.few_queries import FEW

APART_KEYS = FEW.keys
"""Keys that a sequence has room for from which on steps of decoding get launches of their own."""


def why_together(spec: Specialization, keys: int, device: Device) -> str | None:
    """The reason why one launch computes a mixed batch, or None where its steps of decoding have one of their own.

    Args:
        spec: of the packed sequences.
        keys: that a sequence may see: the bound of the lengths, or a window.
        device: the GPU.
    """
    if keys < APART_KEYS:
        return f"{keys} keys are fewer than {APART_KEYS}"
    if spec.mods is not None:
        return "no decode family takes functions of the caller"
    step = replace(spec, direction=DECODE, varlen=False, deterministic=False)
    found = reasons(step, device)
    return None if None in found.values() else "; ".join(f"{name}: {reason}" for name, reason in found.items())
