"""Runs on many stations: every workload once a kind of device, nothing lost with a station, one writer."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen.core.device import find_device
from flashgen.core.errors import DatabaseError, MeasureError
from flashgen.core.record import Failure
from flashgen.core.workload import Workload
from flashgen.db.store import Store
from flashgen.measure.protocol import EvaluateJob
from flashgen.tuning import runs
from flashgen.tuning.budget import Budget
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, RunFinished, TrialFinished, Warned, WorkloadStarted
from flashgen.tuning.many import tune_on_stations
from flashgen.tuning.request import Request
from flashgen.tuning.stations import Handout
from tests.db.samples import TRIAL
from tests.tiers import EXHAUSTIVE
from tests.tuning.fake_stations import FakeStation
from tests.tuning.fakes import H200
from tests.tuning.runs import CAUSAL, FINALS, LONGER, PLAIN

H100 = find_device("h100")
EVERY = (CAUSAL, LONGER, PLAIN, PLAIN.with_shape(seqlen_q=2048, seqlen_k=2048))
TRIALS = 6

Told = list[tuple[str, Event]]


def run(
    *stations: FakeStation, store: Store, workloads: tuple[Workload, ...] = EVERY, budget: Budget | None = None,
    told: Told | None = None, **stores: Store,
) -> tuple[RunFinished, ...]:  # fmt: skip
    heard: Told = told if told is not None else []
    return tune_on_stations(
        workloads,
        stations=stations,
        stores={H200.identity: store, **stores},
        budget=budget or Budget(trials=TRIALS),
        options=Options(finals=FINALS, families=("portable_forward",), seed_configs=1),
        on_event=lambda station, event: heard.append((station, event)),
    )


def warned(told: Told) -> list[str]:
    return [event.message for _, event in told if isinstance(event, Warned)]


def check_complete(store: Store, workloads: tuple[Workload, ...] = EVERY) -> None:
    """Every workload has its record and exactly its trials, none of which is the loss of a station."""
    for workload in workloads:
        record = store.record(workload, H200)
        assert record is not None
        assert record.provenance == "measured"
        trials = store.trials(workload, H200)
        assert len(trials) == TRIALS
        assert not any(isinstance(trial.outcome, Failure) for trial in trials)


def test_every_workload_is_tuned_once_by_some_station(store: Store) -> None:
    stations = [FakeStation(name=f"node:{index}") for index in range(3)]
    told: Told = []
    (finished,) = run(*stations, store=store, told=told)
    assert [outcome.workload for outcome in finished.outcomes] == list(EVERY)
    assert not finished.failed
    assert not finished.interrupted
    check_complete(store)
    assert sum(len(station.evaluated) for station in stations) == TRIALS * len(EVERY)
    assert all(station.is_stopped for station in stations)
    assert {name for name, event in told if isinstance(event, TrialFinished)} <= {f"node:{i}" for i in range(3)}


def test_a_station_that_comes_back_has_lost_no_trial(store: Store) -> None:
    station = FakeStation(lost_at=lambda number, job: number in (3, 10), restarts=2)
    told: Told = []
    run(station, store=store, told=told)
    check_complete(store)
    assert station.asked == TRIALS * len(EVERY) + 2  # only what it was asked when it was lost is asked again
    assert len(warned(told)) == 2
    assert "node:0 was lost while it tuned" in warned(told)[0]


def test_the_work_of_a_lost_station_goes_to_the_others(store: Store) -> None:
    lost = FakeStation(name="lost", lost_at=lambda number, job: number == 2)
    told: Told = []
    run(lost, FakeStation(name="other"), store=store, told=told)
    check_complete(store)
    assert any("lost is given up, and the others take its work" in message for message in warned(told))
    resumed = [event.resumed_trials for _, event in told if isinstance(event, WorkloadStarted)]
    assert 2 in resumed


def test_a_run_does_not_wait_for_a_station_that_is_not_needed_any_more(store: Store) -> None:
    lost = FakeStation(name="lost", lost_at=lambda number, job: True, is_slow=True)
    began = time.monotonic()
    run(lost, FakeStation(name="other"), store=store, workloads=(CAUSAL, PLAIN))
    check_complete(store, (CAUSAL, PLAIN))
    assert time.monotonic() - began < 20


def test_a_loss_in_the_finals_repeats_the_finals_alone(store: Store) -> None:
    station = FakeStation(lost_in_race=lambda number: station.restarts == 1, restarts=1)
    run(station, store=store, workloads=(CAUSAL,))
    check_complete(store, (CAUSAL,))
    assert station.asked == TRIALS


@EXHAUSTIVE
def test_what_is_left_of_a_budget_in_seconds_counts(store: Store) -> None:
    clock_s = 0.4
    station = FakeStation(lost_at=lambda number, job: number == 30, restarts=1)
    tune_on_stations(
        (CAUSAL,),
        stations=[station],
        stores={H200.identity: store},
        budget=Budget(seconds=40.0),
        options=Options(finals=FINALS, families=("portable_forward",), seed_configs=1),
        clock=station.clock,
    )
    searched_s = clock_s * len(station.evaluated)
    assert len(station.evaluated) > 30
    assert searched_s < 40.0 + 2 * clock_s  # a second search from the start would have taken another 30 s


@EXHAUSTIVE
def test_a_workload_that_takes_machines_down_is_given_up_and_is_no_failure_of_a_kernel(store: Store) -> None:
    def deadly(number: int, job: EvaluateJob) -> bool:
        return job.workload == PLAIN

    stations = [FakeStation(name=f"node:{index}", lost_at=deadly, restarts=3) for index in range(2)]
    (finished,) = run(*stations, store=store)
    (failed,) = finished.failed
    assert failed.workload == PLAIN
    assert failed.reason == "3 machines were lost at it; nothing is stored of that"
    assert store.trials(PLAIN, H200) == []
    assert store.record(PLAIN, H200) is None
    check_complete(store, tuple(workload for workload in EVERY if workload != PLAIN))


@EXHAUSTIVE
def test_a_run_without_any_machine_left_says_what_is_not_tuned_and_goes_on_later(store: Store) -> None:
    with pytest.raises(MeasureError, match=r"none is left of 2 with NVIDIA H200: 4 of 4 workloads are not tuned"):
        run(*(FakeStation(lost_at=lambda number, job: number == 2) for _ in range(2)), store=store)
    again = FakeStation()
    run(again, store=store)
    check_complete(store)
    assert len(again.evaluated) == TRIALS * len(EVERY) - 4


@EXHAUSTIVE
def test_a_limit_for_all_workloads_ends_a_run_which_the_same_call_goes_on_with(store: Store) -> None:
    now = iter(range(0, 10**9, 5))
    (finished,) = tune_on_stations(
        EVERY,
        stations=[FakeStation(name="node:0")],
        stores={H200.identity: store},
        budget=Budget(trials=TRIALS),
        options=Options(finals=FINALS, families=("portable_forward",), seed_configs=1),
        clock=lambda: float(next(now)),
        limit_s=100.0,
    )
    assert not finished.interrupted
    assert len(finished.outcomes) < len(EVERY)
    run(FakeStation(name="node:0"), store=store)
    assert all(store.record(workload, H200) for workload in EVERY)


@pytest.mark.parametrize(("limit_s", "seconds"), [(1e9, 400.0), (250.0, 250.0)])
def test_a_workload_has_what_is_left_of_the_limit(store: Store, limit_s: float, seconds: float) -> None:
    now = iter(range(0, 10**9, 5))
    found: list[Event] = []
    tune_on_stations(
        (CAUSAL,),
        stations=[FakeStation(name="node:0")],
        stores={H200.identity: store},
        budget=Budget(seconds=400.0),
        options=Options(finals=FINALS, families=("portable_forward",), seed_configs=1),
        clock=lambda: float(next(now)),
        on_event=lambda station, event: found.append(event),
        limit_s=limit_s,
    )
    given = [event.budget_s for event in found if isinstance(event, WorkloadStarted)]
    assert len(given) == 1
    assert given[0] == pytest.approx(seconds, rel=0.2)


@EXHAUSTIVE
def test_a_mixed_cluster_tunes_everything_for_each_kind(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "h100.sqlite3") as other:
        stations = [FakeStation(name="a:0"), FakeStation(name="a:1", device=H100), FakeStation(name="b:0")]
        finished = run(*stations, store=store, workloads=(CAUSAL, PLAIN), **{H100.identity: other})
        assert [each.device for each in finished] == [H200, H100]
        check_complete(store, (CAUSAL, PLAIN))
        assert [store.devices(), other.devices()] == [[H200], [H100]]
        assert all(other.record(workload, H100) for workload in (CAUSAL, PLAIN))


@pytest.fixture
def listens_to_ctrl_c() -> Iterator[None]:
    """Python takes over SIGINT only if it is not ignored, as it is in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_ctrl_c_stops_every_station_and_the_same_call_goes_on(store: Store) -> None:
    first = threading.Lock()

    def interrupt(number: int) -> None:
        if number == 2:
            until = time.monotonic() + 20
            if first.acquire(blocking=False):
                signal.raise_signal(signal.SIGINT)
            # the main thread hears of it some time later, and nothing may have ended by then
            while not stations[0].is_stopped and time.monotonic() < until:
                time.sleep(0.001)

    stations = [FakeStation(name=f"node:{index}", on_evaluate=interrupt) for index in range(2)]
    (finished,) = run(*stations, store=store)
    assert finished.interrupted
    assert all(station.is_stopped for station in stations)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("node:")]
    run(FakeStation(), store=store)
    check_complete(store)


