"""Without a GPU candidates are compiled and ranked, and never outrank what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from flashgen.codegen import families
from flashgen.codegen.space import search_space
from flashgen.core.compiled import Compiled
from flashgen.core.config import Config
from flashgen.core.device import find_device
from flashgen.core.peak import least_ms
from flashgen.core.record import Failure
from flashgen.core.workload import Specialization, Workload
from flashgen.db.store import Store
from flashgen.tuning.budget import Budget
from flashgen.tuning.candidates import Candidates, by_prediction, ranking
from flashgen.tuning.context import Options
from flashgen.tuning.events import CandidateRanked, Event, Warned, WorkloadStarted
from flashgen.tuning.plan import plan
from flashgen.tuning.report import report_rows
from flashgen.tuning.tune import tune
from tests.families import use_families
from tests.tiers import EXHAUSTIVE, first, only
from tests.tuning.fakes import H200, FakeCompiler
from tests.tuning.runs import CAUSAL, PLAIN, TWO_FAMILIES, Killed, chosen, predicted, run


@pytest.mark.parametrize("target", only(["h100", "sm_86", "rtx 4090", "gfx942"], "sm_86"))
def test_without_a_gpu_records_are_predicted(store: Store, target: str) -> None:
    (outcome,) = predicted(store, target=target).outcomes
    assert outcome.status == "predicted"
    assert outcome.reason == "nothing was measured"
    record = store.record(CAUSAL, find_device(target))
    assert record is not None
    assert record.provenance == "predicted"
    assert record.predicted_ms is not None
    assert record.measurement is None
    assert record.versions.triton == "3.7.1"
    (row,) = report_rows([outcome], find_device(target))
    assert (row.source, row.sdpa_ratio, row.spread) == ("predicted", None, None)
    assert row.peak_share is not None
    assert 0.05 < row.peak_share < 1


def test_steps_of_decoding_are_not_ranked_since_no_model_knows_them(store: Store) -> None:
    """A record of the first candidate that compiles would say nothing, and no rung would read it."""
    decode = Workload.parse("dec-bf16-b16-h32-hk8-sk1024-d64")
    outcome, other = predicted(store, decode, CAUSAL).outcomes
    assert (outcome.status, outcome.record, other.status) == ("skipped", None, "predicted")
    assert "no model ranks steps of decoding" in outcome.reason
    assert store.record(decode, H200) is None
    (planned,) = plan([decode], device=H200, store=store, budget=Budget(trials=5), measured=False, jobs=1)
    assert (planned.status, planned.expected_s, planned.reason) == ("skip", 0.0, outcome.reason)
    (measured,) = plan([decode], device=H200, store=store, budget=Budget(trials=5), measured=True, jobs=1)
    assert measured.status == "tune"


def test_predictions_never_outrank_measurements(store: Store) -> None:
    run(store)
    measured = chosen(store)
    (outcome,) = tune(
        [CAUSAL],
        device=H200,
        store=store,
        compiler=FakeCompiler(),
        executor=None,
        budget=Budget(trials=10),
        options=Options(retune=True),
    ).outcomes
    assert outcome.status == "predicted"
    assert chosen(store) == measured


def test_a_prediction_does_not_count_as_tuned_where_there_is_a_gpu(store: Store) -> None:
    device = H200
    tune([CAUSAL], device=device, store=store, compiler=FakeCompiler(), executor=None, budget=Budget(trials=5))
    assert chosen(store).provenance == "predicted"
    (outcome,) = run(store).outcomes
    assert outcome.status == "tuned"
    assert chosen(store).provenance == "measured"


def test_predicted_runs_agree_and_reject_what_spills(store: Store, tmp_path: Path) -> None:
    compiler = FakeCompiler(spilling=0.4)
    (one,) = predicted(store, compiler=compiler).outcomes
    with Store.open(tmp_path / "again.sqlite3") as other:
        (two,) = predicted(other, compiler=FakeCompiler(spilling=0.4)).outcomes
    assert one.record is not None
    assert two.record is not None
    assert one.record.config == two.record.config
    assert dict(one.failures)["resources"] > 0
    assert len(compiler.submitted) == 25


class DyingCompiler(FakeCompiler):
    """Ends the process, as kill -9 would, when the n-th result is asked for."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def result(self, spec: Specialization, config: Config) -> Compiled | Failure:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().result(spec, config)


@pytest.mark.parametrize("after", first(1, [12, 1, 24]))
def test_a_killed_ranking_loses_the_candidate_in_flight_alone(store: Store, tmp_path: Path, after: int) -> None:
    device = find_device("h100")
    with pytest.raises(Killed):
        predicted(store, compiler=DyingCompiler(after))
    kept = {prediction.config for prediction in store.predictions(CAUSAL, device)}
    assert len(kept) == after
    assert store.record(CAUSAL, device) is None
    compiler, events = FakeCompiler(), list[Event]()
    (outcome,) = predicted(store, compiler=compiler, on_event=events.append).outcomes
    (started,) = [event for event in events if isinstance(event, WorkloadStarted)]
    assert (outcome.status, outcome.trials, started.resumed_trials) == ("predicted", 25, after)
    with Store.open(tmp_path / "whole.sqlite3") as other:
        (whole,) = predicted(other).outcomes
    assert outcome.record is not None
    assert whole.record is not None
    assert (outcome.record.config, outcome.record.predicted_ms) == (whole.record.config, whole.record.predicted_ms)
    # what was ranked before is compiled again only if it won
    assert {config for _, config in compiler.submitted} & kept <= {outcome.record.config}
    assert predicted(store).outcomes[0].status == "skipped"


