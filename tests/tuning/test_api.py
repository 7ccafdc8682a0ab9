"""`flashgen.tune`: the run of the command line as a call, with its events as objects."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.core.calls import CallRecord, add_calls
from flashgen.core.errors import DeviceError, TuningError
from flashgen.core.settings import settings
from flashgen.db.store import Store
from flashgen.tuning import api
from flashgen.tuning.events import Event, RunFinished, RunStarted, TrialFinished
from tests.tuning.fakes import H200, FakeCompiler, FakeExecutor
from tests.tuning.runs import PLAIN

ODD = PLAIN.with_shape(seqlen_q=1000, seqlen_k=1000)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "make_executor", lambda index: FakeExecutor())
    monkeypatch.setattr(api, "make_compiler", lambda device, jobs: contextlib.nullcontext(FakeCompiler()))


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
        with pytest.raises(TuningError, match="from_calls alone"):
            flashgen.tune(**given)  # type: ignore[arg-type]


def test_without_a_gpu_a_target_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="target="):
        flashgen.tune([ODD])