def test_what_cannot_be_stored_ends_the_run(store: Store) -> None:
    def full(number: int) -> None:
        raise DatabaseError("the disk is full")

    stations = [FakeStation(on_evaluate=full), FakeStation(name="node:1")]
    with pytest.raises(DatabaseError, match="the disk is full"):
        run(*stations, store=store)
    assert all(station.is_stopped for station in stations)


def test_stations_stay_with_a_specialization_and_help_at_the_end() -> None:
    handout = Handout(workloads=EVERY)
    first, second = CAUSAL.specialization, PLAIN.specialization
    a, b = handout.take("a", None), handout.take("b", None)
    assert a is not None
    assert b is not None
    assert (a.workload, b.workload) == (CAUSAL, PLAIN)  # what nobody has begun
    assert list(handout.following("a", first)) == [LONGER]
    handout.done()
    c, d = handout.take("a", first), handout.take("a", first)
    assert c is not None
    assert d is not None
    assert (c.workload, d.workload.specialization) == (LONGER, second)
    handout.give_back(d)
    assert handout.left == 1
    handout.stop()
    assert handout.take("b", second) is None


def test_what_a_station_compiles_beforehand_is_begun_by_no_other_one() -> None:
    others = [Workload.parse(f"b1-h8-s512-d{width}") for width in (64, 128)]
    handout = Handout(workloads=(CAUSAL, *others))
    a = handout.take("a", None)
    assert a is not None
    assert list(handout.following("a", CAUSAL.specialization)) == [others[0]]
    b = handout.take("b", None)
    assert b is not None
    assert b.workload == others[1]
    after = handout.take("a", CAUSAL.specialization)
    assert after is not None
    assert after.workload == others[0]


