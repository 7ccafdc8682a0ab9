"""The rungs of the look-up ladder in words; `flashgen.runtime.lookup.ladder` is what walks it."""

from __future__ import annotations

RUNGS = {
    1: "explicit config",
    2: "memo",
    3: "user database, exact",
    4: "shipped database, exact",
    5: "nearest record on this device",
    6: "nearest record on the same architecture",
    7: "predicted record",
    8: "default config",
}

MEANINGS = {
    1: "given by the caller",
    2: "found before by this process, for the same call",
    3: "measured on this GPU for exactly this workload, and kept in a database of yours",
    4: "measured on this GPU for exactly this workload, and shipped with flashgen or a package of records",
    5: "measured on this GPU for the nearest workload of the same kind, or for another one that a rule prefers",
    6: "measured for the nearest workload of the same kind, on another GPU of this architecture; "
    "before rung 5 where that is farther by more than a step",
    7: "ranked for this GPU by an analytic model, and not measured",
    8: "a safe config of the first kernel family that applies, for a kind of workload that has no record at all",
}
"""What a config of each rung rests on."""
