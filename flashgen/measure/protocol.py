"""What a coordinator asks of an executor and what it gets back: frozen payloads that also travel between processes.

An executor holds no state that a search needs: it takes a workload and configs, builds, verifies, times and answers.
Anything that goes wrong with a candidate is a `Failure`, and the next call works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from flashgen.core.alignment import ALIGNMENT_BYTES
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import FlashgenError, MeasureError
from flashgen.core.input_copies import has_aligned_rows
from flashgen.core.record import Baseline, Failure, Measurement, Versions
from flashgen.core.workload import DTYPE_BYTES, Specialization, Workload
from flashgen.measure.sequential import ANCHOR_ROUNDS, LEAST_ROUNDS, Rule

Outcome = Measurement | Failure

SETTLE_S = 1.8
"""Seconds of load before the first window of a race. A card that was idle is 2 to 13% faster in the first 0.4 s, then
up to 9% slower until 0.9 s, and once more, up to 6%, from 1.5 to 1.8 s (docs/decisions/settled-races.md)."""

LEAST_SETTLE_S = 0.9
"""The same where time is short: between the two slumps."""

MOST_WINDOW_S = 60.0
"""Every window is shorter: a whole last race takes a minute."""


def specialization(workload: Workload) -> Specialization:
    """What an executor compiles and measures for a workload: that of packed tensors, as torch allocates them.

    A backward pass also computes the gradient of a bias.
    """
    size = DTYPE_BYTES[workload.dtype]
    rows = [size] if _has_rows(workload, workload.bias) else []
    rows += [1] if _has_rows(workload, workload.mask) else []
    aligned_scores = all(workload.seqlen_k * each % ALIGNMENT_BYTES == 0 for each in rows)
    return Specialization.of(
        workload, aligned16=has_aligned_rows(workload), aligned_scores=aligned_scores, bias_grad=True
    )


def check_window(window_s: float, warm_s: float, error: type[FlashgenError] = MeasureError) -> None:
    """Refuse a window that no executor measures.

    Raises:
        MeasureError: it, or what goes before it unmeasured, is no time or too long; or `error`.
    """
    if not 0 < window_s < MOST_WINDOW_S or not 0 <= warm_s < MOST_WINDOW_S:
        raise error(
            f"a window lasts more than 0 s, what goes before it 0 s or more, and both less than {MOST_WINDOW_S:g} s, "
            f"got {window_s} after {warm_s}"
        )


def _has_rows(workload: Workload, kind: str) -> bool:
    """Whether a bias or mask of this kind has more than one row of keys, so that its length is a stride."""
    return {"": False, "full": True, "keys": workload.batch > 1}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateJob:
    """Build, verify and briefly time one config: the pruning stage of a search.

    A candidate whose single probe exceeds `drop_above_ms` (usually twice the best so far) is timed no further: its
    `Measurement` then holds that one time alone. `window_s` is the length of the short measured window, split into
    three parts with the reference kernel in between, each after `warm_s` seconds unmeasured. A step of decoding
    and packed sequences have a window for each profile of lengths.
    """

    workload: Workload
    config: Config
    drop_above_ms: float | None = None
    window_s: float = 0.045
    warm_s: float = 0.005

    def __post_init__(self) -> None:
        check_window(self.window_s, self.warm_s)
        if self.drop_above_ms is not None and self.drop_above_ms <= 0:
            raise MeasureError(f"drop_above_ms is None or above 0, got {self.drop_above_ms}")

    @property
    def windows_s(self) -> float:
        """About the seconds that the windows take, with those of the reference kernel, which are half as long."""
        return (max(1, len(self.workload.profiles)) + 0.5) * (self.window_s + 3 * self.warm_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceJob:
    """Time several configs of one workload against each other: interleaved rounds in balanced order.

    In each of the `rounds`, every config gets `warm_s` seconds unmeasured and `window_s` seconds measured. With `hard`,
    every config gets the same beside that on the workload's hard data, on which it must be right, too; where there is
    no memory for a second set of inputs, times on hard data are left out. Behind the race the reference kernel, and
    with `baselines` every SDPA backend that can run, has ANCHOR_ROUNDS such windows. A race therefore takes about
    `settle_s + (rounds * windows + ANCHOR_ROUNDS * others) * (warm_s + window_s)` seconds, `windows` being one or two
    for each config and `settle_s` load before the first one that nobody measures. The defaults are those of finals; a
    second look at many candidates within a few per cent of each other takes shorter windows, and no `reference` kernel.

    With a `rule` a race ends as soon as that is sure of who wins, and configs leave it before; `rounds` are the most it
    may have.
    """

    workload: Workload
    configs: tuple[Config, ...]
    rounds: int = 4
    warm_s: float = 0.1
    window_s: float = 0.3
    settle_s: float = SETTLE_S
    reference: bool = True
    baselines: bool = False
    hard: bool = False
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if not self.configs:
            raise MeasureError("a race needs at least one config, got none")
        if self.rule is not None and not 0 <= (self.rule.champion or 0) < len(self.configs):
            raise MeasureError(f"the champion is one of {len(self.configs)} configs, got number {self.rule.champion}")
        if self.rounds < 1:
            raise MeasureError(f"a race has at least one round, got {self.rounds}")
        check_window(self.window_s, self.warm_s)
        check_window(self.window_s, self.settle_s)

    @property
    def windows(self) -> int:
        """Windows of all configs in a round."""
        kinds = max(1, len(self.workload.profiles)) + (1 if self.hard and not self.workload.has_profiles else 0)
        return len(self.configs) * kinds

    @property
    def windows_s(self) -> float:
        """About the most seconds that all windows take, with three backends of torch beside them."""
        window_s = self.warm_s + self.window_s
        round_s = self.windows * window_s
        most_s = self.rule.most_s + 2 * round_s if self.rule else math.inf
        rounds_s = min(round_s * self.rounds, max(most_s, LEAST_ROUNDS * round_s))
        return self.settle_s + rounds_s + 3 * ANCHOR_ROUNDS * window_s

    def without(self, index: int) -> RaceJob:
        """The same race without the config at `index`, which is not the only one."""
        configs = (*self.configs[:index], *self.configs[index + 1 :])
        return replace(self, configs=configs, rule=self.rule.without(index) if self.rule else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """One outcome for each config of the job, in its order, and the baselines beside it (may be none)."""

    outcomes: tuple[Outcome, ...]
    baselines: tuple[Baseline, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """Where an executor runs: device, software, lines that name other processes on the GPU, the machine's name.

    `state` is what the driver says of the device at this moment, such as `power_limit_w`; empty where it does not.
    """

    device: Device
    versions: Versions = field(default_factory=Versions)
    other_processes: tuple[str, ...] = ()
    hostname: str = ""
    state: tuple[tuple[str, float], ...] = ()


class Executor(Protocol):
    """The seam between a coordinator and the machines that measure."""

    def describe(self) -> HostInfo:
        """The device and software that this executor measures on.

        Raises:
            MeasureError: the device cannot be reached.
        """
        ...

    def evaluate(self, job: EvaluateJob) -> Outcome:
        """Build, verify and briefly time one config; a problem of the candidate is a `Failure`."""
        ...

    def race(self, job: RaceJob) -> RaceResult:
        """Time configs against each other in interleaved rounds; a problem of one config is its `Failure`."""
        ...

    def close(self) -> None:
        """End the processes behind this executor; calling it twice is fine."""
        ...
