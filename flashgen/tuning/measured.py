"""The search for one workload on a GPU: a pipeline of compiles ahead of measurements, then finals, then a record.

Every trial is stored as it completes. The trials stored since the last record of the workload are an unfinished search
of it: they are told to the new one, which goes on from there.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping

from flashgen.codegen.families import invalid, successor
from flashgen.core.config import Config
from flashgen.core.history import RunnerUp
from flashgen.core.record import Baseline, Failure, Measurement, TuningRecord
from flashgen.core.workload import Workload
from flashgen.measure.protocol import EvaluateJob, Executor, RaceJob
from flashgen.tuning.candidates import Candidates, related
from flashgen.tuning.context import Context
from flashgen.tuning.events import TrialFinished, WorkloadFinished, WorkloadStarted
from flashgen.tuning.expected import Outlook
from flashgen.tuning.finals import choose, confidence, near_best, runners_up, with_guards
from flashgen.tuning.history import served_elsewhere, unfinished_trials
from flashgen.tuning.learned_cost import WorkloadCost
from flashgen.tuning.measured_workload import MeasuredWorkload
from flashgen.tuning.notes import Evaluated, SearchNotes, not_measured
from flashgen.tuning.search import Proposal, Search
from flashgen.tuning.spending import Spending
from flashgen.tuning.starts import starting_points
from flashgen.tuning.tally import Tally

DROP_FACTOR = 2.0
"""A probe slower than so many times the best ends an evaluation: it will not be in the finals."""

DECODE_WINDOW_S, DECODE_WARM_S = 0.012, 0.002
"""Of each profile of lengths: what takes microseconds is replayed hundreds of times in it."""


class MeasuredSearch(MeasuredWorkload):
    """The search for one workload on the GPU of an executor.

    Args:
        context: the run.
        executor: measures.
        workload: what to tune.

    Raises:
        UnsupportedError: no family applies to the workload on this device.
    """

    def __init__(self, context: Context, executor: Executor, workload: Workload) -> None:
        super().__init__(context, executor, workload)
        served = self._incumbent or served_elsewhere(context, workload)
        self._served = None if served is None else successor(served.config, self._spec)
        self._waiting: deque[Proposal] = deque()
        self._spending = Spending(context.budget, context.options.finals, context.clock, self._kinds)
        self._candidates = Candidates.of(workload, context.device, context.options.families)
        self._tally = Tally(has_profiles=bool(workload.has_profiles))
        self._resumed = [
            trial
            for trial in unfinished_trials(context, workload)
            if invalid(trial.config, self._spec, context.device) is None  # of an earlier version, perhaps
        ]
        self._notes = SearchNotes(context, workload)
        self._outlook = Outlook()
        self._model = self._new_model()
        self._search = self._new_search()

    def warm_up(self) -> None:
        """Have the first candidates compiled, while the GPU still works for another workload."""
        for _ in range(self._context.options.lookahead):
            proposal = self._search.ask()
            if proposal is not None:
                self._context.compiler.submit(self._spec, proposal.config)

    def run(self, before_finals: Callable[[], None]) -> WorkloadFinished:
        """Search, compare the best again, and store the winner's record.

        `before_finals` is called when the compile pool has nothing more to do for this workload.
        """
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
        lessons = self._model.size if self._model else 0
        self._notes.begin(self._candidates.count, self._executor.describe().state, lessons=lessons)
        self._search_within_budget()
        before_finals()
        decided = self._decide()
        while decided is not None and self._has_met_newcomer():
            decided = self._decide()
        if decided is None:
            return self._ended("failed", None, self._tally.why_failed(len(self._resumed)))
        record, rivals = decided
        self._store(record, rivals, "search")
        kept = self._incumbent is not None and record.config == self._incumbent.config
        reason = "the incumbent was not beaten by more than the noise" if kept else ""
        return self._ended("kept" if kept else "tuned", record, reason)

    def _new_model(self) -> WorkloadCost | None:
        context, options = self._context, self._context.options
        if context.learned is None:
            return None
        return context.learned.of(
            self._workload, context.device, seed=options.seed, without_device=options.from_nothing
        )

    def _new_search(self) -> Search:
        options, device, served = self._context.options, self._context.device, self._served
        families = {space.family for space in self._candidates.spaces}
        known = [
            record
            for name in related(self._spec)
            for record in self._context.neighbours(name)
            if record.config.family in families
        ]
        first = starting_points(
            self._candidates,
            self._workload,
            device,
            options,
            known=known,
            incumbent=served,
        )
        for trial in self._resumed:
            self._tally.count(trial.config, trial.outcome)
            self._outlook.add(trial.source, trial.config, is_earlier=True)
        self._tally.resume()
        return Search(
            self._candidates.spaces,
            model=self._model,
            first=first,
            seed=options.seed,
            name=self._spec.key,
            trials=[
                dataclasses.replace(trial, outcome=self._tally.levelled(trial.config, trial.outcome))
                for trial in self._resumed
            ],
        )

    def _search_within_budget(self) -> None:
        """Keep `lookahead` candidates compiling, measure them in the order they were asked for, tell the search."""
        context = self._context
        waiting = self._waiting
        asked = len(self._resumed)
        while True:
            while len(waiting) < context.options.lookahead and asked < (context.budget.trials or math.inf):
                proposal = self._search.ask()
                if proposal is None:
                    break
                context.compiler.submit(self._spec, proposal.config)
                waiting.append(proposal)
                asked += 1
            if not waiting or ((self._is_enough() or self._time_is_up()) and not self._is_served(waiting[0])):
                break
            self._try(waiting.popleft())
        if not self._has_met_newcomer():
            self._try_served()

    def _try(self, proposal: Proposal) -> None:
        """Measure a candidate and tell the search."""
        found = self._evaluate(proposal.config)
        self._spending.measured_one()
        self._tally.count(proposal.config, found.outcome)
        self._search.tell(proposal.config, self._tally.levelled(proposal.config, found.outcome))
        self._outlook.add(proposal.source, proposal.config)
        self._keep(proposal, found)

    def _has_met_newcomer(self) -> bool:
        """Whether a record of another run has come meanwhile, which no search may replace unraced either."""
        newcomer = self._newcomer()
        if newcomer is None:
            return False
        self._served = successor(newcomer.config, self._spec)
        self._try_served()
        return True

    def _try_served(self) -> None:
        """Measure what serves where the search has ended before it: of one trial, or begun before there was any."""
        if self._served is None:
            return
        asked = [each for each in self._waiting if each.config == self._served]
        found = asked[0] if asked else self._search.demand(self._served, "incumbent")
        for each in asked:
            self._waiting.remove(each)
        if found is not None:
            self._context.compiler.submit(self._spec, found.config)
            self._try(found)

    def _is_served(self, proposal: Proposal) -> bool:
        """Whether it serves today, which no budget is too short for: else a config would take its place unraced."""
        return proposal.config == self._served

    def _is_enough(self) -> bool:
        """Whether so little is expected of going on that the run is told to stop."""
        until, gain = self._context.options.until, self._expected_gain()
        return until is not None and gain is not None and gain < until

    def _expected_gain(self) -> float | None:
        budget, spent_s = self._context.budget, self._spending.spent_s
        return self._outlook.gain(
            self._tally.times(),
            candidates=self._search.remaining,
            trials=math.inf if budget.trials is None else budget.trials - self._tally.tried,
            seconds=math.inf if budget.seconds is None else budget.seconds - spent_s,
            spent_s=spent_s,
        )

    def _time_is_up(self) -> bool:
        """Whether what is left of a budget in seconds is needed for the finals of the best configs so far."""
        measured, failures = bool(self._tally.measured), bool(self._tally.failures)
        near, guards = len(self._near_best()), len(self._guards())
        return self._spending.is_over(near, guards, has_times=measured, has_failures=failures)

    def _evaluate(self, config: Config) -> Evaluated:
        compiled, reason = self._compiled(config)
        if isinstance(compiled, Failure) or reason is not None:
            return not_measured(compiled, reason)
        least_ms = min((each.median_ms for each in self._tally.measured.values()), default=None)
        job = EvaluateJob(
            workload=self._workload,
            config=config,
            drop_above_ms=None if least_ms is None else DROP_FACTOR * least_ms,
        )
        if self._workload.is_decode:
            job = dataclasses.replace(job, window_s=DECODE_WINDOW_S, warm_s=DECODE_WARM_S)
        began = self._context.clock()
        outcome = self._believed(self._executor.evaluate(job))
        evaluate_s = self._context.clock() - began
        if isinstance(outcome, Measurement):
            # one that was dropped had none of them
            self._spending.evaluated(evaluate_s, job.windows_s * (len(outcome.times_ms) > 1))
        return Evaluated(outcome=outcome, compiled=compiled, evaluate_s=evaluate_s)

    def _keep(self, proposal: Proposal, found: Evaluated) -> None:
        trial = self._notes.trial(proposal.config, proposal.source, found, self._tally.tried)
        best = self._tally.best()
        self._context.emit(
            TrialFinished(
                trial=trial,
                number=self._tally.tried,
                best_ms=self._tally.measured[best].median_ms if best else None,
                best_config=best,
                expected_gain=self._expected_gain(),
            )
        )

    def _decide(self) -> tuple[TuningRecord, tuple[RunnerUp, ...]] | None:
        """Both races of the finals: the winner's record, and whom it met in the last one; None without a candidate."""
        finals = self._spending.finals(len(self._near_best()), len(self._guards()))
        champion = self._served if self._incumbent else None
        near = self._near_best()[: finals.near_most]
        if len(near) > finals.last:
            job = RaceJob(
                workload=self._workload,
                configs=near,
                rounds=finals.near_rounds,
                warm_s=finals.near_warm_s,
                window_s=finals.near_window_s,
                settle_s=finals.near_settle_s,
                reference=False,
                hard=True,
            )
            results, _ = self._race(job, "near", finals.near_s(len(near), self._kinds))
            if not results:
                return self._decide()  # all of them failed just now: the next best ones have their turn
            near = near_best(results, share=finals.last_share, most=finals.last)
        default = self._candidates.default
        last = with_guards(near[: finals.last], *self._guards())
        if not last:
            return None
        place = last.index(champion) if champion in last else None
        job = self._last_race(last, finals, place, self._spending.last_limit_s(finals, len(last)))
        results, baselines = self._race(job, "last", finals.last_s(len(last), self._kinds))
        if not results:
            return self._decide()  # as above
        winner = choose(results, default=default, incumbent=champion)
        return self._record(winner, self._judged(winner, results), baselines), runners_up(results, winner)

    def _near_best(self) -> tuple[Config, ...]:
        finals = self._context.options.finals
        return near_best(
            self._tally.measured, share=finals.near_share, most=finals.near_most, tile_share=finals.tile_share
        )

    def _guards(self) -> tuple[Config, ...]:
        """The default and what serves today, unless the search found them behind by more than noise can be."""
        usual = (self._candidates.default, *([self._served] if self._served else []))
        return self._tally.within(usual, self._context.options.finals.guard_share)

    def _race(
        self, job: RaceJob, stage: str, expected_s: float
    ) -> tuple[dict[Config, Measurement], tuple[Baseline, ...]]:
        answer = self._run_race(job, stage, expected_s)
        self._notes.race(stage, job, answer)
        results: dict[Config, Measurement] = {}
        for config, outcome in zip(job.configs, answer.outcomes, strict=True):
            if isinstance(outcome, Failure):
                # what fails under long load must not be served, nor be tried again by a resumed search
                self._tally.count(config, outcome)
                self._keep(Proposal(config=config, source="finals"), Evaluated(outcome=outcome))
            else:
                results[config] = outcome
        return results, answer.baselines

    def _judged(self, winner: Config, results: Mapping[Config, Measurement]) -> Measurement:
        """What the race says of the winner, with the largest errors of all its measurements."""
        found, before = results[winner], self._tally.measured[winner]
        return dataclasses.replace(
            found,
            max_error=max(found.max_error, before.max_error),
            mean_error=max(found.mean_error, before.mean_error),
            confidence=confidence(results, winner),
        )

    def _ended(self, status: str, record: TuningRecord | None, reason: str) -> WorkloadFinished:
        failures = tuple(sorted(self._tally.failures.items()))
        return self._finished(status, record, reason, trials=self._tally.tried, failures=failures)
