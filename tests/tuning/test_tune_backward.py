"""Backward workloads on a fake GPU and a real database: both passes, determinism, what its two classes share."""

from __future__ import annotations

import dataclasses
import json

import pytest

from flashgen.codegen.families import default_config, family
from flashgen.codegen.render import source_digest
from flashgen.core.device import find_device
from flashgen.core.record import Failure, Versions
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.measure.protocol import specialization
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, TrialFinished, to_json
from flashgen.tuning.finals import Finals
from flashgen.tuning.history import is_current
from flashgen.tuning.plan import plan
from flashgen.tuning.report import report_rows
from flashgen.tuning.tune import tune
from flashgen.tuning.workloads import collect
from tests.tiers import EXHAUSTIVE, first
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor, true_ms

PORTABLE = {"portable_backward_fused", "portable_backward_split"}
SHAPE = "b2-h16-s4096-d128-causal"
BACKWARD = Workload.parse(f"bwd-{SHAPE}")
SAME_BITS = dataclasses.replace(BACKWARD, deterministic=True)


def run(store: Store, *workloads: Workload, trials: int = 25, events: list[Event] | None = None) -> FakeExecutor:
    executor = FakeExecutor()
    told = events if events is not None else []
    finished = tune(
        workloads,
        device=H200,
        store=store,
        compiler=FakeCompiler(),
        executor=executor,
        budget=Budget(trials=trials),
        options=Options(finals=Finals(rounds=3)),
        on_event=told.append,
        clock=executor.clock,
    )
    assert [outcome.status for outcome in finished.outcomes] == ["tuned"] * len(workloads)
    return executor


def test_both_passes_of_a_shape_are_two_records(store: Store) -> None:
    both = collect(shapes=[SHAPE], direction="both")
    run(store, *both)
    for workload in both:
        record = store.record(workload, H200)
        assert record is not None
        assert family(record.config.family).direction == workload.direction
        assert is_current(record)
        default = default_config(workload.specialization, H200)
        assert true_ms(workload, record.config) <= true_ms(workload, default)


def test_every_family_of_the_pass_is_searched(store: Store) -> None:
    run(store, BACKWARD, trials=40)
    tried = {trial.config.family for trial in store.trials(BACKWARD, H200)}
    assert tried == {"hopper_backward_fused", "hopper_backward_split", *PORTABLE}
    assert store.trials(BACKWARD, H200)[0].config == default_config(BACKWARD.specialization, H200)


@EXHAUSTIVE
def test_a_deterministic_workload_is_searched_among_deterministic_families(store: Store) -> None:
    events: list[Event] = []
    executor = run(store, SAME_BITS, events=events)
    assert all(family(config.family).is_deterministic for _, config in executor.evaluated)
    record = store.record(SAME_BITS, H200)
    assert record is not None
    assert store.record(BACKWARD, H200) is None
    assert record.workload.specialization.workload_class.endswith("-deterministic")
    done = [json.loads(to_json(event)) for event in events if isinstance(event, TrialFinished)]
    assert all("-deterministic" in json.dumps(event) for event in done)


@EXHAUSTIVE
def test_a_search_with_determinism_begins_with_winners_without(store: Store) -> None:
    run(store, BACKWARD, trials=4)
    record = store.record(BACKWARD, H200)
    assert record is not None
    row = family("portable_backward_split")
    winner = row.default(BACKWARD.specialization, H200).replace(dq_num_stages=2, num_stages=2)
    store.put_record(dataclasses.replace(record, config=winner))
    executor = run(store, SAME_BITS, trials=2)
    assert [config for _, config in executor.evaluated] == [default_config(SAME_BITS.specialization, H200), winner]
    assert store.trials(SAME_BITS, H200)[1].source == "neighbour"


@EXHAUSTIVE
def test_a_bias_is_compiled_and_kept_with_its_gradient(store: Store) -> None:
    workload = Workload.parse("bwd-b1-h8-s512-d64-bias")
    assert specialization(workload).bias_grad
    run(store, workload, trials=3)
    record = store.record(workload, H200)
    assert record is not None
    assert record.source_digest == source_digest(workload, record.config)
    assert is_current(record)


def test_spills_of_any_kernel_and_kernels_that_do_not_fit_are_failures(store: Store) -> None:
    (outcome,) = tune(
        [BACKWARD],
        device=H200,
        store=store,
        compiler=FakeCompiler(failing=0.0, spilling=1.0),
        executor=FakeExecutor(),
        budget=Budget(trials=5),
    ).outcomes
    assert outcome.status == "failed"
    assert dict(outcome.failures) == {"resources": 5}
    assert all(isinstance(trial.outcome, Failure) for trial in store.trials(BACKWARD, H200))


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("workload", "target"), first(1, [(BACKWARD, "h100"), (SAME_BITS, "sm_86")]), ids=["h100", "sm_86"]
)
def test_without_a_gpu_records_are_predicted(store: Store, workload: Workload, target: str) -> None:
    device = find_device(target)
    finished = tune(
        [workload],
        device=device,
        store=store,
        compiler=FakeCompiler(),
        executor=None,
        budget=Budget(trials=8),
        versions=Versions(triton="3.7.1"),
    )
    (outcome,) = finished.outcomes
    record = store.record(workload, device)
    assert record is not None
    assert (outcome.status, record.provenance) == ("predicted", "predicted")
    assert is_current(record)
    (row,) = report_rows([outcome], device)
    assert (row.direction, "deterministic" in row.features) == ("backward", workload.deterministic)
    assert row.peak_share is not None
    assert 0.03 < row.peak_share < 1


def test_a_plan_expects_more_of_a_backward_pass(store: Store) -> None:
    both = collect(shapes=[SHAPE], direction="both")
    options = {"device": H200, "store": store, "measured": True, "jobs": 4}
    forward, backward = plan(both, budget=Budget(trials=40), **options)  # type: ignore[arg-type]
    assert backward.expected_s > 1.5 * forward.expected_s
    assert {row.expected_s for row in plan(both, budget=Budget(seconds=30), **options)} == {30}  # type: ignore[arg-type]
