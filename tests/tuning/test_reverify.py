"""Records timed again under another Triton: the best few alone, with the old ones in the history."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.errors import TuningError
from flashgen.core.record import Failure, Limits, Versions
from flashgen.core.workload import Specialization, Workload
from flashgen.db.past import past_of
from flashgen.db.store import Store
from flashgen.measure.protocol import RaceJob, RaceResult
from flashgen.tuning import reverify
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, WorkloadStarted
from flashgen.tuning.plan import plan
from flashgen.tuning.request import Request
from flashgen.tuning.variations import Variation
from tests.tiers import first
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor, true_ms
from tests.tuning.runs import CAUSAL, LONGER, PLAIN, Budget, chosen, run

NEWER = Versions(flashgen="0", triton="3.7.1", torch="2.13", driver="590")
STATE = (("power_limit_w", 700.0), ("sm_clock_max_mhz", 1980.0))
OPTIONS = {"families": ("portable_forward",), "budget": Budget(trials=12)}


def newer(**changes: object) -> FakeExecutor:
    return FakeExecutor(versions=NEWER, state=STATE, **changes)  # type: ignore[arg-type]


def test_a_new_triton_makes_a_record_old_and_the_best_few_are_timed_again(store: Store) -> None:
    run(store, **OPTIONS)
    before = chosen(store)
    executor = newer()
    (outcome,) = run(store, executor=executor, reverify=3, **OPTIONS).outcomes
    assert outcome.status in ("kept", "tuned")
    assert "measured with triton 3.6.0, and 3.7.1 is here" in outcome.reason
    assert not executor.evaluated, "nothing is searched for"
    (job,) = executor.races
    assert (len(job.configs), job.configs[0]) == (3, before.config)
    now = chosen(store)
    assert now.versions == NEWER
    assert now.limits == Limits(power_limit_w=700.0, max_sm_clock_mhz=1980.0)
    past = past_of(store.reader, CAUSAL)
    assert [(each.record, each.reason) for each in past.replaced] == [(before, "retime")]
    ((_, origin),) = past.records
    assert {rival.config for rival in origin.runners_up} | {now.config} == set(job.configs)


def test_what_another_run_has_stored_meanwhile_stays(store: Store) -> None:
    run(store, **OPTIONS)
    others = []

    class Beside(FakeExecutor):
        def race(self, job: RaceJob) -> RaceResult:
            run(store, executor=newer(seed=1), retune=True, **OPTIONS)
            others.append(chosen(store))
            return super().race(job)

    (outcome,) = run(store, executor=Beside(versions=NEWER, state=STATE), reverify=3, **OPTIONS).outcomes
    assert (outcome.status, outcome.reason) == ("skipped", "another run has stored a record meanwhile")
    assert chosen(store) == outcome.record == others[0]


def test_no_rival_has_the_place_of_a_config_that_is_not_valid_any_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, **OPTIONS)
    before = chosen(store).config
    valid = reverify.invalid
    monkeypatch.setattr(
        reverify, "invalid", lambda config, *where: "gone" if config == before else valid(config, *where)
    )
    executor = newer()
    (outcome,) = run(store, executor=executor, reverify=3, **OPTIONS).outcomes
    (job,) = executor.races
    assert job.rule is not None
    assert job.rule.champion is None
    assert outcome.status == "tuned"
    assert outcome.reason.startswith(f"{before} does not run today")


def test_what_is_current_is_left_alone_so_that_a_stopped_command_goes_on(store: Store) -> None:
    run(store, CAUSAL, LONGER, **OPTIONS)
    assert run(store, CAUSAL, LONGER, executor=newer(), reverify=1, **OPTIONS).outcomes[0].status == "kept"
    again = newer()
    outcomes = run(store, CAUSAL, LONGER, PLAIN, executor=again, reverify=3, **OPTIONS).outcomes
    assert [each.status for each in outcomes] == ["skipped"] * 3
    assert [each.reason for each in outcomes][::2] == [
        "the record is current",
        "there is no measured record to time again",
    ]
    assert not again.races
    run(store, executor=again, reverify=2, retune=True, **OPTIONS)
    assert len(again.races) == 1, "unless it is asked for"
    other_limit = newer()
    other_limit.state = (("power_limit_w", 500.0),)
    run(store, executor=other_limit, reverify=1, **OPTIONS)
    assert len(other_limit.races) == 1


def test_a_rival_that_became_faster_takes_the_place(store: Store) -> None:
    run(store, **OPTIONS)
    before = chosen(store).config

    def time_ms(workload: Workload, config: Config) -> float:
        return true_ms(workload, config) * (2.0 if config == before else 1.0)

    (outcome,) = run(store, executor=newer(time_ms=time_ms), reverify=3, **OPTIONS).outcomes
    assert outcome.status == "tuned"
    assert "is beaten today" in outcome.reason
    assert chosen(store).config != before


def test_a_new_value_of_a_knob_meets_every_record_that_has_not_met_it(store: Store) -> None:
    run(store, CAUSAL, LONGER, **OPTIONS)
    before = chosen(store).config
    other = 128 if before["block_n"] == 64 else 64
    vary = (Variation.parse(f"block_n={other}"), Variation.parse("early_settle=true"))
    changed = before.replace(block_n=other)

    def time_ms(workload: Workload, config: Config) -> float:
        return true_ms(workload, config) if config != changed else 0.5 * true_ms(workload, before)

    executor = FakeExecutor(time_ms=time_ms)
    (outcome,) = run(store, executor=executor, reverify=2, vary=vary, **OPTIONS).outcomes
    assert outcome.status == "tuned", "though the record was current"
    assert [job.configs for job in executor.races] == [(before, changed)], "another family's knob changes nothing"
    assert chosen(store).config == changed
    loser = (Variation.parse("block_n=32"),)
    first, second = (run(store, executor=executor, reverify=2, vary=loser, **OPTIONS).outcomes[0] for _ in range(2))
    assert (first.status, second.status) == ("kept", "skipped"), "so that a stopped command goes on"
    assert "has not met" in second.reason
    assert run(store, executor=newer(), reverify=2, vary=loser, **OPTIONS).outcomes[0].status == "skipped"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block_n", "knob=value"),
        ("block_n=", "knob=value"),
        ("block_n=64,block_n=32", "each knob once"),
        ("block_n=65", "no kernel family has"),
        ("early_settel=true", "did you mean early_settle"),
        ("early_settle=true,loads=descriptor", "no kernel family has all"),
    ],
)
def test_a_variation_names_knobs_and_values_of_one_family(text: str, words: str) -> None:
    with pytest.raises(TuningError, match=words):
        Variation.parse(text)
    assert str(Variation.parse(" early_settle = TRUE , exp_order=data")) == "early_settle=TRUE,exp_order=data"


def test_what_does_not_run_any_more_keeps_its_record(store: Store) -> None:
    run(store, **OPTIONS)
    before = chosen(store)
    broken = newer(broken_in_race=lambda config: Failure(stage="launch", reason="planted"))
    (outcome,) = run(store, executor=broken, reverify=2, **OPTIONS).outcomes
    assert outcome.status == "failed"
    assert "planted" in outcome.reason
    assert chosen(store) == before


def test_a_search_begins_again_where_triton_is_another_one(store: Store) -> None:
    run(store, **OPTIONS)
    (same,) = run(store, **OPTIONS).outcomes
    assert same.status == "skipped"
    executor = newer()
    (outcome,) = run(store, executor=executor, **OPTIONS).outcomes
    assert outcome.status in ("kept", "tuned")
    assert executor.evaluated
    planned = {"device": H200, "store": store, "budget": Budget(trials=3), "measured": True, "jobs": 1}
    assert plan([CAUSAL], versions=NEWER, **planned)[0].status == "skip"  # type: ignore[arg-type]
    (row,) = plan([CAUSAL], versions=replace(NEWER, triton="3.8.0"), **planned)  # type: ignore[arg-type]
    assert (row.status, row.reason) == ("tune", "measured with triton 3.7.1, and 3.8.0 is here")


def test_what_makes_no_sense_beside_it_is_refused() -> None:
    with pytest.raises(TuningError, match="at least 1"):
        Options(reverify=0)
    with pytest.raises(TuningError, match="a search varies all"):
        Options(vary=(Variation.parse("block_n=64"),))
    with pytest.raises(TuningError, match="no target"):
        Request.of(options=Options(reverify=3), target="h100", budget=Budget(trials=1))
    assert Request.of(options=Options(reverify=3), budget=Budget(trials=1)).workloads == ()


def test_more_variations_than_are_asked_for_are_met_at_once(store: Store) -> None:
    """Each run would meet another part, forget the last one, and add to the history for ever."""
    run(store, **OPTIONS)
    before = chosen(store).config
    texts = ("num_stages=3", "num_warps=4", "heads_per_group=1", "block_n=128", "heavy_first=false")
    vary = tuple(Variation.parse(text) for text in texts)
    own = {id(each) for each in vary if each.of(before, CAUSAL.specialization, H200) is not None}
    executor = newer(time_ms=lambda workload, config: 1.0 if config == before else 2.0)
    first, second = (run(store, executor=executor, reverify=2, vary=vary, **OPTIONS).outcomes[0] for _ in range(2))
    assert (first.status, second.status) == ("kept", "skipped")
    assert len(executor.races[0].configs) == 1 + len(own) > 2


@dataclass
class Refusing(FakeCompiler):
    """Compiles all but one config."""

    refused: Config | None = None

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        return Failure(stage="build", reason="planted") if config == self.refused else super().result(spec, config)


@pytest.mark.parametrize("stage", first(1, ["build", "verify"]))
def test_a_variation_that_fails_is_not_tried_again_until_the_record_is_old(store: Store, stage: str) -> None:
    run(store, **OPTIONS)
    before = chosen(store)
    lost = before.config.replace(block_n=32)
    compiler = Refusing(refused=lost if stage == "build" else None)
    failure = Failure(stage="verify", reason="planted")
    broken: dict[str, Any] = {"broken_in_race": lambda config: failure if config == lost else None}
    options: dict[str, Any] = {"vary": (Variation.parse("block_n=32"),), "reverify": 2, "compiler": compiler, **OPTIONS}
    first, second = (run(store, executor=FakeExecutor(**broken), **options).outcomes[0] for _ in range(2))
    assert (first.status, second.status) == ("kept", "skipped")
    assert "has not met" in second.reason
    (trial,) = [each for each in store.trials(CAUSAL, H200) if each.source == "varied"]
    assert (trial.config, trial.outcome) == (lost, replace(failure, stage=stage))
    events: list[Event] = []
    run(store, events=events, **OPTIONS, retune=True)
    assert [each.resumed_trials for each in events if isinstance(each, WorkloadStarted)] == [0], "nor a search begun"
    assert chosen(store).config == before.config
    assert run(store, executor=FakeExecutor(**broken), **options).outcomes[0].status == "kept", "another last race"
    for executor in (FakeExecutor(**broken), newer(**broken)):
        repeated = {**options, "retune": executor.versions != NEWER}
        assert run(store, executor=executor, **repeated).outcomes[0].status == "kept"
    assert run(store, executor=newer(**broken), **options).outcomes[0].status == "skipped"


def test_where_nothing_runs_no_failure_is_kept(store: Store) -> None:
    run(store, **OPTIONS)
    broken = FakeExecutor(broken_in_race=lambda config: Failure(stage="launch", reason="planted"))
    options: dict[str, Any] = {"vary": (Variation.parse("block_n=32"),), "reverify": 2, **OPTIONS}
    assert run(store, executor=broken, **options).outcomes[0].status == "failed"
    assert not [each for each in store.trials(CAUSAL, H200) if each.source == "varied"]
    assert run(store, **options).outcomes[0].status == "kept"
