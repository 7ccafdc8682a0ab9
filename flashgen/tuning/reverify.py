"""The best few of a record timed again: under another Triton, torch or driver, or another limit of the card.

A search is not needed to know whether what won still wins. The record's config meets those that were close to it when
it was made, in short windows, and the record of today takes the place of the old one, which the history keeps. What is
current is left alone, so that the same command goes on where it was stopped. With variations, each record meets its own
config with some knobs changed: what a new knob gains is known in seconds a record.

On one H200 91 records of a Hopper family took 6.8 s each, with three configs and their compiles ahead, so that 258
records on four GPUs take 7 to 8 minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashgen.codegen.families import invalid, successor
from flashgen.core.config import Config
from flashgen.core.history import UNKNOWN, Origin
from flashgen.core.record import Failure, Measurement, TuningRecord
from flashgen.core.workload import Workload
from flashgen.db.past import origins_of
from flashgen.db.store import Store
from flashgen.measure.protocol import Executor, Outcome, RaceResult
from flashgen.tuning.candidates import Candidates, nearest
from flashgen.tuning.context import Context
from flashgen.tuning.events import WorkloadFinished, WorkloadStarted
from flashgen.tuning.finals import Finals, choose, confidence, runners_up
from flashgen.tuning.history import why_not_current
from flashgen.tuning.measured_workload import MeasuredWorkload
from flashgen.tuning.notes import Evaluated, SearchNotes

RACE = Finals(window_s=0.1, warm_s=0.05, limit_s=8.0)
"""Windows and limit of a race: rivals are few and known to be close, and there are hundreds of records."""


class Reverification(MeasuredWorkload):
    """One workload's record on the GPU of an executor.

    Args:
        context: the run, whose options say how many configs there are.
        executor: measures.
        workload: whose record it is.

    Raises:
        UnsupportedError: no family applies to the workload on this device.
    """

    def __init__(self, context: Context, executor: Executor, workload: Workload) -> None:
        super().__init__(context, executor, workload)
        self._why = why_not_current(self._incumbent, context.versions, context.limits) if self._incumbent else ()
        self._varied = self._variations(self._incumbent) if self._incumbent else ()

    @property
    def is_needed(self) -> bool:
        """Whether a record is not current, or has not met a variation; any is where the run is told to repeat them."""
        if self._incumbent is None:
            return False
        options = self._context.options
        return bool(self._varied) if options.vary and not options.retune else bool(self._why) or options.retune

    def warm_up(self) -> None:
        """Have the configs compiled, while the GPU still works for another workload."""
        if self._incumbent is not None and self.is_needed:
            for config in self._configs(self._incumbent):
                self._context.compiler.submit(self._spec, config)

    def run(self) -> WorkloadFinished:
        """Time the configs against each other, and store the record of today."""
        record = self._incumbent
        if record is None:
            return self._finished("skipped", None, "there is no measured record to time again")
        if not self.is_needed:
            varied = "no variation is valid that the record has not met"
            return self._finished("skipped", record, varied if self._context.options.vary else "the record is current")
        configs = self._configs(record)
        counts = {"candidates": len(configs), "resumed_trials": 0, "budget_trials": len(configs)}
        self._context.emit(WorkloadStarted(workload=self._workload, budget_s=None, **counts))
        rejected = {config: self._compiled(config)[1] for config in configs}
        able = tuple(config for config, reason in rejected.items() if reason is None)
        if not able:
            return self._finished("failed", None, f"none of {len(configs)} configs: {rejected[configs[0]]}")
        own = successor(record.config, self._spec)
        place = able.index(own) if own in able else None
        job = self._last_race(able, RACE, champion=place, limit_s=RACE.limit_s)
        answer = self._run_race(job, "last", RACE.last_s(len(able), self._kinds))
        raced = dict(zip(able, answer.outcomes, strict=True))
        results = {config: found for config, found in raced.items() if isinstance(found, Measurement)}
        if not results:
            return self._finished("failed", None, f"none of {len(able)} configs: {answer.outcomes[0]}")
        self._note_failures({**rejected, **raced})
        return self._stored(own, results, answer)

    def _configs(self, record: TuningRecord) -> tuple[Config, ...]:
        """The record's own first, then what is varied in it, those that came close, the default, the nearest ones'."""
        context, workload = self._context, self._workload
        times = {
            trial.config: trial.outcome.median_ms
            for trial in context.store.trials(workload, context.device)
            if isinstance(trial.outcome, Measurement)
        }
        known = context.neighbours(workload.specialization.workload_class)
        rivals = [
            *self._varied,
            *self._rivals_of(record),
            *sorted(times, key=lambda config: times[config]),
            Candidates.of(workload, context.device, context.options.families).default,
            *nearest(known, workload, context.device, context.options.neighbours),
        ]
        every = dict.fromkeys(successor(config, self._spec) for config in (record.config, *rivals))
        able = [config for config in every if invalid(config, self._spec, context.device) is None]
        # all variations at once: a race remembers its own rivals alone, so that of two parts neither would be met
        most = max(context.options.reverify or 0, 1 + len(self._varied))
        return tuple(able[:most])

    def _variations(self, record: TuningRecord) -> tuple[Config, ...]:
        """The variations of its config that it has not met in its last race, nor failed to take part in it."""
        asked = (each.of(record.config, self._spec, self._context.device) for each in self._context.options.vary)
        varied = [config for config in asked if config is not None]
        met = {*self._rivals_of(record), *self._failed_beside(record)} if varied else set()
        return tuple(config for config in varied if config not in met)

    def _rivals_of(self, record: TuningRecord) -> list[Config]:
        """The other configs of its last race, where the run's own file has them."""
        return [each.config for each in self._origin_of(record).runners_up]

    def _failed_beside(self, record: TuningRecord) -> list[Config]:
        """What failed in the run that made it; none where the run is told to repeat that, or today it may not fail."""
        run = self._origin_of(record).run
        if not run or self._why or self._context.options.retune:
            return []
        tried = self._context.store.trials(self._workload, self._context.device)
        return [each.config for each in tried if each.run == run and isinstance(each.outcome, Failure)]

    def _origin_of(self, record: TuningRecord) -> Origin:
        """Who made it, where the run's own file says so."""
        store = self._context.store
        known = origins_of(store.reader, self._workload) if isinstance(store, Store) else {}
        return known.get(record.identity, UNKNOWN)

    def _note_failures(self, outcomes: Mapping[Config, Outcome | None]) -> None:
        """Keep why variations failed: the record has met them, too.

        Before the record is stored: from trials that are later than it an ordinary search would go on.
        """
        notes = SearchNotes(self._context, self._workload)
        failed = [(config, outcomes.get(config)) for config in self._varied]
        failures = [(config, outcome) for config, outcome in failed if isinstance(outcome, Failure)]
        for number, (config, failure) in enumerate(failures, 1):
            notes.trial(config, "varied", Evaluated(outcome=failure), number)

    def _stored(self, champion: Config, results: dict[Config, Measurement], answer: RaceResult) -> WorkloadFinished:
        winner = choose(results, default=champion, incumbent=champion)
        found = replace(results[winner], confidence=confidence(results, winner))
        record = self._record(winner, found, answer.baselines)
        newcomer = self._newcomer()
        if newcomer is not None:
            return self._finished("skipped", newcomer, "another run has stored a record meanwhile")
        self._store(record, runners_up(results, winner), "retime")
        why = "; ".join(self._why) or (f"{len(self._varied)} varied" if self._varied else "it was asked for")
        if winner == champion:
            return self._finished("kept", record, f"none of {len(results) - 1} rivals beat it again ({why})")
        lost = "is beaten" if champion in results else "does not run"
        return self._finished("tuned", record, f"{champion} {lost} today ({why})")
