"""`Progress`: how far a run is, from its events; what a display shows and how long the rest will take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.record import Failure
from flashgen.core.workload import Workload
from flashgen.tuning.events import (
    CandidateRanked,
    Event,
    FinalsStarted,
    RunStarted,
    TrialFinished,
    WorkloadFinished,
    WorkloadStarted,
)
from flashgen.tuning.report import peak_share

MOST_OF_A_WORKLOAD = 0.99
"""What a bar shows at most of a workload that has not ended."""


class Progress:
    """Feed it every event of one run with `update`; read the attributes at any time.

    Attributes:
        device: the GPU of the run, None before it started.
        measured: whether anything is measured.
        total, ended: workloads of the run, and those that came to an end.
        workload: the one that is tuned now, None between workloads.
        candidates: size of its valid set.
        trials: its trials so far, those of an earlier run included.
        best_ms: its best time so far.
        best_config: and whose it is.
        expected_gain: the share of it that going on for as long again is expected to save; None is not known.
        stage: search, near or last.
        failures: of all workloads, by stage of the failure.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.device: Device | None = None
        self.measured = True
        self.total = 0
        self.ended = 0
        self.workload: Workload | None = None
        self.candidates = 0
        self.trials = 0
        self.best_ms: float | None = None
        self.best_config: Config | None = None
        self.expected_gain: float | None = None
        self.stage = "search"
        self.failures: Counter[str] = Counter()
        self._started = self._workload_started = clock()
        self._tuned_s: list[float] = []
        self._budget: WorkloadStarted | None = None

    def update(self, event: Event) -> None:
        """Take an event into account."""
        if isinstance(event, RunStarted):
            self.device, self.measured, self.total = event.device, event.measured, len(event.workloads)
        elif isinstance(event, WorkloadStarted):
            self.workload, self.candidates, self._budget = event.workload, event.candidates, event
            self.trials, self.best_ms, self.best_config = event.resumed_trials, None, None
            self.stage, self._workload_started, self.expected_gain = "search", self._clock(), None
        elif isinstance(event, TrialFinished):
            outcome = event.trial.outcome
            self._trial(event.number, event.best_ms, event.best_config, outcome)
            self.expected_gain = event.expected_gain
        elif isinstance(event, CandidateRanked):
            self._trial(event.number, event.best_ms, event.best_config, event.failure)
        elif isinstance(event, FinalsStarted):
            self.stage = event.stage
        elif isinstance(event, WorkloadFinished):
            self.ended += 1
            self.workload = self.best_ms = self.best_config = None
            if event.trials:
                self._tuned_s.append(event.seconds)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started."""
        return self._clock() - self._started

    @property
    def best_tflops(self) -> float | None:
        """1e12 operations per second of the best config of the current workload."""
        if self.workload is None or not self.best_ms:
            return None
        return self.workload.flops / self.best_ms / 1e9

    @property
    def best_peak_share(self) -> float | None:
        """The same as a share of the device's peak."""
        return peak_share(self.best_tflops, self.device) if self.device else None

    @property
    def left_s(self) -> float | None:
        """About how many seconds the run still takes, None while nothing is known."""
        if not self.total:
            return None
        each = self._workload_s()
        if each is None:
            return None
        waiting = self.total - self.ended - (self.workload is not None)
        spent = self._clock() - self._workload_started if self.workload is not None else each
        return waiting * each + max(0.0, each - spent)

    @property
    def share(self) -> float:
        """How much of the run is done, from 0 to 1: workloads that ended, and of the current one its budget."""
        if not self.total:
            return 0.0
        return min(1.0, (self.ended + self._workload_share()) / self.total)

    def _workload_share(self) -> float:
        """The current workload's part of its trials, candidates or seconds; below 1, since finals follow a search."""
        budget = self._budget
        if self.workload is None or budget is None:
            return 0.0
        trials = min(budget.budget_trials or self.candidates, self.candidates)
        shares = [self.trials / trials] if trials else []
        if budget.budget_s:
            shares.append((self._clock() - self._workload_started) / budget.budget_s)
        return min(MOST_OF_A_WORKLOAD, max(shares, default=0.0))

    def _workload_s(self) -> float | None:
        """Seconds that one workload takes: the budget, else the mean of those that ended, else what this one shows."""
        if self._budget is not None and self._budget.budget_s is not None:
            return self._budget.budget_s
        if self._tuned_s:
            return sum(self._tuned_s) / len(self._tuned_s)
        if self._budget is not None and self._budget.budget_trials and self.trials:
            return (self._clock() - self._workload_started) * self._budget.budget_trials / self.trials
        return None

    def _trial(self, number: int, best_ms: float | None, best: Config | None, outcome: object) -> None:
        self.trials, self.best_ms, self.best_config = number, best_ms, best
        if isinstance(outcome, Failure):
            self.failures[outcome.stage] += 1
