"""A search leaves everything that it did in the database: who proposed what, what it cost, and all races."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.codegen.families import default_config
from flashgen.core.record import SOURCES, Failure
from flashgen.core.search_log import SearchLog
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.db.trials import search_logs
from flashgen.measure.protocol import RaceJob, RaceResult
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.finals import Finals
from flashgen.tuning.tune import tune
from tests.tiers import EXHAUSTIVE
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor
from tests.tuning.runs import Killed, chosen, run

TWO_RACES = Finals(rounds=3, last=2)
WIDE = Workload.parse("b4-h16-s1024-d256")
FAMILY = ("hopper_forward",)
"""With few configs for it, so that nobody waits for a large space."""


def logs(store: Store) -> list[SearchLog]:
    return list(search_logs(store, [WIDE], [H200]))


def test_a_search_is_kept_with_the_true_origin_of_every_trial(store: Store) -> None:
    executor = FakeExecutor()
    run(store, WIDE, families=FAMILY, executor=executor, seed=7, finals=TWO_RACES)
    (log,) = logs(store)
    search = log.search
    assert search is not None
    assert (search.host, search.seed, search.budget, search.versions.driver) == ("gpu-7", 7, "30 trials", "580")
    assert dict(search.settings)["neighbours"] == 4
    assert search.candidates == 28
    assert [trial.number for trial in log.trials] == list(range(1, 29))
    sources = [trial.source for trial in log.trials]
    assert set(sources) <= set(SOURCES)
    assert sources[0] == "default"
    assert "seed" in sources
    assert {trial.run for trial in log.trials} == {search.run}
    for trial in log.trials:
        failed_to_compile = isinstance(trial.outcome, Failure) and trial.outcome.stage == "build"
        assert (trial.compiled is None) == failed_to_compile
        assert (trial.evaluate_s is None) == isinstance(trial.outcome, Failure)
        assert trial.predicted_ms is not None or trial.compiled is None
    elapsed = [trial.elapsed_s for trial in log.trials]
    assert elapsed == sorted(elapsed)  # type: ignore[type-var]
    stages = ("near", "last")[-len(executor.races) :]
    assert [(each.race, each.stage) for each in log.finalists] == [
        (number, stage)
        for number, (stage, job) in enumerate(zip(stages, executor.races, strict=True), 1)
        for _ in job.configs
    ]
    assert chosen(store, WIDE).config in {each.config for each in log.finalists if each.stage == "last"}


def test_the_next_search_knows_the_incumbent_and_keeps_the_first_one(store: Store) -> None:
    default = default_config(WIDE.specialization, H200)
    for _ in range(2):
        executor = FakeExecutor(time_ms=lambda _, config: 2.0 if config == default else 1.0)
        run(store, WIDE, families=FAMILY, executor=executor, budget=Budget(trials=8), retune=True)
    first, second = logs(store)
    assert "incumbent" not in {trial.source for trial in first.trials}
    assert "incumbent" in {trial.source for trial in second.trials}
    assert len(first.trials) == len(second.trials) == 8


@EXHAUSTIVE
def test_from_nothing_nobody_names_a_config(store: Store) -> None:
    run(store, WIDE, families=FAMILY, budget=Budget(trials=20), from_nothing=True)
    (log,) = logs(store)
    assert {trial.source for trial in log.trials} <= {"random", "sampler", "local"}


def test_from_nothing_records_of_other_layers_are_not_known(store: Store, tmp_path: Path) -> None:
    run(store, WIDE, families=FAMILY, budget=Budget(trials=3))
    known = store.records()
    for from_nothing in (False, True):
        executor = FakeExecutor()
        with Store.open(tmp_path / f"{from_nothing}.sqlite3") as fresh:
            tune(
                [WIDE],
                device=H200,
                store=fresh,
                compiler=FakeCompiler(failing=0.0, spilling=0.0),
                executor=executor,
                budget=Budget(trials=2),
                options=Options(families=FAMILY, from_nothing=from_nothing, neighbours=0),
                neighbours=lambda name: known,
                clock=executor.clock,
            )
            named = {trial.source for trial in fresh.trials(WIDE, H200)}
            assert (named == {"random"}) if from_nothing else ("default" in named)


def test_what_failed_in_finals_of_another_run_is_not_resumed_as_good(store: Store) -> None:
    """The first run dies; the second one goes on, and its finals find a config wrong; the third one knows."""

    def stop(number: int) -> None:
        if number == 20:
            raise Killed

    with pytest.raises(Killed):
        run(store, WIDE, families=FAMILY, executor=FakeExecutor(on_evaluate=stop))
    best = min(
        (trial for trial in store.trials(WIDE, H200) if not isinstance(trial.outcome, Failure)),
        key=lambda trial: trial.outcome.median_ms,  # type: ignore[union-attr]
    )
    wrong = Failure(stage="verify", reason="wrong after a while")

    class Dying(FakeExecutor):
        def race(self, job: RaceJob) -> RaceResult:
            if self.races:
                raise Killed
            return super().race(job)

    with pytest.raises(Killed):
        run(
            store,
            WIDE,
            families=FAMILY,
            executor=Dying(broken_in_race=lambda config: wrong if config == best.config else None),
            finals=TWO_RACES,
        )
    assert [t.outcome for t in store.trials(WIDE, H200) if t.config == best.config] == [best.outcome, wrong]
    last = FakeExecutor()
    run(store, WIDE, families=FAMILY, executor=last)
    assert not last.evaluated
    assert best.config not in {config for job in last.races for config in job.configs}