def test_a_kind_that_was_there_first_keeps_its_database_when_another_joins(tmp_path: Path) -> None:
    path, beside = tmp_path / "tuning.sqlite3", tmp_path / f"tuning-{H100.identity}.sqlite3"
    with Store.open(path) as store:
        store.put_trial(dataclasses.replace(TRIAL, device=H200))
    assert runs.databases(path, [H200]) == {H200.identity: path}
    both = {H200.identity: path, H100.identity: beside}
    assert runs.databases(path, [H200, H100]) == both
    Store.open(beside).close()
    assert runs.databases(path, [H100, H200]) == both
    assert runs.databases(path, [H100]) == {H100.identity: beside}


def test_an_empty_file_has_rows_of_no_kind(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite3"
    path.touch()
    assert path not in runs.databases(path, [H200, H100]).values()
    assert path.stat().st_size == 0


@EXHAUSTIVE
def test_what_the_first_kind_was_tuned_for_is_known_when_another_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.sqlite3"
    request = Request(
        workloads=(CAUSAL,),
        target=None,
        index=0,
        database=path,
        server=None,
        budget=Budget(trials=TRIALS),
        options=Options(finals=FINALS, families=("portable_forward",), seed_configs=1),
        jobs=1,
        jobs_asked=1,
    )
    for kinds in ([H200], [H200, H100]):
        fleet = [FakeStation(name=kind.name, device=kind) for kind in kinds]
        monkeypatch.setattr(runs, "make_stations", lambda *_, fleet=fleet, **how: contextlib.nullcontext(fleet))
        finished = runs.run_on_cluster(request, "auto", lambda station, event: None)
        assert len(finished) == len(kinds)
    known, searched = finished
    assert (known.outcomes[0].status, searched.outcomes[0].status) == ("skipped", "tuned")
    for kind, file in runs.databases(path, [H200, H100]).items():
        with Store.open(file, read_only=True) as store:
            assert [device.identity for device in store.devices()] == [kind]
