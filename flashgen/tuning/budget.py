"""`Budget`: how much a search may spend on a workload, and how its share for the finals is kept back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from flashgen.core import checks
from flashgen.core.checks import check_fields
from flashgen.core.errors import TuningError
from flashgen.core.quoting import shown

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}

SEARCH_SHARE = 0.4
"""Of a budget in seconds, at least so much goes to the search, however long the finals would like to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """For one workload: new trials, or seconds for everything, finals included. One of them is None."""

    trials: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, TuningError)
        if (self.trials is None) == (self.seconds is None):
            raise TuningError(f"a budget is in trials or in seconds, got {self.trials} and {self.seconds}")
        if self.trials is not None and self.trials < 1:
            raise TuningError(f"a budget has at least 1 trial, got {self.trials}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise TuningError(f"a budget in seconds is finite and above 0, got {self.seconds}")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `20s`, `2m`, `1h` or `1.5m` as time, and a bare number such as `40` as trials.

        Raises:
            TuningError: the text is none of these.
        """
        given = checks.text("a budget", text, TuningError).strip().lower()
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh]?)", given)
        if match and match[2]:
            return cls(seconds=float(match[1]) * _UNITS_S[match[2]])
        if match and "." not in match[1]:
            return cls(trials=int(match[1]))
        raise TuningError(f"a budget is a time like 20s, 2m or 1h, or a number of trials like 40; got {shown(text)}")

    def search_seconds(self, finals_s: float) -> float | None:
        """What is left for the search when the finals take `finals_s`; None if time is no limit."""
        if self.seconds is None:
            return None
        return max(self.seconds - finals_s, SEARCH_SHARE * self.seconds)

    @property
    def finals_seconds(self) -> float | None:
        """The most that finals should take; None if time is no limit."""
        return None if self.seconds is None else (1 - SEARCH_SHARE) * self.seconds

    def __str__(self) -> str:
        return f"{self.trials} trials" if self.seconds is None else f"{self.seconds:g} s"


def parse_share(given: str) -> float:
    """Read `1%` or `0.01`.

    Raises:
        TuningError: the text is neither.
    """
    text = checks.text("a share", given, TuningError).strip()
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share < 1:
        raise TuningError(f"a share is like 1% or 0.01, above 0 and below all, got {shown(given)}")
    return share
