"""What configs are compared by: one time for each round, whatever they were timed on.

Of a pass that is its time on normal data, or the geometric mean of that and the one on hard data. A step of decoding,
and packed sequences, are served by one config whatever the lengths are: it counts by the time of one call on each
profile of them together. So a microsecond counts the same on all, and who else was measured changes no order.
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
    return {each: _together(found, best) if best else found.balanced for each, found in measured.items()}


def least(found: Measurement) -> Measurement:
    """The same with one time, the least of its windows, on each kind of data and each profile of lengths.

    Short windows after a pause are slower by what ran before them, and not faster (docs/decisions/levels.md).
    """
    return replace(
        found,
        times_ms=(min(found.times_ms),),
        hard_times_ms=(min(found.hard_times_ms),) if found.hard_times_ms else (),
        profile_times_ms=tuple((name, (min(times),)) for name, times in found.profile_times_ms),
    )


def _best(measured: Collection[Measurement]) -> dict[str, float]:
    """The least median on each profile; empty where there are none. The first one, which all have, is ""."""
    best: dict[str, float] = {}
    for found in measured:
        for profile, ms in found.profile_ms.items():
            best[profile] = min(ms, best.get(profile, ms))
    return {**best, "": min(found.median_ms for found in measured)} if best else {}


def _together(found: Measurement, best: Mapping[str, float]) -> Measurement:
    profiles = dict(found.profile_times_ms)
    if not profiles:  # it was dropped before
        return found
    unit = best[""] / sum(best.values())
    rounds = zip(found.times_ms, *profiles.values(), strict=True)
    return replace(found, times_ms=tuple(unit * sum(each) for each in rounds), profile_times_ms=())
