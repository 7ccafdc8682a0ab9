"""The ranking for one workload without a GPU: compile for the target, reject what cannot run well, predict the rest.

Candidates are compiled in the order in which the model, given a lower bound of their resources, would take them; what
the compiler really used then decides. Nothing is measured, and the record says so.

Every candidate is stored as it is ranked. What was stored since the last predicted record belongs to a ranking that was
stopped, and the next one goes on behind it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator

from flashgen.codegen.families import family
from flashgen.codegen.render import source_digest
from flashgen.core.config import Config
from flashgen.core.record import Failure, Prediction, TuningRecord
from flashgen.core.workload import Workload
from flashgen.measure.protocol import specialization
from flashgen.tuning.candidates import Candidates, by_prediction
from flashgen.tuning.compile_pool import Compiled, rejected
from flashgen.tuning.context import Context, timestamp
from flashgen.tuning.events import CandidateRanked, WorkloadFinished, WorkloadStarted
from flashgen.tuning.finals import complexity
from flashgen.tuning.history import unfinished_predictions
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
        self._spec = specialization(workload)
        self._candidates = Candidates.of(workload, context.device)
        self._every = [config for space in self._candidates.spaces for config in space.configs]
        self._predicted: dict[Config, float] = {}
        self._failures: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._resumed = self._resume()  # which this run has not compiled

    def run(self) -> WorkloadFinished:
        """Rank candidates within the budget and store the best one's record, marked as predicted."""
        context = self._context
        context.emit(
            WorkloadStarted(
                workload=self._workload,
                candidates=self._candidates.count,
                resumed_trials=len(self._resumed),
                budget_trials=context.budget.trials,
                budget_s=context.budget.seconds,
            )
        )
        for config, compiled in self._compile():
            self._rank(config, compiled)
        best = self._confirmed_best()
        if best is None:
            counted = ", ".join(f"{n} x {stage} ({self._reasons[stage]})" for stage, n in self._failures.items())
            return self._finished("failed", None, f"no candidate is valid: {counted}")
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

    def _resume(self) -> set[Config]:
        """Take over what a stopped ranking left of the candidates of today; which ones they were."""
        valid = set(self._every)
        stored = unfinished_predictions(self._context, self._workload)
        found = {each.config: each.outcome for each in stored if each.config in valid}
        for config, outcome in found.items():
            self._count(config, outcome)
        return set(found)

    def _compile(self) -> Iterator[tuple[Config, Compiled | Failure]]:
        """Candidates with what they take, the families' defaults first, until the budget is spent."""
        context, spec = self._context, self._spec
        default = self._candidates.default
        known = [config for config in self._candidates.defaults if is_modelled(config)]
        ranked = dict.fromkeys([*known, *by_prediction(self._every, default, self._workload, context.device)])
        order = iter([config for config in ranked if config not in self._resumed])
        waiting: deque[Config] = deque()
        asked = len(self._resumed)
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
        """Predict or reject a compiled candidate, store that, and tell it."""
        context = self._context
        outcome = self._predict(config, compiled)
        self._count(config, outcome)
        context.store.put_prediction(
            Prediction(
                workload=self._workload, device=context.device, config=config, outcome=outcome, created=timestamp()
            )
        )
        best = self._best()
        context.emit(
            CandidateRanked(
                workload=self._workload,
                config=config,
                predicted_ms=self._predicted.get(config),
                failure=outcome if isinstance(outcome, Failure) else None,
                number=len(self._predicted) + sum(self._failures.values()),
                best_ms=self._predicted[best] if best else None,
                best_config=best,
            )
        )

    def _predict(self, config: Config, compiled: Compiled | Failure) -> float | Failure:
        failure = rejected(compiled, spill_limit_bytes=family(config.family).tolerated_spills)
        if failure is not None:
            return failure
        assert isinstance(compiled, Compiled)
        return predict_ms(self._workload, config, self._context.device, compiled)

    def _count(self, config: Config, outcome: float | Failure) -> None:
        if isinstance(outcome, Failure):
            self._failures[outcome.stage] += 1
            self._reasons.setdefault(outcome.stage, outcome.reason)
        else:
            self._predicted[config] = outcome

    def _confirmed_best(self) -> Config | None:
        """The best config, compiled in this run: a stored time saves work, but what wins by it is looked at again."""
        best = self._best()
        while best is not None and best in self._resumed:
            self._resumed.remove(best)
            del self._predicted[best]
            self._rank(best, self._context.compiler.result(self._spec, best))
            best = self._best()
        return best

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
