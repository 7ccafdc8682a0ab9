"""What makes a record's time another day's: Triton above all, torch, the driver, the card's limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.core.record import Limits, Versions
from flashgen.core.staleness import why_stale
from tests.db.samples import MEASURED

THEN = Versions(flashgen="0.1.0", triton="3.6.0", torch="2.11.0+cu130", driver="580.159.04")
RECORD = replace(MEASURED, versions=THEN, limits=Limits(power_limit_w=700.0, max_sm_clock_mhz=1980.0))


@pytest.mark.parametrize(
    ("now", "reasons"),
    [
        (THEN, ()),
        (None, ()),
        (replace(THEN, flashgen="0.2.0", torch="2.11.1", driver="580.200"), ()),
        (replace(THEN, triton=""), ()),
        (replace(THEN, triton="3.6.1"), ("measured with triton 3.6.0, and 3.6.1 is here",)),
        (replace(THEN, torch="2.13.0"), ("measured with torch 2.11.0+cu130, and 2.13.0 is here",)),
        (replace(THEN, driver="590.10"), ("measured with driver 580.159.04, and 590.10 is here",)),
        (replace(THEN, driver="hip 6.4.1"), ("measured with driver 580.159.04, and hip 6.4.1 is here",)),
    ],
)
def test_versions_that_change_kernels_or_what_is_beside_them_count(
    now: Versions | None, reasons: tuple[str, ...]
) -> None:
    assert why_stale(RECORD, now) == reasons


def test_limits_of_the_card_count() -> None:
    lower = Limits(power_limit_w=500.0, max_sm_clock_mhz=1985.0)
    assert why_stale(RECORD, THEN, lower) == ("measured under a power limit of 700 W, and it is 500 W here",)
    slower = replace(lower, power_limit_w=None, max_sm_clock_mhz=1700.0)
    assert why_stale(RECORD, THEN, slower) == (
        "measured under a highest SM clock of 1980 MHz, and it is 1700 MHz here",
    )
    assert why_stale(replace(RECORD, limits=Limits()), THEN, lower) == ()
