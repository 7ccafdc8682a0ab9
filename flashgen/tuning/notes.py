"""What a search writes down while it goes on: how it was asked for, every trial, every race of its finals."""

from __future__ import annotations

import dataclasses

from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.record import Failure, Trial, timestamp
from flashgen.core.search_log import Finalist, SearchRun
from flashgen.core.workload import Workload
from flashgen.measure.protocol import Outcome, RaceJob, RaceResult
from flashgen.tuning.context import Context, Options
from flashgen.tuning.predict import cost_model, predict_ms

AS_SETTINGS = ("lookahead", "neighbours", "seed_configs", "retune", "from_nothing")
"""The options that a search is stored with, beside its seed and its families."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What became of a candidate, what was compiled, and the seconds that an executor had it."""

    outcome: Outcome
    compiled: Compiled | None = None
    evaluate_s: float | None = None


class SearchNotes:
    """The search for one workload in the database of a run."""

    def __init__(self, context: Context, workload: Workload) -> None:
        self._context = context
        self._workload = workload
        self._started = context.clock()
        self._races = 0

    def begin(self, candidates: int, state: tuple[tuple[str, float], ...], **more: int | str | bool) -> None:
        """Store how the search was asked for; `more` are settings beside those of the options."""
        context = self._context
        search = SearchRun(
            workload=self._workload,
            device=context.device,
            run=context.run,
            host=context.host,
            seed=context.options.seed,
            budget=str(context.budget),
            candidates=candidates,
            settings=tuple(sorted((*_settings(context.options), *more.items()))),
            versions=context.versions,
            state=state,
            created=timestamp(),
        )
        context.store.put_search(search)

    def trial(self, config: Config, source: str, found: Evaluated, number: int) -> Trial:
        """Store a trial, which is the `number`-th of its search; those of a stopped one that it goes on from count."""
        context = self._context
        trial = Trial(
            workload=self._workload,
            device=context.device,
            config=config,
            source=source,
            outcome=found.outcome,
            created=timestamp(),
            run=context.run,
            number=number,
            compiled=found.compiled,
            predicted_ms=self._predicted_ms(config, found.compiled),
            evaluate_s=found.evaluate_s,
            elapsed_s=context.clock() - self._started,
        )
        context.store.put_trial(trial)
        return trial

    def race(self, stage: str, job: RaceJob, answer: RaceResult) -> None:
        """Store what the configs of a race did."""
        self._races += 1
        now = timestamp()
        self._context.store.put_finalists(
            Finalist(
                workload=self._workload,
                device=self._context.device,
                run=self._context.run,
                race=self._races,
                stage=stage,
                config=config,
                outcome=outcome,
                created=now,
            )
            for config, outcome in zip(job.configs, answer.outcomes, strict=True)
        )

    def _predicted_ms(self, config: Config, compiled: Compiled | None) -> float | None:
        if compiled is None or compiled.occupancy < 1 or cost_model(config) is None:
            return None
        return predict_ms(self._workload, config, self._context.device, compiled)


def not_measured(compiled: Compiled | Failure, why: Failure | None) -> Evaluated:
    """What is known of a candidate that did not compile, or that is not worth measuring."""
    if isinstance(compiled, Failure):
        return Evaluated(outcome=compiled)
    assert why is not None
    return Evaluated(outcome=why, compiled=compiled)


def _settings(options: Options) -> tuple[tuple[str, int | str | bool], ...]:
    chosen = tuple((name, getattr(options, name)) for name in AS_SETTINGS)
    until = "" if options.until is None else f"{options.until:g}"
    return (*chosen, ("families", " ".join(options.families)), ("until", until))
