"""What configs are compared by: one time for each round, whatever they were timed on.

Of a pass that is its time on normal data, or the geometric mean of that and the one on hard data. A step of decoding,
and packed sequences, are served by one config whatever the lengths are, which has to be good on every profile of them:
it counts as far as it is behind the best of all configs on the profile where it is farthest behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from flashgen.core.record import Measurement

C = TypeVar("C")


def compared(measured: Mapping[C, Measurement]) -> dict[C, Measurement]:
    """Measurements of one workload with one time for each round, in ms on the first of its profiles of lengths."""
    best = _best(measured.values())
    return {each: _worst(found, best) if best else found.balanced for each, found in measured.items()}


def _best(measured: Collection[Measurement]) -> dict[str, float]:
    """The least median on each profile; empty where there are none. The first one, which all have, is ""."""
    best: dict[str, float] = {}
    for found in measured:
        for profile, ms in found.profile_ms.items():
            best[profile] = min(ms, best.get(profile, ms))
    return {**best, "": min(found.median_ms for found in measured)} if best else {}


def _worst(found: Measurement, best: Mapping[str, float]) -> Measurement:
    profile, behind = "", found.median_ms / best[""]
    for name, ms in found.profile_ms.items():
        if ms / best[name] > behind:
            profile, behind = name, ms / best[name]
    times_ms = dict(found.profile_times_ms).get(profile, found.times_ms)
    unit = best[""] / best[profile]
    return replace(found, times_ms=tuple(unit * ms for ms in times_ms), profile_times_ms=())
