"""`flashgen.tune`: the run of the command line as a call, with its events as objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.core.calls import CallRecord, add_calls
from flashgen.core.errors import DeviceError, FlashgenError, TuningError
from flashgen.core.settings import settings
from flashgen.db.store import Store
from flashgen.tuning import runs
from flashgen.tuning.context import Options
from flashgen.tuning.events import Event, RunFinished, RunStarted, TrialFinished
from flashgen.tuning.request import Request
from tests.tuning.fake_stations import FakeStation
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor
from tests.tuning.runs import PLAIN

ODD = PLAIN.with_shape(seqlen_q=1000, seqlen_k=1000)


BACKWARD = replace(ODD, direction="backward")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "make_executor", lambda index: FakeExecutor())
    monkeypatch.setattr(runs, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))


def test_a_call_tunes_tells_and_stores(fakes: None, tmp_path: Path) -> None:
    events: list[Event] = []
    finished = flashgen.tune([ODD.key], budget="4", on_event=events.append)
    assert (type(events[0]), events[-1]) == (RunStarted, finished)
    assert sum(isinstance(event, TrialFinished) for event in events) == 4
    with Store.open(settings().db_layers[0], read_only=True) as store:
        assert store.record(ODD, H200) == finished.outcomes[0].record
    path = tmp_path / "calls.json"
    add_calls(path, [CallRecord(workload=ODD, device="", rung=0, server="", calls=1)])
    again = flashgen.tune(from_calls=path, budget="4")
    assert isinstance(again, RunFinished)
    assert [(one.workload, one.status) for one in again.outcomes] == [(ODD, "skipped")]


def test_what_is_tuned_is_named_in_one_way(fakes: None) -> None:
    for given in ({}, {"workloads": [ODD], "from_calls": "calls.json"}):
        with pytest.raises(TuningError, match="what is tuned"):
            flashgen.tune(**given)  # type: ignore[call-overload]


def test_without_a_gpu_a_target_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="target='h100'"):
        flashgen.tune([ODD])


def test_what_is_named_is_read_as_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, database = tmp_path / "mine.yaml", tmp_path / "own.sqlite3"
    shape = "{batch: 1, nheads: 8, seqlen_q: [512, 1024], head_dim: 128}"
    file.write_text(f"mine:\n  title: t\n  source: s\n  workloads:\n    - {shape}\n")
    requests: list[Request] = []
    monkeypatch.setattr(runs, "run_here", lambda request, on_event: requests.append(request))
    for part in range(2):
        flashgen.tune(
            [ODD],
            files=[file],
            direction="backward",
            deterministic=True,
            shard=f"{part}/2",
            store="postgresql://db/x",
            database=str(database),
        )
    asked = [workload for request in requests for workload in request.workloads]
    assert len(asked) == len(set(asked)) == 3
    assert replace(BACKWARD, deterministic=True) in asked
    assert all(workload.direction == "backward" and workload.deterministic for workload in asked)
    assert {(request.database, request.server) for request in requests} == {(database, "postgresql://db/x")}


def test_a_cluster_tells_where_things_happen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []

    @contextlib.contextmanager
    def stations(address: str, *, target: object, jobs: object) -> Iterator[list[FakeStation]]:
        asked.append((address, target, jobs))
        yield [FakeStation(name="a"), FakeStation(name="b")]

    monkeypatch.setattr(runs, "make_stations", stations)
    events: list[tuple[str, Event]] = []
    finished = flashgen.tune(
        [ODD], ray="auto", budget="2", jobs=3, study=str(tmp_path / "studies.log"), database=tmp_path / "own.sqlite3",
        options=Options(families=("portable_forward",)),
        on_event=lambda station, event: events.append((station, event)),
    )  # fmt: skip
    assert asked == [("auto", None, 3)]
    assert [outcome.workload for each in finished for outcome in each.outcomes] == [ODD]
    assert {station for station, event in events if isinstance(event, TrialFinished)} <= {"a", "b"}
    assert events[-1] == ("", finished[0])
    tried = sum(isinstance(event, TrialFinished) for _, event in events)
    assert (tmp_path / "studies.log").read_text().count('"op_code":4') >= tried == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workloads": [ODD], "ray": "auto", "device": 1}, "takes all GPUs of a cluster"),
        ({"from_calls": "calls.json", "ray": "auto"}, "no ray"),
        ({"workloads": [ODD], "shard": "2/2"}, "a shard is i/n"),
        ({"workloads": [ODD], "device": -1}, "device must be at least 0"),
        ({"workloads": [ODD], "jobs": 0}, "jobs must be at least 1"),
        ({"workloads": [ODD], "database": 3}, "database is the path of a file"),
        ({"workloads": [ODD], "limit_s": "long"}, "a limit must be a number"),
        ({"workloads": [ODD], "limit_s": -1.0}, "at least 5 s"),
        ({"workloads": [ODD], "store": 3}, "store"),
        ({"workloads": [ODD], "study": "s.log", "target": "h100"}, "a study keeps what is measured"),
        ({"workloads": [ODD], "device": 3, "target": "h100"}, "for a target nothing is measured, got 3"),
        ({"workloads": [ODD], "study": "sqlite:////nowhere/x.db"}, "a study needs a storage"),
        ({"workloads": [ODD], "direction": "sideways"}, "a direction is one of"),
        ({"workloads": [ODD], "store": "sqlite:///x"}, "URL is not one of a file"),
    ],
)
def test_wrong_arguments_are_refused_as_on_the_command_line(
    fakes: None, given: dict[str, object], message: str
) -> None:
    with pytest.raises(FlashgenError, match=message):
        flashgen.tune(**given)  # type: ignore[call-overload]
