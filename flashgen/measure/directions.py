"""What the bench needs to know of each direction: how to make its problems, and how torch computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashgen.core.record import Failure
from flashgen.core.workload import DECODE, Specialization, Workload
from flashgen.measure import backward_baselines, baselines
from flashgen.measure.backward_verification_case import backward_odd_problems, backward_problem
from flashgen.measure.baselines import BaselineCall
from flashgen.measure.decode_case import decode_problem
from flashgen.measure.decode_odd import odd_decode_problems
from flashgen.measure.odd_shapes import Factory, Titled, odd_problems
from flashgen.measure.packed_case import packed_backward_problem, packed_problem
from flashgen.measure.packed_odd import odd_packed_backward_problems, odd_packed_problems
from flashgen.measure.timing import Run
from flashgen.measure.verification_case import forward_problem
from flashgen.measure.verify import Errors


class VerificationCase(Protocol):
    """Inputs of one call with their right answer, of any direction.

    A factory is what `Toolchain.factory` makes for a specialization of the same direction.
    """

    @property
    def copies(self) -> int:
        """Sets of inputs to rotate."""
        ...

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        ...

    def run(self, factory: Factory, repeats: int = 0, *, out_alone: bool = False) -> Errors | Failure:
        """Run a kernel, judge what it wrote, and ask for the same bits so many times more.

        `out_alone` is for forward passes of which no LSE is asked.
        """
        ...

    def timed(self, factory: Factory) -> Run:
        """A launch that is ready for every copy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One row of `DIRECTIONS`.

    Attributes:
        problem: from a workload, the number of copies, a seed, a device and a kind of data (`measure.data_kinds`).
        odd_problems: the odd shapes of a specialization on a device; of a backward pass those with `most_keys`, too.
        baseline: one of torch's backends (its name) on a workload's problem, or why it cannot run.
        repeats: how often a kernel that gives the same bits every time has to give them again.
    """

    problem: Callable[[Workload, int, int, torch.device, str], VerificationCase]
    odd_problems: Callable[..., Sequence[tuple[Titled, VerificationCase]]]
    baseline: Callable[[str, Workload, Any], BaselineCall | str]
    repeats: int


def _no_baseline(impl: str, workload: Workload, problem: object) -> str:
    return "torch's attention knows no lengths and no pages"


DIRECTIONS = {
    "forward": Direction(problem=forward_problem, odd_problems=odd_problems, baseline=baselines.prepared, repeats=0),
    "backward": Direction(
        problem=backward_problem, odd_problems=backward_odd_problems, baseline=backward_baselines.prepared, repeats=2
    ),
    DECODE: Direction(problem=decode_problem, odd_problems=odd_decode_problems, baseline=_no_baseline, repeats=1),
}
PACKED = {
    "forward": Direction(problem=packed_problem, odd_problems=odd_packed_problems, baseline=_no_baseline, repeats=0),
    "backward": Direction(
        problem=packed_backward_problem, odd_problems=odd_packed_backward_problems, baseline=_no_baseline, repeats=2
    ),
}
"""Both by `Workload.direction`, the second where it has packed sequences.

No family of forward kernels has sums without a fixed order: nothing is repeated there."""


def direction_of(asked: Workload | Specialization) -> Direction:
    """The row of a workload or of its specialization."""
    return (PACKED if asked.varlen and asked.direction in PACKED else DIRECTIONS)[asked.direction]
