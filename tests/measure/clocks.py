"""Emulated kernels that say how long they take, and a stopwatch that believes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashgen.core.workload import Workload
from flashgen.measure.data_kinds import LEVEL
from flashgen.measure.verify import LaunchFunction
from tests.fakes.attention import Emulated

SMALL = Workload.parse("bf16-b1-h2-s96-d16-causal")


@dataclass
class CountingStopwatch:
    """A call takes as many ms as the kernel that ran last says; graphs are not used by calls this slow."""

    kernel_ms: float = 1.0

    def elapsed_ms(self, warm: Callable[[], object], measured: Callable[[], object]) -> float:
        warm()
        Clocked.total_ms = 0.0
        measured()
        return Clocked.total_ms

    def capture(self, calls: Callable[[], object]) -> Callable[[], object]:
        raise AssertionError("these calls are too slow for a graph")

    def sm_clock_mhz(self) -> float | None:
        return 1500.0


@dataclass
class Clocked:
    """An emulated kernel that takes `ms`, and goes wrong when its own number of calls is reached.

    On the workload's scores that rise it takes `hard_ms`, or is wrong if `wrong_on_hard`.
    """

    total_ms = 0.0
    inner: Emulated
    ms: float
    wrong_from_call: int = 10**9
    error_at_call: int = 10**9
    hard_ms: float = 0.0
    wrong_on_hard: bool = False
    calls: int = 0

    def factory(self, *_: torch.Tensor) -> LaunchFunction:
        return self

    def __call__(self, *arguments: torch.Tensor, **unused: object) -> None:
        self.calls += 1
        if self.calls == self.error_at_call:
            raise RuntimeError("something of the driver's\nwith details")
        self.inner(*arguments)  # type: ignore[arg-type]
        q, _, _, out = arguments[:4]
        is_hard = q.shape[2] == SMALL.seqlen_q and bool((q[..., 0] == LEVEL).all())
        if self.calls >= self.wrong_from_call or (is_hard and self.wrong_on_hard):
            out.add_(0.5)
        Clocked.total_ms += self.hard_ms if is_hard and self.hard_ms else self.ms
