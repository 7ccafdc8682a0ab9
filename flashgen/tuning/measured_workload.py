"""One workload on the GPU of an executor: what a search for it and another look at its record have in common."""

from __future__ import annotations

import dataclasses

from flashgen.codegen.families import family
from flashgen.codegen.render import source_digest
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.history import RunnerUp
from flashgen.core.peak import believed
from flashgen.core.record import Baseline, Failure, Limits, Measurement, TuningRecord, timestamp
from flashgen.core.workload import Workload
from flashgen.db.writing import Incoming
from flashgen.measure.protocol import Executor, RaceJob, RaceResult, specialization
from flashgen.measure.sequential import Rule
from flashgen.tuning.compile_pool import rejected
from flashgen.tuning.context import Context
from flashgen.tuning.events import FinalsStarted, WorkloadFinished
from flashgen.tuning.finals import KINDS_OF_DATA, Finals
from flashgen.tuning.history import incumbent


class MeasuredWorkload:
    """A workload whose configs are compiled ahead, race on a GPU, and become its record.

    Args:
        context: the run.
        executor: measures.
        workload: what to measure.
    """

    def __init__(self, context: Context, executor: Executor, workload: Workload) -> None:
        self._context = context
        self._executor = executor
        self._workload = workload
        self._spec = specialization(workload)  # what the executor measures, so that it finds it compiled
        self._started = context.clock()
        self._incumbent = incumbent(context, workload)

    @property
    def _kinds(self) -> int:
        """Windows of a config in each round of a race."""
        return len(self._workload.profiles) or KINDS_OF_DATA

    def _newcomer(self) -> TuningRecord | None:
        """What another run has stored in the own database since this one looked; from then on it is the incumbent."""
        found = self._context.store.record(self._workload, self._context.device, provenance="measured")
        known = self._incumbent
        if found is None or (known is not None and (found.created, found.config) == (known.created, known.config)):
            return None
        self._incumbent = found
        return found

    def _compiled(self, config: Config) -> tuple[Compiled | Failure, Failure | None]:
        """What a config takes, and why it is not worth measuring."""
        compiled = self._context.compiler.result(self._spec, config)
        return compiled, rejected(compiled, spill_limit_bytes=family(config.family).tolerated_spills)

    def _last_race(self, configs: tuple[Config, ...], finals: Finals, champion: int | None, limit_s: float) -> RaceJob:
        """The race that decides: beside torch's backends, on both kinds of data, until it is sure or `limit_s` ends."""
        return RaceJob(
            workload=self._workload,
            configs=configs,
            rounds=finals.rounds,
            warm_s=finals.warm_s,
            window_s=finals.window_s,
            settle_s=finals.settle_s,
            baselines=True,
            hard=True,
            rule=Rule(champion=champion, limit_s=limit_s),
        )

    def _run_race(self, job: RaceJob, stage: str, expected_s: float) -> RaceResult:
        """Tell of a race, and run it."""
        self._context.emit(
            FinalsStarted(workload=self._workload, stage=stage, configs=job.configs, expected_s=expected_s)
        )
        answer = self._executor.race(job)
        return dataclasses.replace(answer, outcomes=tuple(map(self._believed, answer.outcomes)))

    def _believed(self, outcome: Measurement | Failure) -> Measurement | Failure:
        return believed(self._workload, self._context.device, outcome)

    def _record(self, winner: Config, measurement: Measurement, baselines: tuple[Baseline, ...]) -> TuningRecord:
        """The record of today."""
        return TuningRecord(
            workload=self._workload,
            device=self._context.device,
            config=winner,
            provenance="measured",
            measurement=measurement,
            source_digest=source_digest(self._workload, winner),
            versions=self._context.versions,
            limits=Limits.of(self._executor.describe().state),
            baselines=baselines,
            created=timestamp(),
        )

    def _store(self, record: TuningRecord, rivals: tuple[RunnerUp, ...], reason: str) -> None:
        """Keep a record with whom it met in its last race; `reason` is what its history says."""
        incoming = Incoming(reason=reason, source=f"run {self._context.run}")
        self._context.store.put_record(record, self._context.origin(rivals), incoming)

    def _finished(
        self,
        status: str,
        record: TuningRecord | None,
        reason: str,
        *,
        trials: int = 0,
        failures: tuple[tuple[str, int], ...] = (),
    ) -> WorkloadFinished:
        return WorkloadFinished(
            workload=self._workload,
            status=status,
            record=record,
            trials=trials,
            failures=failures,
            reason=reason,
            seconds=self._context.clock() - self._started,
        )
