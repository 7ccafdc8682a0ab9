"""The ranking for one workload without a GPU: compile for the target, reject what cannot run well, predict the rest.

Candidates are compiled in the order in which the model, given a lower bound of their resources, would take them; what
the compiler really used then decides. Nothing is measured, and the record says so. Families without a cost model cannot
be compared: where no other family applies, theirs are tried in knob order, default first, until one compiles.

Every candidate is stored as it is ranked. What was stored since the last predicted record belongs to a ranking that was
stopped, and the next one goes on behind it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from flashgen.codegen.families import applicable, family
from flashgen.codegen.family import KernelFamily
from flashgen.codegen.render import source_digest
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import Device
from flashgen.core.errors import UnsupportedError
from flashgen.core.record import Failure, Prediction, TuningRecord, timestamp
from flashgen.core.workload import Workload
from flashgen.db.writing import Incoming
from flashgen.measure.protocol import specialization
from flashgen.tuning.candidates import Candidates, by_prediction
from flashgen.tuning.compile_pool import rejected
from flashgen.tuning.context import Context
from flashgen.tuning.events import CandidateRanked, WorkloadFinished, WorkloadStarted
from flashgen.tuning.finals import complexity
from flashgen.tuning.history import unfinished_predictions
from flashgen.tuning.predict import cost_model, predict_ms
from flashgen.tuning.tally import why_none

TIE = 0.005
"""Predictions closer than this share are equal, and the simpler config is taken."""


def why_not_ranked(workload: Workload) -> str | None:
    """Why there is nothing to rank for a workload without a GPU, or None."""
    if workload.is_decode:
        return "no model ranks steps of decoding, and no predicted record serves them: tune on that GPU"
    return None


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
        self._candidates = Candidates.of(workload, context.device, context.options.families)
        self._every = [config for space in self._candidates.spaces for config in space.configs]
        self._predicted: dict[Config, float] = {}
        self._unranked: Config | None = None
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
            return self._finished("failed", None, why_none(self._failures, self._reasons, len(self._resumed)))
        record = TuningRecord(
            workload=self._workload,
            device=context.device,
            config=best,
            provenance="predicted",
            predicted_ms=self._predicted.get(best),
            source_digest=source_digest(self._workload, best),
            versions=context.versions,
            created=timestamp(),
        )
        context.store.put_record(record, context.origin(), Incoming(source=f"run {context.run}"))
        reason = "nothing was measured" if best in self._predicted else "nothing was measured, and no model ranked it"
        return self._finished("predicted", record, reason)

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
        order = iter([config for config in self._order() if config not in self._resumed])
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
            if not waiting or self._unranked or (self._predicted and self._time_is_up()):
                return
            config = waiting.popleft()
            yield config, context.compiler.result(spec, config)

    def _order(self) -> list[Config]:
        known = [config for config in self._candidates.defaults if cost_model(config)]
        if not known:
            return self._every
        ranked = by_prediction(self._every, self._candidates.default, self._workload, self._context.device)
        return list(dict.fromkeys([*known, *ranked]))

    def _time_is_up(self) -> bool:
        seconds = self._context.budget.seconds
        return seconds is not None and self._context.clock() - self._started >= seconds

    def _rank(self, config: Config, compiled: Compiled | Failure) -> None:
        """Predict or reject a compiled candidate, store that, and tell it."""
        context = self._context
        outcome = self._predict(config, compiled)
        if outcome is None:
            self._unranked = config
        else:
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
                number=self._tried,
                best_ms=self._predicted.get(best) if best else None,
                best_config=best,
            )
        )

    def _predict(self, config: Config, compiled: Compiled | Failure) -> float | Failure | None:
        """Its time, or why it cannot serve, or None for a valid config without a cost model."""
        failure = rejected(compiled, spill_limit_bytes=family(config.family).tolerated_spills)
        if failure is not None:
            return failure
        if cost_model(config) is None:
            return None
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
            return self._unranked
        limit = (1 + TIE) * min(self._predicted.values())
        tied = [config for config, time in self._predicted.items() if time <= limit]
        return min(tied, key=lambda config: complexity(config, self._candidates.default))

    @property
    def _tried(self) -> int:
        return len(self._predicted) + (self._unranked is not None) + sum(self._failures.values())

    def _finished(self, status: str, record: TuningRecord | None, reason: str) -> WorkloadFinished:
        return WorkloadFinished(
            workload=self._workload,
            status=status,
            record=record,
            trials=self._tried,
            failures=tuple(sorted(self._failures.items())),
            reason=reason,
            seconds=self._context.clock() - self._started,
        )


def what_is_not_ranked(workloads: Iterable[Workload], device: Device, families: tuple[str, ...]) -> tuple[str, ...]:
    """A sentence for every family of which the model does not rank the candidates, and what becomes of these."""
    found: dict[str, None] = {}
    for spec in dict.fromkeys(specialization(workload) for workload in workloads):
        try:
            rows = applicable(spec, device, families)
        except UnsupportedError:
            continue  # it is reported when the workload's turn comes
        found |= dict.fromkeys(filter(None, (_why_not_ranked(row, rows) for row in rows)))
    return tuple(found)


def _why_not_ranked(row: KernelFamily, rows: tuple[KernelFamily, ...]) -> str | None:
    if row.cost_model is None and any(other.cost_model for other in rows):
        return f"{row.id} has no cost model, so none of its candidates is compared with those of other families"
    if row.cost_model is None:
        return (
            f"{row.id} has no cost model: its candidates are tried in knob order, its default first, and the first "
            "that compiles is taken"
        )
    if row.cost_model.ranking is None:
        return f"the cost model of {row.id} does not tell its candidates apart: only its default is predicted"
    return None