def test_a_stored_prediction_does_not_win_by_itself(store: Store) -> None:
    """The file may be older than the model, or by somebody else."""
    device = find_device("h100")
    with pytest.raises(Killed):
        predicted(store, compiler=DyingCompiler(12))
    slow, *_ = store.predictions(CAUSAL, device)[::-1]
    store.put_prediction(dataclasses.replace(slow, outcome=1.01 * least_ms(CAUSAL, device)))
    (outcome,) = predicted(store).outcomes
    assert outcome.record is not None
    assert outcome.record.predicted_ms is not None
    assert outcome.record.predicted_ms > 1.1 * least_ms(CAUSAL, device)


@EXHAUSTIVE
def test_a_finished_ranking_is_not_resumed(store: Store) -> None:
    predicted(store)
    events: list[Event] = []
    predicted(store, options=Options(retune=True), on_event=events.append)
    assert [e.resumed_trials for e in events if isinstance(e, WorkloadStarted)] == [0]


@EXHAUSTIVE
def test_predictions_are_no_trials_of_a_search(store: Store) -> None:
    with pytest.raises(Killed):
        predicted(store, target="h200", compiler=DyingCompiler(12))
    events: list[Event] = []
    run(store, events=events)
    assert [e.resumed_trials for e in events if isinstance(e, WorkloadStarted)] == [0]
    assert chosen(store).provenance == "measured"


@EXHAUSTIVE
def test_nothing_compiles_means_failed_not_an_exception(store: Store) -> None:
    (outcome,) = predicted(store, compiler=FakeCompiler(failing=1.0)).outcomes
    assert outcome.status == "failed"
    assert "planted" in outcome.reason


def test_where_nothing_compiled_a_ranking_is_told_to_try_it_again(store: Store) -> None:
    predicted(store, compiler=FakeCompiler(failing=1.0))
    (same,) = predicted(store).outcomes
    assert same.status == "failed"
    assert same.reason.endswith("; 25 trials of earlier runs, made again with --retune")
    (again,) = predicted(store, options=Options(retune=True)).outcomes
    assert again.status == "predicted"


def test_a_small_prediction_budget_meets_different_tiles() -> None:
    candidates = Candidates.of(CAUSAL, H200)
    (space,) = [space for space in candidates.spaces if ranking(space.configs[0])]
    order = by_prediction(space.configs, candidates.default, CAUSAL, H200)
    assert len(order) == len(space.configs)
    tiles = {(c["block_m"], c["block_n"], c["num_warps"]) for c in order[:8]}
    assert len(tiles) == 8


def without_cost_models(monkeypatch: pytest.MonkeyPatch, *ids: str) -> None:
    rows = [dataclasses.replace(row, cost_model=None) if row.id in ids else row for row in families.FAMILIES]
    use_families(monkeypatch, rows)


def test_a_family_without_a_cost_model_is_tried_in_knob_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cost_models(monkeypatch, "portable_forward")
    events: list[Event] = []
    a100 = find_device("a100")
    compiler = FakeCompiler(failing=0.5, spilling=0.5)
    alone = Options(families=("portable_forward",))
    (outcome,) = predicted(store, target="a100", compiler=compiler, options=alone, on_event=events.append).outcomes
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "portable_forward has no cost model: its candidates are tried in knob order, its default first, and the first "
        "that compiles is taken"
    ]
    assert (outcome.status, outcome.reason) == ("predicted", "nothing was measured, and no model ranked it")
    assert outcome.record is not None
    assert outcome.record.predicted_ms is None
    assert store.record(CAUSAL, a100) == outcome.record
    ranked = [event for event in events if isinstance(event, CandidateRanked)]
    order = search_space(families.family("portable_forward"), CAUSAL.specialization, a100)
    assert [event.config for event in ranked] == list(order[: len(ranked)])
    assert len(ranked) > 1  # some failed to compile before
    assert ranked[-1].best_config == outcome.record.config == ranked[-1].config
    assert report_rows([outcome], a100)[0].ms is None


@EXHAUSTIVE
def test_a_family_without_a_cost_model_is_said_to_be_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cost_models(monkeypatch, "hopper_forward")
    events: list[Event] = []
    (outcome,) = predicted(store, options=Options(families=TWO_FAMILIES), on_event=events.append).outcomes
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "hopper_forward has no cost model, so none of its candidates is compared with those of other families"
    ]
    assert outcome.record is not None
    assert outcome.record.config.family == "portable_forward"


@EXHAUSTIVE
def test_a_family_of_which_only_the_default_is_predicted_is_named(store: Store) -> None:
    events: list[Event] = []
    predicted(store, CAUSAL, PLAIN, options=Options(families=TWO_FAMILIES), on_event=events.append)
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "the cost model of hopper_forward does not tell its candidates apart: only its default is predicted"
    ]
