"""The ranking for one workload without a GPU: compile for the target, reject what cannot run well, predict the rest.

Candidates are compiled in the order in which the model, given a lower bound of their resources, would take them; what
the compiler really used then decides. Nothing is measured, and the record says so.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator

from flashgen.codegen.families import family
from flashgen.codegen.render import source_digest
from flashgen.core.config import Config
from flashgen.core.record import Failure, TuningRecord
from flashgen.core.workload import Workload
from flashgen.measure.protocol import specialization
from flashgen.tuning.candidates import Candidates, by_prediction
from flashgen.tuning.compile_pool import Compiled, rejected
from flashgen.tuning.context import Context, timestamp
from flashgen.tuning.events import CandidateRanked, WorkloadFinished, WorkloadStarted
from flashgen.tuning.finals import complexity
from flashgen.tuning.predict import is_modelled, predict_ms

TIE = 0.005
"""Predictions closer than this share are equal, and the simpler config is taken."""


class PredictedSearch:
    """One workload for a device that need not be present.

    Raises:
        UnsupportedError: no family applies to the workload on this device.
    """

    def __init__(self, context: Context, workload: Workload) -> None:
        self._context = context
        self._workload = workload
        self._started = context.clock()
        self._candidates = Candidates.of(workload, context.device)
        self._predicted: dict[Config, float] = {}
        self._failures: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    def run(self) -> WorkloadFinished:
        """Rank candidates within the budget and store the best one's record, marked as predicted."""
        context = self._context
        context.emit(
            WorkloadStarted(
                workload=self._workload,
                candidates=self._candidates.count,
                resumed_trials=0,
                budget_trials=context.budget.trials,
                budget_s=context.budget.seconds,
            )
        )
        for config, compiled in self._compile():
            self._rank(config, compiled)
        if not self._predicted:
            counted = ", ".join(f"{n} x {stage} ({self._reasons[stage]})" for stage, n in self._failures.items())
            return self._finished("failed", None, f"no candidate is valid: {counted}")
        best = self._best()
        assert best is not None
        record = TuningRecord(
            workload=self._workload,
            device=context.device,
            config=best,
            provenance="predicted",
            predicted_ms=self._predicted[best],
            source_digest=source_digest(self._workload, best),
            versions=context.versions,
            created=timestamp(),
        )
        context.store.put_record(record)
        return self._finished("predicted", record, "nothing was measured")

    def _compile(self) -> Iterator[tuple[Config, Compiled | Failure]]:
        """Candidates with what they take, the families' defaults first, until the budget is spent."""
        context, spec = self._context, specialization(self._workload)
        every = [config for space in self._candidates.spaces for config in space.configs]
        default = self._candidates.default
        known = [config for config in self._candidates.defaults if is_modelled(config)]
        order = iter(dict.fromkeys([*known, *by_prediction(every, default, self._workload, context.device)]))
        waiting: deque[Config] = deque()
        asked = 0
        while True:
            while len(waiting) < context.options.lookahead and asked < (context.budget.trials or math.inf):
                config = next(order, None)
                if config is None:
                    break
                context.compiler.submit(spec, config)
                waiting.append(config)
                asked += 1
            if not waiting or (self._predicted and self._time_is_up()):
                return
            config = waiting.popleft()
            yield config, context.compiler.result(spec, config)

    def _time_is_up(self) -> bool:
        seconds = self._context.budget.seconds
        return seconds is not None and self._context.clock() - self._started >= seconds

    def _rank(self, config: Config, compiled: Compiled | Failure) -> None:
        failure = rejected(compiled, spill_limit_bytes=family(config.family).tolerated_spills)
        if failure is None and isinstance(compiled, Compiled):
            self._predicted[config] = predict_ms(self._workload, config, self._context.device, compiled)
        elif failure is not None:
            self._failures[failure.stage] += 1
            self._reasons.setdefault(failure.stage, failure.reason)
        best = self._best()
        self._context.emit(
            CandidateRanked(
                workload=self._workload,
                config=config,
                predicted_ms=self._predicted.get(config),
                failure=failure,
                number=len(self._predicted) + sum(self._failures.values()),
                best_ms=self._predicted[best] if best else None,
                best_config=best,
            )
        )

    def _best(self) -> Config | None:
        if not self._predicted:
            return None
        limit = (1 + TIE) * min(self._predicted.values())
        tied = [config for config, time in self._predicted.items() if time <= limit]
        return min(tied, key=lambda config: complexity(config, self._candidates.default))

    def _finished(self, status: str, record: TuningRecord | None, reason: str) -> WorkloadFinished:
        return WorkloadFinished(
            workload=self._workload,
            status=status,
            record=record,
            trials=len(self._predicted) + sum(self._failures.values()),
            failures=tuple(sorted(self._failures.items())),
            reason=reason,
            seconds=self._context.clock() - self._started,
        )
