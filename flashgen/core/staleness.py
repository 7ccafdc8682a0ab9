"""What a record was measured with that is not here any more: a reason each, in words.

The machine code of a kernel is Triton's, so another Triton may have another winner; torch gives the times beside it,
the driver and the limits of a card its clocks. What either side does not know is no reason. A record that is not
current still serves: it is the best that is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from flashgen.core.record import Limits, TuningRecord, Versions

PARTS = {"triton": 3, "torch": 2, "driver": 1}
"""How many numbers of a version make a difference: a patch of torch or of a driver changes no kernel."""

SAME_LIMIT = 0.02
"""Limits that are closer than this share are one: drivers round them."""


def why_stale(record: TuningRecord, versions: Versions | None = None, limits: Limits | None = None) -> tuple[str, ...]:
    """How a record's making differs from `versions` and `limits` of today; None is not known."""
    return (*changed(record.versions, versions or Versions()), *_limits(record.limits, limits or Limits()))


def changed(was: Versions, now: Versions) -> Iterator[str]:
    """What makes another kernel or another clock of software that measured then and measures now."""
    for name, parts in PARTS.items():
        then, today = getattr(was, name), getattr(now, name)
        if then and today and _release(then, parts) != _release(today, parts):
            yield f"measured with {name} {then}, and {today} is here"


def _limits(was: Limits, now: Limits) -> Iterator[str]:
    figures = (
        ("a power limit", "W", was.power_limit_w, now.power_limit_w),
        ("a highest SM clock", "MHz", was.max_sm_clock_mhz, now.max_sm_clock_mhz),
    )
    for what, unit, then, today in figures:
        if then is not None and today is not None and abs(today / then - 1) > SAME_LIMIT:
            yield f"measured under {what} of {then:g} {unit}, and it is {today:g} {unit} here"


def _release(text: str, parts: int) -> str:
    """A version without its patch and local part, e.g. `2.11` of `2.11.0+cu130`; a name before it stays."""
    found = re.match(r"\D*\d+(?:\.\d+)*", text)
    return ".".join(found[0].split(".")[:parts]) if found else text
