"""`Shard`: one of several equal parts of a list of workloads, for as many GPUs or machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashgen.core import checks
from flashgen.core.checks import check_fields
from flashgen.core.errors import TuningError
from flashgen.core.quoting import shown
from flashgen.core.workload import DECODE, Workload
from flashgen.tuning.tune import grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part `index` (from 0) of `count`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        check_fields(self, TuningError)
        if not 0 <= self.index < self.count:
            raise TuningError(f"a shard is i/n with i from 0 to n - 1, got {self.index}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `0/4`, the first of four.

        Raises:
            TuningError: the text is not of that form.
        """
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", checks.text("a shard", text, TuningError).strip())
        if match is None:
            raise TuningError(f"a shard is i/n with i from 0 to n - 1, got {shown(text)}")
        return cls(index=int(match[1]), count=int(match[2]))

    def of(self, workloads: Iterable[Workload]) -> tuple[Workload, ...]:
        """This part of the workloads: every one is in exactly one part.

        Forward and backward passes and steps of decoding, which take different times, are each divided into parts whose
        sizes differ by one at the most, in the order they came. Workloads of one specialization stay together where
        that is possible: they share compiled candidates and winners.
        """
        every = grouped(workloads)
        names = ("forward", "backward", DECODE)
        forward, backward, steps = ([w for w in every if w.direction == name] for name in names)
        # the last parts have one more of the forward passes, the first ones of the backward passes
        last = self.count - 1 - self.index
        own = {*self._cut(forward, self.index), *self._cut(backward[::-1], last), *self._cut(steps, self.index)}
        return tuple(workload for workload in every if workload in own)

    def _cut(self, every: Sequence[Workload], index: int) -> Sequence[Workload]:
        start, end = (len(every) * position // self.count for position in (index, index + 1))
        return every[start:end]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
